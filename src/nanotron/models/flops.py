"""How many floating-point operations the parts of a decoder need.

Forward once, backward twice that. Attention is counted at full S² (a causal kernel may do half of it), and at S·W in a
layer with a window of W < S tokens; recomputation is not counted: these are *model* FLOPs, the numerator of MFU (arXiv
2204.02311, appendix B, with attention at full S²).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig


def decoder_layer_flops(model: ModelConfig, kind: str, sequence_length: int) -> int:
    """FLOPs of a decoder layer's forward over one sequence, without a window.

    Letters: s sequence, d hidden, h heads, k key/value heads, e head size.
    """
    s, d = sequence_length, model.hidden_size
    h, k, e = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    projections = 2 * s * d * (h + 2 * k) * e + 2 * s * h * e * d  # q, k, v; then out
    return projections + attention_flops(model, s, s) + mlp_flops(model, kind, s)


def mlp_flops(model: ModelConfig, kind: str, sequence_length: int) -> int:
    """FLOPs of the second half of a layer: gate, up and down; of experts, those that a token uses."""
    tokens = sequence_length * model.hidden_size
    if kind != "sparse":
        return 6 * tokens * model.intermediate_size
    moe = model.moe_config
    assert moe is not None
    shared = moe.shared_expert_intermediate_size if moe.enable_shared_expert else 0
    return 2 * tokens * moe.num_experts + 6 * tokens * (moe.top_k * moe.moe_intermediate_size + shared)


def attention_flops(model: ModelConfig, queries: int, keys: int) -> int:
    """FLOPs of queries with as many keys each: scores, then the weighted sum of values."""
    return 2 * (2 * model.num_attention_heads * queries * keys * model.head_dim)


def head_flops(model: ModelConfig, sequence_length: int) -> int:
    """FLOPs of the output layer's forward over one sequence."""
    return 2 * sequence_length * model.hidden_size * model.vocab_size
