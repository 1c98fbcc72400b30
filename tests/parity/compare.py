"""The comparison of two runs that must have the same numbers."""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

from tests.models.tiny import gradient_errors
from tests.parity.cases import PRECISIONS, Case
from tests.parity.run import Record

NEAR_TIES = {"float32": 1e-6, "float64": 1e-14}
"""The relative gap between two experts' scores below which rounding may decide which of them a token uses."""


class Worst(NamedTuple):
    """The largest relative difference and where it is."""

    error: float
    where: str


class Difference(NamedTuple):
    """How far a run is from its reference, up to the first step in which a token uses another expert."""

    losses: list[Worst]
    norm: Worst
    grad: Worst
    flip: Worst
    """The relative gap of that step's closest choice."""

    def problems(self, case: Case) -> list[str]:
        """One line per number beyond the tolerance of the case's precision."""
        allowed, gap = PRECISIONS[case.dtype], NEAR_TIES[case.dtype]
        lines = [
            f"{case}: {where} differs by {error:.1e} (allowed {allowed:.0e})"
            for error, where in (*self.losses, self.norm, self.grad)
            if not error <= allowed
        ]
        if not self.flip.error <= gap:
            lines.append(
                f"{case}: {self.flip.where}: its closest choice has a gap of {self.flip.error:.1e} ({gap:.0e})"
            )
        return lines


def difference(run: Record, reference: Record) -> Difference:
    """Compare losses, gradient norms and loads of every step and the first gradient of every parameter."""
    assert run.losses.keys() == reference.losses.keys()
    same, flip = same_routes(run, reference)
    losses = [
        _largest(f"{name} loss", values[:same], reference.losses[name][:same]) for name, values in run.losses.items()
    ]
    norm = _largest("grad_norm", run.grad_norm[:same], reference.grad_norm[:same])
    if not same:  # other experts: other gradients
        return Difference(losses, norm, Worst(0.0, "no gradient"), flip)
    errors = gradient_errors(run.first_grads, reference.first_grads)
    name = max(errors, key=lambda name: errors[name])
    return Difference(losses, norm, Worst(errors[name], f"first gradient of {name}"), flip)


def same_routes(run: Record, reference: Record) -> tuple[int, Worst]:
    """How many steps give every expert as many tokens as the reference's, and the first other one's closest choice.

    In the first of its layers with another load: those after it have other inputs.
    """
    assert len(run.loads) == len(reference.loads) > 0
    for step, (loads, expected) in enumerate(zip(run.loads, reference.loads, strict=True)):
        for layer, (load, right) in enumerate(zip(loads, expected, strict=True)):
            if load != right:
                gap = max(run.gaps[step][layer], reference.gaps[step][layer])
                return step, Worst(gap, f"load of sparse layer {layer} in step {step + 1} differs")
    return len(run.loads), Worst(0.0, "no load differs")


def _largest(what: str, values: list[float], expected: list[float]) -> Worst:
    """The step that differs most; a value that is no number differs without limit."""
    assert len(values) == len(expected)
    errors = [_relative(value, right) for value, right in zip(values, expected, strict=True)]
    step = max(range(len(errors)), key=lambda step: errors[step], default=-1)
    return Worst(errors[step] if errors else 0.0, f"{what} of step {step + 1}")


def _relative(value: float, right: float) -> float:
    if value == right:  # such as a loss that is switched off: 0 on both
        return 0.0
    return abs(value - right) / abs(right) if isfinite(value) and right else float("inf")
