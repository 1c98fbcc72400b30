"""Tiny models of each family, made by transformers, and ours run beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nanotron.batch import Batch
from nanotron.checkpoint.format import StateShard
from nanotron.config.model import ModelConfig
from nanotron.models.decoder import ChunkOptions
from nanotron.models.families import family_of
from nanotron.models.specs import StageModules
from nanotron.parallel.mesh import Mesh

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 67,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama-tied": {"model_type": "llama", "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "llama-biases": {"model_type": "llama", "attention_bias": True, "head_dim": 12},
    "llama-3.1": {"model_type": "llama", "rope_parameters": LLAMA3, "eos_token_id": [2, 5]},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 16, "tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "qwen2-tied": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True},
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
SPARSE: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", "num_local_experts": 6, "router_aux_loss_coef": 0.03},
    "qwen2-moe": {"model_type": "qwen2_moe", **_EXPERTS, "shared_expert_intermediate_size": 40},
    "qwen2-moe-normalized": {
        "model_type": "qwen2_moe",
        **_EXPERTS,
        "shared_expert_intermediate_size": 40,
        "qkv_bias": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
    },
    "qwen3-moe": {"model_type": "qwen3_moe", **_EXPERTS, "head_dim": 16, "norm_topk_prob": True},
    "qwen3-moe-some": {"model_type": "qwen3_moe", **_EXPERTS, "mlp_only_layers": [1], "tie_word_embeddings": True},
    "olmoe": {
        "model_type": "olmoe",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "attention_bias": True,
        "pad_token_id": None,  # else its row of the embedding has no gradient there
    },
}
_LATENT = {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
_DEEPSEEK = {**_LATENT, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
}
SPARSE |= {
    "deepseek-v2": {"model_type": "deepseek_v2", **_DEEPSEEK, "q_lora_rank": None, "n_shared_experts": 2},
    "deepseek-v2-groups": {
        "model_type": "deepseek_v2",
        **_DEEPSEEK,
        "q_lora_rank": 24,
        "first_k_dense_replace": 1,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.7,
        "rope_parameters": YARN,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        **_DEEPSEEK,
        "q_lora_rank": 24,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "rope_parameters": YARN,
    },
}
MODELS |= SPARSE


def hugging_face_model(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model whose every parameter is random, biases and norms too."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {**SHAPE, **MODELS[name], **changes}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.rand(buffer.shape) / 4)
    return model.eval()


def save_hugging_face(name: str, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = hugging_face_model(name, dtype)
    model.save_pretrained(folder, **options)
    return model


def weight_pieces(
    config: ModelConfig, dtype: torch.dtype = torch.float32, mesh: Mesh | None = None
) -> list[StateShard]:
    """Empty weights of the shards that a rank holds."""
    mesh = mesh or Mesh()
    pieces = []
    for spec in family_of(config).specs(config).values():
        box = spec.local_box(mesh)
        pieces.append(
            StateShard("weight", spec.name, spec.shape, box, torch.full(box.shape, float("nan"), dtype=dtype))
        )
    return pieces


def logits_of(config: ModelConfig, pieces: list[StateShard], tokens: torch.Tensor) -> torch.Tensor:
    """Our model's logits [b, s, V] with these whole weights."""
    dtype = pieces[0].tensor.dtype
    family = family_of(config)
    chunk = family.chunk()
    model = chunk(config, family.specs(config), Mesh(), StageModules.whole(config), ChunkOptions(dtype))
    with torch.no_grad():
        for piece in pieces:
            model.weights[piece.name].copy_(piece.tensor)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        return model(None, Batch(tokens, torch.zeros_like(tokens), positions, None))[0]
