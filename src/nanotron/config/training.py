"""The batch, the optimizer and the learning rate."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Tag
from pydantic_core import PydanticCustomError, PydanticKnownError

from nanotron.config.compat.retired import OPTIMIZER, TOKENS, retires
from nanotron.config.keys import (
    Count,
    Derived,
    Float,
    Int,
    Lower,
    Reads,
    Section,
    Width,
    choices_in_any_case,
    derived,
    fill,
    key,
    required,
    section,
)


@section
class BatchRampArgs:
    """A stage of the batch-size ramp: steps with fewer samples than those that follow."""

    global_batch_size: Int = required("Samples per step over all replicas.", example=64, gt=0)
    steps: Int = required("How many steps the stage has.", example=1000, gt=0)


@section
@retires(TOKENS)
class TokensArgs:
    """How many tokens make a step, and how many steps make the run."""

    sequence_length: Width = required("Tokens per sample.", example=2048, gt=0)
    micro_batch_size: Count = required("Samples that a replica computes at once.", example=4, gt=0)
    batch_accumulation_per_replica: Derived[Count] = derived(
        "Gradient accumulation: micro-batches per replica and step; a step has micro_batch_size · this · dp samples.",
        "global_batch_size / (micro_batch_size · dp)",
        examples=[8],
        gt=0,
    )
    global_batch_size: Int | None = key(
        None,
        "Samples per step over all replicas, in the place of batch_accumulation_per_replica: another dp then keeps the"
        " batch and the loss curve. Null: micro_batch_size · batch_accumulation_per_replica · dp.",
        examples=[256],
        gt=0,
    )
    batch_ramp: list[BatchRampArgs] = key(
        None,
        "Batch-size ramp: stages of steps with fewer samples, with which the run begins; all later steps have"
        " global_batch_size.",
        factory=list,
    )
    train_steps: Int = key(1000, "Steps of the whole run.", gt=0)
    stop_after: Int | None = key(
        None,
        "Step after which this start stops early, saved as after the last; schedules stay those of train_steps, and the"
        " next start goes on from there. Null: with the last.",
        gt=0,
    )
    val_check_interval: Int = key(-1, "Steps from one validation to the next; -1 is never.", ge=-1)
    limit_val_batches: Int = key(0, "Batches of a validation; 0 is the whole validation set.", ge=0)

    def __post_init__(self) -> None:
        if self.batch_accumulation_per_replica is None and self.global_batch_size is None:
            context = {
                "key": "global_batch_size",
                "text": "missing: samples per step over all replicas, e.g. `global_batch_size: 256`; or give"
                " batch_accumulation_per_replica, micro-batches per replica and step",
                "instead": {"batch_accumulation_per_replica": 8},
            }
            raise PydanticCustomError("rule", "{text}", context)

    @property
    def last_step(self) -> int:
        """The step that this start ends with."""
        return min(self.train_steps, self.stop_after or self.train_steps)


OPTIMIZERS = ("adamW", "muon", "sgd")


def _in_any_case(value: Any) -> Any:
    """Accept an optimizer's name in any case."""
    if isinstance(value, str):
        return next((name for name in OPTIMIZERS if name.lower() == value.lower()), value)
    return value


def _optimizer_name(canonical: str) -> Reads:
    def accept_any_case(value: Any) -> Any:
        if _in_any_case(value) == canonical:
            return canonical
        *others, last = (repr(name) for name in OPTIMIZERS)
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(others)} or {last}"})

    return Reads(accept_any_case, choices_in_any_case)


OptimizerName = Annotated[Literal["adamW", "muon", "sgd"], Reads(_in_any_case, choices_in_any_case)]


@section
class AdamKeys:
    """The keys of AdamW."""

    adam_eps: Float = key(1e-8, "Added to the root of the second moment.", gt=0)
    adam_beta1: Float = key(0.9, "AdamW's beta1: decay of the first moment, per step.", ge=0, lt=1)
    adam_beta2: Float = key(0.95, "AdamW's beta2: decay of the second moment, per step.", ge=0, lt=1)


@section
@retires(OPTIMIZER)
class AdamWOptimizerArgs(AdamKeys):
    """AdamW."""

    name: Annotated[Literal["adamW"], _optimizer_name("adamW")] = key("adamW", "Marks the optimizer.", marker=True)


