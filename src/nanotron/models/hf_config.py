"""A model's config in Hugging Face's words and in ours. No torch, and no transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanotron.errors import ConfigError
from nanotron.models.families import FAMILIES, family_name, family_of

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
MOST_LAYERS = 100_000
"""Whose numbers are listed where only some have a window; no file has the weights of so many."""


def model_config_from_hf(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of ``model.model_config`` for a config.json; raises ConfigError for what we have no words for."""
    known = {name: family.hugging_face for name, family in FAMILIES.items() if family.hugging_face}
    family = theirs.get("model_type")
    if family not in known:
        raise ConfigError(
            f"config.json: model_type={family!r} is no family that can be imported; those are {', '.join(known)}"
        )
    facts = known[family]
    values = {**DEFAULTS, **facts.defaults, **theirs}
    problems = [] if values.get("hidden_act") in (None, "silu") else [f"hidden_act={values['hidden_act']!r}"]
    problems += ["mlp_bias=true"] if values.get("mlp_bias") else []
    rope, unknown = _rope_from_hf(values)
    window, odd = _window_from_hf(family, values)
    problems += [*unknown, *odd]
    if problems:
        raise ConfigError([f"config.json: {problem} is not available here" for problem in problems])
    same = {key: values[key] for key in SAME if values.get(key) is not None}
    ours = {f"is_{family}_config": True, **same, **rope, **window}
    if len(facts.attention_bias) > 1:
        ours["attention_bias"] = bool(values.get("attention_bias", False))
    ours |= {name: values.get(name) for name in ("bos_token_id", "eos_token_id")}  # absent is none, not our default
    return ours


def _window_from_hf(family: str, values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our keys for the window and the layers that have it, and what is wrong.

    Mistral's layers all have it, Llama's none, Qwen's those that ``layer_types`` names, or from ``max_window_layers``
    on.
    """
    chooses = family not in {"llama", "mistral"}
    used = family == "mistral" or (chooses and values.get("use_sliding_window"))
    window = values.get("sliding_window") if used else None
    layers = values.get("num_hidden_layers") or 0
    first = min(layers, values.get("max_window_layers") or 0) if chooses else 0
    sliding: Sequence[int] = range(first, layers) if window else ()
    if kinds := values.get("layer_types"):
        if len(kinds) != layers or set(kinds) - {FULL, SLIDING}:
            return {}, [f"layer_types with {len(kinds)} kinds, of {', '.join(sorted(set(kinds)))}, in {layers} layers"]
        named = [layer for layer, kind in enumerate(kinds) if kind == SLIDING]
        if (named and not window) or (named != list(sliding) and not chooses):
            return {}, [f"a sliding window ({window}) in {len(named)} of {layers} layers, by layer_types,"]
        sliding = named
    if len(sliding) in (0, layers):
        return {"sliding_window_size": window if sliding else None}, []
    if len(sliding) > MOST_LAYERS:
        return {}, [f"a sliding window in {len(sliding)} layers"]
    return {"sliding_window_size": window, "sliding_window_layers": list(sliding)}, []


def _rope_from_hf(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Our rotary keys, from the newer ``rope_parameters`` or the older ``rope_theta`` and ``rope_scaling``."""
    scaling = {**(values.get("rope_scaling") or {}), **(values.get("rope_parameters") or {})}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    ours: dict[str, Any] = {"rope_theta": scaling.pop("rope_theta", None) or values.get("rope_theta") or 10000.0}
    if kind == "default":
        return ours, []
    if kind not in {"linear", "llama3"}:
        return ours, [f"rope_type={kind!r}"]
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    ours["rope_scaling"] = {"rope_type": kind, **{name: scaling[name] for name in names if name in scaling}}
    return ours, []


def hf_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json of an exported model; raises ConfigError for what the Hugging Face family cannot express."""
    family, facts = family_name(config), family_of(config).hugging_face
    if facts is None:
        raise ConfigError(f"a model with is_{family}_config cannot be exported: Hugging Face has no such family")
    if config.qkv_bias not in facts.attention_bias:
        raise ConfigError(
            f"model_config.attention_bias={str(config.qkv_bias).lower()} cannot be exported: Hugging Face's {family} "
            f"always has attention_bias={str(facts.attention_bias[0]).lower()}"
        )
    theirs: dict[str, Any] = {"architectures": [facts.architecture], "model_type": family, "torch_dtype": dtype}
    theirs |= {key: getattr(config, key) for key in SAME}
    theirs |= {"rope_theta": config.rope_theta, "use_cache": True}
    theirs["rope_scaling"] = _rope_scaling(config.rope_scaling)
    if len(facts.attention_bias) > 1:
        theirs["attention_bias"] = config.qkv_bias
    return theirs | _window_to_hf(family, config)


def _window_to_hf(family: str, config: ModelConfig) -> dict[str, Any]:
    layers, window = config.num_hidden_layers, config.sliding_window_size
    sliding = [layer for layer in range(layers) if config.window_of(layer) is not None]
    if family == "mistral" and len(sliding) in (0, layers):
        return {"sliding_window": window}  # null too: left out, it would be 4096
    if not sliding:
        return {}
    if family in {"llama", "mistral"}:
        which = "no window" if family == "llama" else "the window in all layers or in none"
        raise ConfigError(
            f"model_config.sliding_window_size={window} in {len(sliding)} of {layers} layers cannot be exported: "
            f"Hugging Face's {family} has {which}"
        )
    return {
        "use_sliding_window": True,
        "sliding_window": window,
        "max_window_layers": sliding[0],  # for readers that know no layer_types
        "layer_types": [SLIDING if layer in sliding else FULL for layer in range(layers)],
    }


def _rope_scaling(scaling: RopeScalingArgs | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    if scaling.rope_type == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    names = ("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    return {name: getattr(scaling, name) for name in names}
