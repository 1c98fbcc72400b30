"""A model's config in Hugging Face's words and in ours. No torch, and no transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanotron.errors import ConfigError
from nanotron.models.families import FAMILIES, family_name, family_of
from nanotron.models.hf_facts import HFOwn, HuggingFace

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig, RopeScalingArgs

SAME = (  # keys that both sides call the same
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "hidden_act",
    "rms_norm_eps",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
"""What a config.json of any family may leave out, where it is not our default too."""
FULL, SLIDING = "full_attention", "sliding_attention"
_BOTH = ("factor", "original_max_position_embeddings")
ROPE_KEYS = {
    "linear": ("factor",),
    "llama3": (*_BOTH, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_BOTH, "beta_fast", "beta_slow", "truncate", "attention_factor", "mscale", "mscale_all_dim"),
}
"""How rotary frequencies may be stretched, and the keys of each way, which both sides call the same."""
MOST_LAYERS = 100_000
"""Whose numbers are listed where only some have a window, or experts; no file has the weights of so many."""


def model_config_from_hf(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of ``model.model_config`` for a config.json; raises ConfigError for what we have no words for."""
    known = {
        facts.model_type: (name, facts)
        for name, family in FAMILIES.items()
        for facts in (family.hugging_face, family.hugging_face_sparse)
        if facts
    }
    model_type = theirs.get("model_type")
    if model_type not in known:
        raise ConfigError(
            f"config.json: model_type={model_type!r} is no family that can be imported; those are {', '.join(known)}"
        )
    family, facts = known[model_type]
    values = {**DEFAULTS, **facts.defaults, **theirs}
    problems = [] if values.get("hidden_act") in (None, "silu") else [f"hidden_act={values['hidden_act']!r}"]
    problems += ["mlp_bias=true"] if values.get("mlp_bias") else []
    problems += [f"clip_qkv={values['clip_qkv']}"] if values.get("clip_qkv") is not None else []
    rope, unknown = _rope_from_hf(values)
    window, odd = _window_from_hf(facts, values)
    experts, strange = facts.own.read(values) if facts.own else _experts_from_hf(facts, values)
    problems += [*unknown, *odd, *strange]
    if problems:
        raise ConfigError([f"config.json: {problem} is not available here" for problem in problems])
    same = {key: values[key] for key in SAME if values.get(key) is not None}
    ours = {f"is_{family}_config": True, **same, **rope, **window, **experts}
    if len(facts.attention_bias) > 1:
        ours["attention_bias"] = bool(values.get(facts.bias_key, False))
    ours |= {name: values.get(name) for name in ("bos_token_id", "eos_token_id")}  # absent is none, not our default
    return ours


