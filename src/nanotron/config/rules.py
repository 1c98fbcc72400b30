"""Rules between keys: what a key allows by itself is part of its declaration, what several allow together is here.

A rule names the keys that it reads; it is asked only when all of them are sound. It yields (key, text) for every
breach, where key is the one to blame. What is legal and surprising: cautions.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from nanotron.config.config import Config
from nanotron.config.keys import KeyPath, path_of, was_filled
from nanotron.config.model import DeepseekConfig, RandomInit

Findings = Iterator[tuple[str, str]]
HEADS, KV_HEADS = "model.model_config.num_attention_heads", "model.model_config.num_key_value_heads"
LAYERS, TRAIN_STEPS = "model.model_config.num_hidden_layers", "tokens.train_steps"
ACCUMULATION, BATCH_RAMP = "tokens.batch_accumulation_per_replica", "tokens.batch_ramp"
SEQUENCE, SCHEDULER = "tokens.sequence_length", "optimizer.learning_rate_scheduler"
STAGE_SEQUENCES = "data_stages[].sequence_length"
WINDOW_LAYERS = "model.model_config.sliding_window_layers"
ZERO_STAGE, DP_SHARD = "optimizer.zero_stage", "parallelism.dp_shard"
MOE, EXPERT_RANKS = "model.model_config.moe_config", "parallelism.expert_parallel_size"


class Rule(NamedTuple):
    """A question to a config and the keys that it reads."""

    keys: tuple[KeyPath, ...]
    ask: Callable[[Config], Findings]


RULES: list[Rule] = []


def declare(rules: list[Rule], keys: tuple[str, ...]) -> Callable[[Callable[[Config], Findings]], None]:
    """Return a decorator that adds a function to these rules, as one that reads these keys."""
    return lambda ask: rules.append(Rule(tuple(path_of(name) for name in keys), ask))


def rule(*keys: str) -> Callable[[Callable[[Config], Findings]], None]:
    """Declare a rule that reads these keys."""
    return declare(RULES, keys)


def divisors(number: int) -> list[int]:
    """Return the positive divisors of a number, ascending."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def listed(numbers: list[int]) -> str:
    """Write a set of legal values: `1, 2, 3 or 6`."""
    words = [str(number) for number in numbers]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


# --- layout -----------------------------------------------------------------------------------------------------------


@rule(HEADS, KV_HEADS)
def _heads_share_kv_heads(config: Config) -> Findings:
    heads, kv_heads = config.model.model_config.num_attention_heads, config.model.model_config.num_key_value_heads
    if heads % kv_heads:
        yield KV_HEADS, f"{kv_heads} does not divide num_attention_heads={heads}; use {listed(divisors(heads))}"


@rule("parallelism.tp", HEADS, KV_HEADS)
def _heads_divide_by_tp(config: Config) -> Findings:
    heads, kv_heads = config.model.model_config.num_attention_heads, config.model.model_config.num_key_value_heads
    tp = config.parallelism.tp
    if heads % kv_heads:
        kv_heads = heads  # reported by the rule above; say here what the heads allow
    legal = [size for size in divisors(heads) if kv_heads % size == 0 or size % kv_heads == 0]
    if heads % tp:
        yield "parallelism.tp", f"{tp} does not divide {HEADS}={heads}; use {listed(legal)}"
    elif tp not in legal:
        yield (
            "parallelism.tp",
            f"{tp} neither divides {KV_HEADS}={kv_heads} nor is a multiple of it; use {listed(legal)}",
        )


@rule("parallelism.pp", "parallelism.pp_virtual_stages", LAYERS)
def _every_stage_has_a_layer(config: Config) -> Findings:
    layers, virtual = config.model.model_config.num_hidden_layers, config.parallelism.pp_virtual_stages
    stages = config.parallelism.pp * virtual
    if stages > layers:
        what = (
            f"{config.parallelism.pp}" if virtual == 1 else f"{config.parallelism.pp} with pp_virtual_stages={virtual}"
        )
        yield (
            "parallelism.pp",
            f"{what} makes {stages} stages of {LAYERS}={layers}, but every stage needs a layer;"
            f" use at most {max(1, layers // virtual)}",
        )


