"""OLMoE (arXiv 2409.02060): all of a token's queries have one norm, and all its keys another; not each head. No torch.

layers.i.attn.q_norm.weight  [h·e]   cut on dim 0 over tp, as the queries
layers.i.attn.k_norm.weight  [kv·e]  cut on dim 0 over tp_kv, as the keys; tp_rep ranks share a head
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from nanotron.models.specs import decoder_specs

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig
    from nanotron.models.decoder import DecoderChunk
    from nanotron.parallel.params import ParamSpec


def olmoe_specs(config: ModelConfig, **options: Any) -> dict[str, ParamSpec]:
    """A decoder's parameters; the norms of queries and keys see all tokens, and this rank's channels."""
    q, k = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def whole(spec: ParamSpec) -> ParamSpec:
        if spec.name.endswith(".attn.q_norm.weight"):
            return replace(spec, shape=(q,), shard=(("tp", 0),), partial_grad=())
        if spec.name.endswith(".attn.k_norm.weight"):
            return replace(spec, shape=(k,), shard=(("tp_kv", 0),), partial_grad=("tp_rep",))
        return spec

    return {name: whole(spec) for name, spec in decoder_specs(config, **options).items()}


def olmoe_chunk() -> type[DecoderChunk]:
    """The chunk of a decoder with such norms."""
    from nanotron.models.olmoe_decoder import OlmoeChunk

    return OlmoeChunk
