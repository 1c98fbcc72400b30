"""How each family looks in a Hugging Face folder: facts that config.json and tensors' names follow from. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from nanotron.models import hf_deepseek

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig


@dataclass(frozen=True)
class HFWindow:
    """Which layers have a sliding window."""

    layers: Callable[[int, int], Sequence[int]] = lambda layers, _: range(layers)
    """(layers, max_window_layers) -> those that have it, where no layer_types names them."""
    switch: bool = False
    """Only with use_sliding_window."""
    chooses: bool = False
    """layer_types may name any."""


@dataclass(frozen=True)
class HFExperts:
    """What experts can be, and what they are called."""

    count: str = "num_experts"
    """The key of their number. Either name is read: transformers 5 writes num_local_experts for some families."""
    width: str = "moe_intermediate_size"
    """The key of an expert's inner width."""
    dense_layers: bool = True
    """Whether decoder_sparse_step and mlp_only_layers leave some layers without experts."""
    normalize: tuple[bool, ...] = (False, True)
    """The values that normalize_top_k can have; norm_topk_prob says it where there are two."""
    shared: bool = False
    """Whether there is an expert that all tokens share, with a gate."""
    block: str = "mlp"
    """The module that holds router and experts."""
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Of an expert: gate, up and down."""
    shared_module: str = "shared_expert"


@dataclass(frozen=True)
class HFOwn:
    """Keys and tensors that only this family has, experts' keys among them."""

    read: Callable[[Mapping[str, Any]], tuple[dict[str, Any], list[str]]]
    """config.json with its defaults -> our keys, and what is wrong."""
    write: Callable[[ModelConfig, str], tuple[dict[str, Any], list[str]]]
    """(config, model_type) -> its keys, and which of ours it has no words for."""
    names: Callable[[ModelConfig], Mapping[str, str]]
    """Our names of a layer's parameters and its, where they are not as in other families."""


@dataclass(frozen=True)
class HuggingFace:
    """How a family looks in a Hugging Face folder."""

    model_type: str
    architecture: str
    attention_bias: tuple[bool, ...]
    """The values of attention_bias that the Hugging Face model can have."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """What a config.json may leave out, where it is neither our default nor that of all families there."""
    window: HFWindow | None = None
    experts: HFExperts | None = None
    bias_key: str = "attention_bias"
    own: HFOwn | None = None
    any_head_dim: bool = True
    """Whether heads may have another width than hidden_size / num_attention_heads."""


def _later(layers: int, max_window_layers: int) -> Sequence[int]:
    return range(min(layers, max_window_layers), layers)


def _every_second(layers: int, max_window_layers: int) -> Sequence[int]:
    return range(0, min(layers, max_window_layers), 2)


_ALL = HFWindow()
_WINDOW = {"sliding_window": 4096}
_QWEN_WINDOW = HFWindow(_later, switch=True, chooses=True)
_QWEN = {"num_key_value_heads": 32, **_WINDOW, "max_window_layers": 28}

LLAMA = HuggingFace("llama", "LlamaForCausalLM", (False, True), {"max_position_embeddings": 2048})
MISTRAL = HuggingFace("mistral", "MistralForCausalLM", (False,), {"num_key_value_heads": 8, **_WINDOW}, _ALL)
QWEN2 = HuggingFace("qwen2", "Qwen2ForCausalLM", (True,), _QWEN, _QWEN_WINDOW)
QWEN3 = HuggingFace("qwen3", "Qwen3ForCausalLM", (False, True), {**_QWEN, "head_dim": 128}, _QWEN_WINDOW)

_FEW = {"router_aux_loss_coef": 0.001}
_QWEN_MOE = {"sliding_window": 4096, "max_window_layers": 28, "norm_topk_prob": False, **_FEW}

MIXTRAL = HuggingFace(
    "mixtral",
    "MixtralForCausalLM",
    (False,),
    {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "intermediate_size": 14336,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        **_FEW,
    },
    _ALL,
    HFExperts(
        "num_local_experts",
        "intermediate_size",
        dense_layers=False,
        normalize=(True,),
        block="block_sparse_moe",
        matrices=("w1", "w3", "w2"),
    ),
)
QWEN2_MOE = HuggingFace(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    (False, True),
    {
        **_QWEN_MOE,
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    HFWindow(_every_second, switch=True, chooses=True),
    HFExperts(shared=True),
    bias_key="qkv_bias",
)
QWEN3_MOE = HuggingFace(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    (False, True),
    {
        **_QWEN_MOE,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    HFWindow(switch=True),
    HFExperts(),
)
OLMOE = HuggingFace(
    "olmoe",
    "OlmoeForCausalLM",
    (False, True),
    {
        "rms_norm_eps": 1e-5,
        "intermediate_size": 2048,
        "norm_topk_prob": False,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "router_aux_loss_coef": 0.01,
    },
    experts=HFExperts(width="intermediate_size", dense_layers=False),
    any_head_dim=False,
)

_DEEPSEEK = HFOwn(hf_deepseek.from_hf, hf_deepseek.to_hf, hf_deepseek.names)
_LATENT = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}

DEEPSEEK_V2 = HuggingFace(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    (False,),
    {
        **_LATENT,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "routed_scaling_factor": 1.0,
    },
    experts=HFExperts(shared_module="shared_experts"),
    own=_DEEPSEEK,
)
DEEPSEEK_V3 = HuggingFace(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    (False,),
    {
        **_LATENT,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
    experts=HFExperts(shared_module="shared_experts"),
    own=_DEEPSEEK,
)
