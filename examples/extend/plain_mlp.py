"""A family in one file: Llama whose every second layer has a plain MLP, down(relu(up(x))), instead of a gated one.

Its place is src/nanotron/models/plain_mlp.py, with a line in the table of models/families.py; run.py does so in a copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from nanotron.config.keys import key, section
from nanotron.config.model import ModelConfig
from nanotron.models.family import Family
from nanotron.models.flops import decoder_layer_flops
from nanotron.models.specs import decoder_specs, dense_mlp_specs
from nanotron.parallel.params import Init, ParamSpec

if TYPE_CHECKING:
    from nanotron.models.decoder import DecoderChunk


@section
class PlainMLPConfig(ModelConfig):
    """Llama with plain MLPs in between."""

    is_plain_mlp_config: Literal[True] = key(True, "Marks the family.", marker=True)


def layer_kinds(config: ModelConfig) -> list[str]:
    return ["plain" if layer % 2 else "dense" for layer in range(config.num_hidden_layers)]


def plain_mlp_specs(
    config: ModelConfig, layer: str, init: Init, residual_init: Init, partial: tuple[str, ...]
) -> Iterator[ParamSpec]:
    d, f = config.hidden_size, config.intermediate_size
    yield ParamSpec(f"{layer}.mlp.up.weight", (f, d), init, decay=True, shard=(("tp", 0),))
    yield ParamSpec(f"{layer}.mlp.down.weight", (d, f), residual_init, decay=True, shard=(("tp", 1),))


def specs(config: ModelConfig, **options: Any) -> dict[str, ParamSpec]:
    mlps = {"dense": dense_mlp_specs, "plain": plain_mlp_specs}
    return decoder_specs(config, kinds=layer_kinds(config), mlps=mlps, **options)


def layer_flops(config: ModelConfig, kind: str, tokens: int) -> int:
    gate = 2 * tokens * config.hidden_size * config.intermediate_size
    return decoder_layer_flops(config, "dense", tokens) - (gate if kind == "plain" else 0)


@cache
def chunk() -> type[DecoderChunk]:
    import torch
    from torch import nn

    from nanotron.models.decoder import MLP, DecoderChunk
    from nanotron.ops.linear import linear

    class PlainMLP(nn.Module):
        def __init__(self, config: Any, make: Any, name: str, tp: Any, fuse: Any) -> None:
            super().__init__()
            self.tp = tp
            self.up, self.down = make(f"{name}.up.weight"), make(f"{name}.down.weight")

        def forward(self, x: Any) -> Any:
            (up,) = linear(x, [self.up], self.tp, enter=self.tp.enter)  # [b, s, d] -> [b, s, f/t]
            (y,) = linear(torch.relu(up), [self.down], self.tp, exit=self.tp.exit)
            return y

    class PlainMLPChunk(DecoderChunk):
        mlps = {"dense": MLP, "plain": PlainMLP}  # noqa: RUF012

    return PlainMLPChunk


FAMILY = Family(PlainMLPConfig, specs=specs, layer_kinds=layer_kinds, layer_flops=layer_flops, chunk=chunk)
