"""The one matmul of every model, with its collectives over tp and the way its weight gradient takes.

b rows   s tokens of a row   t tensor-parallel ranks   d hidden size   k, n input and output features
Activations between blocks are [b, s, d], or [b, s/t, d] under sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from nanotron.ops.fp8 import Fp8
from nanotron.ops.gemm import add_gemm, gemm
from nanotron.ops.kernels import Kernels
from nanotron.ops.recompute import MatmulOutputs
from nanotron.ops.weight_grads import Accumulate, WeightGrads, add
from nanotron.parallel.comm import (
    AsyncHandle,
    all_gather,
    all_reduce_,
    begin_all_gather,
    begin_all_reduce_,
    begin_reduce_scatter,
    copy_to,
    gather,
    reduce_scatter,
)
from nanotron.parallel.mesh import Mesh

Enter = Literal["copy", "gather"]
Exit = Literal["sum", "scatter"]


@dataclass(frozen=True)
class TensorParallel:
    """How one chunk's layers are spread over the tp axis, where their weight gradients go, and who multiplies."""

    mesh: Mesh
    weight_grads: WeightGrads
    sequence_parallel: bool = False
    recompute_allgather: bool = True
    """Keep only this rank's tokens of a gathered input for backward and gather it again there."""
    overlap: bool = False
    """Multiply while tensors are under way: same numbers but for rounding, and two more copies of an output."""
    kernels: Kernels = "accelerator"
    fp8: Fp8 | None = None
    """How a layer multiplies in fp8, but for weight gradients; None: it does not."""
    matmuls: MatmulOutputs = field(default_factory=MatmulOutputs)
    """What was multiplied in the layer that is under way, where that is kept."""

    @cached_property
    def group(self) -> ProcessGroup | None:
        """The ranks along tp; None: this one alone."""
        return self.mesh.group("tp")

    def awaited(self, arrival: AsyncHandle) -> AsyncHandle:
        """The arrival itself where communication is overlapped; else the same one, waited for already."""
        if self.overlap:
            return arrival
        result = arrival()
        return lambda: result

    @property
    def enter(self) -> Enter:
        """How activations enter a column-cut matmul."""
        return "gather" if self.sequence_parallel else "copy"

    @property
    def exit(self) -> Exit:
        """How the partial results of a row-cut matmul are summed."""
        return "scatter" if self.sequence_parallel else "sum"

    def entered(self, x: Tensor) -> Tensor:
        """x as each rank reads all of it: [b, s, ..], or [b, s/t, ..] under sequence parallelism, -> [b, s, ..]."""
        return gather(x, self.mesh, "tp", dim=1) if self.sequence_parallel else copy_to(x, self.mesh, "tp")


def linear(
    x: Tensor,
    weights: Sequence[Tensor],
    tp: TensorParallel,
    *,
    enter: Enter | None = None,
    exit: Exit | None = None,
    biases: Sequence[Tensor] = (),
) -> tuple[Tensor, ...]:
    """x · wᵀ (+ bias) for each weight: the one matmul of every model.

    x [b, s, k]; a weight [.., n, k] counts as its 2-D view [n', k] and gives [b, s, n'].
    ``enter="gather"``: x comes as [b, s/t, k]. ``exit="scatter"``: the result leaves as [b, s/t, n'].
    Several weights share one entry of x, and one collective for its gradient. A bias is added after the exit, once.

    Forward: identity or all-gather, matmul, then nothing, all-reduce or reduce-scatter. Backward: each one's transpose.
    The input gradient is computed first; weight gradients go to ``tp.weight_grads``. With ``tp.overlap`` matmuls run
    while something is on its way: those of this rank's tokens while the others' are gathered, the input gradient while
    x is gathered again, weight gradients while the input gradient is summed.
    """
    outputs: tuple[Tensor, ...] = _Linear.apply(x, tp, enter, exit, len(weights), *weights, *biases)  # type: ignore[no-untyped-call]
    return outputs


class _Linear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tp: TensorParallel, enter: Enter | None, exit: Exit | None, count: int, *params: Tensor
    ) -> tuple[Tensor, ...]:
        weights, biases = params[:count], params[count:]
        ctx.gathers_again = enter == "gather" and tp.recompute_allgather
        outputs = tp.matmuls.recall()
        if outputs is None:
            entered, outputs = _multiplied(x, weights, biases, tp, enter, exit)
            tp.matmuls.keep(outputs)
        elif enter == "gather" and not ctx.gathers_again:
            entered = all_gather(x, tp.group, dim=1)  # [b, s/t, k] -> [b, s, k]
        else:
            entered = x
        ctx.save_for_backward(x if ctx.gathers_again else entered)
        ctx.tp, ctx.enter, ctx.exit, ctx.weights, ctx.biases = tp, enter, exit, weights, biases
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        group = ctx.tp.group
        bias_grads = [
            weight_grad(ctx.tp, bias, partial(_add_sum, grad=grad))
            for bias, grad in zip(ctx.biases, grads, strict=False)  # all of them, or none
        ]
        if ctx.exit == "scatter":
            grads = tuple(all_gather(grad, group, dim=1) for grad in grads)  # [b, s, n] <- [b, s/t, n]
        (x,) = ctx.saved_tensors
        entering = ctx.tp.awaited(begin_all_gather(x, group if ctx.gathers_again else None, dim=1))
        leaving = None
        if ctx.needs_input_grad[0]:
            leaving = ctx.tp.awaited(_begin_leaving(_input_grad(grads, ctx.weights, ctx.tp), ctx.enter, group))
        x = entering()
        weight_grads = [
            weight_grad(ctx.tp, w, partial(_add_gemm, grad=grad, x=x, kernels=ctx.tp.kernels))
            for w, grad in zip(ctx.weights, grads, strict=True)
        ]
        return leaving and leaving(), None, None, None, None, *weight_grads, *bias_grads


