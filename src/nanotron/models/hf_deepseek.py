"""DeepSeek's words for latent attention and experts, where they are not those of other families. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nanotron.models.latent_attention import as_deepseek

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig

SAME = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Keys that both sides call the same."""


def names(config: ModelConfig) -> dict[str, str]:
    """What our parameters of a layer are called there, where other families have other names."""
    queries = "q_proj" if as_deepseek(config).q_lora_rank is None else "q_b_proj"
    return {
        "attn.q_down.weight": "self_attn.q_a_proj.weight",
        "attn.q_latent_norm.weight": "self_attn.q_a_layernorm.weight",
        "attn.q.weight": f"self_attn.{queries}.weight",
        "attn.kv_down.weight": "self_attn.kv_a_proj_with_mqa.weight",
        "attn.kv_latent_norm.weight": "self_attn.kv_a_layernorm.weight",
        "attn.kv_up.weight": "self_attn.kv_b_proj.weight",
        "mlp.router.bias": "mlp.gate.e_score_correction_bias",
    }


def from_hf(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our keys of a config.json of V2 or V3 (by its model_type), and what is wrong."""
    layers, first, every = (values.get(key) for key in ("num_hidden_layers", "first_k_dense_replace", "moe_layer_freq"))
    third = values["model_type"] == "deepseek_v3"
    grouped = third or values.get("topk_method") == "group_limited_greedy"
    shared = values.get("n_shared_experts") or 0
    moe = {
        "num_experts": values.get("n_routed_experts") or values.get("num_local_experts"),
        "top_k": values["num_experts_per_tok"],
        "moe_intermediate_size": values["moe_intermediate_size"],
        "normalize_top_k": bool(values.get("norm_topk_prob")),
        "routed_scaling_factor": values["routed_scaling_factor"],
        "score_function": "sigmoid" if third else "softmax",
        "num_expert_groups": (values.get("n_group") or 1) if grouped else 1,
        "top_k_groups": (values.get("topk_group") or 1) if grouped else 1,
        "enable_shared_expert": shared > 0,
        "shared_expert_gate": False,
        "router_aux_loss_coef": values.get("aux_loss_alpha", 0.0),
    }
    moe |= {"shared_expert_intermediate_size": shared * values["moe_intermediate_size"]} if shared else {}
    moe |= {"bias_update_rate": 0.0} if third else {}  # stays what it is, until the user says otherwise
    problems = ["attention_bias=true"] if values.get("attention_bias") else []
    problems += [f"moe_layer_freq={every}"] if every not in (None, 1) else []
    if first:
        moe["layers"] = list(range(first, layers or 0))
        problems += [f"first_k_dense_replace={first} of {layers} layers"] if not moe["layers"] else []
    ours = {key: values[key] for key in SAME if key in values}
    ours |= {"head_dim": None, "num_key_value_heads": None, "moe_config": moe}
    ours["rope_interleaved"] = bool(values.get("rope_interleave", True)) if third else True
    return ours, problems


def to_hf(config: ModelConfig, model_type: str) -> tuple[dict[str, Any], list[str]]:
    """Its keys, and which of ours it has no words for."""
    model, moe, third = as_deepseek(config), config.moe_config, model_type == "deepseek_v3"
    assert moe is not None  # a dense one has no family there
    sparse, layers = config.sparse_layers, config.num_hidden_layers
    width, shared = moe.moe_intermediate_size, moe.shared_expert_intermediate_size if moe.enable_shared_expert else 0
    wrong = {
        "score_function": moe.score_function != ("sigmoid" if third else "softmax"),
        "bias_update_rate": (moe.bias_update_rate is not None) != third,
        "enable_shared_expert": not moe.enable_shared_expert,
        "shared_expert_gate": moe.enable_shared_expert and moe.shared_expert_gate,
        "shared_expert_intermediate_size": shared % width != 0,
        "layers": sparse != list(range(sparse[0], layers)),
    }
    problems = [f"moe_config.{name}={getattr(moe, name)}" for name, is_wrong in wrong.items() if is_wrong]
    problems += [] if third or model.rope_interleaved else ["rope_interleaved=False"]
    theirs = {key: getattr(model, key) for key in SAME} | {
        "head_dim": model.qk_rope_head_dim,
        "n_routed_experts": moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": width,
        "n_shared_experts": shared // width,
        "norm_topk_prob": moe.normalize_top_k,
        "routed_scaling_factor": moe.routed_scaling_factor,
        "n_group": moe.num_expert_groups,
        "topk_group": moe.top_k_groups,
        "first_k_dense_replace": sparse[0],
    }
    if third:
        return theirs | {"rope_interleave": model.rope_interleaved}, problems
    method = "group_limited_greedy" if moe.num_expert_groups > 1 else "greedy"
    return theirs | {"topk_method": method, "aux_loss_alpha": moe.router_aux_loss_coef}, problems
