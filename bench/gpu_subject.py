"""What bench.gpu runs on, and the trainer that its sections drive there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from bench.ours import config_of
from bench.shapes import Shape
from bench.work import microbatches
from nanotron.batch import Batch, Spans
from nanotron.config import Config
from nanotron.metrics.devices import Device
from nanotron.parallel.mesh import Mesh
from nanotron.training.step import Training

Found = dict[str, Any]
"""What a section found, a line of JSON; ``ok`` false is something wrong."""


@dataclass(frozen=True)
class Subject:
    """A device, by the name that torch has for it, and what is known of its kind."""

    device: torch.device
    name: str
    kind: Device | None
    dry: bool
    """Whether this is a CPU that only shows that everything runs."""


def asked_of(shape: Shape, dtype: str, keys: Mapping[str, Any]) -> Config:
    """The config of a shape, with further keys by their dotted names."""
    return config_of({"shape": asdict(shape), "dtype": dtype, "config": dict(keys)})


def batches_of(shape: Shape, device: torch.device, spans: Spans | None = None) -> list[Batch]:
    """The microbatches that every step repeats."""
    positions = torch.arange(shape.sequence_length, device=device).expand(shape.micro_batch_size, -1)
    return [Batch(tokens.to(device), labels.to(device), positions, spans) for tokens, labels in microbatches(shape)]


def trainer_of(config: Config, device: torch.device, *, drawn: bool) -> Training:
    """The trainer with its initial weights: those of any layout, ``drawn`` on the host; else drawn on the device.

    A billion numbers by name take minutes of the time that there is.
    """
    training = Training(config, Mesh(), device)
    if drawn:
        training.initialize()
        return training
    with torch.no_grad():
        for weight in training.chunks[0].weights.values():
            weight.fill_(1.0) if weight.ndim == 1 else weight.normal_(std=0.02)
    training.optimizer.load_masters_from_weights()
    return training