@section
@retires(OPTIMIZER)
class MuonOptimizerArgs(AdamKeys):
    """Muon for the matrices of layers; AdamW for embedding, output layer, routers, norms and biases."""

    muon_momentum: Float = key(0.95, "Decay of the momentum, per step.", ge=0, lt=1)
    muon_nesterov: bool = key(True, "Whether the update looks ahead, by the gradient and the momentum it leads to.")
    muon_ns_steps: Count = key(5, "Newton-Schulz iterations that make an update orthogonal.", gt=0)
    muon_scale: Lower[Literal["match_rms", "spectral"]] = key(
        "match_rms",
        "How large updates are. match_rms: as AdamW's, so that its learning rate and weight decay fit; spectral:"
        " changes of a layer's output are as large at every width.",
    )
    muon_ns_dtype: Derived[Lower[Literal["bfloat16", "float32", "float64"]]] = derived(
        "Number format of the iterations, and of the matrices on their way.", "model.dtype"
    )
    adam_learning_rate: Derived[Float] = derived(
        "Learning rate, at its highest, of what AdamW updates; it rises and falls as Muon's.",
        "learning_rate_scheduler.learning_rate",
        ge=0,
    )
    name: Annotated[Literal["muon"], _optimizer_name("muon")] = key("muon", "Marks the optimizer.", marker=True)


@section
@retires(OPTIMIZER)
class SGDOptimizerArgs:
    """Stochastic gradient descent without momentum."""

    name: Annotated[Literal["sgd"], _optimizer_name("sgd")] = key("sgd", "Marks the optimizer.", marker=True)


def _optimizer_kind(value: Any) -> str:
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    kinds = {"sgd": "SGDOptimizerArgs", "muon": "MuonOptimizerArgs"}
    return kinds.get(name.lower() if isinstance(name, str) else "", "AdamWOptimizerArgs")


AnyOptimizer = Annotated[
    Annotated[AdamWOptimizerArgs, Tag("AdamWOptimizerArgs")]
    | Annotated[MuonOptimizerArgs, Tag("MuonOptimizerArgs")]
    | Annotated[SGDOptimizerArgs, Tag("SGDOptimizerArgs")],
    Discriminator(_optimizer_kind),
]


@section
class ParameterGroupArgs:
    """How some parameters are updated otherwise than the rest; what is left out is as for these."""

    params: list[str] = required(
        "Regular expressions of names of parameters, each from its start.", example=["layers.0."], min_length=1
    )
    learning_rate: Float | None = key(
        None, "Their learning rate at its highest; it rises and falls as that of all others. 0 leaves them alone.", ge=0
    )
    weight_decay: Float | None = key(
        None, "Their weight decay, per unit of learning rate; never on norms and biases.", ge=0
    )
    optimizer: OptimizerName | None = key(
        None, "What updates them; AdamW and Muon take their keys from optimizer_factory, which has to have them."
    )


@section
class LRStepArgs:
    """A learning rate that stays until the next."""

    step: Int = required("Update, from 1, that it begins with.", example=1000, gt=0)
    learning_rate: Float = required("Learning rate from there on.", example="3e-5", ge=0)


