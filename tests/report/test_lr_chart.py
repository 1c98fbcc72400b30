"""The learning rate of a run, drawn before it."""

from __future__ import annotations

from pathlib import Path

from nanotron.check import check
from nanotron.report.lr_chart import HEIGHT, lr_chart
from tests.config.test_mistakes import RIGHT


def drawn(folder: Path, *keys: str) -> list[str]:
    (folder / "x.yaml").write_text(RIGHT)
    overrides = [f"optimizer.learning_rate_scheduler.{key}" for key in keys]
    return lr_chart(check(folder / "x.yaml", ["tokens.train_steps=8", *overrides]))


def heights(lines: list[str]) -> list[int]:
    """Eighths of a line that each column is high."""
    columns = zip(*(line.partition("│")[2] for line in lines[:HEIGHT]), strict=True)
    return [sum(" ▁▂▃▄▅▆▇█".index(cell) for cell in column) for column in columns]


def test_each_column_is_as_high_as_its_learning_rate(tmp_path: Path) -> None:
    keys = ("lr_warmup_steps=2", "lr_decay_starting_step=4", "min_decay_lr=0")
    lines = drawn(tmp_path, *keys)
    assert heights(lines) == [32, 64, 64, 64, 48, 32, 16, 0]
    assert lines[0].split()[0] == "0.0003"
    assert lines[-1] == "learning rate: 0.00015 in the first update, 0 in the last"
    assert heights(drawn(tmp_path, *keys, "lr_schedule_steps=5", "lr_rewarm_steps=1")) == [
        32,
        64,
        64,
        64,
        0,
        64,
        64,
        64,
    ]