@rule("parallelism.pp_layers", "parallelism.pp", "parallelism.pp_virtual_stages", LAYERS)
def _pp_layers_add_up(config: Config) -> Findings:
    given, layers = config.parallelism.pp_layers, config.model.model_config.num_hidden_layers
    if given is None:
        return
    stages = config.parallelism.pp * config.parallelism.pp_virtual_stages
    if len(given) != stages:
        yield "parallelism.pp_layers", f"{given} has {len(given)} numbers for {stages} stages; give one for each"
    if any(count < 1 for count in given):
        yield "parallelism.pp_layers", f"{given} leaves a stage without a layer; every stage needs one"
    elif sum(given) != layers:
        yield "parallelism.pp_layers", f"{given} adds up to {sum(given)}, not to {LAYERS}={layers}"


@rule("parallelism.tp", "model.model_config.vocab_size")
def _every_rank_has_tokens(config: Config) -> Findings:
    size = config.model.model_config.vocab_size
    if size is not None and size < config.parallelism.tp:
        yield "parallelism.tp", f"{config.parallelism.tp} ranks cannot share vocab_size={size}; use at most {size}"


@rule("parallelism.tp_mode", "parallelism.tp", "parallelism.context_parallel_size", SEQUENCE, STAGE_SEQUENCES)
def _sequences_divide_by_their_ranks(config: Config) -> Findings:
    """Over cp a sequence is cut into two pieces for each rank; over tp, under REDUCE_SCATTER, what a rank holds."""
    layout, why = config.parallelism, []
    cp, tp = layout.context_parallel_size, layout.tp if layout.sequence_parallel else 1
    if cp > 1:
        why.append(f"parallelism.context_parallel_size={cp} cuts it into {2 * cp} pieces")
    if tp > 1:
        why.append(f"tp_mode: REDUCE_SCATTER cuts what a rank holds over parallelism.tp={tp}")
    unit = math.lcm(2 * cp if cp > 1 else 1, cp * tp)
    for key, length in sequence_lengths(config):
        if length % unit:
            nearest = max(unit, round(length / unit) * unit)
            yield key, f"{length} is not a multiple of {unit}: {' and '.join(why)}; the nearest is {nearest}"


