"""Which layouts every change runs: few, in which every pair of options occurs that any layout of `make parity` has.

They were found by search and are written down, for a table does not change when something else does. When a pair is
missing, `tests/parity/test_parity.py` says which: add it to a line where both fit, or write a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from tests.parity.cases import Case

WORDS: dict[str, dict[str, Any]] = {
    **{name: {"schedule": name} for name in ("afab", "interleaved_1f1b", "zb_h1", "zbv")},
    **{name: {"family": name} for name in ("qwen2", "qwen3", "mistral", "olmoe", "deepseek_v3")},
    **{name: {"experts": 8, "router": name} for name in ("plain", "z-loss", "shared", "grouped")},
    **{name: {"optimizer": name} for name in ("muon", "groups")},
    "gathered": {"tp_mode": "REDUCE_SCATTER"},
    "once": {"tp_mode": "REDUCE_SCATTER", "tp_recompute_allgather": False},
    "overlap": {"overlap": True},
    "exchanged": {"cp_mode": "ALL_TO_ALL"},
    **{f"zero{stage}": {"zero_stage": stage} for stage in (1, 2, 3)},
    "recompute": {"recompute_layer": True},
    "selective": {"recompute_layer": "selective"},
    "compile": {"compile": True},
    "given": {"pp_layers": (1, 3)},
    "z_loss": {"z_loss": True},
    "tied": {"tied": True},
    "mup": {"mup": True},
    "fp8": {"fp8": True},
    "documents": {"documents": True},
    "window": {"window": 11},
    "windows": {"window": 11, "window_layers": (0, 1, 3)},
    "float64": {"dtype": "float64"},
}
NUMBER = re.compile(r"(dp_shard|dp|cp|tp|pp|ep|rows|layers|length|loss_chunk|ramp)(\d+)")

TABLE = """
tp2 rows2 gathered overlap recompute loss_chunk8 compile qwen3 length64 documents z_loss
dp2 ep2 rows2 zero1 compile plain
dp2 ep2 zero1 layers2 z-loss mup
cp2 pp2 zb_h1 rows2 selective compile length64 documents
pp2 afab rows6 given mistral windows
pp2 interleaved_1f1b rows6 loss_chunk7 qwen3 window z_loss float64
pp2 zbv rows12 recompute qwen2 tied windows z_loss shared float64
tp2 once loss_chunk7 qwen3 windows z_loss float64
pp3 rows4 ramp4 recompute qwen3 layers3 z_loss
pp3 zb_h1 rows12 qwen3 layers3 tied
pp3 zbv rows12 loss_chunk7 layers6 windows float64
tp2 pp2 rows12 overlap deepseek_v3 layers3 grouped float64
tp2 pp2 interleaved_1f1b rows6 gathered loss_chunk7 qwen2 tied
tp2 pp2 interleaved_1f1b rows3 ramp6 loss_chunk7 mistral window documents
tp2 pp2 zb_h1 rows6 overlap qwen3 layers2 float64
tp2 pp2 zbv rows12 loss_chunk7 qwen2 tied documents z_loss shared float64
tp2 pp2 zbv rows12 gathered recompute loss_chunk7 tied window grouped float64
tp4 gathered deepseek_v3 layers2 tied z-loss float64
tp2 gathered selective olmoe layers2 plain float64
tp4 olmoe layers2 plain float64
cp2 pp2 rows12 exchanged zero1 loss_chunk7 qwen3 layers2 tied z_loss grouped float64
cp2 pp2 afab rows12 exchanged recompute qwen2 layers2 window documents
cp2 pp2 interleaved_1f1b rows6 zero1 recompute loss_chunk7 window
cp2 pp2 zb_h1 rows6 ramp6 exchanged loss_chunk7 layers5 tied windows float64
cp2 tp2 zero1 selective loss_chunk7 qwen2 layers2 tied window z_loss
cp4 loss_chunk7 qwen3 layers2 float64
dp2 pp2 afab rows3 ramp6 zero1 loss_chunk7 mistral layers2 tied window z_loss
dp2 pp2 ep2 zb_h1 rows6 zero1 recompute loss_chunk7 deepseek_v3 layers2 tied documents z_loss grouped float64
dp2 pp2 ep2 zbv rows3 loss_chunk7 mistral window z-loss float64
dp2 tp2 ep2 overlap mistral layers2 window z_loss grouped float64
tp2 pp3 afab rows12 recompute loss_chunk7 layers3 tied z_loss plain float64
cp3 pp2 rows12 given zero1 loss_chunk7 length48 documents z_loss plain float64
cp3 pp2 zbv rows12 loss_chunk7 mistral length48 windows documents
dp2 pp3 interleaved_1f1b rows2 zero1 qwen3 layers6 tied windows
dp3 pp2 zb_h1 rows4 zero1 qwen2 layers3 tied window
dp3 cp2 exchanged selective loss_chunk7 layers2 window z_loss float64
tp4 pp2 rows12 given once overlap loss_chunk7 mup
tp4 pp2 rows12 loss_chunk7 qwen3 layers2 window z_loss
cp2 tp2 pp2 zb_h1 rows12 gathered loss_chunk7 layers2 tied window z_loss z-loss float64
cp2 tp4 once qwen2 layers2 tied window z_loss float64
dp2 tp2 pp2 ep2 rows6 given gathered selective qwen3 windows shared float64
dp2 tp2 pp2 afab rows6 gathered overlap zero1 loss_chunk7 qwen2 layers2 tied window z_loss grouped float64
dp2 cp2 pp2 ep2 zbv rows6 zero1 loss_chunk7 deepseek_v3 tied z_loss shared float64
dp4 pp2 ep2 rows3 zero1 selective loss_chunk7 deepseek_v3 layers2 documents z_loss grouped float64
dp2 muon zero1 layers2
dp2 muon zero2 layers2 float64
cp2 tp2 layers2 muon
dp2 tp2 pp2 ep2 layers2 zero1 muon shared float64
dp2 tp2 pp2 layers2 zero3 groups
dp2 layers2 groups zero1 float64
dp4 dp_shard2 rows1 layers2 muon zero3 float64
dp4 dp_shard2 rows1 ramp4 zero3 documents
cp2 tp2 zero3 recompute loss_chunk7 qwen2 layers2 tied window z_loss plain float64
dp2 ramp6 zero2 loss_chunk7 olmoe z_loss float64
dp4 ep2 dp_shard2 rows1 zero2 recompute tied window grouped float64
dp2 pp2 ep2 zbv rows3 ramp6 zero3 loss_chunk7 mistral window shared float64
cp2 pp2 rows12 exchanged zero2 loss_chunk7 qwen3 layers2 tied z_loss
dp2 tp2 gathered zero3 selective olmoe layers2 z-loss float64
dp2 tp2 ep2 overlap zero3 loss_chunk7 deepseek_v3 layers2 tied z_loss grouped float64
cp2 pp2 zb_h1 rows6 exchanged zero3 selective qwen3 windows
dp2 tp2 pp2 interleaved_1f1b rows3 gathered overlap zero2 loss_chunk7 tied window z_loss z-loss float64
dp3 pp2 zb_h1 rows1 zero2 recompute loss_chunk7 deepseek_v3 layers2 tied z_loss float64
dp3 rows1 zero3 loss_chunk7 layers2
dp2 cp2 dp_shard1 exchanged zero3 z_loss
dp2 pp2 zbv rows1 zero2 tied float64
cp2 pp2 rows12 exchanged zero3 recompute loss_chunk7 mistral layers2 tied documents z_loss grouped float64
cp2 pp2 interleaved_1f1b rows6 zero3 recompute loss_chunk7 window z_loss
dp2 pp2 rows3 layers2 fp8 float64
dp2 tp2 zero3 overlap recompute layers2 fp8 float64
tp2 pp2 zb_h1 rows6 gathered overlap selective qwen2 layers2 fp8 float64
cp2 tp2 pp2 zbv rows12 once zero1 fp8 float64
dp2 tp2 ep2 gathered layers2 shared fp8 float64
"""


def selection() -> list[Case]:
    """The table's cases."""
    return [Case(**options(line)) for line in TABLE.strip().splitlines()]


