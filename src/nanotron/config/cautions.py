"""What is legal, but worth a line: in the form of rules (rules.py), and defaults that people may not expect."""

from __future__ import annotations

from collections.abc import Callable

from nanotron.config.config import Config
from nanotron.config.data import NanosetDatasetsArgs
from nanotron.config.model import Qwen2Config
from nanotron.config.rules import (
    ACCUMULATION,
    BATCH_RAMP,
    DP_SHARD,
    SCHEDULER,
    SEQUENCE,
    STAGE_SEQUENCES,
    TRAIN_STEPS,
    ZERO_STAGE,
    Findings,
    Rule,
    declare,
    sequence_lengths,
)

CAUTIONS: list[Rule] = []


def caution(*keys: str) -> Callable[[Callable[[Config], Findings]], None]:
    """Declare a caution that reads these keys."""
    return declare(CAUTIONS, keys)


@caution("model.model_config.max_position_embeddings", SEQUENCE, STAGE_SEQUENCES)
def _sequences_are_longer_than_meant(config: Config) -> Findings:
    meant = config.model.model_config.max_position_embeddings
    for key, length in sequence_lengths(config):
        if length > meant:
            yield key, f"{length} is longer than model.model_config.max_position_embeddings={meant}"


@caution(f"{SCHEDULER}.lr_warmup_steps", f"{SCHEDULER}.lr_decay_starting_step", TRAIN_STEPS)
def _the_run_ends_before_its_schedule(config: Config) -> Findings:
    """A schedule may be longer than the run: one tries a few steps of it, or goes on later with more train_steps."""
    scheduler, steps = config.optimizer.learning_rate_scheduler, config.tokens.train_steps
    warmup, start, length = scheduler.lr_warmup_steps, scheduler.lr_decay_starting_step, scheduler.lr_decay_steps
    run = f"the run, {TRAIN_STEPS}={steps}"
    if warmup > steps:
        key, text = "lr_warmup_steps", f"{warmup} is longer than {run}, which ends while the learning rate still rises"
    elif scheduler.min_decay_lr == scheduler.learning_rate or scheduler.falls_by_itself:
        return
    elif start >= steps and length:
        key, text = "lr_decay_starting_step", f"{start} is not before the end of {run}: the learning rate does not fall"
    elif start + length > steps:
        key, text = "lr_schedule_steps", f"{start + length} is after {run}"
        if scheduler.lr_schedule_steps is None:
            key, text = "lr_decay_steps", f"{length} steps from step {start} end at {start + length}, after {run}"
        text += f", which ends before the learning rate has fallen to min_decay_lr={scheduler.min_decay_lr}"
    else:
        return
    yield f"{SCHEDULER}.{key}", text


@caution("tokens.val_check_interval", "data_stages[].validation")
def _validation_takes_place(config: Config) -> Findings:
    interval = config.tokens.val_check_interval
    validated = [index for index, stage in enumerate(config.data_stages) if stage.validation is not None]
    if interval > 0 and not validated:
        yield "tokens.val_check_interval", f"{interval}, but no data stage has a validation data set: none takes place"
    for index in validated if interval < 1 else []:
        yield (
            f"data_stages[{index}].validation",
            f"is never read with tokens.val_check_interval={interval}; set the steps from one validation to the next",
        )


@caution(ZERO_STAGE, "parallelism.dp", DP_SHARD, "parallelism.context_parallel_size", "parallelism.pp", ACCUMULATION)
def _sharding_has_its_price(config: Config) -> Findings:
    layout, stage = config.parallelism, config.optimizer.zero_stage
    microbatches = config.tokens.batch_accumulation_per_replica
    if stage < 2:
        return
    if layout.sharing_ranks == 1:
        alone = (
            "there is one replica (parallelism.dp=1)" if layout.dp == 1 else f"none shares with another ({DP_SHARD}=1)"
        )
        yield ZERO_STAGE, f"{stage} shards nothing: {alone}"
    elif layout.pp > 1 and microbatches > 1:
        also = " and weights are gathered twice" if stage == 3 else ""
        yield (
            ZERO_STAGE,
            f"{stage} with parallelism.pp={layout.pp}: gradients are sent{also} for each of {microbatches} "
            f"micro-batches, where {ZERO_STAGE}=1 sends both once; `nanotron plan` prices it",
        )


