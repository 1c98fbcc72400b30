"""What may not change when a run goes on, and what is said of the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanotron.checkpoint.compare import changed_keys, check_data, check_model, differences
from nanotron.errors import ConfigError
from tests.checkpoint.test_resume import save_steps

FIX = "; put model.model_config back, or give this model its own checkpoints.checkpoints_path"
HEADS = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rope_theta": 1e4,
    "rope_interleaved": False,
}


def test_another_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    check_model(f"{tmp_path}/1", {"w": (4, 2)}, HEADS)
    with pytest.raises(ConfigError) as caught:
        check_model(f"{tmp_path}/1", {"w": (4, 3), "head.weight": (8, 2)}, HEADS)
    assert [line.split(" is of another model: ")[1] for line in caught.value.problems] == [
        "w was [4, 2] in the checkpoint and is [4, 3] now",
        "head.weight is [8, 2] now and absent in the checkpoint" + FIX,
    ]


def test_a_model_of_the_same_shapes_and_other_heads_is_refused(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / "1" / "model_config.json").write_text(json.dumps(HEADS))
    check_model(f"{tmp_path}/1", {"w": (4, 2)}, {**HEADS, "rope_theta": 5e5})
    with pytest.raises(ConfigError) as caught:
        check_model(f"{tmp_path}/1", {"w": (4, 2)}, {**HEADS, "num_attention_heads": 8, "rope_interleaved": True})
    assert [line.split(" is of another model: ")[1] for line in caught.value.problems] == [
        "model.model_config.num_attention_heads was 4 in the checkpoint and is 8 now",
        "model.model_config.rope_interleaved was false in the checkpoint and is true now" + FIX,
    ]


def test_another_shape_is_told_by_the_keys_that_changed_and_not_by_every_weight(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    (tmp_path / "1" / "model_config.json").write_text(json.dumps({**HEADS, "hidden_size": 4, "z_loss": False}))
    with pytest.raises(ConfigError) as caught:
        check_model(f"{tmp_path}/1", {"w": (4, 3), "head.weight": (8, 2)}, {**HEADS, "hidden_size": 8, "window": None})
    assert [line.split(" is of another model: ")[1] for line in caught.value.problems] == [
        "model.model_config.hidden_size was 4 in the checkpoint and is 8 now" + FIX
    ]


def test_what_else_changed_in_the_config_is_listed(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    now = {
        "general": {"run": "today"},
        "parallelism": {"dp": 4, "tp": 1},
        "tokens": {"train_steps": 200, "sequence_length": 8},
        "data_stages": [],
    }
    assert changed_keys(f"{tmp_path}/1", now) == []  # it carries no config
    (tmp_path / "1" / "config.yaml").write_text(
        "general: {run: yesterday}\nparallelism: {dp: 2, tp: 1}\ntokens: {train_steps: 100, sequence_length: 8}\n"
        "data_stages: []\n"
    )
    assert changed_keys(f"{tmp_path}/1", now) == [
        "parallelism.dp was 2 in the checkpoint and is 4 now",
        "tokens.train_steps was 100 in the checkpoint and is 200 now",
    ]


def test_changed_data_is_refused_with_the_difference_unless_allowed() -> None:
    line = "stage 'stable' source 0 (a): a.ds was 10 bytes, is 12 bytes"
    with pytest.raises(ConfigError) as caught:
        check_data([line])
    assert caught.value.problems == [
        f"the data changed since the checkpoint: {line}; put it back, or continue with --allow-data-change"
    ]
    assert check_data([line], allow_change=True) == [line]


def test_nested_differences_are_named_by_their_path() -> None:
    saved = {"layout": {"dp": 2, "tp": 1}, "threads": 2, "stages": [{"name": "a", "lr": 1.0}], "gone": 1}
    now = {"layout": {"dp": 4, "tp": 1}, "threads": 2, "stages": [{"name": "a", "lr": 0.5}], "new": None}
    assert differences(saved, now) == [
        "layout.dp was 2 in the checkpoint and is 4 now",
        "stages[0].lr was 1.0 in the checkpoint and is 0.5 now",
        "gone is 1 in the checkpoint and absent now",
        "new is null now and absent in the checkpoint",
    ]
    assert differences(saved, saved) == []
