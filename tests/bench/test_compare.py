"""What two runs of the bench say of each other: ratios only, and only beyond their noise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bench.__main__ as command
from bench.compare import keep

Quartiles = tuple[float, float, float]


def a_run(ratios: dict[str, Quartiles | str | None], **facts: Any) -> dict[str, Any]:
    """A run of one subject: each contender's ratio; None is a line without one, a text why it failed."""
    contenders = {
        name: {
            "failure": ratio if isinstance(ratio, str) else None,
            "ours_over_it": dict(zip(("low", "median", "high"), ratio, strict=True))
            if isinstance(ratio, tuple)
            else None,
        }
        for name, ratio in ratios.items()
    }
    machine = {
        "processor": "Zen 5",
        "cores": 2,
        "load_average": 0.1,
        "date": "today",
        "versions": {"torch": {"torch": "2"}},
    }
    told = {"machine": machine | facts, "shape": "reference", "steps": 2}
    return {**told, "subjects": {"one": {"contenders": contenders}}}


def compared(folder: Path, old: Any, new: Any, *options: str) -> int:
    paths = [folder / "old.json", folder / "new.json"]
    for path, told in zip(paths, (old, new), strict=True):
        path.write_text(json.dumps(told))
    return command.main(["compare", *map(str, paths), *options])


@pytest.mark.parametrize(
    ("now", "options", "says"),
    [
        ((1.48, 1.50, 1.52), (), ""),
        ((1.35, 1.38, 1.41), (), "worse"),
        ((1.30, 1.38, 1.49), (), ""),  # its noise reaches up to the old quartiles
        ((1.43, 1.44, 1.45), (), ""),  # apart, but only 4 % less
        ((1.43, 1.44, 1.45), ("--worse", "0.98"), "worse"),
        ((1.60, 1.63, 1.66), (), "better"),
    ],
)
def test_a_ratio_is_worse_when_it_fell_by_more_than_the_noise(
    now: Quartiles, options: tuple[str, ...], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = (a_run({"ours": None, "plain loop": ratio}) for ratio in ((1.48, 1.50, 1.52), now))
    assert compared(tmp_path, old, new, *options) == (says == "worse")
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "plain loop" in line]
    assert line.split(")")[-1].split() == [f"{now[1] / 1.5:.3f}", *says.split()]


def test_lines_that_only_one_run_has_and_lines_of_ours_are_told_and_a_peer_may_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = a_run({"ours": None, "ours, MKL": (1.5, 1.6, 1.7), "DDP": (1.0, 1.1, 1.2), "gone": (1.0, 1.1, 1.2)})
    new = a_run({"ours": None, "ours, MKL": (1.0, 1.0, 1.0), "DDP": "out of luck", "FSDP": (1.0, 1.1, 1.2)})
    new["subjects"]["two"] = old["subjects"]["one"]
    assert compared(tmp_path, old, new) == 0
    printed = capsys.readouterr().out
    lines = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in printed.splitlines()}
    assert lines["one: DDP"] == "fails: out of luck"
    assert lines["one: gone"] == "only in the old run"
    assert lines["one: FSDP"] == lines["two: DDP"] == "new"
    assert "MKL" not in printed.split("two:")[0], "how two lines of ours compare is nobody's loss"


def test_a_line_of_ours_that_fails_is_worse(tmp_path: Path) -> None:
    fails = a_run({"ours": "out of luck", "DDP": None})
    assert compared(tmp_path, a_run({"ours": None, "DDP": (1.0, 1.1, 1.2)}), fails) == 1
    assert compared(tmp_path, fails, fails) == 0


def test_what_differs_around_the_runs_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ratios: dict[str, Quartiles | str | None] = {"DDP": (1.0, 1.1, 1.2)}
    new = a_run(ratios, processor="Xeon", load_average=3.0, versions={"torch": {"torch": "3"}, "more": {"numpy": "2"}})
    assert compared(tmp_path, a_run(ratios), new) == 0
    printed = capsys.readouterr().out
    assert "other machines (Zen 5, 2 cores and Xeon, 2 cores)" in printed
    assert "torch: torch 2 before, 3 now" in printed
    assert "busy" in printed
    assert compared(tmp_path, new | {"machine": a_run({})["machine"]}, a_run(ratios)) == 0
    assert capsys.readouterr().out.splitlines()[1] == "before: today, now: today"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ({"runs": {}}, "new.json is not what `python -m bench --json` writes"),
        (a_run({}) | {"shape": "wide"}, "measured other work: shape reference and wide"),
    ],
)
def test_files_that_cannot_be_compared_are_refused(
    other: Any, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        compared(tmp_path, a_run({}), other)
    assert ended.value.code == 2
    assert why in capsys.readouterr().err


def test_a_run_that_is_kept_meets_the_newest_of_its_kind(tmp_path: Path) -> None:
    first, here = a_run({}, processor="Xeon"), a_run({"DDP": (1.0, 1.1, 1.2)})
    (tmp_path / "2026-01-02T00-00-00.json").write_text(json.dumps(here))
    (tmp_path / "2026-01-01T00-00-00.json").write_text(json.dumps(a_run({})))
    (tmp_path / "2026-01-03T00-00-00.json").write_text(json.dumps(here | {"steps": 5}))
    (tmp_path / "2026-01-04T00-00-00.json").write_text("cut o")
    assert keep(first, tmp_path) is None
    assert keep(a_run({}), tmp_path) == here
    assert len(list(tmp_path.iterdir())) > 4
