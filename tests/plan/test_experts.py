"""The planner on models with experts: how many parameters, where they are, what they send, and what would help."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from nanotron.check import summary
from nanotron.config import Config, get_config_from_dict
from nanotron.config.document import parse
from nanotron.config.presets import starter
from nanotron.models.hf_config import hf_config
from nanotron.models.specs import StageModules
from nanotron.plan.fixes import cheapest_fixes
from nanotron.plan.hardware import Cluster, find_cluster
from nanotron.plan.layouts import changed
from nanotron.plan.measure import Measurements, measure_chunk
from nanotron.plan.predict import Planner
from nanotron.plan.search import Fastest, legal_layouts
from nanotron.plan.stage_costs import profiled_costs
from nanotron.plan.text import plan_text, search_text
from nanotron.training.topology import layers_of_stages, num_parameters
from tests.plan.configs import small

EXPERTS: dict[str, Any] = {"num_experts": 8, "top_k": 2, "moe_intermediate_size": 96}
ONE: dict[str, Any] = {"hidden": 64, "sequence": 64, "layers": 2, "experts": EXPERTS}
EP = "parallelism.expert_parallel_size"


def mixtral() -> Config:
    """Mixtral-8x7B."""
    values = small().to_dict()
    values["model"]["model_config"] = {
        "is_mistral_config": True,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 32000,
        "moe_config": {"num_experts": 8, "top_k": 2, "moe_intermediate_size": 14336, "normalize_top_k": True},
    }
    return get_config_from_dict(values)


@pytest.mark.parametrize(
    ("config", "total", "active"),
    [
        (get_config_from_dict(parse(starter("30b-a3b", 64)).values), 30.5e9, 3.35e9),
        (mixtral(), 46.7e9, 12.9e9),
    ],
    ids=["Qwen3-30B-A3B", "Mixtral-8x7B"],
)
def test_models_have_the_parameters_that_transformers_gives_them(config: Config, total: float, active: float) -> None:
    theirs = hf_config(config.model.model_config, "bfloat16")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**theirs))
    assert num_parameters(config)[0] == sum(weight.numel() for weight in model.parameters())
    assert num_parameters(config) == pytest.approx((total, active), rel=2e-3)


@pytest.fixture(scope="module")
def planner() -> Planner:
    """One for all: it measures what layouts share once."""
    return Planner(find_cluster("h100", 8))


def test_experts_are_cut_over_ep_and_tp_and_their_optimizer_state_over_the_copies_that_are_left(
    planner: Planner,
) -> None:
    one, shared, cut = (
        planner.memories(small(**ONE, dp=dp, ep=ep, tp=tp))[0] for dp, ep, tp in ((8, 1, 1), (8, 4, 1), (4, 2, 2))
    )
    experts = 2 * 8 * 3 * 64 * 96 * 4  # bytes of float32, in both layers
    assert one.parameters - shared.parameters == experts * 3 // 4
    assert one.parameters - cut.parameters > experts * 3 // 4  # and attention, cut over tp
    assert (shared.moments, cut.moments) == pytest.approx((one.moments,) * 2, rel=0.02)  # all that is spread over 8


def test_a_token_keeps_as_much_whatever_the_number_of_experts_and_of_their_ranks(planner: Planner) -> None:
    kept = {
        measure_chunk(
            small(**ONE | {"experts": EXPERTS | {"num_experts": experts}}, dp=ep, ep=ep),
            StageModules(range(1, 2), embed=False, head=False),
            "accelerator",
        ).kept
        // 1024
        for experts, ep in ((8, 1), (8, 4), (16, 2))
    }
    assert max(kept) - min(kept) <= 40  # KiB: the scores of more experts


def test_layers_with_and_without_experts_are_counted_each_by_one_more_of_it() -> None:
    config = small(**ONE | {"layers": 7, "experts": EXPERTS | {"layers": [1, 3, 4, 6]}}, dp=2, ep=2)
    whole = StageModules.whole(config.model.model_config)
    assert Measurements("accelerator").chunk(config, whole) == measure_chunk(config, whole, "accelerator")


@pytest.mark.parametrize("sparse", [[], [1, 3, 4]], ids=["dense", "sparse"])
@pytest.mark.parametrize("recompute", [False, "selective"])
def test_the_work_of_a_whole_model_is_that_of_its_parts(recompute: bool | str, sparse: list[int]) -> None:
    layers = {"layers": 5, "experts": EXPERTS | {"layers": sparse} if sparse else None}
    config = small(**ONE | layers, dp=2, ep=2 if sparse else 1, micro_batch=4, recompute=recompute)
    whole = StageModules.whole(config.model.model_config)
    measured = measure_chunk(config, whole, "accelerator")
    expected_works = measured.forward, measured.backward, measured.weights
    for found, expected in zip(Measurements("accelerator").least(config, whole), expected_works, strict=True):
        assert found == pytest.approx(expected, rel=0.02)
        assert all(found[key] <= expected[key] for key in expected)
        # but for those that add up the routers' losses
        assert expected["kernels"] - found["kernels"] <= 2 * len(sparse)


def test_an_expert_s_weight_gradient_is_counted_for_all_of_them() -> None:
    few, many = (
        measure_chunk(
            small(**ONE | {"experts": EXPERTS | {"num_experts": experts}}),
            StageModules(range(1, 2), embed=False, head=False),
            "cpu",
        ).weights
        for experts in (8, 16)
    )
    assert many["kernels"] - few["kernels"] == 2 * 8  # two matrices of each
    assert many["matmul"] - few["matmul"] == 2 * 128 * 64 * 8  # the router's; rows are as many


def test_stages_of_both_kinds_of_layer_are_levelled_by_their_flops() -> None:
    wide = EXPERTS | {"moe_intermediate_size": 4096, "layers": [6, 7]}
    (first, _), (_, _) = layers_of_stages(small(pp=2, layers=8, experts=wide))
    assert first == 0
    assert layers_of_stages(small(pp=2, layers=8, experts=wide))[0][1] > layers_of_stages(small(pp=2, layers=8))[0][1]


def test_a_plan_says_what_is_active_where_experts_are_and_what_is_sent_over_which_links(planner: Planner) -> None:
    config = small(**ONE, dp=16, ep=4, dtype="bfloat16", micro_batch=1, accumulation=2)
    text = plan_text(planner.plan(config))
    for words in (
        " active) parameters in bfloat16",
        "dp 16 · pp 1 (1f1b) · tp 1 (ALL_REDUCE) · ep 4, zero stage 1",
        "8 experts in 2 of 2 layers, 2 of each layer on a rank (0.00 GiB of weights); a token uses 2,",
        "of experts those that a token uses",
    ):
        assert words in text
    lines = [line.split() for line in text.splitlines()]
    assert ["ep", "4", "links", "all_to_all", "32"] in [line[:5] for line in lines]  # 8 for 2 layers and 2 microbatches
    assert ["edp", "4", "network", "reduce_scatter", "1"] in [line[:5] for line in lines]
    assert any(" · ep 4, zero" in line and "layout" in line for line in summary(config))
    assert " active), vocabulary" in summary(config)[0]


def test_an_all_to_all_over_nodes_is_as_slow_as_one_adapter() -> None:
    cluster = find_cluster("h100", 8)
    inside, over = (cluster.collective_seconds("all_to_all", 1e9, 1, ranks, 8) for ranks in (8, 16))
    assert inside == pytest.approx(7 / 8 * 1e9 / cluster.links, rel=0.01)
    assert over == pytest.approx(8 / 16 * 1e9 / cluster.adapter, rel=0.01)


def test_experts_that_do_not_fit_are_shared_by_more_replicas() -> None:
    config = small(
        dp=4,
        hidden=64,
        sequence=64,
        micro_batch=1,
        accumulation=1,
        layers=2,
        experts=EXPERTS | {"moe_intermediate_size": 2048},
    )
    planner = Planner(find_cluster("h100", 8))
    whole, part = (planner.memories(changed(config, {EP: ep}))[0].total for ep in (1, 2))
    planner.cluster = with_memory(planner.cluster, (whole + part) // 2)
    assert {EP: 2} in [fix.change for fix in cheapest_fixes(planner, config)]


def with_memory(cluster: Cluster, num_bytes: float) -> Cluster:
    return replace(cluster, device=replace(cluster.device, memory_bytes=num_bytes))


def test_a_search_tries_experts_whole_shared_on_a_node_and_by_all(planner: Planner) -> None:
    config = small(**ONE, micro_batch=1, accumulation=16)
    found = {
        (layout.dp, layout.tp, layout.expert_parallel_size)
        for _, other in legal_layouts(Planner(find_cluster("h100", 2)), config, 8)
        if (layout := other.parallelism).pp == 1
    }
    assert found == {(8, 1, 1), (8, 1, 2), (8, 1, 8), (4, 2, 1), (4, 2, 4)}
    plan = planner.plan(small(**ONE, dp=4, ep=2))
    lines = search_text(Fastest([({}, plan)], 1, 1)).splitlines()
    assert lines[2].split()[:3] == ["dp", "ep", "cp"]
    assert lines[3].split()[:3] == ["4", "2", "1"]


def test_a_profile_times_layers_with_experts_in_any_stage() -> None:
    config = small(**ONE | {"layers": 3}, pp=3, micro_batch=1)
    cost = profiled_costs(config)
    assert all(cost(kind, stage) > 0 for kind in "FBW" for stage in range(3))