def _multiplied(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    tp: TensorParallel,
    enter: Enter | None,
    exit: Exit | None,
) -> tuple[Tensor, list[Tensor]]:
    """What ``linear`` gives, and the x that was multiplied, [b, s, k]."""
    on_entry = [bias.flatten() for bias in biases] if not exit else []
    if enter == "gather" and tp.overlap:
        entered, outputs = _multiply_while_gathering(x, weights, on_entry, tp)
    else:
        entered = all_gather(x, tp.group, dim=1) if enter == "gather" else x  # [b, s/t, k] -> [b, s, k]
        outputs = _gemms(entered, weights, on_entry, tp)
    if exit == "sum":
        outputs = [all_reduce_(y, tp.group) for y in outputs]
    if exit == "scatter":
        outputs = [reduce_scatter(y, tp.group, dim=1) for y in outputs]  # [b, s, n] -> [b, s/t, n]
    if exit and biases:
        outputs = [y.add_(bias) for y, bias in zip(outputs, biases, strict=True)]
    return entered, outputs


def _gemms(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], tp: TensorParallel) -> list[Tensor]:
    """x · wᵀ (+ bias) for each weight: [b, s, k] -> [b, s, n'] each."""
    if tp.fp8 is None:
        pairs = zip(weights, biases or repeat(None), strict=False)
        return [gemm(x, _matrix(w), bias, kernels=tp.kernels) for w, bias in pairs]
    outputs = tp.fp8.gemms(x, [_matrix(w) for w in weights])
    return [y.add_(bias) for y, bias in zip(outputs, biases, strict=True)] if biases else outputs


def _multiply_while_gathering(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], tp: TensorParallel
) -> tuple[Tensor, list[Tensor]]:
    """Gather x [b, s/t, k] and multiply it, this rank's own tokens first: the gathered [b, s, k] and its outputs."""
    arriving = begin_all_gather(x, tp.group, dim=1)
    own = _gemms(x, weights, biases, tp)
    entered = arriving()
    lo = tp.mesh.coord("tp") * x.shape[1]
    before = _gemms(entered[:, :lo], weights, biases, tp)
    after = _gemms(entered[:, lo + x.shape[1] :], weights, biases, tp)
    return entered, [torch.cat(parts, dim=1) for parts in zip(before, own, after, strict=True)]


def _begin_leaving(input_grad: Tensor, enter: Enter | None, group: ProcessGroup | None) -> AsyncHandle:
    """Begin the transpose of an entry: [b, s, k] -> [b, s, k], or [b, s/t, k] where x was gathered."""
    if enter == "copy":
        return begin_all_reduce_(input_grad, group)
    if enter == "gather":
        return begin_reduce_scatter(input_grad, group, dim=1)
    return lambda: input_grad


def _matrix(weight: Tensor) -> Tensor:
    return weight.flatten(0, -2)  # [.., n, k] -> [n', k]


def _input_grad(grads: Sequence[Tensor], weights: Sequence[Tensor], tp: TensorParallel) -> Tensor:
    """Σ grad · w over the weights that shared the input: [b, s, n'] -> [b, s, k]."""
    (total,) = _gemms(grads[0], [_matrix(weights[0]).t()], (), tp)
    for grad, weight in zip(grads[1:], weights[1:], strict=True):
        total += _gemms(grad, [_matrix(weight).t()], (), tp)[0]
    return total


def weight_grad(tp: TensorParallel, weight: Tensor, accumulate: Accumulate) -> Tensor | None:
    """Send a weight's gradient into its buffer, or, for a weight without one, return it for autograd to keep."""
    if weight in tp.weight_grads:
        tp.weight_grads.add(weight, accumulate)
        return None
    grad = torch.empty_like(weight)
    accumulate(grad, True)
    return grad


def _add_gemm(buffer: Tensor, first: bool, grad: Tensor, x: Tensor, kernels: Kernels) -> None:
    """buffer += gradᵀ · x, over all tokens."""
    add_gemm(_matrix(buffer), grad.flatten(0, -2), x.flatten(0, -2), first=first, kernels=kernels)


def _add_sum(buffer: Tensor, first: bool, grad: Tensor) -> None:
    """buffer += the sum of grad over all tokens."""
    add(buffer.view(-1), grad.flatten(0, -2).sum(0, dtype=buffer.dtype), first)
