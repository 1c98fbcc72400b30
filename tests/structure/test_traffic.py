"""Collectives and bytes of a step: the least that each layout needs, and exactly what the planner says.

On one rank, with b rows of s tokens in each of m microbatches, hidden size d, its L layers, t ranks along tp. An
*activation* is [b, s, d] in the model's dtype; *first* and *last* are 1 on the stage with the embedding, with the head.
Where sequences are cut over c ranks, s stands for the s/c tokens that one of them holds.

    world    1 all-reduce: the control word, five float64
    dp · cp  1 all-reduce: the number of targets, one float64
             zero 0: the gradients once, an all-reduce for each bucket
             zero 1: the gradients once, a reduce-scatter for each bucket; the weights once, an all-gather
             zero 2: m times a reduce-scatter of each block's matrices, embedding and head among its B blocks; the rest
             as before
             zero 3: that, and m times B - 1 all-gathers forward, since the first layer is still whole, and B - 3
             backward, since the last two blocks are and the embedding need not be; one more, of the first layer, once
    tied     1 all-reduce: the gradient of the tied weight's shard
    pp       m sends of an activation (1/t of it under sequence parallelism) to the next stage, m to the one before
    tp       m times (4·L + first + last) all-reduces of an activation: into and out of attention and MLP, forward and
             backward; out of the embedding, into the head; and last · 2 of the loss, 3 float32 per token together
             under sequence parallelism: as many all-gathers and as many reduce-scatters instead, for each all-reduce
             is the sum of one of each; (2·L + last) more all-gathers when gathered inputs are not kept; and an
             all-reduce of the norms' gradients, which each rank has for its own tokens
    cp       gathering keys and values: m · L times an all-gather of both, of the whole row's, forward and backward, and
             a reduce-scatter of their gradients
             cutting heads: m · L · 2 times four exchanges, of queries, keys, values, and what attention gives
    ep       m times, for each layer with experts, 7 all-to-alls: of the numbers of rows, forward; of rows, of their
             weights and of what experts made of them, forward and backward
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from nanotron.config import Config
from nanotron.parallel.mesh import Mesh
from nanotron.plan.counting import Traffic
from nanotron.plan.hardware import find_cluster
from nanotron.plan.predict import Planner
from nanotron.training.topology import layers_of_stages, mesh_axes, tied_stages
from tests.parity.cases import Case
from tests.parity.run import VOCABULARY, config_of, feed_of, microbatches_of, prepare
from tests.pool import Pool
from tests.structure.counters import Collective, Collectives

Counts = dict[Collective, tuple[int, int]]
"""Calls and bytes of each."""

PLANNER = Planner(find_cluster("h100", 8))
"""One for all: it measures what layouts share once."""

CASES = [
    Case(dp=2, zero_stage=1, rows=1),
    Case(dp=3, zero_stage=1, tied=True),
    Case(tp=2, tp_mode="REDUCE_SCATTER"),
    Case(tp=2, tp_mode="REDUCE_SCATTER", tp_recompute_allgather=False, dtype="float64"),
    Case(pp=2, tied=True, schedule="zb_h1"),
    Case(dp=2, tp=2, pp=2, tied=True),
    Case(dp=2, tp=2, pp=2, zero_stage=1, tp_mode="REDUCE_SCATTER", tied=True),
    Case(cp=2),
    Case(cp=2, recompute_layer="selective"),
    Case(cp=2, cp_mode="ALL_TO_ALL", documents=True, dtype="float64"),
    Case(cp=3, length=48, dp=2, zero_stage=1),
    Case(cp=2, tp=2, tp_mode="REDUCE_SCATTER"),
    Case(cp=2, dp=2, pp=2, zero_stage=1, tied=True),
]
ALONE = [Case(dp=2), Case(dp=2, zero_stage=1), Case(tp=2), Case(pp=2)]
ALONE += [Case(dp=2, tp=2, pp=2, zero_stage=1, tp_mode="REDUCE_SCATTER")]
"""What some case above does beside something else."""


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.nightly) for case in ALONE)], ids=str)
def test_a_step_sends_the_least_its_layout_needs_and_what_the_planner_says(pool: Pool, case: Case) -> None:
    config = config_of(case)
    plan = PLANNER.plan(config, every_layer=True)
    for rank, seen in enumerate(pool.run(case.world, count, case)):
        mesh = Mesh(mesh_axes(config), rank)
        assert seen == least(config, mesh), f"rank {rank}"
        if mesh.coord("tp") == case.tp - 1:  # of a vocabulary that does not divide, the rank that is planned
            assert seen == named(plan.ranks[mesh.coord("pp")].traffic, config, mesh), f"rank {rank}"


SHARDED = [
    Case(dp=2, zero_stage=2),
    Case(dp=2, zero_stage=3),
    Case(dp=2, zero_stage=3, recompute_layer=True, dtype="float64"),
    Case(dp=2, tp=2, zero_stage=3),
]


@pytest.mark.parametrize("case", SHARDED, ids=str)
def test_whole_blocks_come_and_go_in_every_microbatch_as_the_planner_says(pool: Pool, case: Case) -> None:
    config = config_of(case)
    plan, m = PLANNER.plan(config, every_layer=True), case.accumulation
    blocks = config.model.model_config.num_hidden_layers + 2
    for rank, seen in enumerate(pool.run(case.world, count, case)):
        mesh = Mesh(mesh_axes(config), rank)
        if mesh.coord("tp") == case.tp - 1:
            assert seen == named(plan.ranks[0].traffic, config, mesh), f"rank {rank}"
        calls = {kind: seen[Collective(kind, mesh.ranks_along("dp"))][0] for kind in ("reduce_scatter", "all_gather")}
        assert calls["reduce_scatter"] == m * blocks + 1  # of norms, at the end
        gathers = m * (2 * blocks - 4) + 1 if case.zero_stage == 3 else blocks
        assert calls["all_gather"] == gathers + 1


EXPERTS = [
    Case(dp=4, ep=2, zero_stage=1, experts=8, router="all"),
    Case(dp=2, ep=2, tp=2, pp=2, zero_stage=1, tp_mode="REDUCE_SCATTER", experts=8, router="all"),
    Case(dp=2, ep=2, cp=2, experts=8, router="all", recompute_layer="selective", dtype="float64"),
]
"""Each token uses all experts: then as many rows go to each as the planner takes to go there."""


@pytest.mark.parametrize("case", EXPERTS, ids=str)
def test_rows_of_experts_travel_as_the_planner_says(pool: Pool, case: Case) -> None:
    config = config_of(case)
    plan, moe = PLANNER.plan(config, every_layer=True), config.model.model_config.moe_config
    assert moe is not None
    for rank, seen in enumerate(pool.run(case.world, count, case)):
        mesh = Mesh(mesh_axes(config), rank)
        if mesh.coord("tp") == case.tp - 1:
            assert seen == named(plan.ranks[mesh.coord("pp")].traffic, config, mesh), f"rank {rank}"
        lo, hi = layers_of_stages(config)[mesh.coord("pp")]
        passes = case.accumulation * len(set(moe.layers) & set(range(lo, hi)))
        size = torch.empty(0, dtype=getattr(torch, case.dtype)).element_size()
        tokens = case.ep * case.micro_batch_size * config.tokens.sequence_length // case.cp  # each to all ranks, once
        x, weights, chosen = config.model.model_config.hidden_size * size, moe.top_k * max(4, size), 8 * moe.top_k
        there = 8 * (case.ep + moe.num_experts // case.tp) + tokens * (x + weights + chosen)  # counts first
        back, gradients = tokens * x, tokens * (2 * x + weights)
        calls = passes * (12 if case.recompute_layer else 8)
        sent = passes * (there * (2 if case.recompute_layer else 1) + back + gradients)
        assert seen[Collective("all_to_all", mesh.ranks_along("ep"))] == (calls, sent), f"rank {rank}"


def count(rank: int, world: int, case: Case, cap_mb: int = 25) -> Counts:
    """The collectives of the second step on this rank."""
    config = capped(case, cap_mb)
    mesh = Mesh(mesh_axes(config), rank)
    training = prepare(config, mesh)
    feed = feed_of(config, mesh)
    batches = [microbatches_of(feed, update, case, mesh) for update in (1, 2)]
    feed.close()
    training.step(1, batches[0]).read()
    collectives = Collectives()
    with collectives:
        training.step(2, batches[1]).read()
    return {key: (calls, collectives.bytes[key]) for key, calls in collectives.calls.items()}


def capped(case: Case, cap_mb: int) -> Config:
    """The case's config with buckets of at most this size."""
    config = config_of(case)
    return replace(config, model=replace(config.model, ddp_bucket_cap_mb=cap_mb))


