"""Keys of a config that decide which sample comes next: changed within a stage, it would go on in another order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nanotron.data.order.blend import round_weights
from nanotron.data.order.skips import Skips
from nanotron.errors import brief

WEIGHTS = "data.dataset.dataset_weights"
FREE = {"dataset_weights", "dataset_processing_num_proc_per_process", "dataset_overwrite_cache"}
"""Keys of a data set without files that are compared apart, or decide nothing."""


def order_changes(
    saved: Mapping[str, Any],
    now: Mapping[str, Any],
    consumed: Mapping[str, int],
    streams: Mapping[str, Any],
    left_out: Mapping[str, Sequence[Sequence[int]]],
) -> list[str]:
    """One line per key that differs between two resolved configs and decides the order of a stage that was begun.

    `consumed` and `streams` are the checkpoint's samples and positions per stage, `left_out` the ranges that the run
    skips beside the configs'. What files hold is not asked here: fingerprints tell.
    """
    saved_stages = {stage["name"]: stage for stage in saved.get("data_stages", [])}
    lines = []
    for number, stage in enumerate(now["data_stages"]):
        name = stage["name"]
        if not consumed.get(name) or name not in saved_stages:
            continue
        seeded = name not in streams or stage["data"].get("shuffle_block") is not None
        also = left_out.get(name, ())
        end = _skips(saved_stages[name], also).end(consumed[name])
        before, after = (
            _decisive(one, config.get("tokens", {}).get("sequence_length"), end, also, seeded=seeded)
            for one, config in ((saved_stages[name], saved), (stage, now))
        )
        for key in sorted(before.keys() | after.keys()):
            old, new = before.get(key), after.get(key)
            if old != new and not (key == WEIGHTS and old and new and round_weights(old) == round_weights(new)):
                own = key != "sequence_length" or stage.get(key) is not None
                where = f"data_stages[{number}].{key}" if own else f"tokens.{key}"
                lines.append(
                    f"{where} was {brief(old)} in the checkpoint and is {brief(new)} now, {consumed[name]} samples "
                    f"into stage {name!r}"
                )
    return lines


def _skips(stage: Mapping[str, Any], left_out: Sequence[Sequence[int]]) -> Skips:
    return Skips([*stage["data"].get("skip_samples", ()), *left_out])


def _decisive(
    stage: Mapping[str, Any],
    sequence_length: int | None,
    end: int,
    left_out: Sequence[Sequence[int]],
    *,
    seeded: bool,
) -> dict[str, Any]:
    """What decides the order of a stage: the value of each key, named from the stage on.

    Of samples to skip, those before `end`, the position: what is left out after it is not decided yet.
    """
    data = stage["data"]
    dataset = data.get("dataset") or {}
    facts = {
        "sequence_length": stage.get("sequence_length") or sequence_length,
        "data.shuffle_block": data.get("shuffle_block"),
        WEIGHTS: dataset.get("dataset_weights"),
        "data.skip_samples": _skips(stage, left_out).before(end),
    }
    if seeded:
        facts["data.seed"] = data["seed"]
    if "python" in dataset or dataset.get("streaming"):
        facts |= {f"data.dataset.{key}": value for key, value in dataset.items() if key not in FREE}
    return facts