@rule("parallelism.cp_mode", "parallelism.context_parallel_size", "parallelism.tp", KV_HEADS)
def _heads_divide_by_cp(config: Config) -> Findings:
    layout, kv_heads = config.parallelism, config.model.model_config.num_key_value_heads
    cp, tp = layout.context_parallel_size, layout.tp
    if cp > 1 and layout.cp_mode == "ALL_TO_ALL" and (kv_heads % tp or kv_heads // tp % cp):
        legal = [size for size in divisors(kv_heads // tp) if size > 1] if kv_heads % tp == 0 else []
        fix = f"context_parallel_size: {listed(legal)}, or " if legal else ""
        yield (
            "parallelism.cp_mode",
            f"ALL_TO_ALL cuts a rank's key and value heads over context_parallel_size={cp}, but {KV_HEADS}={kv_heads}"
            f" over tp={tp} does not divide by it; use {fix}ALL_GATHER",
        )


@rule("parallelism.expert_parallel_size", "parallelism.dp", "parallelism.tp", MOE)
def _experts_divide_by_their_ranks(config: Config) -> Findings:
    layout, moe = config.parallelism, config.model.model_config.moe_config
    ep, tp = layout.expert_parallel_size, layout.tp
    if moe is None:
        if ep > 1:
            yield EXPERT_RANKS, f"{ep} ranks share the experts, but the model has none; use 1, or give {MOE}"
        return
    experts = moe.num_experts
    legal = [size for size in divisors(layout.dp) if experts % (size * tp) == 0]
    use = f"use {listed(legal)}" if legal else f"use another tp, of {listed(divisors(experts))}"
    if layout.dp % ep:
        yield EXPERT_RANKS, f"{ep} does not divide parallelism.dp={layout.dp}; {use}"
    elif experts % (ep * tp):
        yield (
            EXPERT_RANKS if legal else "parallelism.tp",
            f"{ep if legal else tp}: {MOE}.num_experts={experts} does not divide by"
            f" expert_parallel_size={ep} · tp={tp}; {use}",
        )


@rule("parallelism.dp_shard", "parallelism.dp", "parallelism.expert_parallel_size", ZERO_STAGE)
def _shards_divide_replicas(config: Config) -> Findings:
    layout, stage = config.parallelism, config.optimizer.zero_stage
    shards, ep = layout.dp_shard, layout.expert_parallel_size
    if shards is None:
        return
    legal = [size for size in divisors(layout.dp) if size % ep == 0]
    if shards not in legal:
        share = f" that {EXPERT_RANKS}={ep} divides" if ep > 1 else ""
        yield DP_SHARD, f"{shards} is no divisor of parallelism.dp={layout.dp}{share}; use {listed(legal)}"
    elif stage < 2 and shards != layout.dp:
        yield (
            DP_SHARD,
            f"{shards} of {layout.dp} replicas are to share gradients, which {ZERO_STAGE}={stage} does not shard; use "
            f"{ZERO_STAGE}: 2 or 3, or leave dp_shard out",
        )


@rule("tokens.global_batch_size", "tokens.micro_batch_size", ACCUMULATION, "parallelism.dp")
def _batch_has_one_size(config: Config) -> Findings:
    tokens, dp, product = config.tokens, config.parallelism.dp, config.global_batch_size
    asked = tokens.global_batch_size
    if was_filled(config.parallelism, "dp") and asked is None:
        yield (
            "parallelism.dp",
            "auto needs a batch that stays the same: give tokens.global_batch_size in the place of"
            " batch_accumulation_per_replica",
        )
    if asked is None or asked == product:
        return
    if was_filled(tokens, "batch_accumulation_per_replica"):
        text = _no_multiple(asked, config)
    else:
        text = (
            f"{asked} is not micro_batch_size={tokens.micro_batch_size} · batch_accumulation_per_replica="
            f"{tokens.batch_accumulation_per_replica} · parallelism.dp={dp} = {product}; leave one of them out"
        )
    yield "tokens.global_batch_size", text


@rule(BATCH_RAMP, "tokens.global_batch_size", "tokens.micro_batch_size", "parallelism.dp")
def _batch_grows_to_its_size(config: Config) -> Findings:
    tokens, dp = config.tokens, config.parallelism.dp
    if tokens.batch_ramp and tokens.global_batch_size is None:
        text = "leads to tokens.global_batch_size, which is missing; give it in the place of"
        yield BATCH_RAMP, f"{text} batch_accumulation_per_replica"
        return
    sizes = [*(stage.global_batch_size for stage in tokens.batch_ramp), tokens.global_batch_size or 0]
    for index, (size, following) in enumerate(pairwise(sizes)):
        key = f"{BATCH_RAMP}[{index}].global_batch_size"
        if size % (tokens.micro_batch_size * dp):
            yield key, _no_multiple(size, config)
        elif size >= following:
            yield key, f"{size} is not below {following}, the samples of the steps that follow; list smaller ones first"


def _no_multiple(samples: int, config: Config) -> str:
    rows, dp = config.tokens.micro_batch_size, config.parallelism.dp
    unit = rows * dp
    below = samples // unit * unit
    nearest = below if below > 0 and samples - below <= unit // 2 else below + unit
    return f"{samples} is not a multiple of micro_batch_size={rows} · parallelism.dp={dp}; the nearest is {nearest}"


@rule("optimizer.offload", "optimizer.optimizer_factory")
def _muon_stays_on_the_device(config: Config) -> Findings:
    if config.optimizer.offload and config.optimizer.optimizer_factory.name == "muon":
        yield (
            "optimizer.offload",
            "true, but Muon's iterations are matmuls, which would take a CPU longer than the rest of the step; use"
            " false, or optimizer.optimizer_factory.name: adamW",
        )


@rule("parallelism.recompute_offload", "parallelism.recompute_layer")
def _what_is_offloaded_is_kept(config: Config) -> Findings:
    if config.parallelism.recompute_offload and not config.parallelism.recompute_layer:
        yield (
            "parallelism.recompute_offload",
            "true, but without activation checkpointing there are no kept inputs of layers; set recompute_layer: true"
            " or selective",
        )


def sequence_lengths(config: Config) -> Iterator[tuple[str, int]]:
    if any(stage.sequence_length is None for stage in config.data_stages):
        yield SEQUENCE, config.tokens.sequence_length
    for index, stage in enumerate(config.data_stages):
        if stage.sequence_length is not None:
            yield f"data_stages[{index}].sequence_length", stage.sequence_length


# --- model ------------------------------------------------------------------------------------------------------------


@rule("model.dtype")
def _dtype_is_trainable(config: Config) -> Findings:
    if config.model.dtype == "float16":
        yield "model.dtype", "float16 needs loss scaling, which is not available; use bfloat16"


@rule("model.fp8", "parallelism.tp", KV_HEADS)
def _fp8_rounds_whole_gradients(config: Config) -> Findings:
    """Of a head that ranks share, each has a part of the gradient, and would round that."""
    tp, kv_heads = config.parallelism.tp, config.model.model_config.num_key_value_heads
    if config.model.fp8 and tp > kv_heads:
        yield (
            "parallelism.tp",
            f"{tp}: ranks share a head of {KV_HEADS}={kv_heads}, whose gradient model.fp8={config.model.fp8} would"
            f" round in parts; use at most {kv_heads}",
        )


@rule("model.fp8", "model.model_config", "parallelism.tp")
def _fp8_blocks_are_whole(config: Config) -> Findings:
    model, tp = config.model.model_config, config.parallelism.tp
    if not config.model.fp8 or tp > model.num_key_value_heads or not (cut := _cut_blocks(config, tp)):
        return
    legal = [size for size in divisors(model.num_key_value_heads) if not _cut_blocks(config, size)]
    fix = f"use parallelism.tp={listed(legal)}" if legal else "no parallelism.tp mends it: leave fp8 out"
    yield "model.fp8", f"{config.model.fp8}: on a rank {cut} has sides that are no multiples of 128; {fix}"


def _cut_blocks(config: Config, tp: int) -> str:
    """A layer's matrix whose shard over ``tp`` is no whole number of fp8's blocks, and its size; "" if none is."""
    from nanotron.models.families import family_of
    from nanotron.models.specs import is_hidden

    specs = family_of(config.model.model_config).specs(config.model.model_config)
    for spec in filter(is_hidden, specs.values()):
        cut = {dim for _, dim in spec.shard}
        sides = [length // tp if dim in cut else length for dim, length in enumerate(spec.shape)][-2:]
        if any(side % 128 for side in sides):
            return f"{spec.name} of {sides[0]} × {sides[1]}"
    return ""


@rule("model.model_config.sliding_window_size", WINDOW_LAYERS, LAYERS)
def _windows_belong_to_layers(config: Config) -> Findings:
    model = config.model.model_config
    chosen, layers = model.sliding_window_layers, model.num_hidden_layers
    if chosen is None:
        return
    if model.sliding_window_size is None:
        yield WINDOW_LAYERS, f"{chosen} have a window, but there is none; set sliding_window_size too, or leave it out"
    if beyond := [layer for layer in chosen if layer >= layers]:
        yield WINDOW_LAYERS, f"{beyond} are beyond {LAYERS}={layers}; use layers 0 to {layers - 1}"


@rule(MOE, LAYERS)
def _experts_belong_to_layers(config: Config) -> Findings:
    moe, layers = config.model.model_config.moe_config, config.model.model_config.num_hidden_layers
    if moe is None or moe.layers == [-1]:
        return
    if beyond := [layer for layer in moe.layers if not 0 <= layer < layers]:
        yield f"{MOE}.layers", f"{beyond} are beyond {LAYERS}={layers}; use layers 0 to {layers - 1}, or [-1] for all"


@rule(MOE)
def _tokens_find_enough_experts(config: Config) -> Findings:
    moe = config.model.model_config.moe_config
    if moe is None:
        return
    experts, groups = moe.num_experts, moe.num_expert_groups
    if moe.top_k > experts:
        yield f"{MOE}.top_k", f"{moe.top_k} is more than num_experts={experts}; use at most {experts}"
    elif experts % groups:
        yield (
            f"{MOE}.num_expert_groups",
            f"{groups} does not divide num_experts={experts}; use {listed(divisors(experts))}",
        )
    elif moe.top_k_groups > groups:
        yield f"{MOE}.top_k_groups", f"{moe.top_k_groups} is more than num_expert_groups={groups}; use at most {groups}"
    elif moe.top_k > moe.top_k_groups * (experts // groups):
        least = -(-moe.top_k * groups // experts)
        yield (
            f"{MOE}.top_k_groups",
            f"{moe.top_k_groups} groups of {experts // groups} experts have fewer than top_k={moe.top_k}; use at least"
            f" {least}",
        )


@rule("model.init_method", "model.model_config", "optimizer.optimizer_factory")
def _mup_reaches_every_layer(config: Config) -> Findings:
    init, model, factory = config.model.init_method, config.model.model_config, config.optimizer.optimizer_factory
    if not isinstance(init, RandomInit) or not init.use_mup:
        return
    key = "model.init_method.use_mup"
    if init.std != 0.02:
        yield "model.init_method.std", f"{init.std} has no effect with use_mup; leave it out"
    if model.tie_word_embeddings:
        yield key, "an embedding under µP is no output layer; set model.model_config.tie_word_embeddings: false"
    if model.qk_norm:
        yield key, "the family's norms of queries and keys undo what µP does to scores; use a family without"
    if factory.name == "muon" and factory.muon_scale != "spectral":
        yield (
            "optimizer.optimizer_factory.muon_scale",
            f"{factory.muon_scale} updates grow with the width, which use_mup forbids; use spectral",
        )


@rule("model.model_config")
def _latent_heads_fit(config: Config) -> Findings:
    model = config.model.model_config
    if not isinstance(model, DeepseekConfig):
        return
    width = model.qk_nope_head_dim + model.qk_rope_head_dim
    if model.num_key_value_heads != model.num_attention_heads:
        yield KV_HEADS, f"{model.num_key_value_heads}: latent attention has keys for each head; leave it out"
    if model.head_dim != width:
        yield "model.model_config.head_dim", f"{model.head_dim} is not qk_nope_head_dim + qk_rope_head_dim; omit it"
    if model.v_head_dim > width:
        yield (
            "model.model_config.v_head_dim",
            f"{model.v_head_dim} is more than a key's qk_nope_head_dim + qk_rope_head_dim={width}; use at most that",
        )


@rule("model.model_config.rope_scaling")
def _rope_scaling_has_a_slope(config: Config) -> Findings:
    scaling = config.model.model_config.rope_scaling
    if scaling is not None and scaling.rope_type == "llama3" and scaling.high_freq_factor <= scaling.low_freq_factor:
        yield (
            "model.model_config.rope_scaling.high_freq_factor",
            f"{scaling.high_freq_factor} must be larger than low_freq_factor={scaling.low_freq_factor}",
        )


@rule("model.model_config.vocab_size")
def _special_tokens_exist(config: Config) -> Findings:
    model = config.model.model_config
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = getattr(model, name)
        for token in value if isinstance(value, list) else [value]:
            if token is not None and model.vocab_size is not None and token >= model.vocab_size:
                text = f"{token} is no token: vocab_size={model.vocab_size}; use less, or null"
                yield f"model.model_config.{name}", text


# --- length of the run, learning rate, profiler -----------------------------------------------------------------------


@rule(f"{SCHEDULER}.lr_decay_starting_step", f"{SCHEDULER}.lr_warmup_steps")
def _decay_follows_warmup(config: Config) -> Findings:
    scheduler = config.optimizer.learning_rate_scheduler
    start, warmup = scheduler.lr_decay_starting_step, scheduler.lr_warmup_steps
    if start < warmup:
        yield f"{SCHEDULER}.lr_decay_starting_step", f"{start} lies within the warm-up, lr_warmup_steps={warmup}"


@rule(
    f"{SCHEDULER}.lr_schedule_steps",
    f"{SCHEDULER}.lr_decay_starting_step",
    f"{SCHEDULER}.lr_decay_steps",
    f"{SCHEDULER}.lr_warmup_steps",
)
def _schedule_has_one_length(config: Config) -> Findings:
    scheduler = config.optimizer.learning_rate_scheduler
    length, start, decay = scheduler.lr_schedule_steps, scheduler.lr_decay_starting_step, scheduler.lr_decay_steps
    if length is not None and start + decay != length:
        yield (
            f"{SCHEDULER}.lr_schedule_steps",
            f"{length} is not where the decay ends: lr_decay_starting_step={start} + lr_decay_steps={decay}"
            f" = {start + decay}; make them agree, or leave one out",
        )


@rule(f"{SCHEDULER}.min_decay_lr", f"{SCHEDULER}.learning_rate")
def _lowest_lr_is_lower(config: Config) -> Findings:
    scheduler = config.optimizer.learning_rate_scheduler
    if scheduler.min_decay_lr > scheduler.learning_rate:
        yield (
            f"{SCHEDULER}.min_decay_lr",
            f"{scheduler.min_decay_lr} is above learning_rate={scheduler.learning_rate}; use at most that",
        )


@rule(SCHEDULER, TRAIN_STEPS)
def _learning_rate_falls_in_one_way(config: Config) -> Findings:
    scheduler = config.optimizer.learning_rate_scheduler
    style, steps = scheduler.lr_decay_style, scheduler.lr_steps
    end = scheduler.lr_decay_starting_step + scheduler.lr_decay_steps
    without = (
        {"lr_decay_steps": 0, "lr_schedule_steps": None, "lr_rewarm_steps": 0} if scheduler.falls_by_itself else {}
    )
    for name, nothing in without.items():
        value = getattr(scheduler, name)
        if value != nothing and not was_filled(scheduler, name):
            yield f"{SCHEDULER}.{name}", f"{value} has no effect with lr_decay_style={style}; leave it out"
    if scheduler.lr_rewarm_steps and not scheduler.falls_by_itself and end >= config.tokens.train_steps:
        yield (
            f"{SCHEDULER}.lr_rewarm_steps",
            f"{scheduler.lr_rewarm_steps} updates follow the fall, which ends with the run, {TRAIN_STEPS}="
            f"{config.tokens.train_steps}; set lr_schedule_steps to less",
        )
    if (style == "steps") != bool(steps):
        yield (
            f"{SCHEDULER}.lr_steps",
            "goes with lr_decay_style: steps; give both" if steps else "empty, but lr_decay_style is steps; list some",
        )
    for index, (before, each) in enumerate(zip([None, *steps], steps, strict=False)):
        least = before.step if before else scheduler.lr_warmup_steps
        if each.step <= least:
            after = "the one before, at" if before else "the warm-up, which ends at"
            yield f"{SCHEDULER}.lr_steps[{index}].step", f"{each.step} is not after {after} {least}"
        if each.learning_rate > scheduler.learning_rate:
            yield (
                f"{SCHEDULER}.lr_steps[{index}].learning_rate",
                f"{each.learning_rate} is above learning_rate={scheduler.learning_rate}; use at most that",
            )


@rule("optimizer.groups", "optimizer.optimizer_factory")
def _groups_say_something(config: Config) -> Findings:
    factory = config.optimizer.optimizer_factory.name
    for index, group in enumerate(config.optimizer.groups):
        key = f"optimizer.groups[{index}]"
        if group.learning_rate is None and group.weight_decay is None and group.optimizer is None:
            yield key, "says nothing of its parameters; give learning_rate, weight_decay or optimizer, or leave it out"
        if group.optimizer not in {None, "sgd", factory, "adamW" if factory == "muon" else factory}:
            yield (
                f"{key}.optimizer",
                f"{group.optimizer} takes its keys from optimizer.optimizer_factory, which is {factory}; name"
                f" {group.optimizer} there, and {factory} in a group of all others",
            )


@rule("profiler", TRAIN_STEPS)
def _traced_steps_are_made(config: Config) -> Findings:
    trace = config.profiler.pipeline_trace if config.profiler else None
    late = [step for step in trace.steps if step > config.tokens.train_steps] if trace else []
    if late:
        yield (
            "profiler.pipeline_trace.steps",
            f"{late} are beyond {TRAIN_STEPS}={config.tokens.train_steps}; name steps that are made",
        )


@rule("s3_upload")
def _upload_goes_to_a_url(config: Config) -> Findings:
    upload = config.s3_upload
    if upload is not None and "://" not in upload.upload_s3_path:
        yield "s3_upload.upload_s3_path", f"{upload.upload_s3_path} is no URL; write s3://bucket/folder"


@rule("profiler", TRAIN_STEPS)
def _profiler_fits(config: Config) -> Findings:
    profiler, steps = config.profiler, config.tokens.train_steps
    if profiler is not None and profiler.torch_runs and profiler.last_step > steps:
        yield (
            "profiler",
            f"its cycles end at step {profiler.last_step} (skip_first + repeat · (wait + warmup + active)), beyond"
            f" {TRAIN_STEPS}={steps}",
        )


# --- data stages ------------------------------------------------------------------------------------------------------


@rule("data_stages[].name", "data_stages[].start_training_step")
def _stages_are_in_order(config: Config) -> Findings:
    stages = config.data_stages
    for index, stage in enumerate(stages):
        if stage.name in [earlier.name for earlier in stages[:index]]:
            yield f"data_stages[{index}].name", f"{stage.name} is the name of an earlier stage; names are unique"
    starts = [stage.start_training_step for stage in stages]
    if starts[0] != 1:
        yield "data_stages[0].start_training_step", f"{starts[0]}: the first stage starts at step 1"
    for index in range(1, len(starts)):
        if starts[index] <= starts[index - 1]:
            yield (
                f"data_stages[{index}].start_training_step",
                f"{starts[index]} does not come after the stage before, which starts at {starts[index - 1]};"
                " list stages in order",
            )


@rule("data_stages[].data.skip_samples")
def _ranges_are_ranges(config: Config) -> Findings:
    for index, stage in enumerate(config.data_stages):
        for number, left_out in enumerate(stage.data.skip_samples):
            if len(left_out) != 2 or left_out[0] >= left_out[1]:
                key = f"data_stages[{index}].data.skip_samples[{number}]"
                yield key, f"{left_out} is no range of samples; write [first, end], the first below the end"


@rule()
def _tokens_have_a_size(config: Config) -> Findings:
    for index, stage in enumerate(config.data_stages):
        for name, dataset in (("data.dataset", stage.data.dataset), ("validation", stage.validation)):
            size = getattr(dataset, "token_size_in_bytes", None)
            if size not in (None, 2, 4):
                yield f"data_stages[{index}].{name}.token_size_in_bytes", f"{size} is not 2 or 4"
