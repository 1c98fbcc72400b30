"""A user's own schedule: read, proven, run, or refused with the place of the mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanotron.errors import ConfigError
from nanotron.pipeline.custom import custom_schedule, is_custom, to_csv
from nanotron.pipeline.schedules import SCHEDULE_NAMES, get_schedule
from nanotron.pipeline.simulate import prove, simulate


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_a_schedule_written_as_csv_reads_back_as_itself(name: str, tmp_path: Path) -> None:
    schedule = get_schedule(name, 4, 2)
    path = tmp_path / "mine.csv"
    path.write_text("# one line per rank\n\n" + to_csv(schedule, 8))
    mine = custom_schedule(str(path), 4, schedule.num_chunks)
    assert prove(mine, 8) == prove(schedule, 8)


PYTHON = """
def placement(rank, chunk, ranks):
    return rank if chunk == 0 else 2 * ranks - 1 - rank

def down_and_up(rank, ranks, microbatches):
    for kind, chunks in ("F", (0, 1)), ("BW", (1, 0)):
        for chunk in chunks:
            for microbatch in range(microbatches):
                yield kind, microbatch, chunk

def broken(rank, ranks, microbatches):
    return [("F", 0)] + [None + 1]

def misspelled(rank, ranks, microbatches):
    yield "G", 0, 0

def lazy(rank, ranks, microbatches):
    yield from list(down_and_up(rank, ranks, microbatches))[: 1 if rank == 2 else None]
"""


def test_a_python_function_is_a_schedule(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PYTHON)
    schedule = custom_schedule(f"{tmp_path}/mine.py:down_and_up", 3, 2)
    assert schedule.holders[5] == (0, 1)
    assert simulate(schedule, 4).peaks[0].activations == 8


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mine.py:nothing", "has no function nothing"),
        ("mine.py:broken", r"broken\(rank=0, ranks=3, microbatches=4\) raised TypeError"),
        ("mine.py:misspelled", r"yields \('G', 0, 0\); the kind must be F, B, W or BW"),
        ("mine.py:lazy", "rank 2: B of microbatch 0 in stage 2 appears 0 times instead of 1"),
        ("bad.py:f", "importing it raised SyntaxError"),
        ("absent.csv", "there is no file"),
        ("cell.csv", r"cell.csv, line 2: '0X1' is not an action"),
        (
            "short.csv",
            r"tokens.batch_accumulation_per_replica=4 does not fit .*short.csv, which is written for 1 micro",
        ),
        ("two.csv", "has lines for 2 ranks; parallelism.pp=3"),
        ("one_stage.csv", "rank 0 has 1 stages, parallelism.pp_virtual_stages=2"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(PYTHON)
    (tmp_path / "bad.py").write_text("def f(:")
    (tmp_path / "cell.csv").write_text("0F0\n0F0,0X1\n")
    (tmp_path / "short.csv").write_text("0F0,5F0\n1F0,4F0\n2F0,3F0\n")
    (tmp_path / "two.csv").write_text("0F0\n1F0\n")
    (tmp_path / "one_stage.csv").write_text("0F0\n1F0\n2F0\n")
    with pytest.raises(ConfigError, match=message):
        prove(custom_schedule(str(tmp_path / name), 3, 2), 4)


def test_only_files_are_custom() -> None:
    assert [is_custom(name) for name in (*SCHEDULE_NAMES, "mine.csv", "a/b.py:f")] == [False] * 5 + [True] * 2