@caution(BATCH_RAMP, TRAIN_STEPS, "parallelism.pp")
def _ramp_is_short(config: Config) -> Findings:
    ramp, pp = config.tokens.batch_ramp, config.parallelism.pp
    steps = sum(stage.steps for stage in ramp)
    if steps >= config.tokens.train_steps:
        yield (
            BATCH_RAMP,
            f"its {steps} steps are all of the run, {TRAIN_STEPS}={config.tokens.train_steps}: none has"
            f" global_batch_size={config.global_batch_size}",
        )
    for stage, (key, count) in zip(ramp, config.ramp_microbatches.items(), strict=True):
        if count < pp:
            yield (
                key,
                f"{stage.global_batch_size} gives each replica {count} micro-batches, fewer than parallelism.pp={pp}:"
                f" ranks of the pipeline wait in these {stage.steps} steps",
            )


@caution("data_stages")
def _local_folders_are_read_where_they_are(config: Config) -> Findings:
    for index, stage in enumerate(config.data_stages):
        for name, dataset in (("data.dataset", stage.data.dataset), ("validation", stage.validation)):
            if not isinstance(dataset, NanosetDatasetsArgs) or not dataset.dataset_read_path:
                continue
            local = [folder for folder in dataset.dataset_folder if "://" not in folder]
            if local:
                key = f"data_stages[{index}].{name}.dataset_read_path"
                yield key, f"no effect for {local[0]}: local files are read where they are"


@caution(TRAIN_STEPS, "data_stages[].start_training_step")
def _stages_are_reached(config: Config) -> Findings:
    for index, stage in enumerate(config.data_stages):
        if stage.start_training_step > config.tokens.train_steps > 0:
            key = f"data_stages[{index}].start_training_step"
            yield key, f"{stage.start_training_step} is never reached: {TRAIN_STEPS}={config.tokens.train_steps}"


@caution("data_stages[].data.skip_samples", TRAIN_STEPS, "parallelism.dp", BATCH_RAMP)
def _skipped_samples_are_reached(config: Config) -> Findings:
    starts = [stage.start_training_step for stage in config.data_stages]
    for index, (start, end) in enumerate(zip(starts, [*starts[1:], config.tokens.train_steps + 1], strict=True)):
        reached = max(0, config.samples_by(end - 1) - config.samples_by(start - 1))
        for first, last in sorted(config.data_stages[index].data.skip_samples):
            if first >= reached:
                yield (
                    f"data_stages[{index}].data.skip_samples",
                    f"[{first}, {last}] has no effect: the stage ends with its sample {reached - 1}",
                )
                break
            reached += last - first


DEFAULTS_THAT_DIFFER: dict[str, Callable[[Config], str]] = {
    "model.model_config.intermediate_size": lambda config: (
        f"left out, so {config.model.model_config.intermediate_size} (8/3 of hidden_size, rounded up to a multiple of"
        " 64); Hugging Face's Nanotron takes 11008"
    ),
    "model.model_config.attention_bias": lambda config: (
        "left out, so Qwen2 has its biases on q, k and v; Hugging Face's Nanotron leaves them away"
        if isinstance(config.model.model_config, Qwen2Config)
        else ""
    ),
    f"{SCHEDULER}.min_decay_lr": lambda config: (
        f"left out, so the learning rate stays at {config.optimizer.learning_rate_scheduler.learning_rate} after"
        " warm-up; set it, e.g. to a tenth, for a decay"
        if not config.optimizer.learning_rate_scheduler.falls_by_itself
        else ""
    ),
}
"""Keys whose absence has an effect that people may not expect, and the line that says so (empty: nothing to say)."""
