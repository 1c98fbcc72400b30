"""What a layer with experts is made of: the choice, the way to the experts and back, their matmuls, and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotron.config.experts import MoEConfig
from nanotron.config.model import LlamaConfig
from nanotron.models.decoder import MLP
from nanotron.models.experts import MoE, Route
from nanotron.models.specs import sparse_mlp_specs
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
from nanotron.ops.fused import eager
from nanotron.ops.kernels import Kernels
from nanotron.ops.linear import TensorParallel
from nanotron.ops.weight_grads import WeightGrads
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import Init
from tests.pool import Pool

D, WIDTH, E = 8, 6, 8  # hidden size, inner width of an expert, experts
ONE = TensorParallel(Mesh(), WeightGrads(), kernels="cpu")


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ the choice


def plain_choice(scores: list[float], top_k: int, groups: int, top_k_groups: int, best_of_group: int) -> list[int]:
    """The experts of one token, best first."""
    size = len(scores) // groups
    members = [range(group * size, (group + 1) * size) for group in range(groups)]
    strength = [sum(sorted((scores[expert] for expert in of), reverse=True)[:best_of_group]) for of in members]
    kept = sorted(range(groups), key=lambda group: -strength[group])[:top_k_groups]
    allowed = [expert for group in kept for expert in members[group]]
    return sorted(allowed, key=lambda expert: -scores[expert])[:top_k]


@pytest.mark.parametrize(("groups", "top_k_groups", "best"), [(1, 1, 1), (4, 2, 1), (4, 2, 2), (4, 4, 2), (2, 1, 2)])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_experts_are_chosen_as_a_plain_loop_does(top_k: int, groups: int, top_k_groups: int, best: int) -> None:
    scores = normal(5, 7, E)  # of both signs, as scores with biases are
    chosen = choose(scores, top_k, groups=groups, top_k_groups=top_k_groups, best_of_group=best)
    expected = [[plain_choice(token.tolist(), top_k, groups, top_k_groups, best) for token in row] for row in scores]
    assert chosen.tolist() == expected
    counts = counts_of_rows(chosen, E)
    assert counts.tolist() == [[sum(token.count(expert) for token in row) for expert in range(E)] for row in expected]


def test_scores_are_shares_and_their_entropy_is_finite_where_one_is_nothing() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [-200.0, 5.0, -200.0, 5.0]])
    for scores_of in (softmax_scores, sigmoid_scores):
        scores, shares, entropy = scores_of(logits)
        assert torch.allclose(shares.sum(-1), torch.ones(2))
        assert torch.allclose(entropy, torch.tensor([4.0, 2.0]).log())
        assert scores.isfinite().all()


# -------------------------------------------------------- to the experts and back

PATTERNS: dict[str, list[list[list[int]]]] = {  # of each expert-parallel rank, the experts of each of its tokens
    "some": [[[0, 5], [7, 1], [2, 3], [4, 0], [1, 6]], [[5, 2], [0, 1], [6, 7], [3, 4], [0, 7]]],
    "all tokens to one expert": [[[3]] * 5] * 2,
    "an expert gets nothing": [[[0, 1], [2, 4], [5, 6], [7, 0], [1, 2]]] * 2,
    "a rank gets nothing": [[[0, 1], [3, 2], [1, 0], [2, 3], [0, 3]], [[1, 2], [0, 1], [2, 0], [3, 1], [1, 3]]],
    "a rank sends nothing to itself": [
        [[4, 5], [7, 6], [5, 4], [6, 7], [4, 7]],
        [[1, 2], [0, 1], [2, 0], [3, 1], [1, 3]],
    ],
}
PARAMETERS = {"gate_up": normal(E, 2, WIDTH, D, seed=1), "down": normal(E, D, WIDTH, seed=2)}


def tokens_of(pattern: str, rank: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [1, n, d], weights [1, n, k], experts [1, n, k] and the gradient of the result [1, n, d]."""
    chosen = torch.tensor([PATTERNS[pattern][rank]])
    x, grad = normal(1, 5, D, seed=10 + rank), normal(1, 5, D, seed=20 + rank)
    return x.requires_grad_(), normal(*chosen.shape, seed=30 + rank).requires_grad_(), chosen, grad


