"""The live display follows metrics.jsonl."""

import io
import json
from pathlib import Path
from typing import Any

from rich.console import Console

from nanotron.config import get_config_from_dict
from nanotron.launch.display import Display, Tail, sparkline


def row(step: int, **more: Any) -> str:
    numbers = {
        "step": step,
        "lm_loss": 10.0 - step,
        "grad_norm": 0.5,
        "lr": 3e-4,
        "time_per_iteration_ms": 100.0,
        "tokens_per_sec": 52_100.0,
        "tokens_per_sec_per_device": 6_510.0,
        "memory_gib": 0.25,
    }
    return json.dumps(numbers | more) + "\n"


def test_a_tail_returns_each_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    path.write_text(row(1) + row(2)[:10])
    assert [line["step"] for line in tail.read()] == [1]
    with path.open("a") as file:
        file.write(row(2)[10:])
    assert [line["step"] for line in tail.read()] == [2]
    assert tail.read() == []


def test_a_replaced_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(row(1) + row(2) + row(3))
    tail = Tail(path)
    tail.read()
    (tmp_path / "new").write_text(row(1))
    (tmp_path / "new").replace(path)
    assert [line["step"] for line in tail.read()] == [1]


def test_the_rows_of_an_earlier_run_are_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(row(1) + row(2))
    tail = Tail(path, only_new_file=True)
    assert tail.read() == []
    (tmp_path / "new").write_text(row(1))
    (tmp_path / "new").replace(path)
    assert [line["step"] for line in tail.read()] == [1]


def drawn(path: Path, **more: Any) -> str:
    tokens = {"train_steps": 8, **more}
    config = get_config_from_dict(
        {
            "general": {"project": "my-run"},
            "model": {"model_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}},
            "tokens": {
                "sequence_length": 8,
                "micro_batch_size": 1,
                "global_batch_size": 80,
                "train_steps": 8,
                **tokens,
            },
            "optimizer": {"learning_rate_scheduler": {"learning_rate": 1e-3}},
        }
    )
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    display = Display(Tail(path), config, console=console)
    with display.live:
        display.refresh()
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_display_shows_progress_loss_speed_and_time_left(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(row(step) for step in range(1, 7)))
    text = drawn(path)
    for shown in ("my-run", "6/8", "75%", "eta 0s", "▁", "4", "52.1K tokens/s", "6.51K per device", "grad norm 0.5"):
        assert shown in text, shown


def test_steps_that_will_be_larger_are_waited_for_longer(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(row(step, time_per_iteration_ms=1e3) for step in range(1, 7)))
    assert "eta 2s" in drawn(path)
    assert "eta 20s" in drawn(path, batch_ramp=[{"global_batch_size": 8, "steps": 6}])


def test_a_loss_that_is_not_finite_is_shown_and_does_not_break_the_display(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(row(1) + row(2, lm_loss=None))
    assert "nan" in drawn(path)


def test_a_sparkline_goes_from_high_to_low_and_keeps_its_width() -> None:
    assert sparkline([3.0, 2.0, 1.0], 40) == "█▅▁"
    assert len(sparkline([float(i) for i in range(1000)], 40)) == 40
    assert sparkline([2.0, 2.0], 40) == "▁▁"
    assert sparkline([], 40) == ""
