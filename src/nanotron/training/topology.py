"""What a config says about who holds what: mesh axes, schedule, layers of each stage, parameters. No torch.

The trainer, ``check``, the planner and generation all ask here, so they cannot disagree.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from nanotron.config.model import RandomInit
from nanotron.logging import human_format
from nanotron.models.families import family_of, layer_costs
from nanotron.models.flops import head_flops
from nanotron.models.specs import EMBED, StageModules
from nanotron.parallel.mesh import training_axes
from nanotron.parallel.params import ParamSpec
from nanotron.pipeline.custom import find_schedule
from nanotron.pipeline.schedules import Schedule
from nanotron.pipeline.split import stage_layers
from nanotron.training.groups import grouped
from nanotron.training.mup import width_independent

if TYPE_CHECKING:
    from nanotron.config import Config


def mesh_axes(config: Config) -> dict[str, int | dict[str, int]]:
    """The axes of the run's mesh."""
    layout = config.parallelism
    kv_heads = config.model.model_config.num_key_value_heads
    sizes = {"dp": layout.dp, "cp": layout.context_parallel_size, "tp": layout.tp, "pp": layout.pp}
    ep, dp_shard = layout.expert_parallel_size, layout.dp_shard
    return training_axes(**sizes, ep=ep, dp_shard=dp_shard, num_key_value_heads=kv_heads)


def pipeline_schedule(config: Config) -> Schedule:
    """The run's schedule; also says which rank holds which stage."""
    layout = config.parallelism
    schedule = find_schedule(layout.pp_engine, layout.pp, layout.pp_virtual_stages)
    return replace(schedule, sends_before_weights=not layout.recompute_layer)


def layers_of_stages(config: Config) -> list[tuple[int, int]]:
    """The layers [lo, hi) of every stage, first to last: ``parallelism.pp_layers``, or ranks of equal FLOPs."""
    model, length = config.model.model_config, config.tokens.sequence_length
    schedule = pipeline_schedule(config)
    return stage_layers(
        layer_costs(model, length),
        schedule.num_stages,
        config.parallelism.pp_layers,
        embed_cost=2 * length * model.hidden_size,  # a look-up, and its sum over tp: cheap, but not nothing
        head_cost=head_flops(model, length),
        ranks=[schedule.holders[stage][0] for stage in range(schedule.num_stages)],
    )


def modules_of_ranks(config: Config) -> list[list[StageModules]]:
    """What each chunk of every pipeline rank holds of the model."""
    schedule, layers = pipeline_schedule(config), layers_of_stages(config)
    last, chunks = schedule.num_stages - 1, range(schedule.num_chunks)
    held = [StageModules(range(*own), embed=stage == 0, head=stage == last) for stage, own in enumerate(layers)]
    return [[held[schedule.placement(rank, chunk)] for chunk in chunks] for rank in range(schedule.ranks)]


def tied_stages(config: Config) -> dict[str, tuple[int, ...]]:
    """Global name -> the pipeline coordinates that each hold a copy, for parameters that several ranks hold."""
    if not config.model.model_config.tie_word_embeddings:
        return {}
    schedule = pipeline_schedule(config)
    ends = {schedule.holders[0][0], schedule.holders[schedule.num_stages - 1][0]}
    return {EMBED: tuple(sorted(ends))} if len(ends) > 1 else {}


def num_parameters(config: Config) -> tuple[int, int]:
    """Parameters of the model, and those that a token uses: all but the experts that it does not choose."""
    moe, total, idle = config.model.model_config.moe_config, 0, 0
    for spec in parameter_specs(config).values():
        total += spec.numel
        if moe is not None and spec.is_of_experts:
            idle += spec.numel // moe.num_experts * (moe.num_experts - moe.top_k)
    return total, total - idle


def model_size(config: Config) -> str:
    """The number of parameters as a person reads it: `30.5B (3.35B active)`."""
    total, active = num_parameters(config)
    return human_format(total) + (f" ({human_format(active)} active)" if active < total else "")


def parameter_specs(config: Config) -> dict[str, ParamSpec]:
    """Every parameter of the run's model, and how it is updated."""
    model, init = config.model.model_config, config.model.init_method
    specs = family_of(model).specs(
        model,
        std=getattr(init, "std", 0.02),  # of no effect when the weights come from a checkpoint
        scaling_method=getattr(init, "scaling_method", "num_layers"),
        sequence_parallel=config.parallelism.sequence_parallel,
    )
    specs = grouped(specs, config.optimizer)
    if isinstance(init, RandomInit) and init.use_mup:
        return width_independent(specs, init, model.head_dim)
    return specs


def has_owners(config: Config) -> bool:
    """Whether ranks own whole matrices, to update them."""
    return config.optimizer.optimizer_factory.name == "muon"
