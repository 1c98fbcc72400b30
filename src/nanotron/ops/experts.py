"""What a layer with experts computes: which experts a token uses, how its rows travel to them, and their matmuls.

    b rows   s tokens of a row, as this rank has them   n = b·s tokens   d hidden size   k experts of each token
    E experts of the layer, e of them on this rank      m rows that this rank sends, r rows that its experts get
    a "row" of this file is one token's activations for one of its experts, so tokens have n·k of them

No token is dropped: ranks send each other as many rows as there are. Every sum over a token's experts is made in the
order of its choices, without atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from nanotron.ops.fused import any_number_of_rows, precise
from nanotron.ops.gemm import add_gemm, gemm_into
from nanotron.ops.kernels import Kernels
from nanotron.ops.linear import TensorParallel, weight_grad
from nanotron.parallel.comm import all_to_all_rows, with_transpose
from nanotron.parallel.mesh import Mesh

# ------------------------------------------------------------------- what a router says


def softmax_scores(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of router logits [n, E]: the softmax, the same as shares of each token's sum, and the entropy of these [n]."""
    shares = logits.softmax(-1)
    return shares, shares, torch.special.entr(shares).sum(-1)


def sigmoid_scores(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of router logits [n, E]: each one's sigmoid, these as shares of a token's sum, and the entropy of these [n]."""
    scores = logits.sigmoid()
    shares = scores / scores.sum(-1, keepdim=True)
    return scores, shares, torch.special.entr(shares).sum(-1)


def choose(scores: Tensor, top_k: int, *, groups: int, top_k_groups: int, best_of_group: int) -> Tensor:
    """The experts of each token, best first: scores [n, E] -> [n, k] int64.

    With more than one group of E/groups neighbours, those of the ``top_k_groups`` whose ``best_of_group`` best scores
    have the largest sum (arXiv 2405.04434, 2412.19437).
    """
    if groups > 1:
        by_group = scores.view(*scores.shape[:-1], groups, -1)  # [n, groups, E/groups]
        strength = by_group.topk(best_of_group, -1).values.sum(-1)
        kept = torch.zeros_like(strength).scatter_(-1, strength.topk(top_k_groups, -1).indices, 1.0)
        scores = by_group.masked_fill(kept[..., None] == 0, -torch.inf).flatten(-2)
    return scores.topk(top_k, -1).indices


def counts_of_rows(chosen: Tensor, experts: int) -> Tensor:
    """How many of each row's tokens chose each expert: chosen [b, s, k] -> [b, E] float64, exact."""
    counts = torch.zeros(chosen.shape[0], experts, dtype=torch.float64, device=chosen.device)
    choices = chosen.flatten(1)
    return counts.scatter_add_(1, choices, torch.ones((), dtype=counts.dtype, device=counts.device).expand_as(choices))


def router_logits(x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
    """x · wᵀ in float32 at least: x [b, s, d], weight [E, d] -> [b, s, E]."""
    logits: Tensor = _RouterLogits.apply(x, weight, tp)  # type: ignore[no-untyped-call]
    return logits


class _RouterLogits(Function):
    """Keeps x as it is, not its float32 copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: TensorParallel) -> Tensor:
        logits = tp.matmuls.recall()
        if logits is None:
            logits = [F.linear(precise(x), precise(weight))]
            tp.matmuls.keep(logits)
        ctx.save_for_backward(x)
        ctx.weight, ctx.tp = weight, tp
        return logits[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        accumulate = partial(_add_router_grad, grad=grad, x=x)
        return (grad @ precise(ctx.weight)).to(x.dtype), weight_grad(ctx.tp, ctx.weight, accumulate), None


def _add_router_grad(buffer: Tensor, grad: Tensor, x: Tensor) -> None:
    """buffer [E, d] += gradᵀ · x, over all tokens."""
    buffer += grad.flatten(0, -2).t() @ precise(x).flatten(0, -2)


# --------------------------------------------------------------- how rows reach experts


class Dispatch(NamedTuple):
    """The way of a microbatch's rows to the experts on this tensor-parallel coordinate, and back."""

    choices: Tensor
    """[m] which of the n·k choices each sent row is of, in the order of the experts."""
    places: Tensor
    """[n, k] where each choice's row is among those sent; m where another tensor-parallel rank sends it."""
    sent: Sequence[int]
    """Rows for each expert-parallel rank."""
    received: Sequence[int]
    """Rows from each expert-parallel rank."""
    sources: Sequence[Sequence[int]]
    """Rows from each expert-parallel rank for each expert here."""

    @property
    def sizes(self) -> list[int]:
        """Rows of each expert here, [e]."""
        return [sum(rows) for rows in zip(*self.sources, strict=True)]


def dispatch_of(chosen: Tensor, experts: int, mesh: Mesh) -> Dispatch:
    """Who sends which rows where: chosen [n, k], of ``experts`` that are cut over ep and, within a rank's, over tp.

    The only place where a layer waits for the device: how much is sent has to be known on the host.
    """
    to_send, sources = rows_of_experts(chosen, experts, mesh).tolist()
    return dispatch_by(chosen, experts, mesh, to_send, sources)


def rows_of_experts(chosen: Tensor, experts: int, mesh: Mesh) -> Tensor:
    """How many rows leave here for the experts of each expert-parallel rank, and how many come from each for those
    here: [2, ep, e], on the device. Ranks tell each other.
    """
    ep, tp = mesh.size("ep"), mesh.size("tp")
    counts = counts_of_rows(chosen[None], experts).long().view(ep, tp, -1)  # not bincount, which waits for the device
    leaving = counts[:, mesh.coord("tp")]
    group = mesh.group("ep")
    arriving = leaving if group is None else all_to_all_rows(leaving, group, [1] * ep, [1] * ep)
    return torch.stack([leaving, arriving])


def dispatch_by(
    chosen: Tensor, experts: int, mesh: Mesh, to_send: Sequence[Sequence[int]], sources: Sequence[Sequence[int]]
) -> Dispatch:
    """The dispatch of so many rows, [ep, e] each, as ``rows_of_experts`` tells."""
    tp, here = mesh.size("tp"), len(sources[0])
    sent, received = [sum(rows) for rows in to_send], [sum(rows) for rows in sources]
    homes = chosen.flatten()  # [n·k]
    if tp > 1:
        mine = homes // here % tp == mesh.coord("tp")
        homes = homes.where(mine, experts)  # behind all others
    choices = homes.argsort(stable=True)[: sum(sent)]
    places = torch.full_like(homes, len(choices))
    places[choices] = torch.arange(len(choices), device=places.device)
    return Dispatch(choices, places.view_as(chosen), sent, received, sources)


def spread(x: Tensor, dispatch: Dispatch) -> Tensor:
    """Each sent row: its token's activations. x [n, d] -> [m, d]; backward adds up each token's rows."""
    return with_transpose(x, partial(_rows_of_tokens, dispatch), partial(_sums_of_tokens, dispatch))


def collect(rows: Tensor, dispatch: Dispatch) -> Tensor:
    """The sum of each token's rows: [m, d] -> [n, d]; backward gives each row its token's gradient."""
    return with_transpose(rows, partial(_sums_of_tokens, dispatch), partial(_rows_of_tokens, dispatch))


def _rows_of_tokens(dispatch: Dispatch, x: Tensor) -> Tensor:
    return x.index_select(0, dispatch.choices // dispatch.places.shape[1])


def _sums_of_tokens(dispatch: Dispatch, rows: Tensor) -> Tensor:
    if len(rows) < dispatch.places.numel():  # others are sent by other tensor-parallel ranks: a row of zeros is theirs
        rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    first, *others = dispatch.places.unbind(1)
    total = rows.index_select(0, first)
    for places in others:
        total += rows.index_select(0, places)
    return total


def by_expert(rows: Tensor, dispatch: Dispatch) -> Tensor:
    """Received rows [r, ..], which lie rank by rank, expert by expert."""
    if len(dispatch.sources) == 1:
        return rows
    parts = torch.split(rows, [size for source in dispatch.sources for size in source])
    here = len(dispatch.sources[0])
    return torch.cat([part for expert in range(here) for part in parts[expert::here]])


def by_rank(rows: Tensor, dispatch: Dispatch) -> Tensor:
    """The inverse of ``by_expert``."""
    if len(dispatch.sources) == 1:
        return rows
    parts = torch.split(rows, [size for sizes in zip(*dispatch.sources, strict=True) for size in sizes])
    ranks = len(dispatch.sources)
    return torch.cat([part for rank in range(ranks) for part in parts[rank::ranks]])


# ------------------------------------------------------------------ what experts compute


@any_number_of_rows
def weighted_swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) · up · weight: gate_up [r, 2·f], weight [r] -> [r, f].

    An expert's last matmul is linear, so its input is weighted instead of its output, which then nobody has to keep.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) * up * weight[:, None]).to(gate_up.dtype)


def grouped_linear(rows: Tensor, weight: Tensor, sizes: list[int], tp: TensorParallel) -> Tensor:
    """x · wᵀ with the weight of each row's own expert: rows [r, k], weight [e, .., n, k] -> [r, n'].

    ``sizes``: how many rows each expert has, one after the other. Weight gradients take the way of ``linear``'s.
    """
    outputs: Tensor = _GroupedLinear.apply(rows, weight, sizes, tp)  # type: ignore[no-untyped-call]
    return outputs


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, sizes: list[int], tp: TensorParallel) -> Tensor:
        outputs = tp.matmuls.recall()
        if outputs is None:
            outputs = [_grouped_gemm(rows, _matrices(weight).transpose(1, 2), sizes, tp.kernels)]
            tp.matmuls.keep(outputs)
        ctx.save_for_backward(rows)
        ctx.weight, ctx.sizes, ctx.tp = weight, sizes, tp
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        input_grad = _grouped_gemm(grad, _matrices(ctx.weight), ctx.sizes, ctx.tp.kernels)
        accumulate = partial(_add_grouped_gemm, grad=grad, rows=rows, sizes=ctx.sizes, kernels=ctx.tp.kernels)
        return input_grad, weight_grad(ctx.tp, ctx.weight, accumulate), None, None


def _matrices(weight: Tensor) -> Tensor:
    return weight.flatten(1, -2)  # [e, .., n, k] -> [e, n', k]


def _grouped_gemm(rows: Tensor, weights: Tensor, sizes: list[int], kernels: Kernels) -> Tensor:
    """rows · w for each expert's rows: [r, k], weights [e, k, n] -> [r, n]."""
    if kernels == "accelerator" and rows.dtype == torch.bfloat16:  # one kernel, whose ends lie on the device
        ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)
        result: Tensor = F.grouped_mm(rows.contiguous(), weights, offs=ends)
        return result
    outputs = rows.new_empty(len(rows), weights.shape[2])
    for part, output, weight in zip(torch.split(rows, sizes), torch.split(outputs, sizes), weights, strict=True):
        if len(part):
            gemm_into(output, part, weight.t(), kernels=kernels)
    return outputs


def _add_grouped_gemm(buffer: Tensor, grad: Tensor, rows: Tensor, sizes: list[int], kernels: Kernels) -> None:
    """buffer += gradᵀ · rows, of each expert's rows."""
    for total, left, right in zip(_matrices(buffer), torch.split(grad, sizes), torch.split(rows, sizes), strict=True):
        if len(right):
            add_gemm(total, left, right, kernels=kernels)
