"""The script for a GPU goes through all its lines on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_checks, gpu_speed
from bench.gpu_subject import Found, Subject
from nanotron.ops import fused as elementwise
from tests.pool import Pool


def test_it_refuses_without_an_accelerator(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert gpu.main([]) == gpu.NO_ACCELERATOR
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "no accelerator" in told.err


def dry_run(rank: int, world: int, out: str, sections: list[str]) -> int:
    """The script in a process of its own, which has a process group for itself."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.compile = lambda function, **options: function  # seconds, and tested elsewhere
    elementwise._compiled = elementwise._compiled.__wrapped__  # which would remember it
    return gpu.main(["--dry-run", "--out", out, *[f"--section={name}" for name in sections]])


def found_in(path: Path) -> dict[str, list[Found]]:
    lines: dict[str, list[Found]] = {}
    for line in map(json.loads, path.read_text().splitlines()):
        lines.setdefault(line.pop("section"), []).append(line)
    return lines


def test_a_dry_run_goes_through_every_section(pool: Pool, tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    assert pool.run(1, dry_run, str(out), []) == [0]
    found = found_in(out)
    assert list(found) == list(gpu.SECTIONS)
    assert not [line for lines in found.values() for line in lines if "error" in line or "stopped" in line]
    cases = [(dtype, case) for dtype in gpu_checks.TOLERANCES for case in gpu_checks.CASES]
    assert [(line["dtype"], line["case"]) for line in found["parity"]] == cases
    assert all(line["ok"] for name in ("parity", "fp8", "waits", "collectives") for line in found[name])
    assert len(found["collectives"]) == 11
    killed, resumed = found["resume"]
    assert resumed["steps_made_twice"] == killed["killed_after_step"] - killed["saved"] > 0
    assert resumed["largest_difference"] == 0.0
    assert [line["contender"] for line in found["1.3B"]] == ["the plan", *gpu_speed.OURS]
    assert all(line["memory_gib"] > 0 for line in found["1.3B"])
    assert [line["contender"] for line in found["0.3B"]] == list(gpu_speed.CONTENDERS)
    assert all(line["slowest"] <= line["tokens_per_second"] <= line["fastest"] for line in found["0.3B"])
    assert len(found["fp8"]) == 17
    assert len(found["kernels"]) == 12


def test_its_sections_are_over_within_7_minutes() -> None:
    assert gpu.LIMIT_S <= 420
    assert sum(seconds for _, seconds in gpu.SECTIONS.values()) <= gpu.LIMIT_S


def test_a_section_that_raises_or_takes_too_long_says_so_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def raises(subject: Subject) -> Generator[Found]:
        yield {"first": 1}
        raise torch.OutOfMemoryError("out of memory")

    def wrong(subject: Subject) -> Generator[Found]:
        yield {"ok": False}

    def endless(subject: Subject) -> Generator[Found]:
        yield from ({"number": number} for number in count())

    sections = {"raises": (raises, 9.0), "endless": (endless, 0.05), "late": (wrong, 0.0), "wrong": (wrong, 9.0)}
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    timed = replace(gpu._dry(), dry=False)
    monkeypatch.setattr(gpu, "_dry", lambda: timed)
    assert gpu.main(["--dry-run"]) == gpu.FAILED
    told = capsys.readouterr()
    lines = [json.loads(line) for line in told.out.splitlines()]
    assert [line for line in lines if "number" not in line] == [
        {"section": "raises", "first": 1},
        {"section": "raises", "error": "OutOfMemoryError: out of memory"},
        {"section": "endless", "stopped": "its time is over"},
        {"section": "late", "stopped": "its time is over"},
        {"section": "wrong", "ok": False},
    ]
    assert "out of memory" in told.err
    for section, code in (("wrong", gpu.FAILED), ("endless", 0)):
        assert gpu.main(["--dry-run", "--section", section]) == code


def test_a_contender_that_raises_is_left_out_from_there_on_and_what_was_measured_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> gpu_speed.Step:
        raise torch.OutOfMemoryError("out of memory")

    def fails_in_step(number: int) -> Callable[..., gpu_speed.Step]:
        def step(steps: Iterator[int]) -> float:
            if next(steps) == number:
                raise RuntimeError("no kernel image")
            return 0.0

        return lambda *_: partial(step, count(1))

    contenders: dict[str, Any] = {
        "large": full,
        "early": fails_in_step(gpu_speed.WARM_UP + 1),
        "late": fails_in_step(gpu_speed.WARM_UP + gpu_speed.STEPS + 1),
        "steady": fails_in_step(0),
    }
    monkeypatch.setattr(gpu_speed, "CONTENDERS", contenders)
    monkeypatch.setattr(gpu_speed, "DRY_ROUNDS", 2)
    found = list(gpu_speed.in_turns(gpu._dry()))
    assert [(line["contender"], line.get("round", line.get("left_out"))) for line in found] == [
        ("large", "OutOfMemoryError: out of memory"),
        ("early", "RuntimeError: no kernel image"),
        ("late", 1),
        ("steady", 1),
        ("late", "RuntimeError: no kernel image"),
        ("steady", 2),
    ]


def test_parity_tells_when_the_device_computes_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = gpu_checks._three_steps
    calls = count()

    def spoiled(*args: Any) -> Any:
        losses, norms = steps(*args)
        return ([loss * 1.01 for loss in losses], norms) if next(calls) == 2 else (losses, norms)  # the second case

    monkeypatch.setattr(gpu_checks, "_three_steps", spoiled)
    monkeypatch.setattr(gpu_checks, "CASES", dict(list(gpu_checks.CASES.items())[:3]))
    monkeypatch.setattr(gpu_checks, "TOLERANCES", {"float32": 1e-4})
    assert [line["ok"] for line in gpu_checks.parity(gpu._dry())] == [True, False, True]


def test_the_models_have_the_sizes_that_their_names_say() -> None:
    for name, shape in gpu_speed.SIZES.items():
        d, kv = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
        block = 2 * d * d + 2 * d * kv + 3 * d * shape.intermediate_size
        parameters = shape.num_hidden_layers * block + 2 * shape.vocab_size * d
        assert f"{parameters / 1e9:.1f}B" == name