def options(line: str) -> dict[str, Any]:
    """What a line of the table says, as the fields of a case."""
    found: dict[str, Any] = {}
    for word in line.split():
        number = NUMBER.fullmatch(word)
        found |= {number[1]: int(number[2])} if number else WORDS[word]
    return found


MANY = {  # what is tried with more ranks than two of an axis; with everything else, any two are as good as any more
    "dp": {"zero_stage", "ep", "tied", "dtype"},
    "cp": {"cp_mode", "documents", "window", "family", "dtype"},
    "tp": {"tp_mode", "again", "overlap", "cp", "tied", "loss_chunk", "family", "experts", "dtype"},
    "pp": {"schedule", "split", "few", "tied", "dtype"},
}
UPDATED = {"dp", "cp", "tp", "pp", "ep", "zero_stage", "copies", "dtype"}
"""What is tried with each optimizer; with everything else, any is as good as any other."""
RAMPED = {"dp", "cp", "tp", "pp", "ep", "schedule", "zero_stage", "copies"}
"""What is tried with steps of fewer microbatches."""
GRADIENTS = {"dp", "cp", "tp", "pp", "ep", "schedule", "tied", "copies", "dtype"}
"""What is tried with ZeRO-2, which does with gradients what ZeRO-3 does, and nothing with weights."""
ROUTED = {"dp", "cp", "tp", "ep", "tp_mode", "recompute", "documents", "zero_stage"}
"""What is tried with each router; with everything else, any is as good as any other."""

