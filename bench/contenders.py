"""Who is compared with whom, as data: add a contender or a subject here.

A contender is a module that ends in ``bench.serve.serve(step)``. ``world`` processes of it are started, each with RANK,
WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS set, and with one argument of
JSON: shape (the fields of ``bench.shapes.Shape``), dtype, threads, batch_policy, and the contender's own ``options``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

OURS = "ours"


@dataclass(frozen=True)
class Contender:
    """One line of a table."""

    name: str
    module: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: str | None = None
    """Its pinned requirements, bench/peers/requirements/<this>.txt; None is the interpreter that runs the bench."""
    against: str = OURS
    """The line of ours that its ratio is taken with."""
    batch_policy: bool = False
    """SCHED_BATCH, which keeps gloo's threads from spinning against the thread they serve; unused by one process."""
    warm_up: int = 2
    """Steps before the first round, which are not counted."""


@dataclass(frozen=True)
class Subject:
    """One table: the same work, cut in the same way."""

    title: str
    contenders: Sequence[Contender]
    dtype: str = "float32"
    world: int = 1
    threads: int = 1
    """Of each process."""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the shape that this subject needs to be different."""


def ours(name: str = OURS, **options: Any) -> Contender:
    """Ours, with SCHED_BATCH as in training; ``config`` holds further keys, ``layout`` dp, tp and pp."""
    compiled = bool(options.get("config", {}).get("model.compile"))
    return Contender(name, "bench.ours", options, batch_policy=True, warm_up=4 if compiled else 2)


def as_shipped_and_scheduled(contender: Contender) -> list[Contender]:
    """A peer of several processes as its user starts it, and with the scheduling policy that ours sets."""
    return [contender, replace(contender, name=f"{contender.name}, SCHED_BATCH", batch_policy=True)]


def compiled(contender: Contender) -> Contender:
    """A peer under torch.compile, beside ours compiled."""
    return replace(
        contender,
        name=f"{contender.name}, compile",
        options={**contender.options, "compile": True},
        against=COMPILED.name,
        warm_up=4,
    )


COMPILED = ours("ours, compile", config={"model.compile": True})
PLAIN = Contender("plain loop", "bench.peers.plain", environment="torch")
HUGGING_FACE = Contender("transformers", "bench.peers.hugging_face", environment="transformers")


def in_precision(contender: Contender, precision: str, label: str) -> Contender:
    """A peer with float32 weights under autocast, or with weights of the subject's own dtype."""
    return replace(contender, name=f"{contender.name}, {label}", options={**contender.options, "precision": precision})


AUTOCAST = [in_precision(peer, "autocast", "autocast") for peer in (PLAIN, HUGGING_FACE)]
LOW_WEIGHTS = [in_precision(peer, "weights", "bf16 weights") for peer in (PLAIN, HUGGING_FACE)]

SUBJECTS = {
    "one": Subject(
        "One process, float32",
        [ours(), COMPILED, PLAIN, compiled(PLAIN), HUGGING_FACE, compiled(HUGGING_FACE)],
        threads=2,
    ),
    "one-bf16": Subject(
        "One process, bfloat16",
        [ours(), COMPILED, *AUTOCAST, *map(compiled, AUTOCAST), *LOW_WEIGHTS, compiled(LOW_WEIGHTS[1])],
        dtype="bfloat16",
        threads=2,
    ),
    "dp2": Subject(
        "Two replicas, float32",
        [
            ours(layout={"dp": 2}),
            ours("ours, ZeRO 0", layout={"dp": 2}, config={"optimizer.zero_stage": 0}),
            *as_shipped_and_scheduled(Contender("DDP", "bench.peers.ddp", environment="torch")),
            *as_shipped_and_scheduled(Contender("FSDP2", "bench.peers.fsdp2", environment="torch")),
        ],
        world=2,
    ),
}
"""By the names that the command line takes."""
