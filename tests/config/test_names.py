"""Regular expressions of weight_decay_exclude_named_params match our names and Hugging Face's Nanotron's."""

from __future__ import annotations

import pytest

from nanotron.config import LlamaConfig
from nanotron.models.hf_nanotron_names import hf_nanotron_name, matching
from nanotron.models.specs import decoder_specs

NAMES = list(
    decoder_specs(
        LlamaConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, vocab_size=16, attention_bias=True)
    )
)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        (r"layers\.1\.mlp\.", {"layers.1.mlp.gate_up.weight", "layers.1.mlp.down.weight"}),
        (r"model\.decoder\.0\.pp_block\.attn\.qkv_proj\.weight", {"layers.0.attn.q.weight", "layers.0.attn.kv.weight"}),
        (r".*token_embedding", {"embed.weight"}),
        (r"model\.lm_head", {"head.weight"}),
        (r"mlp", set()),  # a pattern has to match from the start of a name
        (r".*0.*o_proj\.bias", {"layers.0.attn.out.bias"}),
    ],
)
def test_a_pattern_matches_from_the_start_of_either_name(pattern: str, found: set[str]) -> None:
    assert matching(NAMES, [pattern]) == found


def test_every_parameter_has_a_name_in_hugging_faces_nanotron() -> None:
    assert hf_nanotron_name("layers.11.mlp_norm.weight") == "model.decoder.11.pp_block.post_attention_layernorm.weight"
    assert all(hf_nanotron_name(name).startswith("model.") for name in NAMES)
