"""The model: its family, shape, initial weights and precision."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Discriminator, Field, Tag
from pydantic_core import PydanticCustomError

from nanotron.config.compat.retired import INIT_METHOD, MODEL, MODEL_CONFIG, retires
from nanotron.config.experts import MoEConfig
from nanotron.config.keys import (
    Count,
    Derived,
    Float,
    Int,
    Lower,
    PathOrUrl,
    Reads,
    Section,
    Width,
    choices,
    derived,
    fill,
    in_any_case,
    key,
    required,
    section,
    true_false_or,
)


@section
class RopeScalingArgs:
    """How rotary frequencies are stretched for sequences longer than the model was first trained on."""

    rope_type: Lower[Literal["linear", "llama3", "yarn"]] = required(
        "`linear` divides every frequency by `factor`; `llama3` and `yarn` only the low ones.", example="llama3"
    )
    factor: Float = required("Stretch.", example=8.0, ge=1)
    low_freq_factor: Float = key(1.0, "llama3: wavelengths above original/low_freq_factor are stretched fully.", gt=0)
    high_freq_factor: Float = key(
        4.0, "llama3: wavelengths below original/high_freq_factor are left as they are.", gt=0
    )
    original_max_position_embeddings: Int = key(8192, "llama3, yarn: tokens per sequence before the stretch.", gt=0)
    beta_fast: Float = key(32.0, "yarn: frequencies that turn more often within the original sequence are kept.", gt=0)
    beta_slow: Float = key(1.0, "yarn: frequencies that turn less often are stretched fully.", gt=0)
    truncate: bool = key(True, "yarn: move the ends of what lies between to whole pairs of channels.")
    attention_factor: Float | None = key(
        None, "yarn: factor of rotated queries and keys.", derived="0.1 · ln(factor) + 1, or from mscale", gt=0
    )
    mscale: Float = key(
        0.0, "yarn: with mscale_all_dim, the factor is (0.1 · mscale · ln(factor) + 1) / (the same of the other).", ge=0
    )
    mscale_all_dim: Float = key(
        0.0, "yarn: see mscale; in DeepSeek models scores are multiplied by the square of its term as well.", ge=0
    )


Token = Annotated[Int, Field(ge=0)]
Layer = Annotated[Int, Field(ge=0)]
Tokens = Annotated[
    Annotated[Token, Tag("<token>")] | Annotated[list[Token], Field(min_length=1), Tag("<tokens>")],
    Discriminator(lambda value: "<tokens>" if isinstance(value, list) else "<token>"),
]


def _unset_when_negative(value: Any) -> Any:
    return None if value == -1 else value


@section
@retires(MODEL_CONFIG)
class ModelConfig:
    """The shape of a decoder-only transformer: what the families have in common."""

    hidden_size: Width = required("Width of the activations between layers.", example=2048, gt=0)
    num_hidden_layers: Count = required("Number of layers.", example=24, gt=0)
    num_attention_heads: Width = required("Query heads of each layer.", example=16, gt=0)
    num_key_value_heads: Derived[Width] = derived("Key and value heads of each layer.", "num_attention_heads", gt=0)
    head_dim: Derived[Width] = derived("Width of a head.", "hidden_size / num_attention_heads", gt=0, multiple_of=2)
    intermediate_size: Derived[Width] = derived(
        "Inner width of the MLP.", "8/3 of hidden_size, rounded up to a multiple of 64", gt=0
    )
    vocab_size: Annotated[Derived[Width], Reads(_unset_when_negative, lambda _: {"const": -1})] = derived(
        "Number of tokens that the model knows.", "the tokenizer's", gt=0
    )
    max_position_embeddings: Derived[Int] = derived(
        "Longest sequence, in tokens, that the model is meant for; written into an exported model.",
        "the longest sequence it is trained on",
        gt=0,
    )
    hidden_act: Lower[Literal["silu"]] = key("silu", "Activation of the MLP, which is gated (SwiGLU).")
    rms_norm_eps: Float = key(1e-6, "Added to the mean square before the root, in norms.", gt=0)
    rope_theta: Float = key(10000.0, "Base of the rotary frequencies.", gt=0)
    rope_interleaved: bool = key(
        False, "Rotate neighbouring pairs of a head's channels instead of its two halves (as in Llama's own code)."
    )
    rope_scaling: RopeScalingArgs | None = key(None, "Stretch of the rotary frequencies; null is none.")
    tie_word_embeddings: bool = key(False, "Use the embedding matrix as output head.")
    z_loss_enabled: bool = key(False, "Add the z-loss: z_loss_coefficient · (log of the softmax's sum)².")
    z_loss_coefficient: Float = key(1e-4, "Weight of the z-loss.", ge=0)
    bos_token_id: Int | None = key(1, "Token that begins a text; written into an exported model.", ge=0)
    eos_token_id: Tokens | None = key(
        2, "Token that ends a text, or a list of tokens that each do; written into an exported model."
    )
    pad_token_id: Int | None = key(None, "Token that fills up; written into an exported model.", ge=0)
    _use_doc_masking: bool = key(False, "Keep attention, and the loss, inside each document of a window.")
    sliding_window_size: Int | None = key(
        None, "Last tokens of its sequence that a token sees, itself among them; null is all.", gt=0
    )
    sliding_window_layers: list[Layer] | None = key(
        None, "Layers that have the window, by number from 0; null is all.", min_length=1
    )

    moe_config: MoEConfig | None = key(
        None, "Mixture of experts: layers whose MLP is many small ones, of which each token uses a few; null is none."
    )

    def __post_init__(self) -> None:
        fill(self, "num_key_value_heads", self.num_attention_heads)
        fill(self, "intermediate_size", 64 * math.ceil(8 * self.hidden_size / 3 / 64))
        if self.head_dim is None:
            fill(self, "head_dim", self._head_dim_from_hidden_size())

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that are rotated."""
        return self.head_dim

    def _head_dim_from_hidden_size(self) -> int:
        width, remainder = divmod(self.hidden_size, self.num_attention_heads)
        if remainder or width % 2:
            raise PydanticCustomError(
                "rule",
                "{text}",
                {
                    "key": "hidden_size",
                    "text": f"{self.hidden_size} / num_attention_heads={self.num_attention_heads} is not an even whole"
                    f" number, which rotary positions need; use a multiple of {2 * self.num_attention_heads}, or give"
                    " head_dim",
                    "instead": {"head_dim": 2 * max(1, width // 2)},
                },
            )
        return width

    def window_of(self, layer: int) -> int | None:
        """The last tokens that a token sees in a layer; None: all."""
        layers = self.sliding_window_layers
        return self.sliding_window_size if layers is None or layer in layers else None

    @property
    def sparse_layers(self) -> list[int]:
        """The layers that have experts, by number from 0."""
        moe = self.moe_config
        return [layer for layer in range(self.num_hidden_layers) if moe is not None and moe.has_experts(layer)]

    @property
    def qkv_bias(self) -> bool:
        """Whether the query, key and value projections have biases."""
        return bool(getattr(self, "attention_bias", False))

    @property
    def out_bias(self) -> bool:
        """Whether the attention's output projection has a bias."""
        return False

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head."""
        return False


@section
class LlamaConfig(ModelConfig):
    """Llama: no biases unless asked for."""

    is_llama_config: Literal[True] = key(True, "Marks the family.", marker=True)
    attention_bias: bool = key(False, "Biases on the q, k, v and output projections of attention.")

    @property
    def out_bias(self) -> bool:
        """Whether the attention's output projection has a bias."""
        return self.attention_bias


@section
class MistralConfig(ModelConfig):
    """Mistral: Llama without a choice of biases."""

    is_mistral_config: Literal[True] = key(True, "Marks the family.", marker=True)


@section
class Qwen2Config(ModelConfig):
    """Qwen2: Llama with biases on q, k and v."""

    is_qwen2_config: Literal[True] = key(True, "Marks the family.", marker=True)
    attention_bias: bool = key(True, "Biases on the q, k and v projections of attention.")


@section
class NormedConfig(ModelConfig):
    """Llama with norms of queries and keys."""

    attention_bias: bool = key(False, "Biases on the q, k, v and output projections of attention.")

    @property
    def out_bias(self) -> bool:
        """Whether the attention's output projection has a bias."""
        return self.attention_bias

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised."""
        return True


@section
class Qwen3Config(NormedConfig):
    """Qwen3: Llama with a norm of every head's queries and keys."""

    is_qwen3_config: Literal[True] = key(True, "Marks the family.", marker=True)


@section
class OlmoeConfig(NormedConfig):
    """OLMoE: Llama with one norm of all of a token's queries, and one of all its keys; with `moe_config`."""

    is_olmoe_config: Literal[True] = key(True, "Marks the family.", marker=True)


@section
class DeepseekConfig(ModelConfig):
    """Multi-head latent attention, in which keys and values come from one short vector."""

    q_lora_rank: Int | None = key(1536, "Width of the vector that queries come from; null: the layer's input.", gt=0)
    kv_lora_rank: Int = key(512, "Width of the vector that keys and values come from.", gt=0)
    qk_nope_head_dim: Int = key(128, "Channels of a query or key without positions.", gt=0)
    qk_rope_head_dim: Int = key(64, "Channels of a query or key that are rotated.", gt=0, multiple_of=2)
    v_head_dim: Int = key(128, "Width of a head's values.", gt=0)

    @property
    def rotary_dim(self) -> int:
        """Dims of a head that are rotated."""
        return self.qk_rope_head_dim

    def _head_dim_from_hidden_size(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@section
class DeepseekV2Config(DeepseekConfig):
    """DeepSeek-V2: latent attention; its experts' scores are a softmax."""

    is_deepseek_v2_config: Literal[True] = key(True, "Marks the family.", marker=True)


@section
class DeepseekV3Config(DeepseekConfig):
    """DeepSeek-V3: latent attention; its experts' scores are sigmoids, balanced by a bias."""

    is_deepseek_v3_config: Literal[True] = key(True, "Marks the family.", marker=True)


from nanotron.models import families  # noqa: E402  # after the classes that its table names

FAMILIES: dict[str, type[ModelConfig]] = {
    f"is_{name}_config": family.config for name, family in families.FAMILIES.items()
}
"""Marker -> the class that a mapping with it is read as."""


def _family(value: Any) -> str:
    """Name the class that a mapping is read as: the one whose marker is true, Llama without a marker."""
    if isinstance(value, dict):
        marked = [name for name in FAMILIES if value.get(name)]
        return FAMILIES[marked[0]].__name__ if marked else LlamaConfig.__name__
    return type(value).__name__ if isinstance(value, ModelConfig) else LlamaConfig.__name__


if TYPE_CHECKING:
    AnyModelConfig = ModelConfig
else:
    AnyModelConfig = Annotated[
        Union[tuple(Annotated[cls, Tag(cls.__name__)] for cls in FAMILIES.values())],  # noqa: UP007
        Discriminator(_family),
    ]


@section
class RandomInit:
    """Random initial weights, keyed by parameter name: the same on every layout."""

    std: Float = key(
        0.02,
        "Standard deviation of embeddings and of projections into attention and MLP; µP has its own.",
        gt=0,
    )
    scaling_method: Lower[Literal["none", "num_layers", "layer_index"]] = key(
        "num_layers",
        "What the standard deviation of projections back to the residual stream is divided by:"
        " 1, √(2 · layers), or √(2 · (layer number from 1)).",
    )
    use_mup: bool = key(
        False,
        "µP: initial weights and learning rates of each matrix by its width, so that the best learning rate of a narrow"
        " model is that of a wide one.",
    )
    mup_base_width: Width = key(
        256, "Width of a matrix's input at which µP leaves AdamW's learning rate as it is; at twice it is half.", gt=0
    )


@section
@retires(INIT_METHOD)
class ExistingCheckpointInit:
    """Weights of an existing checkpoint; the optimizer starts afresh."""

    path: PathOrUrl = required(
        "A checkpoint, a folder of them (the newest is taken), a Hugging Face Nanotron checkpoint, or a Hugging Face"
        " model folder.",
        example="runs/base/1000",
    )


def _init_kind(value: Any) -> str:
    if isinstance(value, dict):
        return "ExistingCheckpointInit" if "path" in value else "RandomInit"
    return type(value).__name__


AnyInit = Annotated[
    Annotated[RandomInit, Tag("RandomInit")] | Annotated[ExistingCheckpointInit, Tag("ExistingCheckpointInit")],
    Discriminator(_init_kind),
]


SHORT_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp64": "float64", "fp16": "float16"}


def _dtype_name(value: Any) -> Any:
    """Accept `torch.bfloat16` the object, its name and its short name."""
    text = str(value).removeprefix("torch.") if type(value).__module__ == "torch" else value
    return SHORT_DTYPES.get(text.lower(), text.lower()) if isinstance(text, str) else text


DtypeName = Annotated[
    Literal["bfloat16", "float32", "float64", "float16"],
    Reads(_dtype_name, lambda legal: in_any_case([*SHORT_DTYPES, *choices(legal)])),
]


@section
@retires(MODEL)
class ModelArgs:
    """The model and how it begins."""

    model_config: Section[AnyModelConfig] = required(
        "The family and shape.", example={"hidden_size": 2048, "num_hidden_layers": 24, "num_attention_heads": 16}
    )
    init_method: Section[AnyInit] = key(None, "The initial weights.", factory=RandomInit)
    dtype: DtypeName = key(
        "bfloat16", "Number format of weights and activations; bf16, fp32 and fp64 are short for them."
    )
    fp8: Lower[Literal["block128"]] | None = key(
        None,
        "Number format of the layers' matmuls, but for weight gradients. block128: e4m3, with a scale for every 128"
        " features of a token and every 128 × 128 of a weight; all sides of a layer's matrices are multiples of 128 on"
        " a rank. null: dtype.",
    )
    ddp_bucket_cap_mb: Int = key(
        25,
        "Gradients that data parallelism sums at once, at most, in MiB.",
        gt=0,
    )
    compile: Annotated[Literal[False, True, "auto"], true_false_or("auto")] = key(
        "auto",
        "Compile what lies between the matmuls (norms, rotation, SwiGLU, loss), so that each takes one pass"
        " over memory; the first step takes seconds longer. Needs a C++ compiler. auto: where one is, on NVIDIA and"
        " AMD GPUs (Triton and a C compiler), and on CPUs in runs of at least 10^15 model FLOPs per rank, some hours; a"
        " run that is resumed goes on as it began.",
    )
    loss_chunk: Int | None = key(
        None,
        "Tokens of a row whose logits exist at once; their gradient is computed with them, chunk by chunk. null: all,"
        " unless the softmax of a microbatch would take more than 512 MiB of a rank; else as many as that allows.",
        gt=0,
    )