@section
class LRSchedulerArgs:
    """The learning rate of each update, counted from 1."""

    learning_rate: Float = required("Learning rate: the highest, after warm-up.", example="3e-4", gt=0)
    lr_warmup_steps: Int = key(0, "Warm-up: updates during which the learning rate rises.", ge=0)
    lr_warmup_style: Derived[Lower[Literal["linear", "constant"]]] = derived(
        "How it rises; constant means at once.", "linear"
    )
    lr_decay_style: Derived[Lower[Literal["linear", "cosine", "1-sqrt", "inverse-sqrt", "steps"]]] = derived(
        "How it falls. inverse-sqrt: as 1/√update, from lr_decay_starting_step to the end of the run; steps: as"
        " lr_steps says.",
        "linear",
    )
    lr_schedule_steps: Int | None = key(
        None,
        "Update with which the learning rate has fallen: the length of the schedule, which stays when the run becomes"
        " longer or shorter.",
        derived="tokens.train_steps, or what lr_decay_steps says",
        gt=0,
    )
    lr_decay_steps: Derived[Int] = derived(
        "Updates during which it falls.", "lr_schedule_steps (or tokens.train_steps) - lr_decay_starting_step", ge=0
    )
    lr_decay_starting_step: Derived[Int] = derived(
        "Update after which it falls; up to there it stays at its highest.", "lr_warmup_steps", ge=0
    )
    min_decay_lr: Derived[Float] = derived(
        "Learning rate after the fall, or the lowest.",
        "learning_rate, that is: it does not fall; 0 for inverse-sqrt and steps",
        ge=0,
    )
    lr_rewarm_steps: Int = key(
        0,
        "Re-warm: updates in which it rises again once it has fallen, to stay and fall as before, again and again; 0:"
        " it stays where it has fallen to.",
        ge=0,
    )
    lr_steps: list[LRStepArgs] = key(None, "What it falls to, and when, for lr_decay_style: steps.", factory=list)

    @property
    def falls_by_itself(self) -> bool:
        """Whether the fall has no length and no end of its own."""
        return self.lr_decay_style in ("inverse-sqrt", "steps")

    def __post_init__(self) -> None:
        fill(self, "lr_warmup_style", "linear")
        fill(self, "lr_decay_style", "linear")
        fill(self, "lr_decay_starting_step", self.lr_warmup_steps)
        fill(self, "min_decay_lr", 0.0 if self.falls_by_itself else self.learning_rate)


@section
@retires(OPTIMIZER)
class OptimizerArgs:
    """The update of the weights."""

    optimizer_factory: Section[AnyOptimizer] = key(None, "The optimizer.", factory=AdamWOptimizerArgs)
    zero_stage: Int = key(
        1,
        "ZeRO stage: what is sharded over the data-parallel replicas. 0: nothing. 1: optimizer state. 2: gradients too."
        " 3: weights too.",
        ge=0,
        le=3,
    )
    offload: bool = key(
        False,
        "Keep optimizer state and the master weights of half precision in host memory, and update them there. Saves"
        " device memory, and a CPU's time is what an update takes; on a CPU it changes nothing.",
    )
    weight_decay: Float = key(0.1, "Weight decay, per unit of learning rate; never on norms and biases.", ge=0)
    ema_decay: Float | None = key(
        None,
        "Keep an average of the weights too, for validation, generation and export: how much of it stays at each"
        " update. Null: none.",
        gt=0,
        lt=1,
    )
    clip_grad: Float | None = key(
        1.0, "Gradient clipping, by global norm: the largest norm of the whole gradient; null is no limit.", gt=0
    )
    accumulate_grad_in_fp32: bool = key(True, "Accumulate the gradients of micro-batches in float32.")
    learning_rate_scheduler: Section[LRSchedulerArgs] = required(
        "The learning rate.", example={"learning_rate": "3e-4"}
    )
    weight_decay_exclude_named_params: list[str] = key(
        None, "Regular expressions of names of parameters that have no weight decay.", factory=list
    )
    groups: list[ParameterGroupArgs] = key(
        None, "Parameters with settings of their own; of several groups that match one, the last counts.", factory=list
    )
    on_nan: Lower[Literal["stop", "skip", "rollback"]] = key(
        "stop",
        "What to do with a step whose loss or gradient is not finite: stop the run, leave that update out, or go back"
        " to the last checkpoint and leave out what was read since.",
    )
    on_spike: Lower[Literal["warn", "rollback"]] = key(
        "warn",
        "What to do at a loss spike, far above the median of the last 50 losses (docs/monitoring.md has the rule): say"
        " so, or go back too.",
    )
    max_rollbacks: Int = key(
        3,
        "How often a run may go back by itself, all its starts together; after that a step that is not finite stops it,"
        " and a loss spike is but told.",
        gt=0,
    )

    def __post_init__(self) -> None:
        if isinstance(self.optimizer_factory, MuonOptimizerArgs):
            fill(self.optimizer_factory, "adam_learning_rate", self.learning_rate_scheduler.learning_rate)

    @property
    def all_groups(self) -> list[ParameterGroupArgs]:
        """The groups, the first of them the parameters that ``weight_decay_exclude_named_params`` names."""
        excluded = self.weight_decay_exclude_named_params
        return [*([ParameterGroupArgs(params=excluded, weight_decay=0.0)] if excluded else []), *self.groups]
