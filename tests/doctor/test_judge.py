"""What is out of line among the numbers of all ranks, and how it is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from nanotron.doctor.judge import problems_of, table


def accounts(num_ranks: int = 4) -> list[dict[str, Any]]:
    """Healthy ranks, two on each host: tp within it, dp between them."""
    return [
        {
            "rank": rank,
            "host": "ab"[rank // 2],
            "facts": {"version of driver": "550.54", "kind of device": "H100"},
            "variables": {"NCCL_DEBUG": "INFO"},
            "numbers": {
                "matmul bfloat16": 6e14 + rank * 1e13,
                "bandwidth tp": 4e11,
                "latency tp": 2e-5,
                "bandwidth dp between hosts": 5e10,  # no outlier: other links
                "latency dp between hosts": 1e-4,
                **({"write": 1e9, "read": 2e9} if rank % 2 == 0 else {}),
            },
            "sources": {"bandwidth tp": rank ^ 1, "latency tp": rank ^ 1, "bandwidth dp between hosts": (rank + 2) % 4},
            "clock": (rank * 1e-3, 1e-3),
            "problems": [],
        }
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_healthy_ranks_have_no_problems(num_ranks: int) -> None:
    assert problems_of(accounts(num_ranks)) == []


def number(rank: int, what: str, value: float) -> Callable[[list[Any]], None]:
    return lambda ranks: ranks[rank]["numbers"].update({what: value})


def skew(seconds: float, error: float = 1e-3) -> Callable[[list[Any]], None]:
    return lambda ranks: [rank.update(clock=(seconds, error)) for rank in ranks[2:]]


@pytest.mark.parametrize(
    ("befalls", "told"),
    [
        (
            number(1, "matmul bfloat16", 2e14),
            [r"matmul bfloat16: 200 TFLOP/s, rank 1 on a, 3\.1 times worse than .* 620"],
        ),
        (number(1, "matmul bfloat16", 5e14), []),
        (
            number(3, "bandwidth dp between hosts", 1e10),
            [r"bandwidth dp between hosts: 10 GB/s, rank 1 on a to rank 3 on b, 5\.0 times worse .* of 50 "],
        ),
        (number(0, "bandwidth tp", 5e10), [r"bandwidth tp: 50 GB/s, rank 1 on a to rank 0 on a, 8\.0 times"]),
        (number(2, "latency tp", 3e-3), [r"latency tp: 3 ms, rank 3 on b to rank 2 on b, 150\.0 times"]),
        (number(2, "latency tp", 8e-4), []),  # many times the median, and still nothing
        (number(2, "write", 2e8), [r"write: 200 MB/s, rank 2 on b, 5\.0 times worse"]),
        (skew(3.0), [r"clock of a: 1\.5 s behind", r"clock of b: 1\.5 s ahead"]),
        (skew(3.0, error=2.0), [r"clock of a: 1\.5 s behind"]),  # b's clock was not read well enough
        (skew(0.4), []),
        (
            lambda ranks: ranks[3]["facts"].update({"version of driver": "535.1"}),
            [r'version of driver: "535\.1" on rank 3 \(b\), "550\.54" on ranks 0, 1, 2 \(a, b\); install the same'],
        ),
        (lambda ranks: ranks[1]["variables"].clear(), []),
        (lambda ranks: ranks[2]["problems"].append("x on b: no space"), [r"x on b: no space"]),
    ],
)
def test_what_is_out_of_line_is_named_with_its_ratio(befalls: Callable[[list[Any]], None], told: list[str]) -> None:
    ranks = accounts()
    befalls(ranks)
    problems = problems_of(ranks)
    assert len(problems) == len(told), problems
    assert all(re.match(line, problem) for line, problem in zip(told, problems, strict=True)), problems


def test_of_two_ranks_the_worse_one_is_named() -> None:
    for what, value in (("matmul bfloat16", 1e14), ("latency tp", 0.1), ("bandwidth tp", 1e9)):
        ranks = accounts(2)
        ranks[1]["numbers"][what] = value
        (problem,) = problems_of(ranks)
        assert "rank 1, " in problem or problem.split(" times")[0].split(", ")[1].endswith("to rank 1"), problem


def test_the_table_has_a_line_for_each_measure_and_notes_what_may_differ() -> None:
    ranks = accounts()
    ranks[3]["variables"] = {"NCCL_DEBUG": "WARN"}
    lines = table(ranks, "run: 1TB free")
    assert lines[0] == "4 ranks on a, b: H100"
    assert sum(line.startswith(("matmul", "bandwidth", "latency", "write", "read")) for line in lines) == 7
    assert "run: 1TB free" in lines
    assert lines[-1].startswith('note: environment variable NCCL_DEBUG: "WARN" on rank 3 (b), "INFO" on ranks 0, 1, 2')


def test_one_host_needs_no_name() -> None:
    ranks = accounts()
    for rank in ranks:
        rank["host"] = "a"
    assert not any(" on a" in line for line in table(ranks, "")[1:])
