"""What the parent says last, and what it shows of another process's run."""

import json
import time
from pathlib import Path

import pytest

from nanotron.config import get_config_from_dict
from nanotron.errors import ConfigError
from nanotron.launch import codes
from nanotron.launch.failures import Failure, read_failures, write_failure
from nanotron.launch.host import Workers
from nanotron.launch.parent import closing_lines, watch


def ended(*statuses: int) -> Workers:
    """A machine's ranks after their end; rank r ended r tenths of a second after 1000 s."""
    workers = Workers(running={}, store=None)  # type: ignore[arg-type]
    workers.ended = {rank: (status, 1000.0 + rank / 10) for rank, status in enumerate(statuses)}
    return workers


def failure(rank: int, kind: str, when: float = 1000.0) -> Failure:
    return Failure(rank, kind, "what it said", when, "host", {"step": 5})


def test_nothing_is_said_of_a_run_that_is_done(tmp_path: Path) -> None:
    assert closing_lines(codes.DONE, ended(0, 0), tmp_path, []) == []


@pytest.mark.parametrize("code", [codes.PREEMPTED, codes.PREEMPTED_UNSAVED])
def test_a_stopped_run_says_how_to_go_on(tmp_path: Path, code: int) -> None:
    (line,) = closing_lines(code, ended(code), tmp_path, [])
    assert "the same command goes on" in line


def test_the_last_line_names_the_rank_whose_own_failure_it_was(tmp_path: Path) -> None:
    write_failure(tmp_path, failure(0, "peer", 999.0))
    write_failure(tmp_path, failure(1, "own"))
    *_, last = closing_lines(codes.INTERNAL_ERROR, ended(1, 1), tmp_path, [])
    assert last == "failed first: rank 1 on host (step 5): what it said"


def test_a_failure_of_an_earlier_run_is_not_taken_for_this_ones(tmp_path: Path) -> None:
    write_failure(tmp_path, failure(0, "own"))
    *_, last = closing_lines(codes.INTERNAL_ERROR, ended(0, -9), tmp_path, read_failures(tmp_path))
    assert last.startswith("failed first: rank 1 on ")
    assert last.endswith("ended by SIGKILL")


def test_when_ranks_waited_in_vain_the_silent_one_is_named(tmp_path: Path) -> None:
    for rank in (0, 2):
        write_failure(tmp_path, failure(rank, "timeout"))
    workers = ended(1, -15, 1)
    workers.being_ended = 1000.05  # rank 1 hung, and was ended by us
    *_, last = closing_lines(codes.INTERNAL_ERROR, workers, tmp_path, [])
    assert last.startswith("failed first: rank 1 fell behind and said nothing; waiting for it: rank 0 ")


def test_a_rank_that_left_no_record_is_named_with_its_status(tmp_path: Path) -> None:
    assert closing_lines(codes.INTERNAL_ERROR, ended(0, 7), tmp_path, []) == ["failed first: rank 1, exit status 7"]


def test_ranks_that_a_preflight_ended_have_said_why(tmp_path: Path) -> None:
    assert closing_lines(codes.INTERNAL_ERROR, ended(1, 1), tmp_path, [], preflight=True) == []


def write_run(folder: Path, steps: int) -> None:
    config = get_config_from_dict(
        {
            "model": {"model_config": {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}},
            "tokens": {
                "sequence_length": 32,
                "micro_batch_size": 1,
                "batch_accumulation_per_replica": 1,
                "train_steps": 3,
            },
            "optimizer": {"learning_rate_scheduler": {"learning_rate": 1e-3}},
        }
    )
    config.save_as_yaml(folder / "config.yaml")
    row = {
        "lm_loss": 2.5,
        "lr": 1e-3,
        "consumed_tokens": 32,
        "time_per_iteration_ms": 100.0,
        "tokens_per_sec": 320.0,
        "tokens_per_sec_per_device": 320.0,
        "model_tflops_per_device": 0.1,
        "memory_gib": 0.5,
    }
    lines = [json.dumps({"step": step} | row) + "\n" for step in range(1, steps + 1)]
    (folder / "metrics.jsonl").write_text("".join(lines))


def test_watch_prints_the_step_lines_of_a_finished_run_and_returns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, steps=3)
    started = time.monotonic()
    assert watch(str(tmp_path), plain=True) == codes.DONE
    assert time.monotonic() - started < 30
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == [f"iteration: {step} / 3" for step in (1, 2, 3)]
    assert "global_batch_size: 32 | lm_loss: 2.50000" in lines[0]


def test_watch_of_a_run_beyond_a_shortened_end_has_no_time_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, steps=5)
    assert watch(str(tmp_path), plain=True) == codes.DONE
    assert capsys.readouterr().out.splitlines()[-1].endswith("| eta: 0s")


def test_watch_refuses_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no metrics\.jsonl"):
        watch(str(tmp_path))
