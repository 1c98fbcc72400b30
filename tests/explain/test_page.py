"""The page of a step: it stands alone, draws every lane, and tells of a rank, an action, a collective, a parameter."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import pytest

from nanotron.explain.explanation import explain
from nanotron.explain.page import page as page_of
from tests.browser import Elements, browse, needs_browser, seen_in
from tests.commands import nanotron
from tests.plan.configs import small

USE = """<script>{
const details = document.getElementById("details"), lanes = document.getElementById("lanes"), seen = {};
const told = () => details.querySelector("h2").textContent;
const met = () => [...document.querySelectorAll("#mesh .met")].map(button => +button.textContent);
const click = (parent, text) =>
  [...document.querySelector(parent).querySelectorAll("button")].find(made => made.textContent.includes(text)).click();
const press = key => lanes.dispatchEvent(new KeyboardEvent("keydown", {key, cancelable: true, bubbles: true}));
seen.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
seen.loaded = performance.getEntriesByType("resource").map(entry => entry.name);
seen.first = told();
seen.cells = [...document.querySelectorAll(".cell")].map(cell => cell.querySelector("title").textContent);
const inside = lanes.getBoundingClientRect();
seen.outside = [...document.querySelectorAll(".cell > rect")].map(rect => rect.getBoundingClientRect())
  .filter(box => box.width < 1 || box.left < inside.left - 1 || box.right > inside.right + 1).length;
const top = element => element.getBoundingClientRect().top;
const last = [...lanes.querySelectorAll(".cell > rect:first-of-type")].pop();
seen.beside = top(document.getElementById("names").lastChild) - top(last);
seen.arrows = document.querySelectorAll(".arrows line").length;
click("#mesh", "5"), seen.rank = [told(), met()];
press("Home"), seen.home = told();
press("End"), seen.end = told();
for (const _ of "1234") press("ArrowDown");
press("Home"), seen.down = told();
[...document.querySelectorAll(".cell")].find(cell => cell.textContent.includes("rank 4: B of")).dispatchEvent(
  new MouseEvent("click"));
seen.backward = [told(), details.querySelectorAll("li").length];
click("#details", "all-reduce · tp"), seen.event = [told(), met()];
seen.code = details.querySelector("mark").textContent, seen.at = details.querySelector(".at").textContent;
[...document.querySelectorAll(".cell")].find(cell => cell.textContent.includes("rank 2: SEND")).dispatchEvent(
  new MouseEvent("click"));
seen.sends = [...document.querySelectorAll(".arrows .met text")].map(text => text.textContent);
click("#details", "send"), seen.send = [told(), met()];
click("#parameters", "layers.0.attn.q.weight");
seen.parameter = [told(), met(), details.querySelectorAll(".shards rect").length];
seen.cut = details.querySelector("p").textContent;
const filter = document.getElementById("filter");
filter.value = "norm", filter.dispatchEvent(new Event("input"));
seen.filtered = [...document.getElementById("parameters").rows].filter(row => !row.hidden)
  .map(row => row.cells[0].textContent);
document.body.dataset.seen = JSON.stringify(seen);
}</script>"""


@pytest.fixture(scope="module")
def step() -> dict[str, Any]:
    return explain(small(dp=2, tp=2, pp=2, hidden=64, sequence=32, layers=2, accumulation=2))


def test_the_page_loads_nothing_and_runs_its_own_script_alone(step: dict[str, Any]) -> None:
    page = page_of(step | {"name": "</script><img src=x>"})
    elements = Elements(page).found
    assert not {"link", "img", "iframe", "object", "base"} & {tag for tag, _ in elements}
    assert not any({"src", "href", "onload"} & attributes.keys() for _, attributes in elements)
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    (policy,) = (attributes["content"] for _, attributes in elements if attributes.get("http-equiv"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


@needs_browser
def test_a_rank_an_action_a_collective_and_a_parameter_are_told_of(step: dict[str, Any], tmp_path: Path) -> None:
    seen = seen_in(page_of(step), USE, tmp_path)
    assert seen["overflow"] <= 0
    assert seen["loaded"] == []
    assert seen["outside"] == 0
    assert abs(seen["beside"]) < 5, "the last rank's name is beside its lane"
    assert seen["first"] == "Rank 0"
    wanted = [f"rank {rank}: {cell['name']}" for rank in range(8) for cell in step["lanes"][rank // 4]]
    assert seen["cells"] == wanted
    assert seen["arrows"] == 4 * 2 * 2, "of two microbatches in each of four pipelines, forward and backward"
    assert seen["rank"] == ["Rank 5", [5]]
    assert seen["home"] == seen["end"] == "Rank 0: around the pipeline"
    assert seen["down"] == "Rank 4: around the pipeline"
    assert seen["backward"] == ["Rank 4: B of microbatch 0 in stage 1", 3]
    assert seen["event"] == ["all-reduce of 16 KiB over tp", [4, 5]]
    assert "(" in seen["code"]
    assert seen["at"].startswith("nanotron/")
    assert "parallel/comm.py" not in seen["at"]
    assert seen["sends"] == ["16 KiB"]
    assert seen["send"] == ["send of 16 KiB over pp", [2, 6]]
    assert seen["parameter"] == ["layers.0.attn.q.weight", [0, 1, 2, 3], 2], "its bucket is cut behind it"
    assert seen["cut"] == "[64, 64], cut: dim 0 over tp; optimizer adamW, weight decay 0.1"
    assert seen["filtered"] == [one["name"] for one in step["parameters"] if "norm" in one["name"]]


@needs_browser
def test_the_command_writes_a_page_whose_script_may_run(tmp_path: Path) -> None:
    small(hidden=64, sequence=32, layers=1, accumulation=1).save_as_yaml(tmp_path / "tiny.yaml")
    ran = nanotron(tmp_path, "explain", "tiny.yaml")
    assert (ran.returncode, ran.stdout) == (0, "tiny.html\n")
    shown = browse(tmp_path / "tiny.html", "--dump-dom", cwd=tmp_path)
    assert sum(attributes.get("class") == "cell" for _, attributes in Elements(shown).found) == 6


def test_more_ranks_than_a_page_has_room_for_are_a_mistake_of_the_user(tmp_path: Path) -> None:
    small(dp=65).save_as_yaml(tmp_path / "wide.yaml")
    ran = nanotron(tmp_path, "explain", "wide.yaml")
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "parallelism.dp · cp · tp · pp = 65" in ran.stderr
    assert not (tmp_path / "wide.html").exists()
