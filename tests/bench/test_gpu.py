"""The script for a GPU goes through all its lines on a CPU."""

from __future__ import annotations

import json

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
    rows = json.loads(lines[-1])["rows"]
    assert [row["contender"] for row in rows] == list(gpu.CONTENDERS)
    assert all(row["slowest"] <= row["tokens_per_second"] <= row["fastest"] for row in rows)
    assert [line.split()[0] for line in lines[1:-1]] == ["size", *["tiny"] * len(rows)]


def test_who_finds_no_memory_is_left_out(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> gpu.Step:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(gpu, "CONTENDERS", {"ours": gpu.CONTENDERS["ours"], "large": full})
    assert gpu.main(["--dry-run"]) == 0
    told = capsys.readouterr()
    assert [row["contender"] for row in json.loads(told.out.splitlines()[-1])["rows"]] == ["ours"]
    assert "large: left out, out of memory" in told.err


def test_the_models_have_the_sizes_that_their_names_say() -> None:
    for name, shape in gpu.SIZES.items():
        d, kv = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
        block = 2 * d * d + 2 * d * kv + 3 * d * shape.intermediate_size
        parameters = shape.num_hidden_layers * block + 2 * shape.vocab_size * d
        assert f"{parameters / 1e9:.1f}B" == name
