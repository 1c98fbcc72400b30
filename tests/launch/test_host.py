"""Ranks of one machine, started and watched by a parent."""

import ctypes
import faulthandler
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from nanotron.launch import codes, host
from nanotron.launch import watch as watch_module
from nanotron.launch.failures import STACK_SIGNAL, first_of, read_failures, stacks_on_record
from nanotron.launch.host import Workers, exit_code, start_workers, watch_workers
from nanotron.launch.parent import closing_lines
from nanotron.launch.peers import Peers
from nanotron.launch.place import Place
from nanotron.launch.roll import Roll
from nanotron.launch.run import _record_failure
from nanotron.launch.watch import Watch


def run(entry: Callable[[Sequence[str]], int], world: int, *argv: str, stop_grace_s: float = 20.0) -> Workers:
    workers = start_workers(world, argv, piped=False, entry=entry)
    watch_workers(workers, stop_grace_s=stop_grace_s, refresh=lambda: None)
    return workers


def all_reduce_ranks(argv: Sequence[str]) -> int:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(total)
    (Path(argv[0]) / os.environ["RANK"]).write_text(f"{total.item()} {os.getpgrp() == os.getpid()}")
    dist.destroy_process_group()
    return 0


def test_ranks_meet_at_the_parents_store_in_process_groups_of_their_own(tmp_path: Path) -> None:
    workers = run(all_reduce_ranks, 3, str(tmp_path))
    assert exit_code(workers) == codes.DONE
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["6 True"] * 3


def collect_garbage(argv: Sequence[str]) -> int:
    before = private_bytes()
    gc.collect()
    Path(argv[0]).write_text(str(private_bytes() - before))
    return 0


def private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))


def test_a_collection_in_a_rank_leaves_what_it_shares_with_the_others_shared(tmp_path: Path) -> None:
    gc.unfreeze()  # what tests/conftest.py has frozen
    shared = [[] for _ in range(1_000_000)]  # 72 MB, of which a collection writes into every page
    assert exit_code(run(collect_garbage, 1, str(tmp_path / "more"))) == codes.DONE
    assert int((tmp_path / "more").read_text()) < 24 * len(shared)


def code_of_rank(argv: Sequence[str]) -> int:
    return int(argv[int(os.environ["RANK"])])


@pytest.mark.parametrize(
    ("ranks", "code"),
    [
        (["0", "0"], codes.DONE),
        (["75", "75"], codes.PREEMPTED),
        (["75", "76"], codes.PREEMPTED_UNSAVED),
        (["76", "1"], codes.PREEMPTED_UNSAVED),
        (["2", "2"], codes.USER_MISTAKE),
        (["4", "4"], codes.STOPPED_BY_NAN),
    ],
)
def test_the_runs_exit_code_is_its_ranks(ranks: list[str], code: int) -> None:
    assert exit_code(run(code_of_rank, 2, *ranks)) == code


def raise_on_rank_one(argv: Sequence[str]) -> int:
    faulthandler.register(STACK_SIGNAL, file=2)
    if os.environ["RANK"] == "1":
        raise ValueError("broken")
    time.sleep(60)
    return 0


def test_a_rank_that_outlives_another_ones_failure_says_where_it_is_and_is_ended(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hours = itertools.count(time.time(), -3600.0)
    clock = SimpleNamespace(time=lambda: next(hours), monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(host, "time", clock)  # somebody sets the machine's clock back, again and again
    monkeypatch.setattr(host, "FAILURE_GRACE_S", 0.3)
    workers = run(raise_on_rank_one, 2)
    assert exit_code(workers) == codes.INTERNAL_ERROR
    assert workers.ended[0][0] == -signal.SIGTERM
    assert workers.killed() == [], "a rank that we ended did not fail"
    errors = capfd.readouterr().err
    assert "ValueError: broken" in errors
    assert "in raise_on_rank_one" in errors.split("Current thread", 1)[1], "it says where it hung"


def kill_rank_one(argv: Sequence[str]) -> int:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    return 1


def test_a_killed_rank_is_named_as_the_first_failure() -> None:
    workers = run(kill_rank_one, 3)
    assert exit_code(workers) == codes.INTERNAL_ERROR
    first = first_of(workers.killed())
    assert first is not None
    assert (first.rank, first.error) == (1, "ended by SIGKILL")


def watch_and_tell(workers: Workers, number: int, ready: Callable[[], bool], stop_grace_s: float = 20.0) -> None:
    """Watch the ranks, and send this process a signal once they are ready and it is the parent's to pass on."""
    unwatched = signal.getsignal(number)

    def tell() -> None:
        while not ready() or signal.getsignal(number) == unwatched:
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=tell)
    thread.start()
    watch_workers(workers, stop_grace_s=stop_grace_s, refresh=lambda: None)
    thread.join()


def exit_75_when_told(argv: Sequence[str]) -> int:
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, lambda number, frame: told.append(number))
    Path(argv[0], os.environ["RANK"]).touch()
    while not told:
        time.sleep(0.02)
    time.sleep(0.2)
    return 75 if len(told) == 1 else 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_parent_reaches_every_rank_once_and_their_code_comes_back(
    number: signal.Signals, tmp_path: Path
) -> None:
    workers = start_workers(2, [str(tmp_path)], piped=False, entry=exit_75_when_told)
    watch_and_tell(workers, number, lambda: len(list(tmp_path.iterdir())) == 2)
    assert exit_code(workers) == codes.PREEMPTED


