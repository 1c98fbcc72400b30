"""How our parameters are made of tensors that another program stores: which, and which rows of them. No torch.

layers.0.attn.kv.weight [2, kv·e, d]    Hugging Face:      [0] = k_proj.weight        [1] = v_proj.weight
                                        Hugging Face Nanotron: [0] = qkv_proj.weight[h·e : h·e + kv·e]  [1] = …
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from nanotron.models.hf_nanotron_names import hf_nanotron_name
from nanotron.models.specs import EMBED, FINAL_NORM, HEAD
from nanotron.parallel.params import Box, ParamSpec

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig


class Part(NamedTuple):
    """Rows [row, …) of a foreign tensor, which hold ``box`` of one of our parameters.

    ``stacked``: our box has a leading dim of size 1 that the foreign tensor lacks. ``rotary``: the rows are channels of
    heads in half-split order (i, i + e/2), which our parameter holds interleaved (2i, 2i + 1).
    """

    tensor: str
    box: Box
    row: int = 0
    stacked: bool = False
    rotary: bool = False

    def foreign(self, shared: Box) -> Box:
        """Where ``shared``, which lies in our box, is in the foreign tensor."""
        first = 1 if self.stacked else 0
        offset = [s - o for s, o in zip(shared.offset, self.box.offset, strict=True)][first:]
        offset[0] += self.row
        return Box(tuple(offset), shared.shape[first:])


def hugging_face_parts(config: ModelConfig, specs: Mapping[str, ParamSpec]) -> dict[str, list[Part]]:
    """The tensors of a Hugging Face Llama, Mistral, Qwen2 or Qwen3 that each parameter is made of."""
    ends = {EMBED: "model.embed_tokens.weight", FINAL_NORM: "model.norm.weight", HEAD: "lm_head.weight"}
    whole = {
        "attn_norm": "input_layernorm",
        "attn.out": "self_attn.o_proj",
        "attn.q": "self_attn.q_proj",
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.down": "mlp.down_proj",
    }
    stacked = {
        "attn.kv": ("self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    }
    turned = {"attn.q", "attn.q_norm", "attn.k_norm"} if config.rope_interleaved else set()

    def parts(spec: ParamSpec) -> list[Part]:
        if spec.name in ends:
            return [Part(ends[spec.name], _whole(spec))]
        layer, module, kind = _split(spec.name)
        prefix = f"model.layers.{layer}"
        if module in whole:
            return [Part(f"{prefix}.{whole[module]}.{kind}", _whole(spec), rotary=module in turned)]
        keys = module == "attn.kv" and config.rope_interleaved
        return [
            Part(f"{prefix}.{name}.{kind}", _slice(spec, i), stacked=True, rotary=keys and i == 0)
            for i, name in enumerate(stacked[module])
        ]

    return {name: parts(spec) for name, spec in specs.items()}


def hf_nanotron_parts(config: ModelConfig, specs: Mapping[str, ParamSpec]) -> dict[str, list[Part]]:
    """The tensors of Hugging Face's Nanotron that each parameter is made of; rotary channels are in our order there."""
    first_row = {"attn.kv": config.num_attention_heads * config.head_dim, "mlp.gate_up": 0}

    def parts(spec: ParamSpec) -> list[Part]:
        name = hf_nanotron_name(spec.name)
        module = spec.name.split(".", 2)[-1].rpartition(".")[0]
        if module not in first_row:
            return [Part(name, _whole(spec))]
        row, rows = first_row[module], spec.shape[1]
        return [Part(name, _slice(spec, i), row=row + i * rows, stacked=True) for i in range(2)]

    return {name: parts(spec) for name, spec in specs.items()}


def _split(name: str) -> tuple[int, str, str]:
    """layers.3.attn.q.weight -> (3, attn.q, weight)."""
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return int(layer), module, kind


def _whole(spec: ParamSpec) -> Box:
    return Box((0,) * len(spec.shape), spec.shape)


def _slice(spec: ParamSpec, index: int) -> Box:
    return Box((index, *(0 for _ in spec.shape[1:])), (1, *spec.shape[1:]))
