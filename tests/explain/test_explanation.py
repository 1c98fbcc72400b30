"""What is said of a step is what the planner counts, what the schedule's proof allows, and what ranks hold."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from math import prod
from typing import Any

import pytest

from nanotron.config import Config
from nanotron.errors import ConfigError
from nanotron.explain.explanation import explain
from nanotron.parallel.mesh import Mesh
from nanotron.plan.counting import Traffic
from nanotron.plan.hardware import find_cluster
from nanotron.plan.layouts import changed
from nanotron.plan.predict import Planner
from nanotron.training.topology import mesh_axes
from tests.parity.cases import Case
from tests.parity.run import config_of
from tests.plan.configs import small
from tests.pool import Pool
from tests.structure.test_traffic import count, named

TINY: dict[str, Any] = {"hidden": 64, "sequence": 32, "micro_batch": 1}
EXPERTS = {"num_experts": 8, "top_k": 2, "moe_intermediate_size": 32}
HYBRID = {"parallelism.dp_shard": 2}
OFFLOAD = {"optimizer.offload": True, "model.compile": True}
MEASURED = {"metrics_logging.straggler_interval": 1, "metrics_logging.log_level": 1}
"""Whose first step would measure its work; a step that does not is shown."""
LAYOUTS: dict[str, Config] = {
    "one": small(**TINY, layers=1, accumulation=1),
    "dp2_tp2_pp2_sequence_parallel_1f1b_tied": small(
        **TINY, dp=2, tp=2, pp=2, sequence_parallel=True, tied=True, layers=3, accumulation=3, loss_chunk=8
    ),
    "pp2_zbv_zero0": small(**TINY, dp=2, pp=2, schedule="zbv", zero=0, accumulation=2),
    "cp2_pp2_interleaved_offload": changed(
        small(**TINY, cp=2, pp=2, schedule="interleaved_1f1b", accumulation=2, dtype="bfloat16"), OFFLOAD
    ),
    "cp2_heads_recompute_zero2": small(
        **TINY, dp=2, cp=2, cp_mode="ALL_TO_ALL", recompute=True, zero=2, layers=2, accumulation=2
    ),
    "dp4_hybrid_zero3": changed(small(**TINY, dp=4, zero=3, layers=3, accumulation=2), HYBRID),
    "ep2_tp2_measured": changed(
        small(**TINY, dp=4, ep=2, tp=2, sequence_parallel=True, experts=EXPERTS, layers=1, accumulation=2), MEASURED
    ),
    "muon_tp2": small(**TINY, dp=2, tp=2, optimizer={"name": "muon"}, layers=2, accumulation=1),
}
PLANNER = Planner(find_cluster("cpu", 8))


@pytest.fixture(scope="module", params=LAYOUTS, ids=str)
def layout(request: pytest.FixtureRequest) -> tuple[Config, dict[str, Any]]:
    config = LAYOUTS[request.param]
    return config, explain(config)


def traffic(step: dict[str, Any], pp_rank: int) -> Counter[Traffic]:
    """What a lane adds up to, without what is received."""
    seen: Counter[Traffic] = Counter()
    for cell in step["lanes"][pp_rank]:
        for kind, axis, num_bytes, *_ in step["contents"][cell["content"]]:
            seen[Traffic(kind, axis, "calls")] += kind != "recv"
            seen[Traffic(kind, axis, "bytes")] += num_bytes * (kind != "recv")
    return +seen


def test_collectives_and_sends_of_every_rank_are_the_planner_s(layout: tuple[Config, dict[str, Any]]) -> None:
    config, step = layout
    for rank in PLANNER.plan(config, every_layer=True).ranks:
        assert traffic(step, rank.pp_rank) == rank.traffic


def test_collectives_and_sends_are_those_of_real_processes(pool: Pool) -> None:
    """Where whole blocks come and go in the order of a pipeline's program."""
    case = Case(dp=2, pp=2, zero_stage=3, schedule="zb_h1")
    config = config_of(case)
    step = explain(config)
    for rank, seen in enumerate(pool.run(case.world, count, case)):
        mesh = Mesh(mesh_axes(config), rank)
        assert named(traffic(step, mesh.coord("pp")), config, mesh) == seen


