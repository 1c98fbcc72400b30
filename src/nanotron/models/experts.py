"""The sparse half of a decoder layer: a router, its experts, and the one that all tokens share.

    b rows   s tokens   t tensor-parallel ranks   d hidden size   E experts   k experts of each token
    f inner width of an expert

The router works on this rank's tokens, outside of what tensor parallelism cuts, like a norm. Then tokens enter as they
enter an MLP; each tensor-parallel rank sends those of its own experts over ep, and adds what they gave to the others'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor, nn

from nanotron.ops.experts import (
    choose,
    collect,
    copies_by,
    copies_for_experts,
    counts_of_rows,
    grouped_linear,
    numbers_of,
    ranks_of,
    router_logits,
    sigmoid_scores,
    softmax_scores,
    spread,
    weighted_swiglu,
)
from nanotron.ops.fused import Fuse
from nanotron.ops.linear import TensorParallel, linear
from nanotron.parallel.comm import all_gather, all_reduce_, exchange_rows, scatter_sum, sum_from

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig

Make = Callable[[str], nn.Parameter]


class Route(NamedTuple):
    """Which experts each of this rank's tokens uses, and what its router adds to losses and metrics."""

    chosen: Tensor
    """[b, s, k] int64."""
    weights: Tensor
    """[b, s, k] of the experts' results, in float32 at least."""
    losses: dict[str, Tensor]
    """Sums over this rank's tokens: "balance", "router_z"."""
    metrics: dict[str, Tensor]
    """Sums over this rank's tokens, float64: "load" [E], how many chose each expert, and "entropy"."""


class Router(nn.Module):
    """Scores the experts for each token and chooses the best ones, in float32 at least."""

    def __init__(self, config: ModelConfig, make: Make, name: str, tp: TensorParallel) -> None:
        super().__init__()
        assert config.moe_config is not None
        self.moe, self.tp = config.moe_config, tp
        self.weight = make(f"{name}.weight")
        self.bias = make(f"{name}.bias") if self.moe.bias_update_rate is not None else None

    def forward(self, x: Tensor) -> Route:
        moe = self.moe
        logits = router_logits(x, self.weight, self.tp)  # [b, s, d] -> [b, s, E]
        sigmoid = moe.score_function == "sigmoid"
        scores, shares, entropy = sigmoid_scores(logits) if sigmoid else softmax_scores(logits)
        chosen = choose(
            scores.detach() if self.bias is None else scores.detach() + self.bias,
            moe.top_k,
            groups=moe.num_expert_groups,
            top_k_groups=moe.top_k_groups,
            best_of_group=2 if sigmoid else 1,
        )
        weights = scores.gather(-1, chosen)
        if moe.normalize_top_k:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * moe.routed_scaling_factor
        counts = counts_of_rows(chosen, moe.num_experts)
        metrics = {"load": counts.sum(0), "entropy": entropy.detach().double().sum()}
        return Route(chosen, weights, self._losses(logits, shares, counts), metrics)

    def _losses(self, logits: Tensor, shares: Tensor, counts: Tensor) -> dict[str, Tensor]:
        """``counts`` [b, E] of this rank's tokens. A row whose experts are all used alike adds its number of tokens."""
        moe, losses = self.moe, {}
        if moe.router_aux_loss_coef:
            mesh, parts = self.tp.mesh, 1
            for axis in ("cp", "tp") if self.tp.sequence_parallel else ("cp",):  # of each row, ranks have tokens
                all_reduce_(counts, mesh.group(axis))
                parts *= mesh.size(axis)
            scale = moe.router_aux_loss_coef * moe.num_experts / (moe.top_k * shares.shape[1] * parts)
            losses["balance"] = scale * (counts.to(shares.dtype) * shares.sum(1)).sum()
        if moe.router_z_loss_coef:
            losses["router_z"] = moe.router_z_loss_coef * logits.logsumexp(-1).square().sum()
        return losses


class MoE(nn.Module):
    """Σ weight · expert(x) over a token's experts, and the shared one's; no token is dropped (arXiv 1701.06538)."""

    def __init__(
        self,
        config: ModelConfig,
        make: Make,
        name: str,
        tp: TensorParallel,
        fuse: Fuse,
        shared: Callable[..., nn.Module],
    ) -> None:
        """``shared``: the class of the MLP that all tokens use."""
        super().__init__()
        assert config.moe_config is not None
        self.moe, self.tp, self.fuse = config.moe_config, tp, fuse
        self.router = Router(config, make, f"{name}.router", tp)
        self.shared = shared(config, make, f"{name}.shared", tp, fuse) if self.moe.enable_shared_expert else None
        gated = self.shared is not None and self.moe.shared_expert_gate
        self.shared_gate = make(f"{name}.shared_gate.weight") if gated else None
        self.gate_up, self.down = make(f"{name}.experts.gate_up.weight"), make(f"{name}.experts.down.weight")

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        route = self.router(x)
        if self.shared is None:
            return self._routed(x, route), route.losses, route.metrics
        y = self.shared(x)  # [b, s, d]
        if self.shared_gate is not None:
            (gate,) = linear(x, [self.shared_gate], replace(self.tp, fp8=None))  # [b, s, d] -> [b, s, 1]
            y = y * gate.sigmoid()
        return y + self._routed(x, route), route.losses, route.metrics

    def _routed(self, x: Tensor, route: Route) -> Tensor:
        """[b, s, d] ([b, s/t, d]) to the experts and back."""
        tp, mesh = self.tp, self.tp.mesh
        x, weights = tp.entered(x), tp.entered(route.weights)
        chosen = all_gather(route.chosen, mesh.group("tp"), dim=1) if tp.sequence_parallel else route.chosen
        shape = x.shape
        x, weights, chosen = (part.flatten(0, 1) for part in (x, weights, chosen))  # [n, d], [n, k], [n, k]
        ranks = ranks_of(chosen, len(self.down), mesh)
        numbers = numbers_of(chosen, ranks, len(self.down), mesh)
        sent = copies_by(ranks, sum(numbers.sent)) if mesh.size("ep") > 1 else None
        if sent:
            x, weights, chosen = (
                exchange_rows(spread(part, sent), mesh, "ep", numbers.sent, numbers.received)
                for part in (x, weights, chosen)
            )  # those of the t tokens that come here
        copies = copies_for_experts(chosen, numbers.sizes, mesh)
        rows, weight = spread(x, copies), weights.flatten()[copies.choices]  # [m, d], [m]
        gate_up = grouped_linear(rows, self.gate_up, numbers.sizes, tp)  # [m, d] -> [m, 2·f]
        rows = grouped_linear(self.fuse(weighted_swiglu)(gate_up, weight), self.down, numbers.sizes, tp)  # [m, d]
        y = collect(rows, copies)  # [t, d]
        if sent:
            y = collect(exchange_rows(y, mesh, "ep", numbers.received, numbers.sent), sent)  # [n, d]
        y = y.view(shape)
        return scatter_sum(y, mesh, "tp", dim=1) if tp.sequence_parallel else sum_from(y, mesh, "tp")
