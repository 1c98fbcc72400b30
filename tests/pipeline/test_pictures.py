"""Timelines drawn, written, read back, and predicted from what was measured."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from nanotron.config import Config, get_config_from_dict
from nanotron.errors import ConfigError
from nanotron.parallel.mesh import Mesh
from nanotron.pipeline.draw import Panel, to_html, to_svg, to_terminal
from nanotron.pipeline.schedules import get_schedule
from nanotron.pipeline.timeline import Span, Timeline, execute
from nanotron.pipeline.trace import costs_of, read_trace, recorder, to_chrome
from nanotron.plan.timeline import as_csv, predict
from nanotron.training.trainer import train
from tests.pipeline.toy import toy_batches, toy_pipeline, toy_schedule
from tests.pool import Pool


def panels() -> list[Panel]:
    return [Panel(f"{name}, predicted", execute(get_schedule(name, 4, 2), 8)) for name in ("1f1b", "zbv")]


def test_the_terminal_shows_every_action_where_it_happens() -> None:
    timeline = execute(get_schedule("1f1b", 2), 4)
    text = to_terminal([Panel("1f1b", timeline)], "units", width=9 + 3 * 14, colour=False)
    assert text.splitlines() == [
        "1f1b: bubble 14.3 %, 14 units",
        "rank 0   0  1  ...b0 w0 2  b1 w1 3  b2 w2 ...b3 w3 ",
        "rank 1   ...0  b0 w0 1  b1 w1 2  b2 w2 3  b3 w3 ",
    ]
    coloured = to_terminal([Panel("1f1b", timeline)], "units", width=9 + 3 * 14, colour=True)
    assert "\x1b[48;2;" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == text


def test_the_svg_stands_alone_and_holds_every_span_at_its_place() -> None:
    svg = to_svg(panels(), "units")
    root = ElementTree.fromstring(svg)
    boxes = [node for node in root.iter() if node.get("class") == "box"]
    assert len(boxes) == sum(len(panel.timeline.spans) for panel in panels())
    assert "bubble 20.0 %" in svg
    assert "href" not in svg
    assert "url(" not in svg
    rects = [box.find("{http://www.w3.org/2000/svg}rect") for box in boxes]
    assert max(float(rect.get("x", 0)) + float(rect.get("width", 0)) for rect in rects if rect is not None) <= 1180
    assert "<svg" in to_html(panels(), "units")


def test_a_chrome_trace_has_a_process_per_timeline_a_thread_per_rank_and_the_waiting() -> None:
    document = json.loads(json.dumps(to_chrome([(panel.title, panel.timeline) for panel in panels()])))
    complete = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert {(event["pid"], event["tid"]) for event in complete} == {(pid, rank) for pid in (0, 1) for rank in range(4)}
    one = panels()[0].timeline
    waits = sum(event["dur"] for event in complete if event["cat"] == "wait" and event["pid"] == 0)
    idle_inside = sum(later.start - earlier.end for rank in range(4) for earlier, later in pairwise(one.of_rank(rank)))
    assert waits == pytest.approx(idle_inside * 1e6)


def record(rank: int, world: int, name: str, folder: Path) -> None:
    mesh = Mesh({"pp": world}, rank)
    mesh.create_groups()
    pipeline = toy_pipeline(toy_schedule(name, world), mesh)
    traced = recorder(pipeline, mesh, [2], folder)
    for step in (1, 2, 3):
        with traced(step):
            pipeline.run(toy_batches(4), 1.0)
        assert pipeline.spans is None


@pytest.mark.parametrize("name", ["1f1b", "zbv"])
def test_a_recorded_step_reads_back_complete_and_in_the_schedules_order(pool: Pool, name: str, tmp_path: Path) -> None:
    pool.run(2, record, name, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2  # one step was asked for
    step, timeline = read_trace(tmp_path)
    schedule = toy_schedule(name, 2)
    assert (step, timeline.name, timeline.ranks) == (2, name, 2)
    for rank in range(2):
        row = timeline.of_rank(rank)
        assert all(earlier.end <= later.start for earlier, later in pairwise(row))
        found = [span[1:4] for span in row if span.kind != "W"]
        wanted = [tuple(action) for action in schedule.actions(rank, 4) if action.kind != "W"]
        assert [(kind[0], *rest) for kind, *rest in found] == [(kind[0], *rest) for kind, *rest in wanted]
    with pytest.raises(ConfigError, match=r"no pipeline trace of step 7; record one with profiler.pipeline_trace"):
        read_trace(tmp_path, 7)
    (tmp_path / "pipeline-step-2-rank-1.json").unlink()
    with pytest.raises(ConfigError, match="step 2 of 1 of 2 ranks"):
        read_trace(tmp_path)


def test_costs_of_a_trace_are_medians_and_join_the_pieces_of_a_w() -> None:
    spans = [Span(0, "F", i, 0, 0, 10.0 * i, 10.0 * i + length) for i, length in enumerate([1.0, 2.0, 9.0])]
    spans += [Span(0, "W", 0, 0, 0, 40.0, 41.0), Span(0, "W", 0, 0, 0, 45.0, 47.0), Span(0, "BW", 0, 0, 0, 50, 54)]
    cost = costs_of(Timeline("x", 1, spans))
    assert [cost(kind, 0) for kind in "FBW"] == [2.0, 4.0, 3.0]


def config(**parallelism: object) -> Config:
    return get_config_from_dict(
        {
            "parallelism": {"pp": 2, **parallelism},
            "model": {
                "dtype": "float32",
                "model_config": {
                    "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 2, "vocab_size": 64,
                    "intermediate_size": 64,
                },
            },
            "tokens": {"sequence_length": 16, "micro_batch_size": 1, "batch_accumulation_per_replica": 4},
            "optimizer": {"learning_rate_scheduler": {"learning_rate": 1e-3}},
        }
    )  # fmt: skip


def test_prediction_compares_schedules_on_equal_work(tmp_path: Path) -> None:
    picture = predict(config(), costs="1:1:1", schedules=["1f1b", "zb_h1", "zbv"])
    busy = [sum(span.end - span.start for span in panel.timeline.spans) for panel in picture.panels]
    assert busy == [pytest.approx(2 * 3 * 4)] * 3
    bubbles = [panel.timeline.bubble for panel in picture.panels]
    assert bubbles == sorted(bubbles, reverse=True)
    assert "zbv, predicted: bubble" in picture.text(120)
    for suffix in ("svg", "html", "json"):
        picture.write(tmp_path / f"picture.{suffix}")
        assert (tmp_path / f"picture.{suffix}").stat().st_size > 1000
    with pytest.raises(ConfigError, match=r"end the name in \.svg"):
        picture.write(tmp_path / "picture.png")
    with pytest.raises(
        ConfigError, match=r"--schedule zbb: not one of afab, 1f1b, .*, a \.csv file or file\.py:function"
    ):
        predict(config(), costs="1:1:1", schedules=["zbb"])


def test_flops_make_a_stage_with_more_layers_dearer() -> None:
    spans = predict(config(pp_layers=[4, 1]), costs="flops").panels[0].timeline.spans
    length = {span.stage: span.end - span.start for span in spans if span.kind == "F"}
    assert length[0] > 2 * length[1]


def test_a_short_profile_measures_every_kind_of_every_stage() -> None:
    picture = predict(config(), costs="profile")
    assert picture.unit == "s"
    assert all(span.end > span.start for span in picture.panels[0].timeline.spans)


def test_mistakes_of_the_command_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--costs 1:2: write F:B:W"):
        predict(config(), costs="1:2")
    with pytest.raises(ConfigError, match="--costs trace needs --run"):
        predict(config(), costs="trace")
    with pytest.raises(ConfigError, match="no pipeline trace"):
        predict(config(), run=tmp_path)
    with pytest.raises(ConfigError, match=r"batch_accumulation_per_replica=4 is not a multiple of parallelism.pp=3"):
        predict(config(pp=3), costs="1:1:1", schedules=["interleaved_1f1b"])


def test_a_schedule_is_exported_as_csv() -> None:
    assert as_csv(config()).splitlines()[1].startswith("1F0,1BW0,1F1")


def test_a_training_run_records_the_steps_that_its_config_names(tmp_path: Path) -> None:
    given = config(pp=1).to_dict()
    given["tokens"]["train_steps"] = 3
    given["profiler"] = {"pipeline_trace": {"steps": [2]}}
    given["data_stages"] = [{"name": "random", "start_training_step": 1, "data": {"dataset": None}}]
    given["checkpoints"] = {"checkpoints_path": str(tmp_path), "save_final_state": False}
    assert train(get_config_from_dict(given), Mesh(), torch.device("cpu")) == 0
    step, timeline = read_trace(tmp_path / "traces")
    assert (step, timeline.name) == (2, "1f1b")
    assert [f"{span.kind}{span.microbatch}" for span in timeline.spans[:4]] == ["F0", "BW0", "F1", "BW1"]
