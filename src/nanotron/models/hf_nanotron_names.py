"""The names that Hugging Face's Nanotron gives to our parameters, for the regular expressions in its users' configs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

_TOP = {
    "embed.weight": "model.token_position_embeddings.pp_block.token_embedding.weight",
    "norm.weight": "model.final_layer_norm.pp_block.weight",
    "head.weight": "model.lm_head.pp_block.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn.q": "attn.qkv_proj",  # one fused tensor there
    "attn.kv": "attn.qkv_proj",
    "attn.q_norm": "attn.q_norm",
    "attn.k_norm": "attn.k_norm",
    "attn.out": "attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_up": "mlp.gate_up_proj",
    "mlp.down": "mlp.down_proj",
}


def hf_nanotron_name(name: str) -> str:
    """`layers.3.attn.out.weight` -> `model.decoder.3.pp_block.attn.o_proj.weight`; parts it lacks keep our word."""
    if name in _TOP:
        return _TOP[name]
    _, layer, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    return f"model.decoder.{layer}.pp_block.{_LAYER.get(part, part)}.{kind}"


def matching(names: Iterable[str], patterns: Sequence[str]) -> set[str]:
    """Return the parameters whose name, ours or Hugging Face's Nanotron's, begins with a match of any pattern."""
    compiled = [re.compile(pattern) for pattern in patterns]
    names_of = {name: (name, hf_nanotron_name(name)) for name in names}
    return {name for name, both in names_of.items() if any(pattern.match(it) for pattern in compiled for it in both)}
