"""The comparison of two runs that must have the same numbers."""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

from tests.models.tiny import gradient_errors
from tests.parity.cases import PRECISIONS, Case
from tests.parity.run import Record


class Worst(NamedTuple):
    """The largest relative difference and where it is."""

    error: float
    where: str


class Difference(NamedTuple):
    """How far a run is from its reference."""

    loss: Worst
    z_loss: Worst
    norm: Worst
    grad: Worst

    def problems(self, case: Case) -> list[str]:
        """One line per number beyond the tolerance of the case's precision."""
        allowed = PRECISIONS[case.dtype]
        return [
            f"{case}: {where} differs by {error:.1e} (allowed {allowed:.0e})"
            for error, where in self
            if not error <= allowed
        ]


def difference(run: Record, reference: Record) -> Difference:
    """Compare losses and gradient norms of every step and the first gradient of every parameter."""
    errors = gradient_errors(run.first_grads, reference.first_grads)
    name = max(errors, key=lambda name: errors[name])
    return Difference(
        _largest("lm_loss", run.lm_loss, reference.lm_loss),
        _largest("z_loss", run.z_loss, reference.z_loss),
        _largest("grad_norm", run.grad_norm, reference.grad_norm),
        Worst(errors[name], f"first gradient of {name}"),
    )


def _largest(what: str, values: list[float], expected: list[float]) -> Worst:
    """The step that differs most; a value that is no number differs without limit."""
    assert len(values) == len(expected) > 0
    errors = [_relative(value, right) for value, right in zip(values, expected, strict=True)]
    step = max(range(len(errors)), key=lambda step: errors[step])
    return Worst(errors[step], f"{what} of step {step + 1}")


def _relative(value: float, right: float) -> float:
    if value == right:  # such as a loss that is switched off: 0 on both
        return 0.0
    return abs(value - right) / abs(right) if isfinite(value) and right else float("inf")
