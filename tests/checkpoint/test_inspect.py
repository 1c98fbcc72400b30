"""What `nanotron inspect` says about a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanotron.checkpoint.format import StateShard
from nanotron.checkpoint.inspect import inspect_checkpoint, is_checkpoint
from nanotron.checkpoint.write import Saver
from nanotron.errors import ConfigError
from nanotron.parallel.params import Box


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    weight = torch.tensor([[3.0, 0.0], [0.0, -4.0]])
    halves = [StateShard("exp_avg", "w", (2, 2), Box((row, 0), (1, 2)), weight[row : row + 1]) for row in range(2)]
    saver = Saver(str(tmp_path))
    state = {"step": 7, "layout": {"dp": 2, "tp": 1}, "lr": 0.001}
    saver.save(7, [StateShard("weight", "w", (2, 2), Box((0, 0), (2, 2)), weight.bfloat16()), *halves], state)
    assert saver.wait()
    return tmp_path


def test_step_layout_sizes_and_norms_are_shown(saved: Path) -> None:
    lines = list(inspect_checkpoint(str(saved)))
    assert f"checkpoint   {saved}/7" in lines
    assert "step         7" in lines
    assert "layout       dp 2 · tp 1" in lines
    assert "lr           0.001" in lines
    assert "parameters   4 in 1 tensors" in lines
    assert "exp_avg      0.00 MiB of F32 in 2 boxes" in lines
    assert ["weight/w", "2×2", "BF16", "5", "2.5", "4"] in [line.split() for line in lines]
    assert ["exp_avg/w", "2×2", "F32", "5", "2.5", "4"] in [line.split() for line in lines]
    tensors = [line.split()[0] for line in lines if "/w " in line]
    assert tensors == ["weight/w", "exp_avg/w"], "weights first"
    assert lines[-1] == "integrity    all 2 files are as they were written"


def test_damage_is_said_and_raised_after_what_can_be_shown(saved: Path) -> None:
    shard = saved / "7" / "shard-00000-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\x00")
    lines = inspect_checkpoint(str(saved / "7"))
    shown = [next(lines) for _ in range(10)]
    assert shown[-1] == "integrity    damaged"
    with pytest.raises(ConfigError, match=r"shard-00000-of-00001.safetensors is damaged: the checksum of weight/w@0,0"):
        next(lines)


def test_a_folder_of_unfinished_steps_is_recognised_and_said_to_be_so(tmp_path: Path, saved: Path) -> None:
    assert is_checkpoint(str(saved))
    assert is_checkpoint(str(saved / "7"))
    assert not is_checkpoint(str(tmp_path / "absent"))
    assert not is_checkpoint(str(saved / "7" / "index.json")), "a file is no folder of steps"
    (saved / "7" / "index.json").unlink()
    assert is_checkpoint(str(saved))
    with pytest.raises(ConfigError, match="none of its steps has an index"):
        list(inspect_checkpoint(str(saved)))
