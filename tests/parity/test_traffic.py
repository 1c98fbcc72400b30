"""How many collectives a step makes: a count that only grows when someone means it to.

Counted outside the code, as operators pass torch's dispatcher. L layers, m microbatches, on one tensor-parallel group:

    ALL_REDUCE       per microbatch: each layer 2 forward and 2 backward; embedding 1; loss 2; head's input gradient 1
    REDUCE_SCATTER   all-gathers: each layer 2 forward, 2 backward and 2 repeated; embedding 1; head 1 and 1 repeated
                     reduce-scatters: each layer 2 forward and 2 backward; embedding 1; head 1. All-reduces: loss 2
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from nanotron.data.feed import Feed
from nanotron.layout import mesh_axes
from nanotron.mesh import Mesh
from tests.parity.cases import Case
from tests.parity.run import config_of, prepare, to_walk
from tests.pool import Pool

LAYERS = 4
KINDS = {  # operator -> (our word, which argument is the group)
    "allreduce_": ("all-reduce", 1),
    "_allgather_base_": ("all-gather", 2),
    "_reduce_scatter_base_": ("reduce-scatter", 2),
}
TRANSFERS = {"send", "recv_"}


class Collectives(TorchDispatchMode):
    """Counts (kind, number of ranks) of every collective."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and func._opname not in TRANSFERS:
            kind, position = KINDS[func._opname]
            self.seen[kind, dist.ProcessGroup.unbox(args[position]).size()] += 1
        return func(*args, **(kwargs or {}))


def count(rank: int, world: int, case: Case) -> Counter[tuple[str, int]]:
    """The collectives of the second step on this rank."""
    config = config_of(case)
    mesh = Mesh(mesh_axes(config), rank)
    training = prepare(config, mesh)
    feed = Feed(config, mesh, device=torch.device("cpu"))
    batches = [[to_walk(batch, case) for batch in feed.step(update).microbatches] for update in (1, 2)]
    feed.close()
    training.step(1, batches[0]).read()
    collectives = Collectives()
    with collectives:
        training.step(2, batches[1]).read()
    return collectives.seen


def test_only_the_control_word_is_world_wide(pool: Pool) -> None:
    for seen in pool.run(8, count, Case(dp=2, tp=2, pp=2, tied=True, zero_stage=1)):
        assert sum(times for (_, ranks), times in seen.items() if ranks == 8) == 1
        assert seen["all-reduce", 8] == 1


def test_all_reduce_mode_makes_four_all_reduces_per_layer(pool: Pool) -> None:
    case = Case(tp=2)
    control_word = 1
    for seen in pool.run(2, count, case):
        assert seen == {("all-reduce", 2): case.accumulation * (4 * LAYERS + 1 + 2 + 1) + control_word}


@pytest.mark.parametrize("repeated", [True, False])
def test_sequence_parallel_mode_gathers_and_scatters_instead(pool: Pool, repeated: bool) -> None:
    case = Case(tp=2, tp_mode="REDUCE_SCATTER", tp_recompute_allgather=repeated)
    for seen in pool.run(2, count, case):
        again = 2 * LAYERS + 1 if repeated else 0
        assert seen["all-gather", 2] == case.accumulation * (4 * LAYERS + 1 + 1 + again)
        assert seen["reduce-scatter", 2] == case.accumulation * (4 * LAYERS + 1 + 1)
        partial_buckets = seen["all-reduce", 2] - case.accumulation * 2 - 1  # the loss, and the control word
        assert 1 <= partial_buckets <= LAYERS + 1  # norms share buckets
        assert len(seen) == 3


@pytest.mark.parametrize(
    ("zero_stage", "kinds"), [(0, {"all-reduce"}), (1, {"all-reduce", "reduce-scatter", "all-gather"})]
)
def test_gradients_are_reduced_once_per_step_however_many_microbatches(
    pool: Pool, zero_stage: int, kinds: set[str]
) -> None:
    counts = []
    for size in (1, 6):
        case = Case(dp=2, zero_stage=zero_stage, micro_batch_size=size)
        (seen, other) = pool.run(2, count, case)
        assert seen == other
        counts.append(seen)
    assert counts[0] == counts[1]
    assert {kind for kind, _ in counts[0]} == kinds
