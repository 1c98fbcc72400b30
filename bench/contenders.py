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
    keep_freed_memory: bool = False
    """glibc's settings that ours makes on a CPU: large tensors are not handed back to the system and paged in anew."""
    alone: bool = False
    """One process has the threads of all."""
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
    """Ours, with SCHED_BATCH as in training.

    ``config`` holds further keys, ``layout`` those of parallelism; ``onednn=False`` leaves all products to MKL.
    """
    compiled = bool(options.get("config", {}).get("model.compile"))
    return Contender(name, "bench.ours", options, batch_policy=True, warm_up=4 if compiled else 2)


def by_mkl(contender: Contender) -> Contender:
    """Ours where MKL multiplies, as for its peers: what it does on processors for which MKL has all its code."""
    return replace(contender, name=f"{contender.name}, MKL", options={**contender.options, "onednn": False})


def as_shipped_and_scheduled(contender: Contender) -> list[Contender]:
    """A peer of several processes as its user starts it, and with the scheduling policy that ours sets."""
    return [contender, replace(contender, name=f"{contender.name}, SCHED_BATCH", batch_policy=True)]


def keeping_memory(contender: Contender) -> Contender:
    """A peer with the allocator's settings that ours makes for itself."""
    return replace(contender, name=f"{contender.name}, freed memory kept", keep_freed_memory=True)


def in_all_ways(contender: Contender) -> list[Contender]:
    """A peer of several processes as shipped, scheduled as ours, and with our allocator's settings too."""
    shipped, scheduled = as_shipped_and_scheduled(contender)
    return [shipped, scheduled, keeping_memory(scheduled)]


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

EXPERTS = Contender("transformers", "bench.peers.hugging_face", environment="transformers", alone=True)
DDP = Contender("DDP", "bench.peers.ddp", environment="torch")
RESHARDED = Contender("FSDP2, resharded", "bench.peers.fsdp2", {"reshard": True}, environment="torch")
RING = Contender("ring attention", "bench.peers.ring", environment="torch")

EP = {"dp": 2, "expert_parallel_size": 2}
CUBE = {"dp": 2, "tp": 2, "pp": 2}


def torchtitan(name: str = "torchtitan", **options: Any) -> Contender:
    """torchtitan's Trainer; ``layout`` holds dp, tp and pp, and how many replicas share experts."""
    return Contender(name, "bench.peers.torchtitan_step", options, environment="torchtitan")


def unsplit_torchtitan(layout: Mapping[str, int]) -> Contender:
    """torchtitan without sequence parallelism, which it has on with tp."""
    return torchtitan("torchtitan, no sequence parallel", layout=layout, sequence_parallel=False)


def dtensor(name: str, **options: Any) -> Contender:
    """torch's own tensor parallelism on a plain model."""
    return Contender(name, "bench.peers.dtensor_tp", options, environment="torch")


def pipelining(name: str, schedule: str) -> Contender:
    """torch's own pipeline parallelism on a plain model, beside ours of the same kind."""
    options = {"schedule": schedule}
    return Contender(name, "bench.peers.pipelining", options, environment="torch", against=f"ours, {schedule}")


def cut_rows(sequence_length: int) -> Subject:
    """One row that is cut over two context-parallel ranks, and beside it cut by tensor parallelism."""
    layout = {"context_parallel_size": 2}
    return Subject(
        f"One row of {sequence_length:,} tokens, cut over two ranks, float32",
        [
            ours(layout=layout),
            by_mkl(ours(layout=layout)),
            ours("ours, ALL_TO_ALL", layout={**layout, "cp_mode": "ALL_TO_ALL"}),
            ours("ours, tp 2 REDUCE_SCATTER", layout={"tp": 2, "tp_mode": "REDUCE_SCATTER"}),
            *in_all_ways(RING),
        ],
        world=2,
        shape={
            "num_hidden_layers": 4,
            "sequence_length": sequence_length,
            "micro_batch_size": 1,
            "num_microbatches": 1,
        },
    )


def sharded(dtype: str) -> Subject:
    """Two replicas of which each keeps half of everything, and gathers a block when it computes."""
    return Subject(
        f"Two replicas that share weights, gradients and optimizer's state, {dtype}",
        [
            ours(layout={"dp": 2}, config={"optimizer.zero_stage": 3}),
            *(
                ours(f"ours, ZeRO {stage}", layout={"dp": 2}, config={"optimizer.zero_stage": stage})
                for stage in (2, 1)
            ),
            *in_all_ways(RESHARDED),
        ],
        dtype=dtype,
        world=2,
    )


def in_precision(contender: Contender, precision: str, label: str) -> Contender:
    """A peer with float32 weights under autocast, or with weights of the subject's own dtype."""
    return replace(contender, name=f"{contender.name}, {label}", options={**contender.options, "precision": precision})