def ignore_signals(argv: Sequence[str]) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)
    Path(argv[0], "ready").touch()
    time.sleep(60)
    return 0


def test_a_rank_that_does_not_stop_in_time_is_killed_and_nothing_counts_as_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "END_GRACE_S", 0.2)

    workers = start_workers(1, [str(tmp_path)], piped=False, entry=ignore_signals)
    watch_and_tell(workers, signal.SIGTERM, (tmp_path / "ready").exists, stop_grace_s=0.3)
    assert workers.ended[0][0] == -signal.SIGKILL
    assert exit_code(workers) == codes.PREEMPTED_UNSAVED


def say_something(argv: Sequence[str]) -> int:
    os.write(1, f"out of rank {os.environ['RANK']}\n".encode())
    os.write(2, f"err of rank {os.environ['RANK']}\n".encode())
    return 0


def test_piped_ranks_print_to_the_parent() -> None:
    workers = start_workers(2, [], piped=True, entry=say_something)
    watch_workers(workers, stop_grace_s=1.0, refresh=lambda: None)
    assert workers.output is not None
    text = os.read(workers.output, 65536).decode()
    os.close(workers.output)
    assert sorted(text.splitlines()) == [f"{where} of rank {rank}" for where in ("err", "out") for rank in (0, 1)]


def test_a_fresh_rank_runs_the_same_entry() -> None:
    program = host._program(code_of_rank, ["3"])
    assert (
        program == "import sys; from " + code_of_rank.__module__ + " import code_of_rank; sys.exit(code_of_rank(['3']))"
    )


def abort_while_another_rank_is_blocked(argv: Sequence[str]) -> int:
    """Rank 0 never joins what the others wait for; their watchdog, a thread that is not Python's, ends them."""
    libc, rank = ctypes.CDLL(None), int(os.environ["RANK"])
    with stacks_on_record(Path(argv[0]), rank):
        if rank > 0:
            libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, libc.abort, None)
        time.sleep(60)
    return 0


def abort_unless_the_watch_is_first(argv: Sequence[str]) -> int:
    """Ranks 1 and 3 never join what the others wait for, deep in calls that only a watchdog would end."""
    from torch.distributed import TCPStore

    place = Place.from_environment(os.environ)
    peers = Peers(place)
    peers.roll = Roll(TCPStore(place.address, place.port, is_master=False), place.rank, place.world)
    watch = Watch(place, peers)
    watch.beat_within(0.8, timeout_s=2.0)
    watch.record = partial(_record_failure, run_dir=Path(argv[0]), peers=peers)
    watch.begin()
    with watch.training(lambda: None, lambda: {"stage": 0, "step": 3}, grace_s=60):
        if place.rank in (1, 3):
            be_stuck()
        threading.Timer(ABORT_S, os.abort).start()
        waits = compile("import time; time.sleep(60)", "/x/nanotron/parallel/comm.py", "exec")
        exec(waits, {})
    return 0


def be_stuck() -> None:
    time.sleep(60)


ABORT_S = 20.0


@pytest.mark.parametrize(("world", "named", "nor"), [(3, "rank 1", ""), (4, "ranks 1, 3", "nor did rank 3, and ")])
def test_a_rank_that_lives_and_does_not_go_on_is_on_record_with_its_stack_before_any_watchdog_aborts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    world: int,
    named: str,
    nor: str,
) -> None:
    monkeypatch.setattr(watch_module, "LOOK_S", 0.05)
    workers = run(abort_unless_the_watch_is_first, world, str(tmp_path))
    assert [status for _, (status, _) in sorted(workers.ended.items())] == [codes.INTERNAL_ERROR] * world
    first = first_of(read_failures(tmp_path))
    assert first is not None
    assert (first.rank, first.kind) == (1, "stuck")
    assert first.where.keys() >= {"stage", "step", "at"}
    assert "in be_stuck" in first.traceback
    *_, last = closing_lines(exit_code(workers), workers, tmp_path, [])
    assert last.startswith(f"failed first: rank 1 on {first.host} (stage 0, step 3, at ")
    assert f"lives, but did not go on: {nor}all others waited for 2 s" in last
    said = capfd.readouterr().err
    assert said.count(f"all ranks have waited 2 s for {named}:") == 1
    assert "in be_stuck" in said
    assert "failed first: rank 0" not in said


def abort_on_rank_one(argv: Sequence[str]) -> int:
    with stacks_on_record(Path(argv[0]), int(os.environ["RANK"])):
        if os.environ["RANK"] == "1":
            os.abort()
        time.sleep(60)
    return 0


@pytest.mark.parametrize(
    ("entry", "world", "named"),
    [
        (abort_while_another_rank_is_blocked, 3, "failed first: rank 0 fell behind and said nothing; waiting for it: "),
        (abort_on_rank_one, 2, "failed first: rank 1 on "),
    ],
)
def test_the_rank_that_a_watchdog_waited_for_is_named_and_not_those_that_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: Callable[[Sequence[str]], int], world: int, named: str
) -> None:
    monkeypatch.setattr(host, "FAILURE_GRACE_S", 0.3)
    workers = run(entry, world, str(tmp_path))
    *_, last = closing_lines(exit_code(workers), workers, tmp_path, [])
    assert last.startswith(named)


def test_a_rank_that_ends_by_itself_leaves_no_stacks(tmp_path: Path) -> None:
    with stacks_on_record(tmp_path, 0):
        assert (tmp_path / "failures/rank-0.stack").exists()
    assert list(tmp_path.iterdir()) == []
