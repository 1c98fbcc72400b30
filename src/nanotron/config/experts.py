"""Mixture of experts: which layers have experts, how many, and how tokens are routed to them."""

from __future__ import annotations

from typing import Literal

from nanotron.config.compat.retired import MOE, retires
from nanotron.config.keys import Count, Float, Int, Lower, Width, key, section


@section
@retires(MOE)
class MoEConfig:
    """A sparse model: in some layers many small MLPs, the experts, of which each token uses a few. No token is dropped.

    A token's experts are those of the highest scores; what they give is weighted by their scores and added up.
    """

    num_experts: Count = key(8, "Experts of a layer.", gt=0)
    top_k: Count = key(2, "Experts of each token.", gt=0)
    moe_intermediate_size: Width = key(1408, "Inner width of an expert.", gt=0)
    layers: list[Int] = key(
        None,
        "Layers that have experts, by number from 0; [-1] is all. The others have the dense MLP.",
        factory=lambda: [-1],
        min_length=1,
    )
    enable_shared_expert: bool = key(False, "Add an MLP that all tokens use.")
    shared_expert_intermediate_size: Width = key(5632, "Inner width of the shared expert.", gt=0)
    shared_expert_gate: bool = key(
        True, "Weight what the shared expert gives by the sigmoid of one more projection (Qwen2-MoE)."
    )
    score_function: Lower[Literal["softmax", "sigmoid"]] = key(
        "softmax", "How the router's logits become scores: softmax over all experts, or each expert's sigmoid."
    )
    normalize_top_k: bool = key(False, "Divide the scores of a token's experts by their sum.")
    routed_scaling_factor: Float = key(1.0, "Factor of what the routed experts give.", gt=0)
    num_expert_groups: Count = key(
        1,
        "Groups of neighbouring experts; a token uses experts of `top_k_groups` of them only. A group's score is its"
        " best expert's, or with sigmoid scores its two best experts' sum (DeepSeek).",
        gt=0,
    )
    top_k_groups: Count = key(1, "Groups whose experts a token may use.", gt=0)
    router_aux_loss_coef: Float = key(
        0.01,
        "Weight of the loss that balances experts: of each row of tokens, (experts / top_k) · Σ share of the row's"
        " choices · mean score; 1 when all experts are used alike (arXiv 2101.03961).",
        ge=0,
    )
    router_z_loss_coef: Float = key(
        0.0, "Weight of the router's z-loss: (log of the softmax's sum)² of its logits (arXiv 2202.08906).", ge=0
    )
    bias_update_rate: Float | None = key(
        None,
        "Balance without a loss (arXiv 2408.15664): after each step, the bias that is added to an expert's score when"
        " experts are chosen moves by this much, up if fewer tokens than average chose it, else down. 0 keeps the bias"
        " as it is, null is no bias.",
        ge=0,
    )

    def has_experts(self, layer: int) -> bool:
        """Whether a layer, by number from 0, has experts."""
        return self.layers == [-1] or layer in self.layers
