"""Regular expressions of names of parameters match our names and Hugging Face's Nanotron's."""

from __future__ import annotations

import pytest

from nanotron.config import LlamaConfig, get_config_from_dict
from nanotron.models.hf_nanotron_names import hf_nanotron_name, matching
from nanotron.models.specs import decoder_specs
from nanotron.training.topology import parameter_specs

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


def test_groups_set_what_they_name_and_the_last_one_counts() -> None:
    config = get_config_from_dict(
        {
            "model": {"model_config": {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}},
            "tokens": {"sequence_length": 8, "micro_batch_size": 1, "batch_accumulation_per_replica": 1},
            "optimizer": {
                "learning_rate_scheduler": {"learning_rate": 1e-2},
                "weight_decay": 0.2,
                "weight_decay_exclude_named_params": [r"embed", r"layers\.1"],
                "groups": [
                    {"params": [r"layers\.1\.attn", r"head"], "learning_rate": 1e-3, "weight_decay": 0.3},
                    {"params": [r".*o_proj", r"norm"], "learning_rate": 5e-3, "optimizer": "sgd"},
                ],
            },
        }
    )
    config.model.model_config.vocab_size = 16
    found = {
        name: (spec.weight_decay, spec.lr_scale, spec.optimizer, spec.decay)
        for name, spec in parameter_specs(config).items()
    }
    assert found["embed.weight"] == (0.0, 1.0, "adamW", True)
    assert found["layers.0.attn.q.weight"] == (0.2, 1.0, "adamW", True)
    assert found["layers.1.mlp.down.weight"] == (0.0, 1.0, "adamW", True)
    assert found["layers.1.attn.q.weight"] == (0.3, 0.1, "adamW", True)
    assert found["layers.1.attn.out.weight"] == (0.3, 0.5, "sgd", True)
    assert found["layers.0.attn.out.weight"] == (0.2, 0.5, "sgd", True)
    assert found["head.weight"] == (0.3, 0.1, "adamW", True)
    assert found["norm.weight"][1:] == (0.5, "sgd", False)  # which never decays
