"""Starter configs: a model of a usual size on a number of devices, as commented YAML."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from nanotron.errors import ConfigError

DEVICE_GIB = 80
_USABLE = 0.5 * DEVICE_GIB * 2**30  # bytes of a device for weights, gradients and optimizer; the rest is activations
_NODE = 8  # devices with fast links between them: tensor parallelism stays inside
TINY = 1e8  # parameters of a model that is there to see that everything works
_LONG = 32768  # tokens of a row on one device; longer rows are cut over several


class Preset(NamedTuple):
    """A model's usual shape and training recipe; `batch` is in samples, `parameters` is about how many it has."""

    parameters: float
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int | None
    tied: bool
    rope_theta: float
    sequence: int
    batch: int
    steps: int
    learning_rate: str
    lowest_rate: str
    experts: Experts | None = None
    family: str = "llama"
    head_dim: int | None = None


class Experts(NamedTuple):
    """Of a sparse model: in all layers but the first ones so many experts, and `used` of them for each token.

    `parameters` is about how many of the model's are theirs.
    """

    parameters: float
    number: int
    used: int
    intermediate: int
    aux_loss: str
    first_dense: int = 0


_FEW, _MANY = Experts(1.8e6, 16, 4, 96, "0.1", first_dense=1), Experts(29.0e9, 128, 8, 768, "0.001")

PRESETS = {
    "tiny": Preset(1.5e6, 128, 4, 4, 2, 384, None, True, 10000.0, 128, 32, 60, "3e-3", "3e-4"),
    "tiny-moe": Preset(2.6e6, 128, 4, 4, 2, 384, None, True, 10000.0, 128, 32, 60, "1e-3", "1e-4", _FEW, "qwen3"),
    "160m": Preset(162e6, 768, 12, 12, 12, 2048, 50304, False, 10000.0, 2048, 256, 20000, "6e-4", "6e-5"),
    "1b": Preset(1.24e9, 2048, 16, 32, 8, 8192, 128256, True, 500000.0, 4096, 512, 50000, "4e-4", "4e-5"),
    "8b": Preset(8.0e9, 4096, 32, 32, 8, 14336, 128256, False, 500000.0, 8192, 512, 100000, "3e-4", "3e-5"),
    "8b-128k": Preset(
        8.0e9, 4096, 32, 32, 8, 14336, 128256, False, 8e6, 131072, 32, 1000, "3e-5", "3e-6"
    ),  # to go on from weights that know shorter texts
    "30b-a3b": Preset(
        30.5e9, 2048, 48, 32, 4, 6144, 151936, False, 1e6, 4096, 1024, 100000, "3e-4", "3e-5", _MANY, "qwen3", 128
    ),
    "70b": Preset(70.6e9, 8192, 80, 64, 8, 28672, 128256, False, 500000.0, 8192, 1024, 100000, "1.5e-4", "1.5e-5"),
    "405b": Preset(405.9e9, 16384, 126, 128, 8, 53248, 128256, False, 500000.0, 8192, 2048, 100000, "8e-5", "8e-7"),
}


class Layout(NamedTuple):
    """How many ranks share what."""

    dp: int
    ep: int
    cp: int
    tp: int
    pp: int