MULTIPLIED = {"dp", "cp", "tp", "pp", "ep", "schedule", "tp_mode", "again", "overlap", "zero_stage", "recompute"}
MULTIPLIED |= {"experts"}
"""What is tried with matmuls in fp8; with everything else, these are as good as any other."""


def pairs_of(case: Case) -> Iterator[frozenset[tuple[str, Any]]]:
    """The pairs of option values that a case exercises; `compile` has none, for it costs a compiler's seconds."""
    values = {
        **{axis: min(2, getattr(case, axis)) for axis in MANY},
        "ep": case.ep,
        "recompute": case.recompute_layer,
        "loss_chunk": case.loss_chunk is not None,
        "z_loss": case.z_loss,
        "tied": case.tied,
        "family": case.family,
        "documents": case.documents,
        "window": (case.window is not None, case.window_layers is not None),
        "experts": case.experts > 0,
        "dtype": case.dtype,
    }
    if case.pp > 1:
        values["schedule"] = case.schedule
        values["split"] = "given" if case.pp_layers else "uneven" if case.layers % case.pp else "even"
        values["few"] = case.accumulation < case.pp  # microbatches, so that no stage is ever steadily at work
    if case.tp > 1:
        values |= {"tp_mode": case.tp_mode, "overlap": case.overlap}
    if case.tp_mode == "REDUCE_SCATTER":
        values["again"] = case.tp_recompute_allgather
    if case.cp > 1:
        values["cp_mode"] = case.cp_mode
    if case.dp * case.cp > 1:
        values |= {"zero_stage": case.zero_stage, "copies": case.dp_shard is not None}
    for pair in combinations(values.items(), 2):
        if ("zero_stage", 2) not in pair or {name for name, _ in pair} <= {"zero_stage"} | GRADIENTS:
            yield frozenset(pair)
    for axis, others in MANY.items():
        if getattr(case, axis) > 2:
            yield from (frozenset({(axis, getattr(case, axis)), (name, values[name])}) for name in others & set(values))
    if case.optimizer != "adamW":
        optimizer = ("optimizer", case.optimizer)
        yield from (frozenset({optimizer, (name, values[name])}) for name in UPDATED & set(values))
    if case.ramp:
        yield from (frozenset({("ramp", True), (name, values[name])}) for name in RAMPED & set(values))
    if case.fp8:
        yield from (frozenset({("fp8", True), (name, values[name])}) for name in MULTIPLIED & set(values))
    if case.experts and case.zero_stage != 2:
        yield from (frozenset({("router", case.router), (name, values[name])}) for name in ROUTED & set(values))
