"""The comparison of two runs that must have the same numbers."""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

from tests.models.tiny import gradient_errors
from tests.parity.cases import PRECISIONS, Case
from tests.parity.run import Record


class Difference(NamedTuple):
    """How far a run is from its reference, each relative, and where it is farthest."""

    loss: float
    loss_step: int
    norm: float
    norm_step: int
    grad: float
    grad_name: str

    def problems(self, case: Case) -> list[str]:
        """One line per number beyond the tolerance of the case's precision."""
        allowed = PRECISIONS[case.dtype]
        found = [
            (self.loss, f"lm_loss of step {self.loss_step}"),
            (self.norm, f"grad_norm of step {self.norm_step}"),
            (self.grad, f"first gradient of {self.grad_name}"),
        ]
        return [
            f"{case}: {what} differs by {error:.1e} (allowed {allowed:.0e})"
            for error, what in found
            if not error <= allowed
        ]


def difference(run: Record, reference: Record) -> Difference:
    """Compare losses and gradient norms of every step and the first gradient of every parameter."""
    loss, loss_step = _largest(run.lm_loss, reference.lm_loss)
    norm, norm_step = _largest(run.grad_norm, reference.grad_norm)
    errors = gradient_errors(run.first_grads, reference.first_grads)
    name = max(errors, key=lambda name: errors[name])
    return Difference(loss, loss_step, norm, norm_step, errors[name], name)


def _largest(values: list[float], expected: list[float]) -> tuple[float, int]:
    """(largest relative difference, its step counted from 1); a value that is no number differs without limit."""
    assert len(values) == len(expected) > 0
    errors = [
        abs(value - right) / abs(right) if isfinite(value) else float("inf")
        for value, right in zip(values, expected, strict=True)
    ]
    worst = max(range(len(errors)), key=lambda step: errors[step])
    return errors[worst], worst + 1
