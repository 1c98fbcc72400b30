"""The report of a run: one page that stands alone, tells the run's numbers, and looks right in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from nanotron.errors import ConfigError
from nanotron.pipeline.schedules import get_schedule
from nanotron.pipeline.timeline import Timeline, execute
from nanotron.pipeline.trace import to_chrome
from nanotron.report.page import report, write_report
from nanotron.report.run import NEEDED, read_run
from nanotron.report.series import series_of
from tests.browser import SIZE, Elements, browse, needs_browser, seen_in
from tests.commands import nanotron

LOSS_BLUE = (0x2A, 0x6F, 0xB0)


def row(step: int) -> dict[str, Any]:
    """A step of a run that spikes at 150, loses its gradient norm at 170, and is measured every 20 steps."""
    loss = 2.0 + 6 * math.exp(-step / 30) + (3.0 if step == 150 else 0.0)
    numbers: dict[str, Any] = {"step": step, "lm_loss": loss, "grad_norm": None if step == 170 else 30 / step}
    numbers |= {"lr": 3e-4 * min(1, step / 20), "consumed_tokens": 4096 * step, "consumed_samples": 32 * step}
    numbers |= {"time_per_iteration_ms": 500.0 + step % 7, "tokens_per_sec": 8192.0 - step % 50, "memory_gib": 1.25}
    numbers |= {"tokens_per_sec_per_device": 1024.0, "model_tflops_per_device": 0.1, "stage": "main"}
    if step % 10 == 0:
        numbers |= {"expert_load": 3.0, "expert_load_layer": 1, "router_entropy": 0.75, "dropped_tokens": 0}
        numbers |= {f"expert_load/layers.{layer}": 1.5 + layer for layer in range(2)}
        numbers |= {f"router_entropy/layers.{layer}": 1 - layer / 2 for layer in range(2)}
    if step % 50 == 0:
        numbers |= {"val_loss": loss + 0.1, "validation_ms": 20e3}
    if step % 20 == 0:
        for layer in range(4):
            for kind, value in (("weight_norm", 10.0), ("grad_norm", 0.1), ("update_ratio", 1e-3)):
                numbers[f"{kind}/layers.{layer}.attn.q.weight"] = value * (layer + 1)
                numbers[f"{kind}/layers.{layer}.mlp.down.weight"] = value
            numbers[f"activation_norm/layers.{layer}"] = 1.5**layer
        numbers |= {"slowest_rank": 3, "slowest_rank_ms": 420.0, "median_rank_ms": 350.0}
        numbers |= {"fullest_rank": 0, "fullest_rank_gib": 1.5}
    return numbers


def loads(step: int) -> dict[str, Any]:
    """Twelve experts in each of two layers; those of the second collapse."""
    collapsed = [max(0, 100 - step)] * 10 + [100 + 5 * min(step, 100)] * 2
    return {"step": step, "layers.0": " ".join(["90", "110"] * 6), "layers.1": " ".join(map(str, collapsed))}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory with everything that a report can show."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row(step)) + "\n" for step in range(1, 201)))
    (folder / "expert_loads.jsonl").write_text("".join(json.dumps(loads(10 * n)) + "\n" for n in range(1, 21)))
    general = "general:\n  project: a <b>bold</b> project\n  run: a <i>run</i>\n"
    (folder / "config.yaml").write_text(general + "tokens:\n  train_steps: 400\n")
    environment = {"host": "here", "layout": {"pp": 2, "dp": 2, "cp": 1, "tp": 1}, "device": "a CPU", "cores": 2}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "traces").mkdir()
    timeline = execute(get_schedule("1f1b", 2), 4)
    for rank in range(2):
        mine = Timeline(timeline.name, 2, timeline.of_rank(rank))
        path = folder / "traces" / f"pipeline-step-5-rank-{rank}.json"
        path.write_text(json.dumps(to_chrome([("measured", mine)])))
    (folder / "failures").mkdir()
    failure = {"rank": 1, "kind": "own", "error": "OSError: disk full", "when": 1.0, "host": "here"}
    (folder / "failures" / "rank-1.json").write_text(json.dumps(failure))
    return folder


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return write_report([run]).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def another(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of another project: twice as long, with no more than it needs, but started three times."""
    folder = tmp_path_factory.mktemp("another")
    needed = (*NEEDED, "step")
    rows = [{key: row(step)[key] for key in needed} | {"unix_s": 1000.0 + step} for step in range(1, 401)]
    for one in rows[300:]:
        one["unix_s"] += 90
    lines = "".join(json.dumps(one) + "\n" for one in rows)
    (folder / "metrics.jsonl").write_text(lines + '{"step": 401, "lm_lo')
    starts = ((1, 1000.5, "dp 2", 0), (311, 1310.0, "dp 2", 0), (301, 1390.0, "dp 4", 25))
    named = (dict(zip(("step", "unix_s", "layout", "taken_back"), start, strict=True)) for start in starts)
    (folder / "starts.jsonl").write_text("".join(json.dumps(start) + "\n" for start in named))
    (folder / "config.yaml").write_text("general:\n  project: another\ntokens:\n  train_steps: 500\n")
    return folder


