"""The control word: the one world-wide all-reduce of a step.

    squared_norm │ losses: lm, z, … │ flags: save, stop │ a section for each vector that the model counts

Every rank gives its addend of each section. Sections are asked for by name, so a further one changes no other. The
host reads the word when it is needed; what decides the update stays on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from nanotron.parallel.comm import all_reduce_
from nanotron.parallel.mesh import Mesh
from nanotron.training.diagnostics import Diagnostics
from nanotron.training.host_copy import HostCopy


@dataclass(frozen=True)
class Outcome:
    """What every rank knows of a step once its control word is read."""

    losses: dict[str, float]
    """Means over the valid tokens of the global batch, by the model's name for each."""
    grad_norm: float
    """Global norm of the gradient, before clipping."""
    save: bool
    """Some rank asked for a checkpoint of this step."""
    stop: bool
    """Some rank was told to stop after this step."""
    diagnostics: dict[str, float] = field(default_factory=dict)
    """What only measured steps tell, by column of the step's row."""
    has_targets: bool = True
    """Whether any token of the global batch was a target; without one the losses are 0 and mean nothing."""
    vectors: dict[str, list[float]] = field(default_factory=dict)
    """The further sections, sums over all ranks."""

    @property
    def lm_loss(self) -> float:
        """The language-modelling loss alone."""
        return self.losses["lm"]

    @property
    def finite(self) -> bool:
        """Whether the update was made: it is left out when a loss or the gradient is not finite."""
        return all(abs(value) < float("inf") for value in (*self.losses.values(), self.grad_norm))


class ControlWord:
    """A step's control word, float64: this rank's addends until ``reduce``, the sums over all ranks afterwards."""

    def __init__(
        self,
        squared_norm: Tensor,
        losses: Mapping[str, Tensor],
        loss_names: Sequence[str],
        vectors: Mapping[str, Tensor] | None = None,
        *,
        save: bool,
        stop: bool,
    ) -> None:
        """``losses``: those this rank counts, sums over tokens; ``loss_names``: all that any rank has.

        ``vectors``: further sections, 1-dim, of equal names and lengths on all ranks.
        """
        zero = torch.zeros_like(squared_norm)
        pinned = squared_norm.device.type == "cuda"  # from any other memory a copy may wait for the device
        flags = torch.tensor([save, stop], dtype=torch.float64, pin_memory=pinned)
        sections = {
            "squared_norm": squared_norm[None],
            "losses": torch.stack([losses[name].double() if name in losses else zero for name in loss_names]),
            "flags": flags.to(squared_norm.device, non_blocking=True),
            **(vectors or {}),
        }
        self._loss_names = tuple(loss_names)
        self._word = torch.cat([section.double() for section in sections.values()])
        parts = torch.split(self._word, [len(section) for section in sections.values()])
        self._sections: dict[str, Tensor] = dict(zip(sections, parts, strict=True))  # views of the word
        self._num_targets: Tensor | None = None  # until it is reduced
        self.diagnostics: Diagnostics | None = None
        """The step's further measurements; most steps have none."""
        self._host_copy: HostCopy | None = None

    def __getitem__(self, section: str) -> Tensor:
        """A section, on the device."""
        return self._sections[section]

    def reduce(self, mesh: Mesh, num_targets: Tensor) -> None:
        """Add up all ranks' words; the losses become means over ``num_targets``, which may be 0."""
        all_reduce_(self._word, mesh.world_group())
        self["losses"].div_(num_targets.clamp(min=1))
        self._num_targets = num_targets

    def grad_scale(self, clip: float | None) -> Tensor:
        """What gradients are divided by so that their global norm is at most ``clip`` (arXiv 1211.5063)."""
        norm = self["squared_norm"][0].sqrt()
        return torch.ones_like(norm) if clip is None else ((norm + 1e-6) / clip).clamp(min=1.0)

    def found_inf(self) -> Tensor:
        """1 when a loss or the gradient is not finite, else 0."""
        return 1.0 - self._word[: 1 + len(self._loss_names)].isfinite().all().double()

    def begin_read(self) -> HostCopy:
        """Send the word to the host; without it, ``read`` waits for all that the device has been given until then."""
        self._host_copy = HostCopy(self._word)
        if self.diagnostics:
            self.diagnostics.begin_read()
        return self._host_copy

    def read(self) -> Outcome:
        """Wait for the word and read it on the host."""
        numbers = iter((self._host_copy or self.begin_read()).read())
        values = {name: list(islice(numbers, len(section))) for name, section in self._sections.items()}
        (squared_norm,), losses, (save, stop) = (values.pop(name) for name in ("squared_norm", "losses", "flags"))
        norm = squared_norm**0.5 if squared_norm >= 0 else squared_norm
        diagnostics = self.diagnostics.read() if self.diagnostics else {}
        has_targets = any(losses) or self._num_targets is None or self._num_targets.item() > 0
        named = dict(zip(self._loss_names, losses, strict=True))
        return Outcome(named, norm, save > 0, stop > 0, diagnostics, has_targets, vectors=values)
