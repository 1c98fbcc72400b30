"""A run in a few numbers, and what was wrong with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from statistics import median
from typing import Any

from nanotron.logging import human_duration, human_format
from nanotron.metrics.columns import (
    APART,
    LAYOUT,
    MEDIAN_RANK_MS,
    ROLLBACK_LOST_S,
    ROLLBACKS,
    ROLLED_BACK_FROM,
    SLOWEST_HOST,
    SLOWEST_RANK,
    SLOWEST_RANK_MS,
    SLOWEST_SINCE,
    TIME_MS,
)
from nanotron.metrics.record import Goodput, layout_text, straggler_text
from nanotron.report.experts import expert_lines
from nanotron.report.run import RunFiles

MOST_LINES = 12  # of one kind


def facts(run: RunFiles) -> Iterator[tuple[str, str]]:
    """(name, value) of the run's last or typical numbers."""
    row = run.rows[-1]
    train_steps = run.config.get("tokens", {}).get("train_steps")
    yield "steps", f"{row['step']} of {train_steps}" if train_steps else str(row["step"])
    yield "training loss", "not finite" if row["lm_loss"] is None else f"{row['lm_loss']:.5g}"
    validated = _numbers(run, "val_loss")
    if validated:
        yield "best validation loss", f"{min(validated):.5g}"
    yield "tokens", human_format(row["consumed_tokens"])
    yield "time of the steps", human_duration(sum(_numbers(run, TIME_MS)) / 1e3)
    apart = sum(sum(_numbers(run, column)) for column in APART)
    if apart:
        yield "validating and saving", human_duration(apart / 1e3)
    goodput = Goodput()
    for one in run.rows:
        goodput.add(one)
    if str(goodput):
        yield "goodput: steps that count", str(goodput)
    yield "tokens per second, median", human_format(median(_numbers(run, "tokens_per_sec")))
    utilization = _numbers(run, "mfu")
    if utilization:
        yield "MFU, median", f"{median(utilization):.1%}"
    yield "memory, at most", f"{human_format(max(_numbers(run, 'memory_gib')))} GiB"
    layout = run.environment.get("layout", {})
    if layout:
        yield "layout", layout_text(layout)
    if run.environment.get("device"):
        yield "device", str(run.environment["device"])


def health(run: RunFiles) -> Iterator[tuple[str, bool]]:
    """(line, whether it is bad news)."""
    steps = [row["step"] for row in run.rows if row["lm_loss"] is None or row.get("grad_norm", 0.0) is None]
    bad = [f"step {step}: the loss or the gradient norm is not finite" for step in steps]
    spikes = [str(spike) for spike in run.spikes()]
    failures = [str(failure) for failure in run.failures]
    for lines in (failures, bad, spikes):
        yield from ((line, True) for line in lines[:MOST_LINES])
        if len(lines) > MOST_LINES:
            yield f"… and {len(lines) - MOST_LINES} more like the last", True
    if not (failures or bad or spikes):
        yield "no failure, no loss spike, every loss and gradient norm finite", False
    for row in (row for row in run.rows if ROLLED_BACK_FROM in row):
        lost = human_duration(row[ROLLBACK_LOST_S])
        yield f"rollback {row[ROLLBACKS]}: from step {row[ROLLED_BACK_FROM]} to {row['step'] - 1}, {lost} lost", True
    yield from ((line, False) for line in _changes((row["step"], row[LAYOUT]) for row in run.rows if LAYOUT in row))
    taken = [(row["step"], row["consumed_samples"]) for row in run.rows if row.get("consumed_samples") is not None]
    start = [(0, 0)] if taken[:1] and taken[0][0] == 1 else []
    sizes = ((step, f"{now - before} samples a step") for (_, before), (step, now) in pairwise([*start, *taken]))
    yield from ((line, False) for line in islice(_changes(sizes), MOST_LINES))
    yield from expert_lines(run.expert_loads)
    looks = (SLOWEST_RANK, SLOWEST_RANK_MS, MEDIAN_RANK_MS)
    slow = [row for row in run.rows if all(row.get(key) is not None for key in looks)]
    if slow:
        yield _slowest(slow), False


def _changes(found: Iterable[tuple[int, str]]) -> Iterator[str]:
    """A line for each step with something else than the step before."""
    for (_, before), (step, after) in pairwise(found):
        if after != before:
            yield f"from step {step} on: {after}; before: {before}"


def _slowest(rows: list[dict[str, Any]]) -> str:
    ranks = [int(row[SLOWEST_RANK]) for row in rows]
    rank = max(set(ranks), key=ranks.count)
    times = [row[SLOWEST_RANK_MS] / row[MEDIAN_RANK_MS] for row in rows if row[MEDIAN_RANK_MS]]
    how = f"; the slowest rank works {median(times):.2f} times as long as the median one" if times else ""
    last = next(row for row in reversed(rows) if row[SLOWEST_RANK] == rank)
    host = f" on {last[SLOWEST_HOST]}" if SLOWEST_HOST in last else ""
    since = f"; at the end rank {ranks[-1]}{straggler_text(rows[-1])}".rstrip(",") if SLOWEST_SINCE in rows[-1] else ""
    return f"rank {rank}{host} was the slowest in {ranks.count(rank)} of {len(ranks)} looks at all ranks{how}{since}"


def _numbers(run: RunFiles, key: str) -> list[float]:
    """A column's numbers, as far as they are finite."""
    return [row[key] for row in run.rows if row.get(key) is not None]
