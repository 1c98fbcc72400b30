"""What a block keeps from its forward for its backward: exactly the tensors of the formula in docs/performance.md."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from nanotron.config import Config
from nanotron.data.context import ContextCut
from nanotron.ops.attention import LONG
from nanotron.ops.context import ContextMode, context_attention
from nanotron.ops.kernels import Kernels
from nanotron.ops.recompute import Recompute
from nanotron.plan.counting import Counting
from nanotron.plan.fakes import META, FakeMesh, counting
from nanotron.plan.measure import ChunkCounts
from tests.models.tiny import mean_loss, tiny_batch, tiny_config, whole_model
from tests.plan.configs import small
from tests.pool import Pool
from tests.structure.blocks import SIZES, planned, planned_block, real_block

CUT_IN_THREE = SIZES | {"sequence": 96}
LAYOUTS: list[dict[str, Any]] = [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}]
LAYOUTS += [{**layout, "dtype": "bfloat16"} for layout in LAYOUTS] + [{"tp": 2, "recompute": True}]
LAYOUTS += [
    {"cp": 3, "sequence": 96},
    {"cp": 2, "tp": 2, "sequence_parallel": True},
    {"cp": 2, "cp_mode": "ALL_TO_ALL"},
]
SELECTIVE: list[dict[str, Any]] = [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True, "dtype": "bfloat16"}, {"cp": 2}]
LAYOUTS += [{**layout, "recompute": "selective"} for layout in SELECTIVE]


def kept_bytes(config: Config, *, accelerator: bool) -> int:
    """The formula: bytes that one block keeps of one microbatch on one rank.

    accelerator: one kernel for the norms and one for attention; else those of a CPU, where a norm keeps its
    normalised input too, and in half precision works in float32, and attention keeps copies of q, k and v.
    """
    model, layout, tokens = config.model.model_config, config.parallelism, config.tokens
    d, f, t, e = model.hidden_size, model.intermediate_size, layout.tp, model.head_dim
    heads, kv_heads = model.num_attention_heads // t, model.num_key_value_heads // t
    cut = layout.cp_mode if layout.context_parallel_size > 1 else None
    between = d // t if layout.sequence_parallel else d  # of a token between two matmuls that are cut over tp
    entered = between if layout.tp_recompute_allgather else d
    size = torch.empty(0, dtype=getattr(torch, config.model.dtype)).element_size()
    half = size == 2 and not accelerator
    if layout.recompute_layer is True:
        per_token = size * between
    elif layout.recompute_layer == "selective":
        per_token = size * (2 * between + (heads + 2 * kv_heads) * e + 2 * f // t)  # input, and matmuls but the last
    else:
        per_token = size * 2 * entered  # what enters attention and MLP
        per_token += size * (2 * heads + kv_heads) * e  # q and k, rotated; what attention gives
        # v, in one tensor with k unrotated; a copy; where both are gathered, what is gathered holds k and v
        per_token += size * (2 if accelerator and not cut else 1) * kv_heads * e
        if cut == "ALL_TO_ALL" and accelerator:
            per_token += size * heads * e  # what attention gives before it is exchanged: the kernel's backward reads it
        per_token += size * 4 * f // t  # gate | up, silu(gate), silu(gate) · up
        per_token += 0 if half else size * 2 * between  # the stream of residuals, which the norms keep
        per_token += 4 * heads if accelerator and cut != "ALL_GATHER" else 0  # attention's log Σ exp of each row
        per_token += 2 * 4 * between // d  # a norm's 1/√(mean square) of each token
        if not accelerator:
            per_token += (
                4 * 4 * between if half else size * 2 * between
            )  # norms: float32 x and normalised; or only this
    return per_token * tokens.micro_batch_size * tokens.sequence_length // layout.context_parallel_size


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: ",".join(f"{k}={v}" for k, v in layout.items()) or "one")
def test_a_block_keeps_what_the_formula_and_the_planner_say(pool: Pool, layout: dict[str, Any]) -> None:
    config = small(**(SIZES | layout))
    expected = kept_bytes(config, accelerator=False)
    for block in pool.run(config.parallelism.world_size, real_block, config, "cpu"):
        assert block.kept == expected
    assert planned_block(config, "cpu").kept == expected
    assert planned_block(config, "accelerator").kept == kept_bytes(config, accelerator=True)


@pytest.mark.parametrize("layout", [{}, LAYOUTS[5], {"recompute": "selective"}, {"cp": 2}], ids=str)
def test_one_dnn_keeps_as_much_as_a_cpus_other_kernels(layout: dict[str, Any]) -> None:
    config = small(**SIZES, **layout)
    assert planned_block(config, "cpu_onednn").kept == kept_bytes(config, accelerator=False)


@pytest.mark.parametrize(
    ("kernels", "kv_heads", "dtype"),  # every pair of two
    [
        ("accelerator", 1, "float32"),
        ("accelerator", 2, "bfloat16"),
        ("accelerator", 8, "float32"),
        ("cpu", 1, "bfloat16"),
        ("cpu", 2, "float32"),
        ("cpu", 8, "bfloat16"),
    ],
)
def test_the_formula_holds_for_any_sizes(kernels: Kernels, kv_heads: int, dtype: str) -> None:
    config = small(hidden=128, micro_batch=3, sequence=72, dtype=dtype)
    shape = replace(config.model.model_config, num_key_value_heads=kv_heads, intermediate_size=320)
    config = replace(config, model=replace(config.model, model_config=shape))
    assert planned_block(config, kernels).kept == kept_bytes(config, accelerator=kernels == "accelerator")


def test_gathered_inputs_are_kept_whole_when_they_are_not_gathered_again() -> None:
    config = small(**SIZES, tp=2, sequence_parallel=True)
    config.parallelism.tp_recompute_allgather = False
    assert planned_block(config, "accelerator").kept == kept_bytes(config, accelerator=True)
    assert planned_block(config, "cpu").kept == kept_bytes(config, accelerator=False)


@pytest.mark.parametrize(("kernels", "sequence"), [("accelerator", 96), ("cpu", 96), ("cpu", 6 * LONG)])
def test_context_parallel_ranks_keep_their_part_and_gathered_keys_of_one_layer_in_passing(
    kernels: Kernels, sequence: int
) -> None:
    whole, part = (small(**(CUT_IN_THREE | {"sequence": sequence}), cp=cp) for cp in (1, 3))
    assert 3 * planned_block(part, kernels).kept <= planned_block(whole, kernels).kept
    chunks = [planned(part, layers, kernels) for layers in (1, 2, 3)]
    assert len({chunk.forward_peak - chunk.kept for chunk in chunks}) == 1
    assert len({chunk.fused_peak - chunk.kept for chunk in chunks[1:]}) == 1


@pytest.mark.parametrize("mode", ["ALL_GATHER", "ALL_TO_ALL"])
@pytest.mark.parametrize("cp", [1, 2])
def test_attention_takes_memory_linear_in_tokens_with_documents_and_context(cp: int, mode: ContextMode) -> None:
    short, long = (peak_of_attention(length, cp, mode) for length in (2048, 4096))
    assert long <= 2.01 * short


def peak_of_attention(length: int, cp: int, mode: ContextMode) -> int:
    """Bytes at the worst moment of forward and backward by an accelerator's kernels, of rows with documents."""
    with counting() as counter:
        mesh = FakeMesh({"cp": cp})
        starts = np.repeat(
            [0, length // 5, length // 2], [length // 5, length // 2 - length // 5, length - length // 2]
        )
        _, spans = ContextCut(mesh, mode).of((2, length), np.stack([starts, np.zeros_like(starts)]))
        leaves = [torch.empty(2, length // cp, heads, 16, device=META, requires_grad=True) for heads in (4, 2, 2)]
        attended = context_attention(*leaves, spans, mesh, mode=mode, kernels="accelerator")
        torch.autograd.grad(attended, leaves, torch.empty_like(attended))
        return counter.peak


def counts(layout: dict[str, Any], recompute: bool | str) -> ChunkCounts:
    return planned(small(**SIZES, **layout, recompute=recompute), 2, "accelerator")


@pytest.mark.parametrize("layout", [{}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}], ids=["one", "tp", "sp"])
def test_selective_recomputation_multiplies_nothing_again_and_sends_nothing_over_tp_again(
    layout: dict[str, Any],
) -> None:
    plain, selective, whole = (counts(layout, recompute) for recompute in (False, "selective", True))
    again = {key for key in plain.backward if selective.backward[key] != plain.backward[key]}
    assert again == {"attention", "moved", "kernels"}
    assert selective.forward == plain.forward
    assert selective.backward["attention"] == whole.backward["attention"]
    assert selective.backward["matmul"] < whole.backward["matmul"]


@pytest.mark.parametrize(("kernels", "sequence"), [("cpu", 128), ("cpu_onednn", 128), ("cpu", 4 * LONG)])
def test_a_cpus_backward_of_gathered_attention_multiplies_as_often_as_that_of_whole_rows(
    kernels: Kernels, sequence: int
) -> None:
    whole, part = (planned(small(**(SIZES | {"sequence": sequence}), cp=cp), 1, kernels) for cp in (1, 2))
    for of_whole, of_part in ((whole.forward, part.forward), (whole.backward, part.backward)):
        assert (of_part["matmul"], of_part["attention"]) == (of_whole["matmul"] // 2, of_whole["attention"] // 2)


@pytest.mark.parametrize("recompute", get_args(Recompute))
def test_what_layers_keep_is_gone_after_their_backward_and_with_a_forward_that_has_none(recompute: Any) -> None:
    model, batch = whole_model(tiny_config(), dtype=torch.float32, recompute=recompute), tiny_batch()
    with Counting() as counter:
        mean_loss(model, batch)[1].backward()  # type: ignore[no-untyped-call]
        gc.collect()
        before = counter.alive
        gc.disable()  # tensors and their graph may not hold each other
        try:
            loss = mean_loss(model, batch)[1]
            assert counter.alive > before + 10_000
            loss.backward()  # type: ignore[no-untyped-call]
            del loss
            assert counter.alive == before
            mean_loss(model, batch)
            assert counter.alive == before
        finally:
            gc.enable()


@pytest.mark.parametrize("recompute", [True, "selective"])
def test_inputs_of_layers_in_host_memory_change_no_bit_and_take_nothing_of_a_device(
    monkeypatch: pytest.MonkeyPatch, recompute: Any
) -> None:
    moved: list[torch.Size] = []

    def watched(pin_memory: bool) -> Any:
        return saved_tensors_hooks(lambda x: moved.append(x.shape) or x.clone(), lambda x: x.clone())

    monkeypatch.setattr("nanotron.ops.recompute.save_on_cpu", watched)
    config, batch, grads = tiny_config(), tiny_batch(), []
    for offload in (False, True):
        model = whole_model(config, dtype=torch.float32, recompute=recompute, recompute_offload=offload)
        mean_loss(model, batch)[1].backward()  # type: ignore[no-untyped-call]
        grads.append({name: weight.grad for name, weight in model.weights.items()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
    inputs = torch.Size([*batch.tokens.shape, config.hidden_size])
    assert moved == [inputs] * config.num_hidden_layers

    kept = small(**SIZES, recompute=recompute)
    offloaded = replace(kept, parallelism=replace(kept.parallelism, recompute_offload=True))
    blocks = [planned_block(each, "accelerator", layers=2).kept for each in (kept, offloaded)]
    tokens, model_config = kept.tokens, kept.model.model_config
    input_bytes = tokens.micro_batch_size * tokens.sequence_length * model_config.hidden_size * 4
    assert blocks[0] - blocks[1] == input_bytes
