"""What a layer with experts computes: which experts a token uses, how its rows travel to them, and their matmuls.

    b rows   s tokens of a row, as this rank has them   n = b·s tokens   d hidden size   k experts of each token
    E experts of the layer, e of them on this rank      t tokens that come to this rank, m rows that its experts get
    a "row" of this file is one token's activations for one of its experts, so tokens have n·k of them

A token travels once to each rank that holds experts of it, is copied there for each of these, and what they gave is
added up before it travels back. No token is dropped: ranks send each other as many as there are. Every sum over a
token's experts on a rank, and over its ranks, is made in the order of its choices, without atomics.
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
from nanotron.ops.gemm import add_gemm
from nanotron.ops.kernels import Kernels
from nanotron.ops.linear import TensorParallel, weight_grad
from nanotron.ops.weight_grads import add
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


def _add_router_grad(buffer: Tensor, first: bool, grad: Tensor, x: Tensor) -> None:
    """buffer [E, d] += gradᵀ · x, over all tokens."""
    add(buffer, grad.flatten(0, -2).t() @ precise(x).flatten(0, -2), first)


# ------------------------------------------------------------- how tokens reach experts


class Numbers(NamedTuple):
    """How much travels, and how much each expert gets."""

    sent: list[int]
    """Tokens for each expert-parallel rank."""
    received: list[int]
    """Tokens from each expert-parallel rank."""
    sizes: list[int]
    """Rows of each expert here, [e]."""


def ranks_of(chosen: Tensor, here: int, mesh: Mesh) -> Tensor:
    """The expert-parallel rank to which each choice sends its token: chosen [n, k] -> [n, k], ``here`` experts a rank.

    It is ep, that is none, for experts of another tensor-parallel rank, and where an earlier choice sends the token
    to the same rank already: it travels once, however many of its experts are there.
    """
    shards = chosen // here  # experts are cut over ep and, within a rank's, over tp
    none = mesh.size("ep")
    ranks = (shards // mesh.size("tp")).where(shards % mesh.size("tp") == mesh.coord("tp"), none)
    repeated = (ranks[:, :, None] == ranks[:, None, :]).tril(-1).any(-1)
    return ranks.masked_fill(repeated, none)


def numbers_of(chosen: Tensor, ranks: Tensor, here: int, mesh: Mesh) -> Numbers:
    """How many tokens and rows there are, of chosen and ``ranks_of`` it, [n, k] each.

    The only place where a layer waits for the device: how much is sent has to be known on the host.
    """
    leaving, arriving = count(chosen, ranks, here, mesh).tolist()
    rows = zip(*(rows for _, *rows in arriving), strict=True)
    return Numbers([tokens for tokens, *_ in leaving], [tokens for tokens, *_ in arriving], [sum(of) for of in rows])


def count(chosen: Tensor, ranks: Tensor, here: int, mesh: Mesh) -> Tensor:
    """How many tokens leave for each expert-parallel rank and the rows of its experts, and how many come from each:
    [2, ep, 1 + e], on the device. Ranks tell each other.
    """
    ep, tp = mesh.size("ep"), mesh.size("tp")
    tokens = counts_of_rows(ranks[None], ep + 1)[0, :ep]  # not bincount, which waits for the device
    rows = counts_of_rows(chosen[None], ep * tp * here).view(ep, tp, here)[:, mesh.coord("tp")]
    leaving = torch.cat([tokens[:, None], rows], dim=1).long()
    group = mesh.group("ep")
    arriving = leaving if group is None else all_to_all_rows(leaving, group, [1] * ep, [1] * ep)
    return torch.stack([leaving, arriving])


class Copies(NamedTuple):
    """Copies of tokens in the order of where they go: m of the n·k choices are taken, and each has one."""

    choices: Tensor
    """[m] which of the n·k choices each copy is of."""
    of_tokens: Tensor
    """[m] the copies in the order of the choices: each token's one after the other."""
    starts: Tensor
    """[n] where in ``of_tokens`` each token's begin."""
    top_k: int


def copies_by(homes: Tensor, size: int) -> Copies:
    """The copies of the ``size`` choices with the least homes, [n, k], in the order of these."""
    n, top_k = homes.shape
    choices = homes.flatten().argsort(stable=True)[:size]
    in_order, of_tokens = choices.sort()
    starts = torch.searchsorted(in_order, torch.arange(0, n * top_k, top_k, device=homes.device))
    return Copies(choices, of_tokens, starts, top_k)


def copies_for_experts(chosen: Tensor, sizes: Sequence[int], mesh: Mesh) -> Copies:
    """The rows of this rank's experts, expert by expert: chosen [t, k] of the tokens that are here."""
    here = len(sizes)
    homes = chosen - here * (mesh.coord("ep") * mesh.size("tp") + mesh.coord("tp"))
    return copies_by(homes.where((homes >= 0) & (homes < here), here), sum(sizes))


