"""What a block keeps from its forward for its backward: exactly the tensors of the formula in docs/performance.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanotron.config import Config
from nanotron.ops.kernels import Kernels
from tests.plan.configs import small
from tests.pool import Pool
from tests.structure.blocks import planned_block, real_block

SIZES: dict[str, Any] = {"hidden": 64, "micro_batch": 2, "sequence": 96}
LAYOUTS: list[dict[str, Any]] = [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}]
LAYOUTS += [{**layout, "dtype": "bfloat16"} for layout in LAYOUTS] + [{"tp": 2, "recompute": True}]


def kept_bytes(config: Config, *, accelerator: bool) -> int:
    """The formula: bytes that one block keeps of one microbatch on one rank.

    accelerator: one kernel for the norms and one for attention; else those of a CPU, where a norm keeps its
    normalised input too, and in half precision works in float32, and attention keeps copies of q, k and v.
    """
    model, layout, tokens = config.model.model_config, config.parallelism, config.tokens
    d, f, t, e = model.hidden_size, model.intermediate_size, layout.tp, model.head_dim
    heads, kv_heads = model.num_attention_heads // t, model.num_key_value_heads // t
    between = d // t if layout.sequence_parallel else d  # of a token between two matrix products that are cut over tp
    entered = between if layout.tp_recompute_allgather else d
    size = torch.empty(0, dtype=getattr(torch, config.model.dtype)).element_size()
    half = size == 2 and not accelerator
    if layout.recompute_layer:
        per_token = size * between
    else:
        per_token = size * 2 * entered  # what enters attention and MLP
        per_token += size * (2 * heads + kv_heads) * e  # q and k, rotated; what attention gives
        per_token += size * (
            2 * kv_heads * e if accelerator else kv_heads * e
        )  # v, in one tensor with k unrotated; a copy
        per_token += size * 4 * f // t  # gate | up, silu(gate), silu(gate) · up
        per_token += 0 if half else size * 2 * between  # the stream of residuals, which the norms keep
        per_token += 4 * heads if accelerator else 0  # attention's log Σ exp of each row
        per_token += 2 * 4 * between // d  # a norm's 1/√(mean square) of each token
        if not accelerator:
            per_token += (
                4 * 4 * between if half else size * 2 * between
            )  # norms: float32 x and normalised; or only this
    return per_token * tokens.micro_batch_size * tokens.sequence_length


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: ",".join(f"{k}={v}" for k, v in layout.items()) or "one")
def test_a_block_keeps_what_the_formula_and_the_planner_say(pool: Pool, layout: dict[str, Any]) -> None:
    config = small(**SIZES, **layout)
    expected = kept_bytes(config, accelerator=False)
    for block in pool.run(config.parallelism.tp, real_block, config, "cpu"):
        assert block.kept == expected
    assert planned_block(config, "cpu").kept == planned_block(config, "cpu_onednn").kept == expected
    assert planned_block(config, "accelerator").kept == kept_bytes(config, accelerator=True)


@pytest.mark.parametrize("kernels", ["accelerator", "cpu"])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_formula_holds_for_any_sizes(kernels: Kernels, kv_heads: int, dtype: str) -> None:
    config = small(hidden=128, micro_batch=3, sequence=200, dtype=dtype)
    shape = replace(config.model.model_config, num_key_value_heads=kv_heads, intermediate_size=320)
    config = replace(config, model=replace(config.model, model_config=shape))
    assert planned_block(config, kernels).kept == kept_bytes(config, accelerator=kernels == "accelerator")


def test_gathered_inputs_are_kept_whole_when_they_are_not_gathered_again() -> None:
    config = small(**SIZES, tp=2, sequence_parallel=True)
    config.parallelism.tp_recompute_allgather = False
    assert planned_block(config, "accelerator").kept == kept_bytes(config, accelerator=True)
    assert planned_block(config, "cpu").kept == kept_bytes(config, accelerator=False)
