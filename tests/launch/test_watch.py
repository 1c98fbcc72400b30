"""What a rank does that is told to stop, or whose launcher or peers are gone, whatever its main thread is at."""

from __future__ import annotations

import ast
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanotron.launch import codes
from nanotron.launch.watch import waits_at

PACKAGE = Path(codes.__file__).parents[1]
BEGINNING = """
import ctypes, os, signal, sys, time
from nanotron.launch import watch as module
from nanotron.launch.failures import Failure
from nanotron.launch.peers import Peers
from nanotron.launch.place import Place
from nanotron.launch.roll import Roll
from tests.local_store import LocalStore

module.LOOK_S = 0.05
libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(256)

def be_deaf():
    "A wait that no signal ends."
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)

def ready():
    print("ready", flush=True)

def watched(world=1, **place):
    place = Place(0, world, 0, 1, **place)
    peers = Peers(place)
    return peers, module.Watch(place, peers)
"""


def start(code: str) -> subprocess.Popen[str]:
    """A process that runs the code, once it has said that it is ready."""
    command = [sys.executable, "-c", BEGINNING + code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", process.communicate()
    return process


def end_of(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and what it said."""
    out, errors = process.communicate(timeout=60)
    return process.returncode, out + errors


STARTING = "peers, watch = watched()\nwatch.begin()\nready()\nbe_deaf()"


def test_each_signal_to_stop_ends_a_start_at_once_with_its_code_though_the_main_thread_is_deaf() -> None:
    ranks = {number: start(STARTING) for number in codes.STOP_SIGNALS}
    for number, rank in ranks.items():
        rank.send_signal(number)
    for rank in ranks.values():
        code, said = end_of(rank)
        assert code == codes.PREEMPTED_UNSAVED
        assert said == "rank 0: told to stop by a signal before the first step\n"


def test_a_signal_is_kept_until_the_configs_mistakes_have_been_said() -> None:
    rank = start(
        "peers, watch = watched()\nready()\ntime.sleep(0.5)\nprint('said', flush=True)\nwatch.begin()\nbe_deaf()"
    )
    rank.send_signal(signal.SIGTERM)
    code, said = end_of(rank)
    assert code == codes.PREEMPTED_UNSAVED
    assert said.startswith("said\n")


TRAINING = """
peers, watch = watched()
watch.begin()
told = []
with watch.training(lambda: told.append(1), grace_s={grace_s}):
    ready()
    {main}
watch.end(75)
{after}
sys.exit(75)
"""


def test_a_signal_while_training_is_a_wish_and_another_one_at_the_end_changes_nothing() -> None:
    main, after = "while not told: time.sleep(0.02)", "os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.3)"
    rank = start(TRAINING.format(grace_s=60, main=main, after=after))
    rank.send_signal(signal.SIGTERM)
    assert end_of(rank) == (codes.PREEMPTED, "")


def test_a_rank_that_is_not_done_after_its_grace_is_ended_and_says_so() -> None:
    rank = start(TRAINING.format(grace_s=0.2, main="be_deaf()", after=""))
    rank.send_signal(signal.SIGTERM)
    code, said = end_of(rank)
    assert code == codes.PREEMPTED_UNSAVED
    assert said == "rank 0: told to stop by a signal, not done within 0.2 s: ended without a save\n"


def test_a_rank_that_hangs_at_its_end_is_hurried_and_keeps_its_code() -> None:
    rank = start("module.LAST_WORDS_S = 0.2\n" + TRAINING.format(grace_s=60, main="pass", after="be_deaf()"))
    time.sleep(0.3)
    rank.send_signal(signal.SIGTERM)
    assert end_of(rank) == (codes.PREEMPTED, "")


LAUNCHED = """
heard, says = os.pipe()
if os.fork():
    os.read(heard, 1)
    ready()
    os._exit(0)
peers, watch = watched(launched={launched})
watch.begin()
told, deadline = [], time.monotonic() + {seconds}
with watch.training(lambda: told.append(1), grace_s=60):
    os.write(says, b"1")
    while not told and time.monotonic() < deadline:
        time.sleep(0.02)
print("told" if told else "not told")
"""


@pytest.mark.parametrize(("launched", "seconds", "said"), [(True, 30, "told\n"), (False, 0.5, "not told\n")])
def test_the_end_of_a_launcher_is_a_wish_to_stop_and_that_of_any_other_parent_is_none(
    launched: bool, seconds: float, said: str
) -> None:
    assert end_of(start(LAUNCHED.format(launched=launched, seconds=seconds))) == (0, said)


LOST = """
module.LAST_WORDS_S = 0.3
store = LocalStore()
peers, watch = watched()
peers.roll, other = Roll(store, 0, 2), Roll(store, 1, 2)
watch.record = lambda failure: print(failure.error) or 1
watch.begin()
with watch.training(lambda: None, grace_s=60):
    {happens}
    ready()
    be_deaf()
"""


def test_a_rank_that_does_not_notice_that_another_one_failed_is_ended() -> None:
    rank = start(LOST.format(happens="other.claim(Failure(1, 'own', 'broken'))"))
    assert end_of(rank) == (codes.INTERNAL_ERROR, "another rank has failed\n")


def test_a_rank_that_is_told_to_stop_does_not_wait_for_one_that_is_gone() -> None:
    rank = start(LOST.format(happens="pass"))
    rank.send_signal(signal.SIGTERM)
    assert end_of(rank) == (codes.PREEMPTED_UNSAVED, "rank 1 does not answer\n")


def test_a_child_process_of_a_rank_is_ended_by_a_signal_and_the_rank_is_not_told() -> None:
    main = "child = os.fork() or time.sleep(60)\n    os.kill(child, signal.SIGTERM)\n    status = os.wait()[1]"
    rank = start(TRAINING.format(grace_s=60, main=main, after="time.sleep(0.3); print(status, told)"))
    assert end_of(rank) == (codes.PREEMPTED, f"{int(signal.SIGTERM)} []\n")


TWO = "watched(2)"
SLOW = """store, be_deaf_to = LocalStore(), lambda *_: time.sleep(60)
from nanotron.launch import roll
roll.STORE_WAIT_S = 0.1"""


def test_a_rank_whose_peer_gives_no_sign_of_life_says_where_all_were_and_ends() -> None:
    happens = "other.beat(Beat(1, 'there', 'ops/x.py:1 f', False, {'step': 7})); watch.beat_within(0.2)"
    rank = start("from nanotron.launch.roll import Beat\n" + LOST.format(happens=happens).replace("watched()", TWO))
    code, said = end_of(rank)
    assert code == codes.INTERNAL_ERROR
    why, silent, other = said.splitlines()  # the last two from standard error
    assert why == "rank 1 gave no sign of life"
    assert silent == "rank 1 on there, last heard of: step 7, at ops/x.py:1 f"
    assert other.startswith("rank 0 on ")


def test_wherever_the_sources_wait_for_other_ranks_the_watch_takes_a_rank_for_waiting() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                calls = [ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)]
                if any(
                    re.fullmatch(r"(self\._)?work\.wait|(torch\.distributed|dist)\.(all_|reduce|broadcast).*", c)
                    for c in calls
                ):
                    found.add((name, function.name))
    ours = {(file, name) for file, name in found if not file.startswith(("generate/", "plan/"))}
    assert {("optim/buckets.py", "wait"), ("data/replica.py", "share"), ("parallel/comm.py", "all_reduce_")} <= ours
    assert [place for place in ours if not waits_at(*place)] == []


def test_a_rank_that_reaches_no_store_is_on_the_machine_that_is_cut_off() -> None:
    code = LOST.format(happens="watch.beat_within(0.3); store.set = be_deaf_to")
    code = code.replace("watched()", TWO).replace("store = LocalStore()", SLOW)
    code, said = end_of(start(code))
    assert code == codes.INTERNAL_ERROR
    assert said.startswith("cut off for ")
