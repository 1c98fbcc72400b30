"""The table of model families. No torch.

A family is a class of config keys and a line here. Most share DecoderChunk and its table of parameters, and differ in
biases, norms and in what Hugging Face calls them; one that computes something else brings a file with its own.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from nanotron.config.model import (
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MistralConfig,
    ModelConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
)
from nanotron.models import hf_facts
from nanotron.models.family import Family
from nanotron.models.flops import attention_flops, head_flops
from nanotron.models.latent_attention import latent_attention_specs, latent_chunk, latent_layer_flops
from nanotron.models.olmoe import olmoe_chunk, olmoe_specs
from nanotron.models.specs import decoder_specs

_LATENT: dict[str, Any] = {
    "specs": partial(decoder_specs, attention=latent_attention_specs),
    "layer_flops": latent_layer_flops,
    "chunk": latent_chunk,
}

FAMILIES: dict[str, Family] = {
    "llama": Family(LlamaConfig, hf_facts.LLAMA),
    "mistral": Family(MistralConfig, hf_facts.MISTRAL, hf_facts.MIXTRAL),
    "qwen2": Family(Qwen2Config, hf_facts.QWEN2, hf_facts.QWEN2_MOE),
    "qwen3": Family(Qwen3Config, hf_facts.QWEN3, hf_facts.QWEN3_MOE),
    "olmoe": Family(OlmoeConfig, None, hf_facts.OLMOE, specs=olmoe_specs, chunk=olmoe_chunk),
    "deepseek_v2": Family(DeepseekV2Config, hugging_face_sparse=hf_facts.DEEPSEEK_V2, **_LATENT),
    "deepseek_v3": Family(DeepseekV3Config, hugging_face_sparse=hf_facts.DEEPSEEK_V3, **_LATENT),
}


def family_name(config: ModelConfig) -> str:
    """The name of a model's family."""
    return next(name for name, family in FAMILIES.items() if type(config) is family.config)


def family_of(config: ModelConfig) -> Family:
    """A model's family."""
    return FAMILIES[family_name(config)]


def layer_kinds(config: ModelConfig) -> list[tuple[str, int | None]]:
    """The kind of each layer and its window; layers that share both have equal parameters, memory and FLOPs."""
    return [(kind, config.window_of(layer)) for layer, kind in enumerate(family_of(config).layer_kinds(config))]


def layer_costs(config: ModelConfig, sequence_length: int) -> list[int]:
    """FLOPs of each layer's forward over one sequence."""
    kinds, family = layer_kinds(config), family_of(config)

    def flops(kind: str, window: int | None) -> int:
        out_of_sight = max(0, sequence_length - window) if window else 0  # keys of each query
        full = family.layer_flops(config, kind, sequence_length)
        return full - attention_flops(config, sequence_length, out_of_sight)

    costs = {kind: flops(*kind) for kind in set(kinds)}
    return [costs[kind] for kind in kinds]


def flops_per_step(config: ModelConfig, *, num_samples: int, sequence_length: int) -> int:
    """Model FLOPs of forward and backward over ``num_samples`` sequences; recomputation is not counted."""
    forward = sum(layer_costs(config, sequence_length)) + head_flops(config, sequence_length)
    return 3 * num_samples * forward
