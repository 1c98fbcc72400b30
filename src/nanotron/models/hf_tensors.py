"""How our parameters are made of tensors that another program stores: which, and which rows of them. No torch.

layers.0.attn.kv.weight [2, kv·e, d]    Hugging Face:      [0] = k_proj.weight        [1] = v_proj.weight
                                        Hugging Face Nanotron: [0] = qkv_proj.weight[h·e : h·e + kv·e]  [1] = …

layers.0.mlp.experts.gate_up.weight [E, 2, f, d]    Hugging Face: [3, 0] = experts.3.gate_proj.weight   [3, 1] = …
                                            fused:  [:, 0] = experts.gate_up_proj[:, 0 : f]             [:, 1] = …
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from nanotron.models.families import family_of
from nanotron.models.hf_facts import HFExperts
from nanotron.models.hf_nanotron_names import hf_nanotron_name
from nanotron.models.specs import EMBED, FINAL_NORM, HEAD
from nanotron.parallel.params import Box, ParamSpec

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig


class Part(NamedTuple):
    """Rows [row, …) on dim ``row_dim`` of a foreign tensor, which hold ``box`` of one of our parameters.

    ``lacks``: dims of ours, of size 1 in the box, that the foreign tensor does not have. ``rotary``: the rows are
    channels of heads in half-split order (i, i + e/2), which our parameter holds interleaved (2i, 2i + 1).
    """

    tensor: str
    box: Box
    row: int = 0
    row_dim: int = 0
    lacks: tuple[int, ...] = ()
    rotary: bool = False

    def foreign(self, shared: Box) -> Box:
        """Where ``shared``, which lies in our box, is in the foreign tensor."""
        kept = [dim for dim in range(len(shared.shape)) if dim not in self.lacks]
        offset = [shared.offset[dim] - self.box.offset[dim] for dim in kept]
        offset[self.row_dim] += self.row
        return Box(tuple(offset), tuple(shared.shape[dim] for dim in kept))


FUSED = ".mlp.experts.gate_up_proj"
"""Ends the names of transformers' own tensors of all of a layer's experts; others store each expert's by itself."""


def hugging_face_parts(
    config: ModelConfig, specs: Mapping[str, ParamSpec], *, fused: bool = False
) -> dict[str, list[Part]]:
    """The tensors of a Hugging Face model that each parameter is made of.

    ``fused``: a layer's experts are stacked, as transformers has them in memory, and stores them when asked to.
    """
    facts = family_of(config).hugging_face_of(config)
    experts = (facts and facts.experts) or HFExperts()
    block = "mlp" if fused else experts.block
    ends = {EMBED: "model.embed_tokens.weight", FINAL_NORM: "model.norm.weight", HEAD: "lm_head.weight"}
    whole = {
        "attn_norm": "input_layernorm",
        "attn.out": "self_attn.o_proj",
        "attn.q": "self_attn.q_proj",
        "attn.q_norm": "self_attn.q_norm",
        "attn.k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.down": "mlp.down_proj",
        "mlp.router": f"{block}.gate",
        "mlp.shared.down": f"{block}.{experts.shared_module}.down_proj",
        "mlp.shared_gate": f"{block}.shared_expert_gate",
    }
    stacked = {
        "attn.kv": ("self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
        "mlp.shared.gate_up": tuple(f"{block}.{experts.shared_module}.{name}_proj" for name in ("gate", "up")),
    }
    own = facts.own.names(config) if facts and facts.own else {}
    turns = config.rope_interleaved and not own  # else rotated channels are in the order that the config says
    turned = {"attn.q", "attn.q_norm", "attn.k_norm"} if turns else set()

    def parts(spec: ParamSpec) -> list[Part]:
        if spec.name in ends:
            return [Part(ends[spec.name], _whole(spec))]
        layer, module, kind = _split(spec.name)
        prefix = f"model.layers.{layer}"
        if module.startswith("mlp.experts."):
            name = f"{prefix}.{block}.experts"
            return _fused_parts(spec, name) if fused else _expert_parts(spec, name, experts.matrices)
        if theirs := own.get(f"{module}.{kind}"):
            return [Part(f"{prefix}.{theirs}", _whole(spec))]
        if module in whole:
            return [Part(f"{prefix}.{whole[module]}.{kind}", _whole(spec), rotary=module in turned)]
        keys = module == "attn.kv" and turns
        return [
            Part(f"{prefix}.{name}.{kind}", _slice(spec, 0, i), lacks=(0,), rotary=keys and i == 0)
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
        return [Part(name, _slice(spec, 0, i), row=row + i * rows, lacks=(0,)) for i in range(2)]

    return {name: parts(spec) for name, spec in specs.items()}


def _expert_parts(spec: ParamSpec, name: str, matrices: tuple[str, str, str]) -> list[Part]:
    """Of gate_up [E, 2, f, d] or down [E, d, f]: a tensor of each expert for each matrix."""
    gate, up, down = matrices
    first = range(spec.shape[0])
    if len(spec.shape) == 3:
        return [Part(f"{name}.{i}.{down}.weight", _slice(spec, 0, i), lacks=(0,)) for i in first]
    matrix = Box((0, 0, 0, 0), (1, 1, *spec.shape[2:]))
    return [
        Part(f"{name}.{i}.{part}.weight", matrix._replace(offset=(i, j, 0, 0)), lacks=(0, 1))
        for i in first
        for j, part in enumerate((gate, up))
    ]


def _fused_parts(spec: ParamSpec, name: str) -> list[Part]:
    """Of gate_up [E, 2, f, d], which is [E, 2·f, d] there, or down [E, d, f]."""
    if len(spec.shape) == 3:
        return [Part(f"{name}.down_proj", _whole(spec))]
    f = spec.shape[2]
    return [Part(f"{name}.gate_up_proj", _slice(spec, 1, i), row=i * f, row_dim=1, lacks=(1,)) for i in range(2)]


def _split(name: str) -> tuple[int, str, str]:
    """layers.3.attn.q.weight -> (3, attn.q, weight)."""
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return int(layer), module, kind


def _whole(spec: ParamSpec) -> Box:
    return Box((0,) * len(spec.shape), spec.shape)


def _slice(spec: ParamSpec, dim: int, index: int) -> Box:
    whole = _whole(spec)
    return Box(_with(whole.offset, dim, index), _with(whole.shape, dim, 1))


def _with(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    return (*values[:dim], value, *values[dim + 1 :])