def plain_experts(x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    rows = []
    for token, its_weights, its_experts in zip(x[0], weights[0], chosen[0], strict=True):
        gates = [gate_up[expert] @ token for expert in its_experts.tolist()]  # [2, f] each
        inner = [F.silu(gate) * up for gate, up in gates]
        outputs = [down[expert] @ y for expert, y in zip(its_experts.tolist(), inner, strict=True)]
        rows.append(sum((w * y for w, y in zip(its_weights, outputs, strict=True)), torch.zeros(D)))
    return torch.stack(rows)[None]


def through_layers(rank: int, world: int, axes: Any) -> dict[str, dict[str, float]]:
    mesh = Mesh(axes, rank)
    mesh.create_groups()
    return {pattern: through_layer(mesh, pattern) for pattern in PATTERNS}


def through_layer(mesh: Mesh, pattern: str) -> dict[str, float]:
    """How far the layer is from the loop: its result, and the gradients of tokens, weights and this rank's experts."""
    moe = MoEConfig(num_experts=E, moe_intermediate_size=WIDTH)
    config = LlamaConfig(hidden_size=D, num_hidden_layers=1, num_attention_heads=2, moe_config=moe)
    boxes = {
        spec.name: spec.local_box(mesh) for spec in sparse_mlp_specs(config, "x", Init("zeros"), Init("zeros"), ())
    }

    def make(name: str) -> nn.Parameter:
        kind = name.split(".")[-2]
        whole = PARAMETERS.get(kind, torch.zeros(E, D))
        return nn.Parameter(whole[boxes[name].slices()].clone())

    tp = TensorParallel(mesh, WeightGrads(), kernels="cpu")
    layer = MoE(config, make, "x.mlp", tp, eager, shared=MLP)
    ranks = [tokens_of(pattern, ep) for ep in range(2)]
    x, weights, chosen, grad = ranks[mesh.coord("ep")]
    y = layer._routed(x, Route(chosen, weights, {}, {}))
    y.backward(grad)  # type: ignore[no-untyped-call]

    whole = {name: tensor.clone().requires_grad_() for name, tensor in PARAMETERS.items()}
    errors = {}
    for ep, (tokens, their_weights, experts, their_grad) in enumerate(ranks[: mesh.size("ep")]):
        copies = [tokens.detach().clone().requires_grad_(), their_weights.detach().clone().requires_grad_()]
        expected = plain_experts(copies[0], copies[1], experts, whole["gate_up"], whole["down"])
        expected.backward(their_grad)  # type: ignore[no-untyped-call]
        if ep == mesh.coord("ep"):
            assert x.grad is not None
            assert weights.grad is not None
            errors = {"y": _error(y, expected), "x": _error(x.grad, copies[0].grad)}
            errors["weights"] = _error(weights.grad, copies[1].grad)
    for name, mine in (("gate_up", layer.gate_up), ("down", layer.down)):
        box = boxes[f"x.mlp.experts.{name}.weight"]
        expected_grad = whole[name].grad
        assert expected_grad is not None
        errors[name] = _error(mine.grad, expected_grad[box.slices()])
    return errors


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


LAYOUTS = [{"dp": 1}, {"dp": {"edp": 1, "ep": 2}}, {"tp": 2}, {"dp": {"edp": 1, "ep": 2}, "tp": 2}]


@pytest.mark.parametrize("axes", LAYOUTS, ids=str)
def test_rows_reach_their_experts_and_come_back_wherever_they_are(pool: Pool, axes: Any) -> None:
    for found in pool.run(Mesh(axes).world, through_layers, axes):
        for pattern, errors in found.items():
            assert errors.keys() == {"y", "x", "weights", "gate_up", "down"}
            assert max(errors.values()) < 1e-13, (pattern, errors)


# ------------------------------------------------------------------------ matmuls


@pytest.mark.parametrize("sizes", [[3, 0, 5, 8], [0, 0, 16, 0], [16, 0, 0, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize(
    ("kernels", "dtype"), [("cpu", torch.float64), ("cpu", torch.bfloat16), ("accelerator", torch.bfloat16)], ids=str
)
def test_each_expert_multiplies_its_own_rows(kernels: Kernels, dtype: torch.dtype, sizes: list[int]) -> None:
    rows = normal(sum(sizes), 16).to(dtype).requires_grad_()
    weight = normal(4, 2, 8, 16, seed=1).to(dtype).requires_grad_()
    grad = normal(sum(sizes), 16, seed=2).to(dtype)
    tp = TensorParallel(Mesh(), WeightGrads(), kernels=kernels)
    weight_grad = torch.full_like(weight, torch.nan).detach()  # the first gradient writes over what is there
    tp.weight_grads.bind(weight, weight_grad.detach, is_first=lambda: True)
    y = grouped_linear(rows, weight, sizes, tp)
    y.backward(grad)  # type: ignore[no-untyped-call]
    plain_rows, plain_weight = (tensor.detach().double().requires_grad_() for tensor in (rows, weight))
    parts = zip(torch.split(plain_rows, sizes), plain_weight, strict=True)
    expected = torch.cat([part @ matrix.flatten(0, 1).t() for part, matrix in parts])
    expected.backward(grad.double())  # type: ignore[no-untyped-call]
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-12, "atol": 1e-12}
    for found, right in ((y, expected), (rows.grad, plain_rows.grad), (weight_grad, plain_weight.grad)):
        assert found is not None
        assert right is not None
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), right, **tolerance)


def test_gradients_are_those_of_finite_differences() -> None:
    chosen = torch.tensor(PATTERNS["some"][0])
    sizes = numbers_of(chosen, torch.zeros_like(chosen), E, Mesh()).sizes
    copies = copies_for_experts(chosen, sizes, Mesh())
    weights = normal(5, 2, seed=3)

    def layer(x: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        rows, weight = spread(x, copies), weights.flatten()[copies.choices]
        rows = weighted_swiglu(grouped_linear(rows, gate_up, sizes, ONE), weight)
        return collect(grouped_linear(rows, down, sizes, ONE), copies)

    inputs = [normal(5, D), weights, *PARAMETERS.values()]
    assert torch.autograd.gradcheck(layer, [tensor.clone().requires_grad_() for tensor in inputs], fast_mode=True)
    router = [normal(1, 5, D).requires_grad_(), normal(E, D, seed=4).requires_grad_()]
    assert torch.autograd.gradcheck(lambda x, weight: router_logits(x, weight, ONE), router)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_choice_gets_one_row_on_the_rank_of_its_expert(pattern: str) -> None:
    chosen = torch.tensor(PATTERNS[pattern][0])
    taken = []
    for rank in range(4):
        mesh, shard = Mesh({"dp": {"edp": 1, "ep": 2}, "tp": 2}, rank), slice(rank * 2, rank * 2 + 2)
        sizes = counts_of_rows(chosen[None], E)[0, shard].int().tolist()
        copies = copies_for_experts(chosen, sizes, mesh)
        experts = chosen.flatten()[copies.choices].tolist()
        assert experts == [expert for expert, size in zip(range(E)[shard], sizes, strict=True) for _ in range(size)]
        in_order = copies.choices[copies.of_tokens].tolist()
        assert in_order == sorted(in_order)
        starts = copies.starts.tolist()
        tokens = [in_order[lo:hi] for lo, hi in zip(starts, [*starts[1:], len(in_order)], strict=True)]
        assert all(choice // chosen.shape[1] == token for token, choices in enumerate(tokens) for choice in choices)
        taken += in_order
    assert sorted(taken) == list(range(chosen.numel()))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_token_travels_once_to_each_rank_that_has_experts_of_it(pattern: str) -> None:
    chosen = torch.tensor(PATTERNS[pattern][0])
    for tp in range(2):
        mesh = Mesh({"dp": {"edp": 1, "ep": 2}, "tp": 2}, tp)
        ranks = ranks_of(chosen, E // 4, mesh)
        wanted = [
            (ep, token)
            for ep in range(2)
            for token, experts in enumerate(chosen.tolist())
            if any(expert // 2 == 2 * ep + tp for expert in experts)
        ]
        choices = copies_by(ranks, len(wanted)).choices
        assert (
            list(zip(ranks.flatten()[choices].tolist(), (choices // chosen.shape[1]).tolist(), strict=True)) == wanted
        )