def starter(name: str, devices: int) -> str:
    """Return a commented config of a preset for a number of devices.

    Raises ConfigError when the name is unknown or the model does not fit.
    """
    if name not in PRESETS:
        raise ConfigError(f"--preset {name}: not one of {', '.join(PRESETS)}")
    preset = PRESETS[name]
    layout = _layout(name, preset, devices)
    is_tiny = preset.parameters < TINY
    micro_batch = 4 if is_tiny else 1
    at_once = layout.dp * micro_batch
    return _TEMPLATE.format(
        name=name,
        **layout._asdict(),
        **preset._asdict(),
        tied_text=str(preset.tied).lower(),
        world=devices,
        mode="REDUCE_SCATTER" if layout.tp > 1 and not is_tiny else "ALL_REDUCE",
        vocab_line=f"\n    vocab_size: {preset.vocab} # at least the tokenizer's" if preset.vocab else "",
        head_dim_line=f"\n    head_dim: {preset.head_dim}" * (preset.head_dim is not None),
        ep_line=f"\n  expert_parallel_size: {layout.ep} # of the replicas, those that share one set of experts"
        * (layout.ep > 1),
        moe_lines=_moe_lines(preset),
        cp_line=f"\n  context_parallel_size: {layout.cp} # ranks that share every sequence" * (layout.cp > 1),
        recompute="true" if preset.parameters > 5e9 else "false",
        dtype="float32" if is_tiny else "bfloat16",
        micro_batch=micro_batch,
        samples=max(1, preset.batch // at_once) * at_once,
        warmup=max(1, min(2000, preset.steps // 20)),
        interval=max(20, preset.steps // 50),
    )


def _moe_lines(preset: Preset) -> str:
    experts = preset.experts
    if experts is None:
        return ""
    lines = [
        "moe_config:",
        f"  num_experts: {experts.number} # of a layer",
        f"  top_k: {experts.used} # of a token",
        f"  moe_intermediate_size: {experts.intermediate}",
        "  normalize_top_k: true",
        f"  router_aux_loss_coef: {experts.aux_loss} # of the loss that has all experts used",
    ]
    if experts.first_dense:
        lines.append(f"  layers: {list(range(experts.first_dense, preset.layers))} # the others have the dense MLP")
    return "".join(f"\n    {line}" for line in lines)


def _layout(name: str, preset: Preset, devices: int) -> Layout:
    """Choose the least model parallelism that fits; what is left over are replicas."""
    if preset.parameters < TINY:  # fits anywhere; shows every kind of parallelism when there are ranks enough
        tp, pp = (2, 2) if devices % 8 == 0 else (2, 1) if devices % 4 == 0 else (1, 1)
        dp = devices // (tp * pp)
        return Layout(dp, 2 if preset.experts and dp % 2 == 0 else 1, 1, tp, pp)
    layout = _fitting(preset, devices)
    if layout is not None:
        return layout
    least = next(n for n in (2**i for i in range(16)) if _fitting(preset, n) is not None)
    raise ConfigError(
        f"--gpus {devices}: {name} does not fit on them with {DEVICE_GIB} GiB each;"
        f" use a multiple of {least}, or a smaller --preset"
    )


def _fitting(preset: Preset, devices: int) -> Layout | None:
    """The least model parallelism that fits; a pipeline only once a node is used up."""
    cp = max(1, preset.sequence // _LONG)
    for pp in (1, 2, 4, 8, 16):
        for tp in (1, 2, 4, 8):
            whole_node = pp == 1 or tp >= min(_NODE, preset.kv_heads)
            dp, rest = divmod(devices, cp * tp * pp)
            ep = _expert_ranks(preset, dp, cp * tp)
            if whole_node and not rest and _bytes(preset, ep, tp, pp, devices) <= _USABLE:
                return Layout(dp, ep, cp, tp, pp)
    return None


def _expert_ranks(preset: Preset, dp: int, neighbours: int) -> int:
    """The replicas that share a set of experts: as many as a node has."""
    ep = gcd(dp, max(1, _NODE // neighbours))
    return ep if preset.experts else 1


def _bytes(preset: Preset, ep: int, tp: int, pp: int, devices: int) -> float:
    """Bytes per device: bf16 weights and fp32 gradients of its part, and its share of master weights and moments."""
    experts = preset.experts.parameters if preset.experts else 0.0
    held = (experts / ep + preset.parameters - experts) / (tp * pp)
    return held * (2 + 4) + preset.parameters * (4 + 4 + 4) / devices


_TEMPLATE = """\
# {name}: about {parameters:.3g} parameters on {world} device(s).
#   nanotron check THIS.yaml    names every mistake, prints all keys with their defaults
#   nanotron train THIS.yaml    trains; the same command resumes
# docs/config.md describes every key.
general:
  project: {name}
  seed: 42 # of the initial weights

parallelism: # the product of its sizes is the number of ranks; they change speed and memory, never the loss
  dp: {dp} # replicas{ep_line}{cp_line}
  tp: {tp} # ranks that share every matrix; at most one machine's devices
  pp: {pp} # groups of layers
  pp_engine: 1f1b
  tp_mode: {mode} # REDUCE_SCATTER is sequence parallelism: less activation memory
  recompute_layer: {recompute} # selective: half the activation memory; true: least, for a third more work

model:
  dtype: {dtype}
  model_config:
    is_{family}_config: true
    hidden_size: {hidden}
    num_hidden_layers: {layers}
    num_attention_heads: {heads}
    num_key_value_heads: {kv_heads}{head_dim_line}
    intermediate_size: {intermediate}{vocab_line}
    tie_word_embeddings: {tied_text}
    rope_theta: {rope_theta}{moe_lines}
  init_method:
    std: 0.02

tokens:
  sequence_length: {sequence}
  micro_batch_size: {micro_batch} # samples at once on each replica
  global_batch_size: {samples} # per step, over all replicas: another dp changes the speed and not the curve
  train_steps: {steps}

optimizer:
  zero_stage: 1 # replicas share the optimizer's state
  weight_decay: 0.1
  clip_grad: 1.0
  optimizer_factory:
    name: adamW
    adam_beta1: 0.9
    adam_beta2: 0.95
  learning_rate_scheduler:
    learning_rate: {learning_rate}
    lr_warmup_steps: {warmup}
    lr_decay_style: cosine
    min_decay_lr: {lowest_rate}

# Without data_stages the embedded corpus is used: enough to see that everything works. Your own text:
#   nanotron tokenize my_texts/ --tokenizer NAME --output data/my_corpus
# data_stages:
#   - name: Training
#     start_training_step: 1
#     data:
#       dataset:
#         dataset_folder: data/my_corpus

checkpoints:
  checkpoints_path: runs/{name}
  checkpoint_interval: {interval}
  keep_last_n: 3

logging:
  iteration_step_info_interval: 1
  tensorboard: true
"""