AUTOCAST = [in_precision(peer, "autocast", "autocast") for peer in (PLAIN, HUGGING_FACE)]
LOW_WEIGHTS = [in_precision(peer, "weights", "bf16 weights") for peer in (PLAIN, HUGGING_FACE)]

PIPELINES = [ours(f"ours, {engine}", layout={"pp": 2, "pp_engine": engine}) for engine in ("1f1b", "zb_h1", "zbv")]

SUBJECTS = {
    "one": Subject(
        "One process, float32",
        [
            ours(),
            by_mkl(ours()),
            COMPILED,
            by_mkl(COMPILED),
            PLAIN,
            keeping_memory(PLAIN),
            compiled(PLAIN),
            keeping_memory(compiled(PLAIN)),
            HUGGING_FACE,
            keeping_memory(HUGGING_FACE),
            compiled(HUGGING_FACE),
            torchtitan(),
        ],
        threads=2,
    ),
    "one-bf16": Subject(
        "One process, bfloat16",
        [
            ours(),
            COMPILED,
            *AUTOCAST,
            *map(keeping_memory, AUTOCAST),
            *map(compiled, AUTOCAST),
            *LOW_WEIGHTS,
            compiled(LOW_WEIGHTS[1]),
        ],
        dtype="bfloat16",
        threads=2,
    ),
    "dp2": Subject(
        "Two replicas, float32",
        [
            ours(layout={"dp": 2}),
            by_mkl(ours(layout={"dp": 2})),
            by_mkl(ours("ours, compile", layout={"dp": 2}, config={"model.compile": True})),
            ours("ours, ZeRO 0", layout={"dp": 2}, config={"optimizer.zero_stage": 0}),
            *in_all_ways(DDP),
            *as_shipped_and_scheduled(Contender("FSDP2", "bench.peers.fsdp2", environment="torch")),
            *as_shipped_and_scheduled(torchtitan(layout={"dp": 2})),
        ],
        world=2,
    ),
    "zero3": sharded("float32"),
    "zero3-bf16": sharded("bfloat16"),
    "tp2": Subject(
        "Two tensor-parallel ranks, float32",
        [
            ours(layout={"tp": 2}),
            by_mkl(ours(layout={"tp": 2})),
            ours("ours, overlapped", layout={"tp": 2, "tp_linear_async_communication": True}),
            ours("ours, compile", layout={"tp": 2}, config={"model.compile": True}),
            by_mkl(ours("ours, compile", layout={"tp": 2}, config={"model.compile": True})),
            *in_all_ways(dtensor("DTensor")),
            *as_shipped_and_scheduled(dtensor("DTensor, loss parallel", loss_parallel=True)),
            *in_all_ways(dtensor("DTensor, sequence parallel", sequence_parallel=True, loss_parallel=True)),
            *as_shipped_and_scheduled(torchtitan(layout={"tp": 2})),
            *as_shipped_and_scheduled(unsplit_torchtitan(layout={"tp": 2})),
        ],
        world=2,
    ),
    "cp2": cut_rows(4096),
    "cp2-8k": cut_rows(8192),
    "moe2": Subject(
        "Sixteen experts, of which a token uses four, shared by two replicas, float32",
        [
            ours(layout=EP),
            by_mkl(ours(layout=EP)),
            ours("ours, compile", layout=EP, config={"model.compile": True}),
            replace(ours("ours, one process"), alone=True),
            replace(ours("ours, one process, compile", config={"model.compile": True}), alone=True),
            EXPERTS,
            keeping_memory(EXPERTS),
            replace(EXPERTS, name="transformers, eager", options={"experts": "eager"}),
            *as_shipped_and_scheduled(torchtitan("torchtitan, bf16 experts", layout=EP)),
        ],
        world=2,
        shape={"num_experts": 16},
    ),
    "pp2": Subject(
        "Two pipeline stages, float32",
        [
            *PIPELINES,
            *map(by_mkl, PIPELINES),
            ours("ours, zbv, compile", layout={"pp": 2, "pp_engine": "zbv"}, config={"model.compile": True}),
            by_mkl(ours("ours, zbv, compile", layout={"pp": 2, "pp_engine": "zbv"}, config={"model.compile": True})),
            *in_all_ways(pipelining("Schedule1F1B", "1f1b")),
            *in_all_ways(pipelining("ScheduleZBVZeroBubble", "zbv")),
        ],
        world=2,
    ),
    "3d": Subject(
        "Two replicas of two stages of two tensor-parallel ranks, float32",
        [
            ours(layout=CUBE),
            by_mkl(ours(layout=CUBE)),
            by_mkl(ours("ours, compile", layout=CUBE, config={"model.compile": True})),
            ours("ours, zbv", layout={**CUBE, "pp_engine": "zbv"}),
            *as_shipped_and_scheduled(torchtitan(layout=CUBE)),
        ],
        world=8,
    ),
}
"""By the names that the command line takes."""
