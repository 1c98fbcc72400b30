"""The model against one that nobody here wrote: `transformers`' Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from nanotron.batch import IGNORED_LABEL, Batch
from nanotron.config.model import ModelConfig, RopeScalingArgs
from tests.models.tiny import differing, gradients, mean_loss, tiny_batch, tiny_config, whole_model

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 48}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama grouped heads": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama all heads": ("llama", {"num_key_value_heads": 4}),
    "llama one kv head": ("llama", {"num_key_value_heads": 1, "rms_norm_eps": 1e-2}),
    "llama biases": ("llama", {"attention_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 12, "rope_theta": 500.0}),
    "llama rope linear": ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    "llama rope llama3": ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 100.0}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3 tied": ("qwen3", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {}),
    "mistral window": ("mistral", {"sliding_window_size": 5}),
    "qwen2 window in later layers": (
        "qwen2",
        {"sliding_window_size": 7, "sliding_window_layers": [1, 2], "num_hidden_layers": 3},
    ),
    "qwen3 every third layer without the window": (
        "qwen3",
        {"sliding_window_size": 9, "sliding_window_layers": [0, 1, 3, 4], "num_hidden_layers": 6},
    ),
}


def config_of(case: str) -> ModelConfig:
    family, facts = CASES[case]
    scaling = facts.get("rope_scaling")
    return tiny_config(family, **{**facts, "rope_scaling": RopeScalingArgs(**scaling) if scaling else None})


def reference_model(case: str, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The same architecture as its own authors' code has it."""
    family, facts = CASES[case]
    config = config_of(case)
    rope = {"rope_type": "default", **(facts.get("rope_scaling") or {}), "rope_theta": config.rope_theta}
    shared = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"]
    shared += ["vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "head_dim"]
    settings = {name: getattr(config, name) for name in shared}
    biases = {"attention_bias": config.qkv_bias} if family in ("llama", "qwen3") else {}
    window: dict[str, Any] = {"sliding_window": config.sliding_window_size}
    if config.sliding_window_layers is not None:
        kinds = ["full_attention"] * config.num_hidden_layers
        for layer in config.sliding_window_layers:
            kinds[layer] = "sliding_attention"
        window |= {"use_sliding_window": True, "layer_types": kinds}
    kind = {
        "llama": transformers.LlamaConfig,
        "mistral": transformers.MistralConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
    }[family]
    model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        kind(**settings, **biases, **window, rope_parameters=rope), attn_implementation="eager", dtype=dtype
    )
    return model.to(dtype).eval()  # type: ignore[no-any-return]


def places(model: transformers.PreTrainedModel, config: ModelConfig) -> dict[str, list[nn.Parameter]]:
    """Our global name -> the reference's parameters that it stacks, in order."""
    named = dict(model.named_parameters())
    found = {"embed.weight": [named["model.embed_tokens.weight"]], "norm.weight": [named["model.norm.weight"]]}
    if not config.tie_word_embeddings:
        found["head.weight"] = [named["lm_head.weight"]]
    parts = {
        "attn_norm.weight": ["input_layernorm.weight"],
        "attn.q.weight": ["self_attn.q_proj.weight"],
        "attn.q.bias": ["self_attn.q_proj.bias"],
        "attn.kv.weight": ["self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        "attn.kv.bias": ["self_attn.k_proj.bias", "self_attn.v_proj.bias"],
        "attn.q_norm.weight": ["self_attn.q_norm.weight"],
        "attn.k_norm.weight": ["self_attn.k_norm.weight"],
        "attn.out.weight": ["self_attn.o_proj.weight"],
        "attn.out.bias": ["self_attn.o_proj.bias"],
        "mlp_norm.weight": ["post_attention_layernorm.weight"],
        "mlp.gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
        "mlp.down.weight": ["mlp.down_proj.weight"],
    }
    for layer in range(config.num_hidden_layers):
        for ours, theirs in parts.items():
            if f"model.layers.{layer}.{theirs[0]}" in named:
                found[f"layers.{layer}.{ours}"] = [named[f"model.layers.{layer}.{name}"] for name in theirs]
    assert sum(len(tensors) for tensors in found.values()) == len(named), "a parameter of the reference has no place"
    return found


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.stack(list(tensors))


def reference_run(model: transformers.PreTrainedModel, batch: Batch) -> tuple[Tensor, Tensor]:
    """(logits, mean loss) of the reference; its loss is torch's own cross entropy on its logits."""
    logits = model(input_ids=batch.tokens, position_ids=batch.positions).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORED_LABEL)
    loss.backward()  # type: ignore[no-untyped-call]
    return logits.detach(), loss.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_equal_the_reference(case: str, dtype: torch.dtype) -> None:
    config, batch = config_of(case), tiny_batch()
    ours = whole_model(config, dtype=dtype)
    reference = reference_model(case, dtype)
    theirs = places(reference, config)
    assert ours.weights.keys() == theirs.keys()
    with torch.no_grad():
        for name, tensors in theirs.items():
            parts = ours.weights[name].unbind() if len(tensors) > 1 else [ours.weights[name]]
            for tensor, part in zip(tensors, parts, strict=True):
                tensor.copy_(part)

    logits, loss = mean_loss(ours, batch)
    loss.backward()  # type: ignore[no-untyped-call]
    expected_logits, expected_loss = reference_run(reference, batch)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    expected = {name: stacked([tensor.grad for tensor in tensors]) for name, tensors in theirs.items()}  # type: ignore[misc]
    assert not differing(gradients(ours), expected, 1e-5)
