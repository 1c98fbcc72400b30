"""Multi-head latent attention (MLA, arXiv 2405.04434): keys and values of all heads are made of one short vector.

    b rows   s tokens   t tensor-parallel ranks   d hidden size   h heads   e = p + r dims of a query or key: p without
    positions, r rotated   u dims of a value   c_q, c dims of the latent vectors of queries, of keys and values

    layers.i.attn.q_down.weight         [c_q, d]      with q_lora_rank; else q reads the layer's input
    layers.i.attn.q_latent_norm.weight  [c_q]
    layers.i.attn.q.weight              [h·e, c_q]    cut on dim 0 over tp: whole heads; [h·e, d] without q_lora_rank
    layers.i.attn.kv_down.weight        [c + r, d]    the latent vector, and one rotated key that all heads share
    layers.i.attn.kv_latent_norm.weight [c]
    layers.i.attn.kv_up.weight          [h·(p+u), c]  cut on dim 0 over tp: of each head, keys | values
    layers.i.attn.out.weight            [d, h·u]      cut on dim 1 over tp

What leads to the latent vectors works on this rank's tokens, outside of what tensor parallelism cuts, like a norm.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from nanotron.models.flops import mlp_flops
from nanotron.models.specs import ONES
from nanotron.parallel.params import Init, ParamSpec

if TYPE_CHECKING:
    from nanotron.config.model import DeepseekConfig, ModelConfig
    from nanotron.models.decoder import DecoderChunk


def latent_attention_specs(
    config: ModelConfig, layer: str, init: Init, residual_init: Init, partial: tuple[str, ...]
) -> Iterator[ParamSpec]:
    """Of a layer's first half."""
    model = as_deepseek(config)
    d, h, name = model.hidden_size, model.num_attention_heads, f"{layer}.attn"
    p, r, u = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    heads, of_queries, latent = (("tp", 0),), model.q_lora_rank, model.kv_lora_rank
    if of_queries is not None:
        yield ParamSpec(f"{name}.q_down.weight", (of_queries, d), init, decay=True, partial_grad=partial)
        yield ParamSpec(f"{name}.q_latent_norm.weight", (of_queries,), ONES, decay=False, partial_grad=partial)
    yield ParamSpec(f"{name}.q.weight", (h * (p + r), of_queries or d), init, decay=True, shard=heads)
    yield ParamSpec(f"{name}.kv_down.weight", (latent + r, d), init, decay=True, partial_grad=partial)
    yield ParamSpec(f"{name}.kv_latent_norm.weight", (latent,), ONES, decay=False, partial_grad=partial)
    yield ParamSpec(f"{name}.kv_up.weight", (h * (p + u), latent), init, decay=True, shard=heads)
    yield ParamSpec(f"{name}.out.weight", (d, h * u), residual_init, decay=True, shard=(("tp", 1),))


def latent_layer_flops(config: ModelConfig, kind: str, sequence_length: int) -> int:
    """FLOPs of a layer's forward over one sequence."""
    model = as_deepseek(config)
    s, d, h = sequence_length, model.hidden_size, model.num_attention_heads
    p, r, u = model.qk_nope_head_dim, model.qk_rope_head_dim, model.v_head_dim
    of_queries, latent = model.q_lora_rank, model.kv_lora_rank
    queries = d * h * (p + r) if of_queries is None else of_queries * (d + h * (p + r))
    keys_and_values = d * (latent + r) + latent * h * (p + u)
    projections = 2 * s * (queries + keys_and_values + h * u * d)
    return projections + 2 * h * s * s * (p + r + u) + mlp_flops(model, kind, s)


def latent_chunk() -> type[DecoderChunk]:
    """The chunk of a decoder with latent attention."""
    from nanotron.models.latent_decoder import LatentDecoderChunk

    return LatentDecoderChunk


def as_deepseek(config: ModelConfig) -> DeepseekConfig:
    """The config of a model whose family has latent attention."""
    from nanotron.config.model import DeepseekConfig

    assert isinstance(config, DeepseekConfig)
    return config
