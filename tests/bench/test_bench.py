"""The bench: everybody takes turns, everybody has a line, and nobody's failure is another's."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import bench.__main__ as command
from bench.contenders import PLAIN, SUBJECTS, Contender, Subject, ours
from bench.environments import REQUIREMENTS
from bench.report import LIMIT, lines, table
from bench.runner import Measured, compare
from bench.shapes import SHAPES

TINY = SHAPES["tiny"]
PARAMETERS = 57_344  # of its matrices


def pretender(name: str, **options: Any) -> Contender:
    return Contender(name, "tests.bench.pretender", options, warm_up=1)


def run(subject: Subject, folder: Path, said: list[str] | None = None) -> dict[str, Any]:
    say = (said if said is not None else []).append
    return compare(subject, subject.contenders, TINY, folder, rounds=2, steps=1, say=say)


def test_ours_and_a_plain_loop_train_the_same_model_and_both_are_in_the_table_and_the_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here = replace(PLAIN, environment=None)  # nothing is installed by a test
    monkeypatch.setattr(command, "SUBJECTS", {"small": Subject("A small one", [ours(), here])})
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    code = command.main(["small", "--shape", "tiny", "--rounds", "2", "--json", str(tmp_path / "found.json")])
    printed = capsys.readouterr().out
    told = json.loads((tmp_path / "found.json").read_text())
    assert code == 0, printed
    assert "A small one" in printed
    for name in ("ours", "plain loop"):
        assert any(line.split("  ")[1] == name for line in printed.splitlines() if line.startswith("  ")), printed
        found = told["subjects"]["small"]["contenders"][name]
        assert found["failure"] is None
        assert len(found["seconds_per_step"]) == 2
        assert found["tokens_per_second"]["low"] <= found["tokens_per_second"]["median"]
        assert 0 < found["share_of_limit"] < 1
        assert 1e8 < found["peak_bytes"] < 1e10
        assert 16 * PARAMETERS < found["in_use_bytes"] < 1e8
        assert found["first_loss"] == pytest.approx(4.852, abs=0.1)  # ln 128
    assert told["subjects"]["small"]["contenders"]["plain loop"]["ours_over_it"]["median"] > 0
    assert told["machine"]["versions"]["ours"]["torch"]


def test_the_ratio_is_taken_round_by_round_and_a_wrong_first_loss_is_marked() -> None:
    subject = Subject("", [pretender("ours"), pretender("slow")])
    measured = {"ours": Measured([1.0, 2.0, 4.0], 4.85), "slow": Measured([2.0, 2.0, 6.0], 9.0)}
    mine, its = lines(subject, subject.contenders, TINY, measured)
    assert mine.ratio is None
    assert its.ratio == (1.25, 1.5, 1.75)  # of 2, 1 and 1.5; the ratio of the medians is 1
    assert its.rate is not None
    assert its.rate.median == pytest.approx(TINY.tokens_per_step / 2)
    assert its.doubtful
    assert not mine.doubtful
    assert "9.00 !" in "\n".join(table("", [mine, its]))


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (Contender("broken", "bench.nowhere"), "No module named bench.nowhere"),
        (pretender("broken", fails_at=1), "RuntimeError: rank 0 is out of luck"),
        (pretender("broken", fails_at=2, fails_on=1), "RuntimeError: rank 1 is out of luck"),
    ],
    ids=["at the start", "at its first step", "another rank, in a round"],
)
def test_one_that_fails_is_reported_with_its_last_words_and_the_others_go_on(
    broken: Contender, why: str, tmp_path: Path
) -> None:
    subject = Subject("", [broken, pretender("ours")], world=2)
    failed, mine = lines(subject, subject.contenders, TINY, run(subject, tmp_path))
    assert failed.failure is not None
    assert why in failed.failure
    assert mine.failure is None
    assert mine.rate is not None
    assert f"failed: {failed.failure}" in "\n".join(table("", [failed, mine]))


def test_no_process_is_left_of_those_that_end_and_of_those_that_hang(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("hangs", "ours")]
    for folder in folders:
        folder.mkdir()
    hangs = pretender("hangs", fails_at=2, pids=str(folders[0]))
    subject = Subject("", [hangs, pretender("ours", pids=str(folders[1]))], world=2)
    run(subject, tmp_path)
    pids = [int(path.read_text()) for folder in folders for path in folder.iterdir()]
    assert len(pids) == 4
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_order_of_turns_moves_on_by_one_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bench.runner import Running

    turns: list[Path] = []
    make_steps = Running.make_steps
    monkeypatch.setattr(
        Running, "make_steps", lambda self, count: (turns.append(self._logs[0]), make_steps(self, count))[1]
    )
    run(Subject("", [pretender("a"), pretender("b")]), tmp_path)
    assert "".join(path.name[0] for path in turns) == "ab" + "ab" + "ba"  # the warm-up, then two rounds


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_contender_is_there_to_be_started(name: str) -> None:
    contenders = [LIMIT, *SUBJECTS[name].contenders]
    names = [one.name for one in contenders]
    assert len(set(names)) == len(names)
    for one in contenders:
        assert importlib.util.find_spec(one.module), one.module
        assert one.environment is None or (REQUIREMENTS / f"{one.environment}.txt").exists()
        assert one.against in names or one.module in ("bench.ours", LIMIT.module)