def test_every_transfer_is_sent_and_received_once_and_used_afterwards(layout: tuple[Config, dict[str, Any]]) -> None:
    _, step = layout
    ends: dict[str, Counter[str]] = {"send": Counter(), "recv": Counter()}
    for pp_rank, lane in enumerate(step["lanes"]):
        for index, cell in enumerate(lane):
            events = [kind for kind, *_ in step["contents"][cell["content"]] if kind in ends]
            transfers = cell.get("transfers", [])
            assert Counter(events) == Counter("send" if one["from"] == pp_rank else "recv" for one in transfers)
            for one in transfers:
                ends["send" if one["from"] == pp_rank else "recv"].update([str(one)])
                if one["to"] == pp_rank:
                    message = one["for"]
                    used = [(later["kind"][0], later.get("microbatch"), later.get("stage")) for later in lane[index:]]
                    assert tuple(message.values()) in used
    assert ends["send"] == ends["recv"]
    assert set(ends["send"].values()) <= {1}


def test_ranks_update_every_element_of_every_parameter_once(layout: tuple[Config, dict[str, Any]]) -> None:
    """Copies are alike, so the different boxes tile the parameter."""
    config, step = layout
    for one in step["parameters"]:
        boxes = {box for hold in one["holds"] for box in hold["updates"]}
        assert sum(box.numel for box in boxes) == prod(one["shape"]), one["name"]
        holders = sorted(rank for hold in one["holds"] for rank in hold["ranks"])
        assert len(set(holders)) == len(holders)
        if config.optimizer.zero_stage == 3 and len(one["shape"]) > 1:
            assert not any(hold["whole"] for hold in one["holds"])


def test_cells_of_a_lane_follow_each_other(layout: tuple[Config, dict[str, Any]]) -> None:
    for lane in layout[1]["lanes"]:
        for before, after in pairwise(lane):
            assert before["start"] <= before["end"] <= after["start"] + 1e-9


def code_of(step: dict[str, Any], place: int) -> str:
    line = step["lines"][place]
    text: str = line["code"][int(line["at"].split(":")[1]) - line["first"]]
    return text


def test_each_communication_names_the_lines_that_do_it() -> None:
    step = explain(LAYOUTS["dp2_tp2_pp2_sequence_parallel_1f1b_tied"])
    for content in step["contents"]:
        for kind, _, _, lines, _ in content:
            assert {"send": "start(", "recv": "start("}.get(kind, "dist.") in code_of(step, lines[0])
    (word,) = (cell for cell in step["lanes"][0] if cell["name"] == "word.reduce(self._mesh, num_targets())")
    ((kind, axis, num_bytes, lines, _),) = step["contents"][word["content"]]
    assert (kind, axis, num_bytes) == ("all_reduce", "world", 4 * 8)
    assert [code_of(step, line).strip() for line in lines[-2:]] == [
        "all_reduce_(self._word, mesh.world_group())",
        "word.reduce(self._mesh, num_targets())",
    ]
    backward = next(cell for cell in step["lanes"][1] if cell["kind"] == "B")
    for *_, forward in step["contents"][backward["content"]]:
        asked = {step["lines"][line]["at"].split(":")[0] for line in forward}
        assert "nanotron/models/decoder.py" in asked, "whose forward it is"


def test_ranks_and_their_groups() -> None:
    step = explain(LAYOUTS["ep2_tp2_measured"])
    assert step["sizes"] == {"pp": 1, "dp": 4, "ep": 2, "cp": 1, "tp": 2}
    assert step["ranks"][5] == {"pp": 0, "dp": 2, "ep": 0, "cp": 0, "tp": 1}
    assert step["groups"]["ep"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert step["groups"]["world"] == [list(range(8))]


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (small(dp=65), r"parallelism\.dp · cp · tp · pp = 65: .*64 ranks.* --override parallelism\.dp=64"),
        (small(tp=8, pp=16, layers=16), r" = 128: .* --override parallelism\.pp=2"),
        (small(accumulation=1025), r"tokens\.batch_accumulation_per_replica=1025: 4 layers .* over 4,096"),
    ],
    ids=["replicas", "stages", "microbatches"],
)
def test_what_no_page_can_show_is_refused_in_one_line(config: Config, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as error:
        explain(config)
    assert len(str(error.value).splitlines()) == 1
