"""Which of several failures came first."""

from pathlib import Path

import pytest

from nanotron.launch.failures import Failure, failure_of, first_of, read_failures, record_collectives, write_failure
from nanotron.parallel.store import LostPeers, LostStore


def failure(rank: int, kind: str, when: float, **where: object) -> Failure:
    return Failure(rank, kind, "error", when, "host", dict(where))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("bad"), "own"),
        (RuntimeError("shape mismatch"), "own"),
        (RuntimeError("[pair.cc:537] Connection closed by peer [127.0.0.1]:39393"), "peer"),
        (RuntimeError("Timed out waiting 1000ms for recv operation to complete"), "timeout"),
        (ConnectionResetError("Connection reset by peer"), "peer"),
        (LostPeers("rank 1 did not answer within 30 s", [1]), "timeout"),
        (LostStore("the store of the ranks is gone"), "peer"),
    ],
)
def test_an_error_is_told_apart_from_the_loss_of_a_peer(error: Exception, kind: str) -> None:
    assert failure_of(error, 0).kind == kind


def test_a_ranks_own_error_comes_before_earlier_losses_of_peers() -> None:
    first = first_of([failure(0, "peer", 1.0), failure(1, "timeout", 2.0), failure(2, "own", 3.0)])
    assert first is not None
    assert first.rank == 2


def test_a_killed_rank_and_an_own_error_are_ordered_by_time() -> None:
    first = first_of([failure(0, "own", 3.0), failure(1, "killed", 2.0)])
    assert first is not None
    assert first.rank == 1


def test_among_timeouts_the_rank_furthest_behind_comes_first() -> None:
    first = first_of([failure(0, "timeout", 1.0, step=9), failure(1, "timeout", 2.0, step=8)])
    assert first is not None
    assert first.rank == 1


def test_nothing_failed() -> None:
    assert first_of([]) is None


def test_a_failure_survives_its_file_and_a_broken_one_is_left_out(tmp_path: Path) -> None:
    error = ValueError("bad\nin two lines")
    error.where = {"stage": 1, "step": 7, "action": "F0"}  # type: ignore[attr-defined]
    try:
        raise error
    except ValueError as caught:
        written = failure_of(caught, 3)
    write_failure(tmp_path, written)
    (tmp_path / "failures/rank-0.json").write_text("{")
    (tmp_path / "failures/rank-1.json").write_text("[1]")
    assert read_failures(tmp_path) == [written]
    assert str(written).endswith("(stage 1, step 7, action F0): ValueError: bad in two lines")
    assert "raise error" in written.traceback


def test_the_place_in_torchs_own_sources_is_left_out() -> None:
    error = RuntimeError("[/a/b/gloo/unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete")
    assert failure_of(error, 0).error == "RuntimeError: Timed out waiting 5000ms for recv operation to complete"


def test_collectives_in_flight_go_into_the_runs_folder_unless_the_environment_says_where(tmp_path: Path) -> None:
    environment = {"TORCH_FR_BUFFER_SIZE": "5"}
    record_collectives(environment, tmp_path)
    assert environment == {
        "TORCH_FR_BUFFER_SIZE": "5",
        "TORCH_FR_DUMP_TEMP_FILE": str(tmp_path / "failures/nccl-"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }
