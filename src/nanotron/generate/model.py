"""This rank's part of a model: its shards of its pipeline stage's layers, filled from weights of any layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from nanotron.checkpoint.format import Piece
from nanotron.convert.sources import load_weights
from nanotron.models.decoder import Llama
from nanotron.parallel.agreement import Agreement
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.store import Store
from nanotron.training.topology import layers_of_stages, parameter_specs

if TYPE_CHECKING:
    from nanotron.config import Config


def load_model(path: str, config: Config, mesh: Mesh, device: torch.device, store: Store | None = None) -> Llama:
    """The chunk that a rank of ``mesh`` holds, laid out as ``config`` says, with weights from the folder ``path``.

    Ranks agree through ``store`` that the weights are what was written; raises ConfigError on all of them.
    """
    stage, num_stages = mesh.coord("pp"), mesh.size("pp")
    specs = parameter_specs(config)
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    model = Llama(
        config.model.model_config,
        specs,
        mesh,
        layers=layers_of_stages(config)[stage],
        embed=stage == 0,
        head=stage == num_stages - 1,
        dtype=dtype,
        device=device,
    )
    pieces = [
        Piece("weight", name, specs[name].shape, specs[name].local_box(mesh), weight.data)
        for name, weight in model.weights.items()
    ]
    load_weights(path, pieces, config.model.model_config, Agreement("weights", mesh.rank, mesh.world, store))
    return model.eval()