def least(config: Config, mesh: Mesh) -> Counts:
    """The table above."""
    model, layout, tokens = config.model.model_config, config.parallelism, config.tokens
    stage, size = mesh.coord("pp"), torch.empty(0, dtype=getattr(torch, config.model.dtype)).element_size()
    first, last = stage == 0, stage == layout.pp - 1
    lo, hi = layers_of_stages(config)[stage]
    m, ends, layers = tokens.batch_accumulation_per_replica, first + last, hi - lo
    positions = tokens.micro_batch_size * tokens.sequence_length // layout.context_parallel_size
    activation = positions * model.hidden_size * size
    norms = (2 * layers + last) * model.hidden_size
    found = _Found(mesh)
    found.add("all_reduce", tuple(range(mesh.world)), 1, 4 * 8)  # squared norm, lm loss, save, stop

    replicas = mesh.ranks_along("dp", "cp")
    found.add("all_reduce", replicas, 1, 8)

    def share(parameters: int) -> int:  # of one replica, in whole 128 bytes
        return -(-parameters // (len(replicas) * 128 // size)) * 128 // size

    for parameters in buckets(config, mesh, layers, norms):
        padded = share(parameters) * len(replicas)
        if config.optimizer.zero_stage == 0:
            found.add("all_reduce", replicas, 1, padded * size)
        else:
            found.add("reduce_scatter", replicas, 1, padded * size)
            found.add("all_gather", replicas, 1, padded * size)

    def part(parameters: int) -> int:  # of a gradient that this rank has the sum of
        return share(parameters) * (1 if config.optimizer.zero_stage else len(replicas))

    if tied_stages(config) and ends:
        found.add("all_reduce", _tied(config, mesh), 1, part(rows(mesh) * model.hidden_size) * size)

    shards, pipeline = mesh.ranks_along("tp"), mesh.ranks_along("pp")
    neighbours = (stage > 0) + (stage < layout.pp - 1)
    parts = layout.tp if layout.sequence_parallel else 1
    found.add("send", pipeline, m * neighbours, m * neighbours * activation // parts)
    entries = m * (4 * layers + ends)
    if layout.sequence_parallel:
        again = m * (2 * layers + last) if layout.tp_recompute_allgather else 0
        found.add("all_gather", shards, entries + again, (entries + again) * activation)
        found.add("reduce_scatter", shards, entries, entries * activation)
        found.add("all_reduce", shards, 1, part(norms) * size)
    else:
        found.add("all_reduce", shards, entries, entries * activation)
    found.add("all_reduce", shards, 2 * m * last, m * last * 3 * positions * max(4, size))

    context, calls = mesh.ranks_along("cp"), m * layers
    heads, kv_heads = model.num_attention_heads // layout.tp, max(1, model.num_key_value_heads // layout.tp)
    head = calls * positions * model.head_dim * size  # bytes of one in all calls
    if layout.cp_mode == "ALL_GATHER":
        found.add("all_gather", context, 2 * calls, 2 * len(context) * 2 * kv_heads * head)
        found.add("reduce_scatter", context, calls, len(context) * 2 * kv_heads * head)
    else:
        found.add("all_to_all", context, 2 * 4 * calls, 2 * (2 * heads + 2 * kv_heads) * head)
    return found.counts


def buckets(config: Config, mesh: Mesh, layers: int, norms: int) -> list[int]:
    """Parameters of each: those that decay, those that do not, and a tied one."""
    model, stage, stages = config.model.model_config, mesh.coord("pp"), mesh.size("pp")
    d, heads, kv_heads = model.hidden_size, model.num_attention_heads, model.num_key_value_heads
    matrices = (2 * heads + 2 * kv_heads) * model.head_dim * d + 3 * model.intermediate_size * d
    table = rows(mesh) * d
    tied = model.tie_word_embeddings
    tables = (stage == 0) + (stage == stages - 1 and not (tied and stages == 1))
    decaying = layers * matrices // mesh.size("tp")
    if tied and stages > 1:
        return [decaying, norms] + [table] * tables
    return [decaying + tables * table, norms]


def rows(mesh: Mesh) -> int:
    """Of the vocabulary, on this rank."""
    rank, ranks = mesh.coord("tp"), mesh.size("tp")
    return VOCABULARY * (rank + 1) // ranks - VOCABULARY * rank // ranks


class _Found:
    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.counts = mesh, dict[Collective, tuple[int, int]]()

    def add(self, kind: str, ranks: tuple[int, ...], calls: int, num_bytes: int) -> None:
        """Note some collectives; those of one rank alone, and none at all, are not made."""
        if len(ranks) > 1 and calls:
            before = self.counts.get(Collective(kind, ranks), (0, 0))
            self.counts[Collective(kind, ranks)] = before[0] + calls, before[1] + num_bytes


def _tied(config: Config, mesh: Mesh) -> tuple[int, ...]:
    (stages,) = tied_stages(config).values()
    return tuple(mesh.rank_at(pp=stage) for stage in stages)


def named(traffic: Counter[Traffic], config: Config, mesh: Mesh) -> Counts:
    """What the planner says, with groups instead of axes."""
    found = _Found(mesh)
    for key, calls in traffic.items():
        if key.what == "calls":
            groups = {"world": lambda: tuple(range(mesh.world)), "tied": lambda: _tied(config, mesh)}
            ranks = groups[key.axis]() if key.axis in groups else mesh.ranks_along(*key.axis.split("+"))
            found.add(key.kind, ranks, calls, traffic[key._replace(what="bytes")])
    return found.counts


def test_the_planner_counts_the_buckets_of_many_layers(pool: Pool) -> None:
    case = Case(dp=2, layers=16, zero_stage=1)
    config = capped(case, 1)
    plan = PLANNER.plan(config, every_layer=True)
    for rank, seen in enumerate(pool.run(2, count, case, 1)):
        assert seen == named(plan.ranks[0].traffic, config, Mesh(mesh_axes(config), rank))
        assert seen[Collective("reduce_scatter", (0, 1))][0] == 4  # 6 layers of 148 KB, 6, 4 and the head; the norms


def test_only_the_control_word_is_world_wide(pool: Pool) -> None:
    for seen in pool.run(8, count, Case(dp=2, tp=2, pp=2, tied=True, zero_stage=1)):
        assert [key.kind for key in seen if len(key.ranks) == 8] == ["all_reduce"]
        assert seen[Collective("all_reduce", tuple(range(8)))] == (1, 32)
