"""What a model computes between its matmuls and its collectives: pure functions of tensors, easy to fuse.

b rows   s tokens   d hidden size   f intermediate size   V vocabulary   t tensor-parallel ranks   h heads   e head dim

Whoever calls them says how: ``fuse(swiglu)(gate_up)``, where ``fuse`` is ``eager`` (one torch operator after the
other, each over all its operands) or ``fused`` (torch.compile: one pass over memory forward, and one backward). A
function is compiled once for each shape it meets, however many layers call it, or once for any number of rows where
these change from call to call. Matmuls, attention, collectives and the buckets of weight gradients stay
outside, so schedules, recomputation and overlap know nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

Function = TypeVar("Function", bound=Callable[..., Any])

SHAPES = 64  # that one function may be compiled for: a run has as many as its data stages have sequence lengths


class Fuse(Protocol):
    """How a function is to run."""

    def __call__(self, function: Function, /) -> Function: ...


def eager(function: Function, /) -> Function:
    """Return the function itself."""
    return function


def fused(function: Function, /) -> Function:
    """Return the function compiled: its first call with new shapes takes seconds, and needs a C++ compiler."""
    compiled: Function = _compiled(function)
    return compiled


def any_number_of_rows(function: Function, /) -> Function:
    """Say of a function of tensors, as a decorator, that their first dim has another size in every call."""
    function.any_number_of_rows = True  # type: ignore[attr-defined]
    return function


@cache
def _compiled(function: Callable[..., Any]) -> Any:
    options: dict[str, bool | int] = {"deterministic": True}  # nothing that is chosen by the clock
    if not torch.accelerator.is_available():
        options["compile_threads"] = 1  # in this process: the other cores have ranks of their own
    compile: Any = torch.compile  # its types lack recompile_limit
    compiled = compile(function, dynamic=False, fullgraph=True, options=options, recompile_limit=SHAPES)
    return _once_for_all_rows(function, compiled) if hasattr(function, "any_number_of_rows") else compiled


def _once_for_all_rows(function: Callable[..., Tensor], compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Have the compiler take the number of rows as a variable, which it does not with 0 or 1 of them."""
    from torch._dynamo import maybe_mark_dynamic

    @wraps(function)
    def run(*tensors: Tensor) -> Tensor:
        if len(tensors[0]) < 2:
            return function(*tensors)
        for tensor in tensors:
            maybe_mark_dynamic(tensor, 0)
        return compiled(*tensors)

    return run


def seconds_compiling() -> float:
    """How long this process has been compiling since it began; other ranks may be waiting meanwhile."""
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]


def precise(x: Tensor) -> Tensor:
    """x in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


# -------------------------------------------------------------------- in a block


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / √(mean of x² over the last dim + eps) · weight (arXiv 1910.07467). x [.., d], weight [d]."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_and_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + y, its rms_norm): what leaves a block's first half. x and y [b, s, d], weight [d]."""
    x = x + y
    return x, rms_norm(x, weight, eps)


def queries_and_keys(
    q: Tensor,
    k: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """q [b, s, h/t, e] and k as attention wants them: normalised per head (weights [e], or None), then rotated."""
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    return rotate(q, cos, sin, interleaved=interleaved), rotate(k, cos, sin, interleaved=interleaved)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """Rotate each pair of dims of x [b, s, h, e] by its token's angle (arXiv 2104.09864); cos and sin [b, s, 1, e/2].

    ``interleaved`` pairs dims (2i, 2i+1), else (i, i+e/2).
    """
    one, two = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    rotated = one * cos - two * sin, two * cos + one * sin
    return torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) · up (arXiv 2002.05202): [b, s, 2·f/t] -> [b, s, f/t]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


# -------------------------------------------------------------------- in the loss


def softmax_and_log_z(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax of logits [n, V/t] over this rank's columns, and its divisor's logarithm [n]; in float32 at least."""
    logits = precise(logits)
    softmax = logits.softmax(-1)
    return softmax, logits.amax(-1) - softmax.amax(-1).log()  # the largest logit's probability is exp(it − log z)


def logit_gradient(softmax: Tensor, scale: Tensor, columns: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """softmax · scale, less ``targets`` at each row's column; overwrites softmax [n, V/t]. The others are [n]."""
    grad = softmax.mul_(scale[:, None])
    grad.scatter_add_(1, columns[:, None], -targets[:, None])
    return grad.to(dtype)
