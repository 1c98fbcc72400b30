"""This rank's part of a model: its shards of its pipeline stage's layers, filled from weights of any layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanotron.checkpoint.format import StateShard
from nanotron.convert.sources import load_weights
from nanotron.models.decoder import ChunkOptions, DecoderChunk
from nanotron.parallel.agreement import Agreement
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.store import Store
from nanotron.training.build import build_chunks
from nanotron.training.topology import modules_of_ranks

if TYPE_CHECKING:
    from nanotron.config import Config


def load_model(
    path: str, config: Config, mesh: Mesh, device: torch.device, store: Store | None = None, *, ema: bool = False
) -> DecoderChunk:
    """The chunk that a rank of ``mesh`` holds, laid out as ``config`` says, with weights from the folder ``path``.

    ``ema``: the average of the weights in their place. Ranks agree through ``store`` that the weights are what was
    written; raises ConfigError on all of them.
    """
    options = ChunkOptions(getattr(torch, config.model.dtype), device)
    (model,) = build_chunks(config, mesh, modules_of_ranks(config)[mesh.coord("pp")], options)
    pieces = [
        StateShard("ema" if ema else "weight", name, spec.shape, spec.local_box(mesh), model.weights[name].data)
        for name, spec in model.specs.items()
    ]
    load_weights(path, pieces, config.model.model_config, Agreement("weights", mesh.rank, mesh.world, store))
    return model.eval()