def spread(x: Tensor, copies: Copies) -> Tensor:
    """Each copy's token: x [n, d] -> [m, d]; backward adds up each token's copies."""
    return with_transpose(x, partial(_copied, copies), partial(_added_up, copies))


def collect(rows: Tensor, copies: Copies) -> Tensor:
    """The sum of each token's copies: [m, d] -> [n, d]; backward gives each copy its token's gradient."""
    return with_transpose(rows, partial(_added_up, copies), partial(_copied, copies))


def _copied(copies: Copies, x: Tensor) -> Tensor:
    return x.index_select(0, copies.choices // copies.top_k)


def _added_up(copies: Copies, rows: Tensor) -> Tensor:
    """In one pass over the rows, and in float32 at least."""
    return F.embedding_bag(copies.of_tokens, rows.detach(), copies.starts, mode="sum")


# ------------------------------------------------------------------ what experts compute


@any_number_of_rows
def weighted_swiglu(gate_up: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) · up · weight: gate_up [m, 2·f], weight [m] -> [m, f].

    An expert's last matmul is linear, so its input is weighted instead of its output, which then nobody has to keep.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return (F.silu(gate) * up * weight[:, None]).to(gate_up.dtype)


def grouped_linear(rows: Tensor, weight: Tensor, sizes: list[int], tp: TensorParallel) -> Tensor:
    """x · wᵀ with the weight of each row's own expert: rows [m, k], weight [e, .., n, k] -> [m, n'].

    ``sizes``: how many rows each expert has, one after the other. Weight gradients take the way of ``linear``'s.
    """
    outputs: Tensor = _GroupedLinear.apply(rows, weight, sizes, tp)  # type: ignore[no-untyped-call]
    return outputs


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, sizes: list[int], tp: TensorParallel) -> Tensor:
        outputs = tp.matmuls.recall()
        if outputs is None:
            outputs = [_grouped_gemm(rows, _matrices(weight).transpose(1, 2), sizes, tp)]
            tp.matmuls.keep(outputs)
        ctx.save_for_backward(rows)
        ctx.weight, ctx.sizes, ctx.tp = weight, sizes, tp
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        input_grad = _grouped_gemm(grad, _matrices(ctx.weight), ctx.sizes, ctx.tp)
        accumulate = partial(_add_grouped_gemm, grad=grad, rows=rows, sizes=ctx.sizes, kernels=ctx.tp.kernels)
        return input_grad, weight_grad(ctx.tp, ctx.weight, accumulate), None, None


def _matrices(weight: Tensor) -> Tensor:
    return weight.flatten(1, -2)  # [e, .., n, k] -> [e, n', k]


def _grouped_gemm(rows: Tensor, weights: Tensor, sizes: list[int], tp: TensorParallel) -> Tensor:
    """rows · w for each expert's rows: [m, k], weights [e, k, n] -> [m, n].

    On a CPU always by torch's default library: oneDNN makes code anew for each number of rows that it has not met,
    which takes half as long as such a product. In fp8 one expert after another everywhere: for scales of blocks torch
    has no kernel that takes all of them.
    """
    if tp.fp8 is not None:
        parts = zip(torch.split(rows, sizes), weights, strict=True)
        return torch.cat([tp.fp8.gemms(part, [weight.t()])[0] for part, weight in parts])
    if tp.kernels == "accelerator" and rows.dtype == torch.bfloat16:  # one kernel, whose ends lie on the device
        ends = torch.tensor(sizes, dtype=torch.int32).cumsum(0, dtype=torch.int32).to(rows.device, non_blocking=True)
        result: Tensor = F.grouped_mm(rows.contiguous(), weights, offs=ends)
        return result
    outputs = rows.new_empty(len(rows), weights.shape[2])
    for part, output, weight in zip(torch.split(rows, sizes), torch.split(outputs, sizes), weights, strict=True):
        if len(part):
            torch.mm(part, weight, out=output)
    return outputs


def _add_grouped_gemm(
    buffer: Tensor, first: bool, grad: Tensor, rows: Tensor, sizes: list[int], kernels: Kernels
) -> None:
    """buffer += gradᵀ · rows, of each expert's rows; by the libraries of ``_grouped_gemm``."""
    kernels = "accelerator" if kernels == "accelerator" else "cpu"
    for total, left, right in zip(_matrices(buffer), torch.split(grad, sizes), torch.split(rows, sizes), strict=True):
        if len(right):
            add_gemm(total, left, right, first=first, kernels=kernels)
        elif first:  # nobody has chosen the expert
            total.zero_()
