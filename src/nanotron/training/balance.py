"""How evenly the experts of a sparse model are used: counted in every step, and balanced by moving biases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanotron.checkpoint.format import StateShard
from nanotron.ops.chunk import Chunk
from nanotron.parallel.mesh import Mesh
from nanotron.training.control import ControlWord

if TYPE_CHECKING:
    from nanotron.config import Config


class ExpertBalance:
    """What the routers of a rank's chunks count, and their biases; of a dense model, nothing.

    A bias has no gradient: it follows the counts of the whole global batch, so it moves alike on every rank.
    """

    def __init__(self, config: Config, mesh: Mesh, chunks: Sequence[Chunk]) -> None:
        model, layout = config.model.model_config, config.parallelism
        self._mesh, self._moe = mesh, model.moe_config
        self._layers = [f"layers.{layer}" for layer in model.sparse_layers]
        self._counts = layout.sequence_parallel or mesh.coord("tp") == 0  # else tp ranks count the same tokens
        self._biases = {
            name: (chunk.specs[name], bias)
            for chunk in chunks
            for name, bias in chunk.weights.items()
            if not bias.requires_grad
        }
        device = next(iter(chunks[0].weights.values())).device
        self._zeros = torch.zeros(self._moe.num_experts if self._moe else 0, dtype=torch.float64, device=device)

    def vectors(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's addends of the control word: "load" [layers · E], how many tokens chose each expert of each
        sparse layer of the model, and "entropy" [layers], sums over tokens; ``found``: the pipeline's metrics.
        """
        if not self._layers:
            return {}
        counted = found if self._counts else {}
        return {
            "load": torch.cat([counted.get(f"load/{layer}", self._zeros) for layer in self._layers]),
            "entropy": torch.stack([counted.get(f"entropy/{layer}", self._zeros[0]) for layer in self._layers]),
        }

    @torch.no_grad()
    def move_biases(self, word: ControlWord) -> None:
        """Make experts that fewer tokens than average chose more likely, and the others less, unless the update was
        left out (arXiv 2408.15664).
        """
        rate = self._moe.bias_update_rate if self._moe else None
        if not rate or not self._layers:
            return
        load = word["load"].view(len(self._layers), -1)
        moves = rate * (1 - word.found_inf()) * (load.mean(1, keepdim=True) - load).sign()
        for layer, move in zip(self._layers, moves, strict=True):
            if held := self._biases.get(f"{layer}.mlp.router.bias"):
                held[1].add_(move)

    def state(self) -> Iterator[StateShard]:
        """The biases, which no bucket holds; the first rank of those that hold copies writes them."""
        first = all(self._mesh.coord(axis) == 0 for axis in (*self._mesh.data_parts, "tp"))
        for name, (spec, bias) in self._biases.items():
            yield StateShard("weight", name, spec.shape, spec.local_box(self._mesh), bias.data, first)
