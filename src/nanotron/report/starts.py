"""Where a run's time went, and each start of it: the steps it made, on which layout, and what stood between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from nanotron.logging import human_duration
from nanotron.metrics.columns import LAYOUT, SAVING_MS, TIME_MS, UNIX_S, VALIDATION_MS
from nanotron.metrics.starts import TAKEN_BACK

if TYPE_CHECKING:
    from nanotron.report.run import RunFiles

KINDS = (  # of time: name, colour
    ("steps", "#2a6fb0"),
    ("validating", "#3b8f57"),
    ("saving", "#b8860b"),
    ("other", "#9aa4b2"),
    ("before it", "#d9662b"),
)


class Segment(NamedTuple):
    """The steps of one start that are left."""

    start: dict[str, Any]
    rows: Sequence[dict[str, Any]]
    seconds: tuple[float, ...]
    """Of each kind; "before it" is what lies between the last step before and its first one: waiting, starting, steps
    that it takes back."""


def segments(run: RunFiles) -> list[Segment]:
    """A run's starts in their order; of an earlier version's run, those that changed the layout."""
    starts = run.starts or [{"step": row["step"], LAYOUT: row[LAYOUT]} for row in run.rows if LAYOUT in row]
    starts = starts or [{"step": run.rows[0]["step"]}]
    found: list[Segment] = []
    before = None
    for index, start in enumerate(starts):
        bound = min((later["step"] for later in starts[index + 1 :]), default=float("inf"))
        rows = [row for row in run.rows if start["step"] <= row["step"] < bound]
        found.append(Segment(start, rows, _seconds(rows, before)))
        before = rows[-1] if rows else before
    return found


def _seconds(rows: Sequence[dict[str, Any]], before: dict[str, Any] | None) -> tuple[float, ...]:
    steps, validating, saving = (
        sum(row.get(key) or 0 for row in rows) / 1e3 for key in (TIME_MS, VALIDATION_MS, SAVING_MS)
    )
    if not rows or any(row.get(UNIX_S) is None for row in rows):
        return steps, validating, saving, 0.0, 0.0
    began = rows[0][UNIX_S] - rows[0][TIME_MS] / 1e3
    other = max(0.0, rows[-1][UNIX_S] - began - steps - validating - saving)
    waited = began - before[UNIX_S] if before and before.get(UNIX_S) is not None else 0.0
    return steps, validating, saving, other, max(0.0, waited)


def marks(run: RunFiles) -> Iterator[tuple[int, str]]:
    """(first step, what it is) of every start but the first."""
    starts = [segment.start for segment in segments(run)]
    for before, start in pairwise(starts):
        changed = start.get(LAYOUT) != before.get(LAYOUT)
        layout = f" on another layout: {start.get(LAYOUT)}; before: {before.get(LAYOUT)}" if changed else ""
        back = f", {start[TAKEN_BACK]} taken back" if start.get(TAKEN_BACK) else ""
        yield start["step"], f"started again from step {start['step']}{layout}{back}"


def time_section(run: RunFiles) -> str:
    """A bar of all the time, and a table of the starts."""
    found = segments(run)
    totals = [sum(segment.seconds[kind] for segment in found) for kind in range(len(KINDS))]
    whole = sum(totals) or 1.0
    shares = [(name, colour, total) for (name, colour), total in zip(KINDS, totals, strict=True) if total > 0]
    bar = "".join(
        f'<i style="width:{100 * total / whole:.2f}%;background:{colour}" title="{name}: {human_duration(total)}"></i>'
        for name, colour, total in shares
    )
    legend = "".join(
        f'<span><i style="border-top:3px solid {colour}"></i>{name} {human_duration(total)}, {total / whole:.1%}</span>'
        for name, colour, total in shares
    )
    columns = ("from step", "to", "layout", "taken back", *(name for name, _ in KINDS))
    head = "".join(f'<th scope="col">{column}</th>' for column in columns)
    return (
        f'<div class="bar" role="img" aria-label="where the time went">{bar}</div><p class="legend">{legend}</p>'
        f'<table class="wide"><thead><tr>{head}</tr></thead><tbody>{"".join(map(_row, found))}</tbody></table>'
    )


def _row(segment: Segment) -> str:
    last = segment.rows[-1]["step"] if segment.rows else "none is left"
    start = segment.start
    cells = [
        start["step"],
        last,
        start.get(LAYOUT, ""),
        start.get(TAKEN_BACK, 0),
        *map(human_duration, segment.seconds),
    ]
    return f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in cells)}</tr>"
