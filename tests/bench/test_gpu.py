"""The script for a GPU goes through all its lines on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

from bench import gpu
from nanotron.ops import fused as elementwise


def test_it_refuses_without_an_accelerator(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert gpu.main([]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "no accelerator" in told.err


def test_a_dry_run_measures_every_contender(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)  # seconds, and tested elsewhere
    monkeypatch.setattr(elementwise, "_compiled", elementwise._compiled.__wrapped__)  # which would remember it
    assert gpu.main(["--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    turns = [json.loads(line) for line in lines[: len(gpu.CONTENDERS)]]
    assert [turn["contender"] for turn in turns] == list(gpu.CONTENDERS)
    rows = json.loads(lines[-1])["rows"]
    assert [row["contender"] for row in rows] == list(gpu.CONTENDERS)
    assert all(row["slowest"] <= row["tokens_per_second"] <= row["fastest"] for row in rows)
    assert [line.split()[0] for line in lines[len(turns) + 1 : -1]] == ["size", *["tiny"] * len(rows)]


def test_who_raises_is_left_out_from_there_on_and_what_was_measured_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def full(*_: object) -> gpu.Step:
        raise torch.OutOfMemoryError("out of memory")

    def fails_in_step(number: int) -> Callable[..., gpu.Step]:
        def step(steps: Iterator[int]) -> float:
            if next(steps) == number:
                raise RuntimeError("no kernel image")
            return 0.0

        return lambda *_: partial(step, count(1))

    contenders = {
        "large": full,
        "warming": fails_in_step(1),
        "early": fails_in_step(gpu.WARM_UP + 1),
        "late": fails_in_step(gpu.WARM_UP + gpu.STEPS + 1),
        "steady": fails_in_step(0),
    }
    monkeypatch.setattr(gpu, "CONTENDERS", contenders)
    monkeypatch.setattr(gpu, "DRY_ROUNDS", 2)
    out = tmp_path / "gpu.jsonl"
    assert gpu.main(["--dry-run", "--out", str(out)]) == 0
    told = capsys.readouterr()
    *turns, last = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(turn["round"], turn["contender"]) for turn in turns] == [(1, "late"), (1, "steady"), (2, "steady")]
    assert [row["contender"] for row in last["rows"]] == ["late", "steady"]
    assert "large: left out, OutOfMemoryError: out of memory" in told.err
    assert told.err.count("left out, RuntimeError: no kernel image") == 3


def test_a_bench_that_measured_nothing_does_not_end_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "CONTENDERS", {})
    assert gpu.main(["--dry-run"]) == gpu.NOTHING_RAN


def test_the_models_have_the_sizes_that_their_names_say() -> None:
    for name, shape in gpu.SIZES.items():
        d, kv = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
        block = 2 * d * d + 2 * d * kv + 3 * d * shape.intermediate_size
        parameters = shape.num_hidden_layers * block + 2 * shape.vocab_size * d
        assert f"{parameters / 1e9:.1f}B" == name
