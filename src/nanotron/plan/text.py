"""A plan as a person reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from nanotron.logging import human_duration, human_format
from nanotron.metrics.memory import GIB
from nanotron.parallel.mesh import Mesh
from nanotron.plan.counting import Traffic
from nanotron.plan.fixes import Fix
from nanotron.plan.layouts import written
from nanotron.plan.measure import leaves_each_microbatch
from nanotron.plan.predict import Plan, RankPlan, ranks_of
from nanotron.plan.search import Fastest
from nanotron.training.topology import mesh_axes, model_size, parameter_specs

if TYPE_CHECKING:
    from nanotron.config import Config, ParallelismArgs

SHOWN = 6  # pipeline ranks; of more, the ends and the worst


def plan_text(plan: Plan, ramp: Sequence[tuple[int, Plan]] = ()) -> str:
    """Everything about one layout; ``ramp``: (steps, the plan of each) before the batch has its size."""
    blocks = [_heading(plan, ramp), _memory(plan), _traffic(plan), _time(plan, ramp), [_verdict(plan)]]
    return "\n\n".join("\n".join(block) for block in blocks)


def fixes_text(fixes: Sequence[Fix]) -> str:
    """What would make it fit, the cheapest first."""
    if not fixes:
        return "No small change makes it fit: use more devices, or search with --search."
    lines = ["Cheapest changes that make it fit:"]
    for fix in fixes:
        plan = fix.plan
        devices = plan.config.parallelism.world_size
        lines.append(
            f"  {written(fix.change)}: {plan.worst.memory.total / GIB:.1f} GiB, "
            f"{human_format(plan.tokens_per_second)} tokens/s on {devices} devices, MFU {plan.mfu:.1%}"
        )
    return "\n".join(lines)


def search_text(found: Fastest) -> str:
    """The table of the fastest layouts."""
    lines = [f"{found.num_legal} legal layouts, {found.num_planned} of them planned in full; the fastest that fit:", ""]
    sparse = any(plan.config.model.model_config.sparse_layers for _, plan in found.best)
    header = f"{'dp':>5}{'ep':>4}" if sparse else f"{'dp':>5}"
    header += f"{'cp':>8}{'tp':>4}{'pp':>4}  {'schedule':<17}{'micro-batch':>11}{'zero':>8}{'recompute':>11}"
    lines.append(f"{header}{'GiB':>7}{'bubble':>8}{'tokens/s':>10}{'MFU':>7}")
    for _, plan in found.best:
        layout, tokens = plan.config.parallelism, plan.config.tokens
        micro = f"{tokens.micro_batch_size} × {tokens.batch_accumulation_per_replica}"
        recomputed = {False: "no", True: "yes", "selective": "selective"}[layout.recompute_layer]
        schedule = layout.pp_engine if layout.pp > 1 else "-"
        line = f"{layout.dp:>5}{layout.expert_parallel_size:>4}" if sparse else f"{layout.dp:>5}"
        line += f"{_cut(layout):>8}{layout.tp:>4}{layout.pp:>4}  {schedule:<17}{micro:>11}"
        zero = f"{plan.config.optimizer.zero_stage}{f' of {layout.dp_shard}' if layout.dp_shard else ''}"
        line += f"{zero:>8}{recomputed:>11}"
        line += f"{plan.worst.memory.total / GIB:>7.1f}{plan.bubble:>8.1%}{human_format(plan.tokens_per_second):>10}"
        lines.append(f"{line}{plan.mfu:>7.1%}")
    if any(plan.config.parallelism.context_parallel_size > 1 for _, plan in found.best):
        lines += ["", "cp: g with cp_mode ALL_GATHER, a with ALL_TO_ALL"]
    if any(plan.config.parallelism.dp_shard for _, plan in found.best):
        lines += ["", "zero: 3 of 8 is stage 3 with dp_shard 8"]
    return "\n".join(lines)


def _cut(layout: ParallelismArgs) -> str:
    """`4 g`: context-parallel ranks, and how attention sees what they hold."""
    ranks = layout.context_parallel_size
    return f"{ranks} {'a' if layout.cp_mode == 'ALL_TO_ALL' else 'g'}" if ranks > 1 else "1"


def _heading(plan: Plan, ramp: Sequence[tuple[int, Plan]]) -> list[str]:
    config, layout, cluster = plan.config, plan.config.parallelism, plan.cluster
    nodes = -(-layout.world_size // cluster.per_node)
    tokens = config.tokens
    recompute = {False: "", True: ", recompute", "selective": ", selective recompute"}[layout.recompute_layer]
    fp8 = f", layers multiply in fp8 ({config.model.fp8})," if config.model.fp8 else ""
    return [
        f"{model_size(config)} parameters in {config.model.dtype}{fp8} on {layout.world_size} × {cluster.device.name}"
        f" ({nodes} node{'s'[: nodes > 1]} of {cluster.per_node})",
        f"{layout}, zero stage {config.optimizer.zero_stage}{recompute}",
        f"{config.global_batch_size} samples of {tokens.sequence_length} tokens per step:"
        f" {tokens.batch_accumulation_per_replica} micro-batches of {tokens.micro_batch_size} on each replica",
        *(_smaller(steps, smaller) for steps, smaller in ramp),
        *_sharing(config),
        *_experts(plan),
    ]


def _smaller(steps: int, plan: Plan) -> str:
    """Steps of the ramp, and what is slow in them."""
    batch, count = plan.config.global_batch_size, plan.config.tokens.batch_accumulation_per_replica
    return (
        f"before them {steps} steps of {batch}: {count} micro-batches, {_seconds(plan.step_seconds)} each"
        f" (bubble {plan.bubble:.1%}), {human_format(plan.tokens_per_second)} tokens/s"
    )


def _sharing(config: Config) -> list[str]:
    """What ZeRO-2 and 3 send in every micro-batch, of which a pipeline needs many."""
    if not leaves_each_microbatch(config):
        return []
    m, stage = config.tokens.batch_accumulation_per_replica, config.optimizer.zero_stage
    weights = " and gathers its weights forward and backward" if stage == 3 else ""
    whose = "a pipeline stage's" if config.parallelism.pp > 1 else "the model's"
    return [
        f"ZeRO {stage}: each of {m} micro-batches sends {whose} gradients{weights}; ZeRO 1 sends either once a step"
    ]


def _experts(plan: Plan) -> list[str]:
    """Where experts are, what they weigh, and what is assumed of their router."""
    config, model, mesh = plan.config, plan.config.model.model_config, Mesh(mesh_axes(plan.config))
    moe = model.moe_config
    if moe is None or not model.sparse_layers:
        return []
    here = moe.num_experts // (mesh.size("ep") * mesh.size("tp"))
    layers = {f"layers.{layer}" for modules in plan.worst.held for layer in modules.layers}
    held = [spec for name, spec in parameter_specs(config).items() if name.partition(".mlp")[0] in layers]
    numel = sum(spec.local_box(mesh).numel for spec in held if spec.is_of_experts)
    itemsize = getattr(torch, config.model.dtype).itemsize
    return [
        f"{moe.num_experts} experts in {len(model.sparse_layers)} of {model.num_hidden_layers} layers, {here} of each"
        f" layer on a rank ({numel * itemsize / GIB:.2f} GiB of weights); a token uses {moe.top_k}, taken to be spread"
        " evenly",
    ]


def _memory(plan: Plan) -> list[str]:
    lines = [
        f"GiB per rank, of {plan.cluster.memory_bytes / GIB:.1f}",
        f"{'pp rank':<9}{'weights':>8}{'grads':>8}{'master':>8}{'moments':>9}{'activations':>13}"
        f"{'buffers':>9}{'total':>8}  holds",
    ]
    for rank in _shown(plan):
        memory = rank.memory
        sizes = (memory.parameters, memory.gradients, memory.master_weights, memory.moments)
        line = f"{rank.pp_rank:<9}" + "".join(
            f"{size / GIB:>{width}.2f}" for size, width in zip(sizes, (8, 8, 8, 9), strict=True)
        )
        line += f"{memory.activations / GIB:>13.2f}{memory.buffers / GIB:>9.2f}{memory.total / GIB:>8.2f}"
        lines.append(line + f"  {_holds(rank)}{' (most)' if rank is plan.worst and len(plan.ranks) > 1 else ''}")
    hidden = len(plan.ranks) - len(_shown(plan))
    return lines + ([f"({hidden} more pipeline ranks, none of which needs more)"] if hidden else [])


def _shown(plan: Plan) -> list[RankPlan]:
    if len(plan.ranks) <= SHOWN:
        return plan.ranks
    ends = (*plan.ranks[:2], plan.worst, plan.ranks[-1])
    return [rank for rank in plan.ranks if rank in ends]


def _holds(rank: RankPlan) -> str:
    parts = []
    for layers, embed, head in rank.held:
        lo, hi = layers[0], layers[-1]
        parts += ["embedding"] * embed + [f"layers {lo}-{hi}" if hi > lo else f"layer {lo}"] + ["head"] * head
    return ", ".join(parts)


def _traffic(plan: Plan) -> list[str]:
    """One line per axis and kind: bytes of the busiest rank, and what they travel over."""
    keys = sorted({(key.axis, key.kind) for rank in plan.ranks for key in rank.traffic})
    width = max([6, *(len(axis) + 1 for axis, _ in keys)])
    columns = f"{'ranks':>6}  {'over':<9}{'kind':<16}{'calls':>7}{'GiB per step':>14}{'time of the axis':>18}"
    lines = [f"{'axis':<{width}}{columns}"]
    for axis, kind in keys:
        calls, num_bytes = (
            max(rank.traffic[Traffic(kind, axis, what)] for rank in plan.ranks) for what in ("calls", "bytes")
        )
        ranks = ranks_of(plan.config, axis)
        over = f"{len(ranks):>6}  {'links' if ranks[-1] < plan.cluster.per_node else 'network':<9}"
        first = (axis, kind) == next(key for key in keys if key[0] == axis)
        time = f"{plan.axis_seconds[axis] * 1e3:.1f} ms" if first and axis in plan.axis_seconds else ""
        lines.append(f"{axis:<{width}}{over}{kind:<16}{calls:>7}{num_bytes / GIB:>14.3f}{time:>18}".rstrip())
    return lines if keys else ["one rank: nothing is sent"]


def _time(plan: Plan, ramp: Sequence[tuple[int, Plan]]) -> list[str]:
    config = plan.config
    steps = config.tokens.train_steps
    tokens = config.samples_by(steps) * config.tokens.sequence_length
    run_seconds = plan.step_seconds * (steps - sum(of_ramp for of_ramp, _ in ramp))
    run_seconds += sum(of_ramp * smaller.step_seconds for of_ramp, smaller in ramp)
    hours = run_seconds / 3600 * config.parallelism.world_size
    windowed = ", at S·W in windows" if config.model.model_config.sliding_window_size else ""
    active = ", of experts those that a token uses" if config.model.model_config.sparse_layers else ""
    return [
        f"step        {_seconds(plan.step_seconds)}: pipeline {_seconds(plan.pipeline_seconds)}"
        f" (bubble {plan.bubble:.1%}), communication after it {_seconds(plan.exposed_seconds)},"
        f" update {_seconds(plan.update_seconds)}",
        f"model FLOPs {human_format(plan.model_flops)} per step, attention at full S²{windowed}{active}",
        f"throughput  {human_format(plan.tokens_per_second)} tokens/s, "
        f"{human_format(plan.tokens_per_second / config.parallelism.world_size)} per device, MFU {plan.mfu:.1%}",
        f"whole run   {human_format(tokens)} tokens in {steps} steps:"
        f" {human_duration(run_seconds)}, {human_format(hours)} device-hours",
    ]


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def _verdict(plan: Plan) -> str:
    need, have = plan.worst.memory.total / GIB, plan.cluster.memory_bytes / GIB
    if plan.fits:
        return f"It fits: {need:.1f} of {have:.1f} GiB."
    return f"It does not fit: pipeline rank {plan.worst.pp_rank} needs {need:.1f} GiB, a device has {have:.1f}."