def _window_from_hf(facts: HuggingFace, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our keys for the window and the layers that have it, and what is wrong."""
    used = facts.window and (values.get("use_sliding_window") or not facts.window.switch)
    window = values.get("sliding_window") if used else None
    layers = values.get("num_hidden_layers") or 0
    sliding: Sequence[int] = ()
    if facts.window and window:
        sliding = facts.window.layers(layers, values.get("max_window_layers") or 0)
    if kinds := values.get("layer_types"):
        if len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
            return {}, [f"layer_types with {len(kinds)} kinds, of {', '.join(sorted(set(kinds)))}, in {layers} layers"]
        named = [layer for layer, kind in enumerate(kinds) if kind == SLIDING]
        may_choose = facts.window is not None and facts.window.chooses
        if (named and not window) or (named != list(sliding) and not may_choose):
            return {}, [f"a sliding window ({window}) in {len(named)} of {layers} layers, by layer_types,"]
        sliding = named
    if len(sliding) in (0, layers):
        return {"sliding_window_size": window if sliding else None}, []
    if len(sliding) > MOST_LAYERS:
        return {}, [f"a sliding window in {len(sliding)} layers"]
    return {"sliding_window_size": window, "sliding_window_layers": list(sliding)}, []


def _experts_from_hf(facts: HuggingFace, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our ``moe_config``, and what is wrong."""
    experts, layers = facts.experts, values.get("num_hidden_layers") or 0
    if experts is None:
        return {}, []
    moe = {
        "num_experts": values.get("num_local_experts") or values["num_experts"],
        "top_k": values["num_experts_per_tok"],
        "moe_intermediate_size": values[experts.width],
        "normalize_top_k": bool(values.get("norm_topk_prob")) if len(experts.normalize) > 1 else experts.normalize[0],
        "router_aux_loss_coef": values["router_aux_loss_coef"],
    }
    if experts.shared:
        moe |= {
            "enable_shared_expert": True,
            "shared_expert_intermediate_size": values["shared_expert_intermediate_size"],
        }
    if experts.dense_layers:
        if layers > MOST_LAYERS:
            return {}, [f"experts in some of {layers} layers"]
        step, dense = values.get("decoder_sparse_step") or 1, set(values.get("mlp_only_layers") or ())
        sparse = [layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0]
        if not sparse:
            return {}, [f"model_type={facts.model_type!r} with experts in none of {layers} layers"]
        moe |= {"layers": sparse} if len(sparse) < layers else {}
    return {"moe_config": moe}, []


def _rope_from_hf(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our rotary keys, from the newer ``rope_parameters`` or the older ``rope_theta`` and ``rope_scaling``."""
    scaling = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    ours: dict[str, Any] = {"rope_theta": scaling.pop("rope_theta", None) or values.get("rope_theta") or 10000.0}
    if kind == "default":
        return ours, []
    if kind not in ROPE_KEYS:
        return ours, [f"rope_type={kind!r}"]
    told = {"original_max_position_embeddings": values.get("max_position_embeddings"), **scaling}
    found = {name: told[name] for name in ROPE_KEYS[kind] if told.get(name) is not None}
    ours["rope_scaling"] = {"rope_type": kind, **found}
    return ours, []


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of an exported model; raises ConfigError for what the Hugging Face family cannot express."""
    facts = family_of(config).hugging_face_of(config)
    if facts is None:
        raise ConfigError(_no_such_family(config))
    if config.qkv_bias not in facts.attention_bias:
        raise ConfigError(
            f"model_config.attention_bias={str(config.qkv_bias).lower()} cannot be exported: Hugging Face's "
            f"{facts.model_type} always has attention_bias={str(facts.attention_bias[0]).lower()}"
        )
    width = config.hidden_size // config.num_attention_heads
    if not facts.any_head_dim and config.head_dim != width:
        raise ConfigError(
            f"model_config.head_dim={config.head_dim} cannot be exported: Hugging Face's {facts.model_type} has heads "
            f"of hidden_size / num_attention_heads = {width}"
        )
    theirs: dict[str, Any] = {"architectures": [facts.architecture], "model_type": facts.model_type}
    theirs |= {"torch_dtype": dtype, **{key: getattr(config, key) for key in SAME}}
    theirs |= {"rope_theta": config.rope_theta, "use_cache": True}
    theirs["rope_scaling"] = _rope_scaling(config.rope_scaling)
    if len(facts.attention_bias) > 1:
        theirs[facts.bias_key] = config.qkv_bias
    return theirs | _window_to_hf(facts, config) | _experts_to_hf(facts, config)


def _own_to_hf(own: HFOwn, facts: HuggingFace, config: ModelConfig) -> dict[str, Any]:
    theirs, problems = own.write(config, facts.model_type)
    if problems:
        said = f"cannot be exported: Hugging Face's {facts.model_type} has no such model"
        raise ConfigError([f"model_config.{problem} {said}" for problem in problems])
    return theirs


def _no_such_family(config: ModelConfig) -> str:
    name = family_name(config)
    if config.moe_config is None:
        return f"a model with is_{name}_config cannot be exported: Hugging Face has no such family"
    sparse = [f"is_{other}_config" for other, family in FAMILIES.items() if family.hugging_face_sparse]
    return (
        f"a model with is_{name}_config and moe_config cannot be exported: Hugging Face has no such family; it has "
        f"experts with {', '.join(sparse)}"
    )


def _window_to_hf(facts: HuggingFace, config: ModelConfig) -> dict[str, Any]:
    layers, window = config.num_hidden_layers, config.sliding_window_size
    sliding = [layer for layer in range(layers) if config.window_of(layer) is not None]
    if facts.window and not facts.window.switch and len(sliding) in (0, layers):
        return {"sliding_window": window}  # null too: left out, it would be 4096
    if not sliding:
        return {}
    if facts.window and facts.window.chooses:
        return {
            "use_sliding_window": True,
            "sliding_window": window,
            "max_window_layers": sliding[0],  # for readers that know no layer_types
            "layer_types": [SLIDING if layer in sliding else FULL for layer in range(layers)],
        }
    if facts.window and len(sliding) == layers:
        return {"use_sliding_window": True, "sliding_window": window}
    which = "the window in all layers or in none" if facts.window else "no window"
    raise ConfigError(
        f"model_config.sliding_window_size={window} in {len(sliding)} of {layers} layers cannot be exported: "
        f"Hugging Face's {facts.model_type} has {which}"
    )


def _experts_to_hf(facts: HuggingFace, config: ModelConfig) -> dict[str, Any]:
    moe, experts = config.moe_config, facts.experts
    if facts.own is not None:
        return _own_to_hf(facts.own, facts, config)
    if moe is None or experts is None:
        return {}
    sparse = set(config.sparse_layers)
    dense = [layer for layer in range(config.num_hidden_layers) if layer not in sparse]
    legal: dict[str, tuple[Any, ...]] = {
        "score_function": ("softmax",),
        "routed_scaling_factor": (1.0,),
        "num_expert_groups": (1,),
        "bias_update_rate": (None,),
        "normalize_top_k": experts.normalize,
        "enable_shared_expert": (experts.shared,),
        "shared_expert_gate": (True,) if moe.enable_shared_expert else (True, False),
    }
    key, has = "model_config.moe_config", f"cannot be exported: Hugging Face's {facts.model_type} has"
    problems = [
        f"{key}.{name}={json.dumps(getattr(moe, name))} {has} {json.dumps(values[0])}"
        for name, values in legal.items()
        if getattr(moe, name) not in values
    ]
    if dense and not experts.dense_layers:
        problems.append(f"{key}.layers={json.dumps(moe.layers)} {has} experts in every layer")
    if problems:
        raise ConfigError(problems)
    theirs: dict[str, Any] = {
        experts.count: moe.num_experts,
        "num_experts_per_tok": moe.top_k,
        experts.width: moe.moe_intermediate_size,
        "router_aux_loss_coef": moe.router_aux_loss_coef,
    }
    theirs |= {"decoder_sparse_step": 1, "mlp_only_layers": dense} if experts.dense_layers else {}
    theirs |= {"norm_topk_prob": moe.normalize_top_k} if len(experts.normalize) > 1 else {}
    theirs |= {"shared_expert_intermediate_size": moe.shared_expert_intermediate_size} if experts.shared else {}
    return theirs


def _rope_scaling(scaling: RopeScalingArgs | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    told = {name: getattr(scaling, name) for name in ("rope_type", *ROPE_KEYS[scaling.rope_type])}
    unset = {"attention_factor": None, "mscale": 0.0, "mscale_all_dim": 0.0}
    return {name: value for name, value in told.items() if name not in unset or value != unset[name]}
