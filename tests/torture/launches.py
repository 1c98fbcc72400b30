"""Launches of two ranks in which one is stopped or killed, or the launcher killed or told to stop, again and again.

A stopped rank has to be named when `general.timeout_s` is over. No rank outlives its launcher. The same command goes
on, and in the end all steps and weights are those of a run that was left in peace.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nanotron.launch import codes
from tests.checkpoint.runs import different, metrics_of, values_of
from tests.commands import Command

LAYOUT = (1, 2, 1)
WORLD = 2
INTERVAL = 2  # steps from one checkpoint to the next
MOST_STEPS = 4  # that an attack waits for
TIMEOUT_S = 4.0
ENDS_WITHIN_S = 90.0  # a busy machine is slow; what this is to tell from is 600 seconds, or never

HASTE = {
    "nanotron.launch.host:FAILURE_GRACE_S": 2.0,
    "nanotron.launch.host:END_GRACE_S": 0.5,
    "nanotron.launch.watch:LAST_WORDS_S": 3.0,
    "nanotron.launch.watch:LOOK_S": 0.2,
    "nanotron.launch.roll:ROLL_WAIT_S": 1.5,
    "nanotron.launch.roll:STORE_WAIT_S": 1.5,
    "nanotron.launch.peers:STORE_WAIT_S": 1.5,
}
LAUNCHERS = ("nanotron", "torchrun")
DEEDS = ("stop", "kill", "kill the launcher", "tell the launcher")
PLACES = {  # what a rank is about to do, and how often it comes by
    "nanotron.launch.peers:Peers.meet": 1,
    "nanotron.launch.run:claim_folders": 1,
    "nanotron.training.init_or_resume:agree_resume": 1,
    "nanotron.training.step:Training.step": MOST_STEPS,
    "nanotron.checkpoint.write:Snapshot.take": MOST_STEPS // INTERVAL,
    "nanotron.checkpoint.write:Saver._write_shard": MOST_STEPS // INTERVAL,
}


class Attack(NamedTuple):
    """What happens, when a rank comes by a place for the n-th time, under which launcher."""

    deed: str
    place: str
    count: int
    rank: int
    launcher: str


def draw(seed: int) -> list[Attack]:
    """One attack of each kind, in some order."""
    random_numbers = random.Random(seed)
    attacks = []
    for deed in random_numbers.sample(DEEDS, len(DEEDS)):
        place, most = random_numbers.choice(list(PLACES.items()))
        count, rank = random_numbers.randint(1, most), random_numbers.randrange(WORLD)
        attacks.append(Attack(deed, place, count, rank, random_numbers.choice(LAUNCHERS)))
    return attacks


def start(folder: Path, launcher: str, trap: dict[str, Any] | None = None) -> Command:
    """Launch the run of the folder's config."""
    script = Path(__file__).with_name("trapped.py")
    environment = {} if trap is None else {"TRAP": json.dumps(trap)}
    if launcher == "nanotron":
        return Command(folder, script, "nanotron", "train", "run.yaml", environment=environment)
    options = ("--standalone", f"--nproc_per_node={WORLD}", "--shutdown-timeout=5")
    return Command(folder, "torchrun", *options, script, "--config-file", "run.yaml", environment=environment)


def attacked(folder: Path, attack: Attack) -> None:
    """Launch, and see how it ends."""
    note = folder / "note"
    note.unlink(missing_ok=True)
    numbers = {"stop": signal.SIGSTOP, "tell the launcher": signal.SIGTERM}
    trap = {
        "rank": attack.rank,
        "place": attack.place,
        "count": attack.count,
        "signal": numbers.get(attack.deed, signal.SIGKILL),
        "whom": "launcher" if "launcher" in attack.deed else "rank",
        "note": str(note),
        "patches": HASTE,
    }
    command = start(folder, attack.launcher, trap)
    out, errors = command.communicate()
    assert note.exists(), f"{attack} never happened: {out}{errors}"
    ranks, happened = json.loads(note.read_text()), note.stat().st_mtime  # by the clock of files
    while any(Path(f"/proc/{rank}").exists() for rank in ranks) and time.time() < happened + ENDS_WITHIN_S:
        time.sleep(0.05)
    assert time.time() < happened + ENDS_WITHIN_S, f"{attack}: not over after {ENDS_WITHIN_S} s: {out}{errors}"
    check_end(attack, command.returncode, errors)


def check_end(attack: Attack, code: int | None, errors: str) -> None:
    """Whether an attacked launch ended as it should, and said so."""
    told = f"{attack}: exit code {code}\n{errors}"
    if attack.deed == "kill the launcher":
        assert code == -signal.SIGKILL, told
    elif attack.deed == "tell the launcher":
        assert code in ((codes.PREEMPTED, codes.PREEMPTED_UNSAVED) if attack.launcher == "nanotron" else (1,)), told
    else:
        assert code == codes.INTERNAL_ERROR, told
        verdicts = [line for line in errors.splitlines() if "failed first: " in line]
        assert f"failed first: rank {attack.rank} " in verdicts[-1], told


def torture(folder: Path, attacks: list[Attack], tell: Callable[[str], None] = print) -> None:
    """Attack a run, one launch after another; raises AssertionError when it suffers."""
    steps = MOST_STEPS * (len(attacks) + 1)
    for name in ("plain", "attacked"):
        (folder / name).mkdir(parents=True)
        values = values_of(
            folder / name / "run",
            LAYOUT,
            general__timeout_s=TIMEOUT_S,
            general__threads_per_rank=1,
            tokens__train_steps=steps,
            tokens__batch_accumulation_per_replica=2,
            checkpoints__checkpoint_interval=INTERVAL,
        )
        (folder / name / "run.yaml").write_text(yaml.safe_dump(values))
    for attack in attacks:
        tell(str(attack))
        attacked(folder / "attacked", attack)
    for name in ("plain", "attacked"):
        command = start(folder / name, "nanotron")
        _, errors = command.communicate()
        assert command.returncode == codes.DONE, errors
    plain, run = folder / "plain" / "run", folder / "attacked" / "run"
    assert metrics_of(run) == metrics_of(plain)
    assert different(run / str(steps), plain / str(steps)) == []