@pytest.fixture(scope="module")
def two(run: Path, another: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_report([run, another], tmp_path_factory.mktemp("two") / "page.html")
    return path.read_text(encoding="utf-8")


def drawn(page: str) -> dict[str, Any]:
    """Title -> what the script draws."""
    found = re.findall(r'<figure class="lines"><h3>(.*?)</h3>.*?<script type="application/json">(.*?)</script>', page)
    return {title: json.loads(data) for title, data in found}


def test_the_page_loads_nothing_and_runs_its_own_script_alone(page: str, two: str) -> None:
    for one in (page, two):
        elements = Elements(one).found
        for tag, attributes in elements:
            assert tag not in {"link", "img", "iframe", "object", "base"}
            assert not {"src", "href", "onload"} & attributes.keys()
        assert "url(" not in one
        assert "@import" not in one
        scripts = [attributes for tag, attributes in elements if tag == "script" and "type" not in attributes]
        assert len(scripts) == 1
        (policy,) = (attributes["content"] for _, attributes in elements if attributes.get("http-equiv"))
        script = one.rpartition("<script>")[2].partition("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def test_a_name_ends_no_element(tmp_path: Path) -> None:
    """Neither of the page nor of a figure's numbers."""
    for folder in (tmp_path / "one", tmp_path / "two"):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text(json.dumps(row(1)) + "\n")
        (folder / "config.yaml").write_text(f"general: {{project: '</script><b>{folder.name}'}}\n")
    page = write_report([tmp_path / "one", tmp_path / "two"]).read_text(encoding="utf-8")
    assert "b" not in {tag for tag, _ in Elements(page).found}
    assert [line["name"] for line in drawn(page)["Loss"]["lines"]] == [
        "</script><b>one: training loss",
        "</script><b>two: training loss",
    ]


def test_runs_are_drawn_over_each_other_each_in_its_colour(two: str) -> None:
    loss = drawn(two)["Loss"]["lines"]
    assert [(line["name"], line["dash"]) for line in loss] == [
        ("a <b>bold</b> project: training loss", ""),
        ("a <b>bold</b> project: validation loss", "6 3"),
        ("another: training loss", ""),
    ]
    assert loss[0]["colour"] == loss[1]["colour"] != loss[2]["colour"]
    assert loss[0]["points"][149] == [150, 5.04043, 5.04043, 5.04043]
    assert [line["points"][-1][0] for line in loss] == [200, 200, 400]
    assert drawn(two)["Gradient norm, before clipping"]["lines"][0]["gaps"] == [170]
    assert "another: grad" not in two, "a column that one of the runs lacks is drawn for the other alone"


def test_runs_are_compared(two: str) -> None:
    assert "<h1>a &lt;b&gt;bold&lt;/b&gt; project and another</h1>" in two
    assert "<tr><td>steps</td><td>200 of 400</td><td>400 of 500</td></tr>" in two
    assert "<tr><td>tokens.train_steps</td><td>400</td><td>500</td></tr>" in two
    assert "<tr><td>device</td><td>a CPU</td><td>—</td></tr>" in two
    assert "<h2>Experts of a &lt;b&gt;bold&lt;/b&gt; project</h2>" in two
    assert "<h2>Experts of another</h2>" not in two


def test_starts_are_marked_and_their_time_is_told(another: Path) -> None:
    page = write_report([another]).read_text(encoding="utf-8")
    assert drawn(page)["Loss"]["marks"] == [
        [311, "started again from step 311"],
        [301, "started again from step 301 on another layout: dp 4; before: dp 2, 25 taken back"],
    ]
    rows = [re.findall("<td>(.*?)</td>", line) for line in re.findall("<tr>(.*?)</tr>", page)]
    starts = [cells for cells in rows if len(cells) == 9]
    assert starts == [
        ["1", "300", "dp 2", "0", "2m31s", "0s", "0s", "2m29s", "0s"],
        ["311", "none is left", "dp 2", "0", "0s", "0s", "0s", "0s", "0s"],
        ["301", "400", "dp 4", "25", "50s", "0s", "0s", "49s", "1m30s"],
    ]


def test_the_title_is_the_projects_name_which_stays_on_resume_and_names_are_text(page: str) -> None:
    assert "<h1>a &lt;b&gt;bold&lt;/b&gt; project</h1>" in page
    assert " · a &lt;i&gt;run&lt;/i&gt;</p>" in page


@pytest.mark.parametrize(
    "line",
    [
        "step 150: loss spike, 5.04043 where 2.",
        "step 170: the loss or the gradient norm is not finite",
        "rank 1 on here: OSError: disk full",
        "experts of layer 1: at the end the busiest, 10, gets 6.00 times an even load, and 10 of 12 get nothing",
        "layer 0: 0.90 to 1.10 times an even load",
        "rank 3 was the slowest in 10 of 10 looks at all ranks",
        "200 of 400",
        "<span>validating and saving</span><b>1m20s</b>",
        "pp 2 · dp 2",
        "measured in step 5",
        "train_steps: 400",
    ],
)
def test_the_page_tells(page: str, line: str) -> None:
    assert line in page


def test_charts_are_drawn_for_what_the_run_has_and_no_other(page: str) -> None:
    titles = re.findall(r"<figure[^>]*><h3>(.*?)</h3>", page)
    assert titles == [
        "Loss",
        "Learning rate",
        "Gradient norm, before clipping",
        "Tokens per second",
        "Time of a step, ms",
        "Memory, GiB",
        "Weight norm by layer",
        "Gradient norm by layer",
        "Update-to-weight ratio by layer",
        "Activation norm by layer, of a token",
        "Load of the busiest expert by layer, 1 is even",
        "Router entropy by layer, 1 is all experts alike",
        "Load of layer × expert, at the end",
        "Load of expert × step, layer 1",
        "Load of expert × step, layer 0",
    ]


def test_a_heat_map_has_each_cell_once_in_the_colour_of_its_load(page: str) -> None:
    drawing = page.partition("layer × expert, at the end")[2].partition("</svg>")[0]
    boxes = {
        colour: [tuple(map(int, box)) for box in re.findall(r"M(\d+) (\d+)h(\d+)v1h-\3z", path)]
        for colour, path in re.findall(r'<path fill="(#\w+)" d="(.*?)"', drawing)
    }
    assert boxes == {"#e9edf1": [(0, 0, 12)], "#0b2f57": [(0, 1, 10)], "#a51f0b": [(10, 1, 2)]}
    drawing = page.partition("expert × step, layer 1")[2].partition("</svg>")[0]
    cells = sum(int(length) for length in re.findall(r"h(\d+)v1", drawing))
    assert cells == 12 * 20


def test_the_largest_model_s_heat_maps_stay_small(tmp_path: Path) -> None:
    numbers = np.random.default_rng(0).integers(0, 700, (200, 48, 128))
    lines = (
        {"step": n, **{f"layers.{i}": " ".join(map(str, x)) for i, x in enumerate(row)}}
        for n, row in enumerate(numbers)
    )
    (tmp_path / "expert_loads.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1)) + "\n")
    assert len(write_report([tmp_path]).read_bytes()) < 2**20


def test_the_plainest_run_has_a_report_too(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(1)) + "\n")
    page = write_report([tmp_path], tmp_path / "out" / "page.html").read_text(encoding="utf-8")
    assert "no failure, no loss spike" in page
    assert "Timeline" not in page


def test_a_folder_without_numbers_is_the_users_mistake(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no metrics\.jsonl with a step in it"):
        write_report([run, tmp_path])


GARBAGE = (b"", b"\xff\xfe", b"[", b"[1]", b"null", b"3", b"[" * 900, b"a: &a [*a]", b"a: b: c", b"\x00")
HOSTILE = ("abc", [], -1, float("nan"), 10**30, None, {"a": [1]})


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where values are, inside of values: of a list's, the first three."""
    yield path
    for key in value if isinstance(value, dict) else range(min(3, len(value))) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def replaced(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], new)
    return copy


def test_no_damage_to_a_run_s_files_is_more_than_a_line(run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    further = re.compile(r".*/layers\.[123]")  # layer 0 stands for all of them
    rows = [{key: value for key, value in row(step).items() if not further.match(key)} for step in (1, 20)]
    metrics, experts, starts = (folder / f"{name}.jsonl" for name in ("metrics", "expert_loads", "starts"))
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    experts.write_text("".join(json.dumps(loads(step)) + "\n" for step in (10, 20)))
    others = [path for path in folder.rglob("*.json") if not path.name.endswith("5-rank-1.json")]
    documents: dict[Path, Any] = {path: json.loads(path.read_text()) for path in others}
    documents |= {folder / "config.yaml": yaml.safe_load((folder / "config.yaml").read_text()), metrics: rows[1]}
    documents |= {experts: loads(20), starts: {"step": 9, "unix_s": 1.5, "layout": "dp 2", "taken_back": 0}}
    refused = []
    for path, whole in documents.items():
        content = path.read_bytes() if path.exists() else b""
        first = (
            json.dumps({metrics: rows[0], experts: loads(10)}.get(path, documents[path])).encode() + b"\n"
            if path.suffix == ".jsonl"
            else b""
        )
        changed = (replaced(whole, place, value) for place in places(whole) for value in HOSTILE)
        for damaged in [*GARBAGE, *(json.dumps(value).encode() for value in changed)]:
            path.write_bytes(first + damaged + (b"\n" if first else b""))
            try:
                report([read_run(folder)])
            except ConfigError as error:
                (line,) = error.problems
                assert str(path) in line
                refused.append(path)
        path.write_bytes(content)
    assert set(refused) == set(documents)


def test_a_file_that_cannot_be_read_or_written_is_named_in_a_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    for arguments, line in [
        ((tmp_path,), f"{tmp_path}/metrics.jsonl: is a directory\n"),
        ((run, "--output", tmp_path), f"{tmp_path}: is a directory\n"),
    ]:
        done = nanotron(tmp_path, "report", *arguments)
        assert (done.returncode, done.stderr) == (2, line)


def test_a_thinned_series_keeps_every_extreme_and_the_steps_without_a_number() -> None:
    rows = [{"step": n, "x": None if n == 777 else 100.0 if n == 5000 else float(n % 3)} for n in range(10_000)]
    series = series_of(rows, "x", "x", most=50)
    assert series is not None
    assert len(series.points) == 50
    assert max(point.high for point in series.points) == 100.0
    assert series.not_finite == [777]
    assert series_of(rows, "y", "y") is None


# ---------------------------------------------------------------- in a browser

LOOK = """<script>
const box = e => { const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom] };
document.body.dataset.seen = JSON.stringify({
  overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
  charts: [...document.querySelectorAll("svg.chart")].map(svg => ({
    name: svg.getAttribute("aria-label"), box: box(svg),
    lines: [...svg.querySelectorAll("polyline")].map(box), labels: [...svg.querySelectorAll("text")].map(box),
  })),
  timeline: box(document.querySelector(".timeline svg")),
  failed: performance.getEntriesByType("resource").map(entry => entry.name),
});
</script>"""


@needs_browser
def test_a_browser_shows_every_chart_where_it_belongs(page: str, tmp_path: Path) -> None:
    seen = seen_in(page, LOOK, tmp_path)
    assert seen["failed"] == [], "the page asked for something outside"
    assert seen["overflow"] <= 0, "the page is wider than the window"
    assert len(seen["charts"]) == 15
    assert sum(bool(chart["lines"]) for chart in seen["charts"]) == 12, "all but the heat maps"
    for chart in seen["charts"]:
        left, top, right, bottom = chart["box"]
        assert right - left > 400, chart["name"]
        assert bottom - top > 150, chart["name"]
        for lo_x, lo_y, hi_x, hi_y in chart["lines"] + chart["labels"]:
            assert left - 1 <= lo_x <= hi_x <= right + 1, chart["name"]
            assert top - 1 <= lo_y <= hi_y <= bottom + 1, chart["name"]
        labels = chart["labels"]
        for index, one in enumerate(labels):
            assert not any(overlap(one, other) for other in labels[index + 1 :]), f"{chart['name']}: labels overlap"
    assert seen["timeline"][2] - seen["timeline"][0] > 1000


def overlap(one: list[float], other: list[float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


@needs_browser
def test_a_screenshot_has_the_loss_in_its_colour_on_a_light_page(run: Path, page: str, tmp_path: Path) -> None:
    browse(run / "report.html", f"--screenshot={tmp_path / 'shot.png'}", cwd=tmp_path)
    shot = Image.open(tmp_path / "shot.png").convert("RGB")
    assert shot.size == SIZE
    pixels = np.asarray(shot)[:900].astype(int)  # [height, width, 3]
    assert (pixels == 255).all(axis=-1).mean() > 1 / 3, "a light page"
    assert (abs(pixels - LOSS_BLUE).max(axis=-1) < 24).sum() > 500


USE = """<script>
const figure = document.querySelector("figure.lines"); // the loss
const svg = figure.querySelector("svg"), told = () => figure.querySelector("output").textContent, seen = {};
const lines = () => [...svg.querySelectorAll("polyline")].map(line => line.getAttribute("points"));
const ticks = () => [...svg.querySelectorAll("text")].map(text => text.textContent);
const press = key => svg.dispatchEvent(new KeyboardEvent("keydown", {key, cancelable: true, bubbles: true}));
const change = (input, event) => input.dispatchEvent(new Event(event, {bubbles: true}));
seen.end = told();
const box = svg.getBoundingClientRect(), place = figure.x(150) / 560 * box.width + box.left;
svg.dispatchEvent(new PointerEvent("pointermove", {clientX: place, clientY: box.top + 20}));
seen.pointed = told();
press("ArrowRight"), seen.right = told();
press("Home"), seen.home = told();
seen.plain = lines(), seen.ticks = ticks();
const smoothing = document.forms.controls.smoothing;
smoothing.value = 0.9, change(smoothing, "input");
seen.smooth = lines(), seen.smoothing = document.forms.controls.told.value;
press("Home"), press("ArrowRight"), seen.smoothSecond = told();
smoothing.value = 0, change(smoothing, "input");
figure.log.click(), seen.log = ticks(), seen.logLines = lines();
document.forms.controls.steps.click(), seen.logSteps = ticks();
seen.starts = [...svg.querySelectorAll(".start title")].map(title => title.textContent);
document.body.dataset.seen = JSON.stringify(seen);
</script>"""


@needs_browser
def test_values_are_told_where_one_points_and_controls_change_the_lines(two: str, tmp_path: Path) -> None:
    seen = seen_in(two, USE, tmp_path)
    spike = "step 150 · a <b>bold</b> project: training loss 5.04043"
    assert seen["end"].startswith("step 400 · ")
    assert seen["pointed"].startswith(spike)
    assert " · another: training loss " in seen["pointed"]
    assert seen["right"].startswith("step 151 · ")
    assert seen["home"].startswith("step 1 · ")
    first, second = (row(step)["lm_loss"] for step in (1, 2))
    assert seen["smoothing"] == "0.9"
    told = float(re.findall(r"another: training loss ([\d.]+)", seen["smoothSecond"])[0])
    assert told == pytest.approx((0.09 * first + 0.1 * second) / 0.19, rel=1e-5)
    assert len(seen["smooth"]) == len(seen["plain"]) == 3
    assert seen["smooth"] != seen["plain"]
    assert seen["ticks"][:4] == ["2", "4", "6", "8"]
    assert seen["log"][:2] == ["1", "10"]
    assert seen["logLines"] != seen["plain"]
    assert {"1", "10", "100"} <= set(seen["logSteps"])
    assert "another: started again from step 311" in seen["starts"]


@needs_browser
def test_the_page_s_policy_lets_its_script_run(two: str, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(two, encoding="utf-8")
    shown = browse(tmp_path / "page.html", "--dump-dom", cwd=tmp_path)
    assert sum(tag == "polyline" for tag, _ in Elements(shown).found) > 20
