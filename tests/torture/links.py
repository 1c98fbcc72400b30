"""The link between two machines of one rank each goes down: two network namespaces and a pair of interfaces. Root only.

Both ranks end in time and name one another, though nothing tells either that the other is gone: packets just vanish.
With the link up again the same command goes on, and ends like a run that was left in peace.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from nanotron.launch import codes
from tests.checkpoint.runs import different, metrics_of, values_of
from tests.commands import Command
from tests.torture.launches import ENDS_WITHIN_S, HASTE, INTERVAL, LAYOUT, TIMEOUT_S, WORLD, start

STEPS = 12
ADDRESS = "10.77.0.1"  # in a namespace of its own
PORT = 29500


def ip(*arguments: str) -> None:
    """Run iproute2's `ip`."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def why_not() -> str:
    """Why this machine cannot have two network namespaces with a link between them; "" when it can."""
    if os.getuid() != 0:
        return "only root may make network namespaces"
    if shutil.which("ip") is None:
        return "iproute2 is not installed"
    try:
        with two_machines():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no link between network namespaces can be made here: {error.stderr.strip()}"


class Machine(NamedTuple):
    """A network namespace, and its end of the link."""

    name: str
    interface: str

    def link(self, state: str) -> None:
        """Set this end of the link "up" or "down"."""
        ip("-n", self.name, "link", "set", self.interface, state)


@contextmanager
def two_machines() -> Iterator[list[Machine]]:
    """Two namespaces and a link that is up; they are gone afterwards."""
    machines = [Machine(f"torture-{os.getpid()}-{rank}", f"link{rank}") for rank in range(WORLD)]
    made: list[Machine] = []
    try:
        for machine in machines:
            ip("netns", "add", machine.name)
            made.append(machine)
        here, there = machines
        pair = ["type", "veth", "peer", "name", there.interface, "netns", there.name]
        ip("link", "add", here.interface, "netns", here.name, *pair)
        for rank, machine in enumerate(machines):
            ip("-n", machine.name, "addr", "add", f"10.77.0.{rank + 1}/24", "dev", machine.interface)
            ip("-n", machine.name, "link", "set", "lo", "up")
            machine.link("up")
        yield machines
    finally:
        for machine in made:
            ip("netns", "del", machine.name)


def launch(folder: Path, machines: list[Machine]) -> list[Command]:
    """Start the run as somebody would by hand: one command a machine."""
    ranks = []
    for rank, machine in enumerate(machines):
        environment = {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environment |= {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(PORT)}
        environment["TRAP"] = json.dumps({"patches": HASTE})
        environment |= {"NETNS": machine.name, "GLOO_SOCKET_IFNAME": machine.interface}
        script = Path(__file__).with_name("trapped.py")
        ranks.append(Command(folder, script, "--config-file", "run.yaml", environment=environment))
    return ranks


def ends(ranks: list[Command]) -> list[tuple[int, str]]:
    """The exit code of every rank, and what it said."""
    return [(rank.wait(), "".join(rank.communicate())) for rank in ranks]


def num_steps(folder: Path) -> int:
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def torture(folder: Path, seed: int, tell: Callable[[str], None] = print) -> None:
    """Take the link down once; raises AssertionError when the run suffers."""
    random_numbers = random.Random(seed)
    for name in ("plain", "cut"):
        (folder / name).mkdir(parents=True)
        values: dict[str, Any] = values_of(
            folder / name / "run",
            LAYOUT,
            general__timeout_s=TIMEOUT_S,
            general__threads_per_rank=1,
            tokens__train_steps=STEPS,
            tokens__batch_accumulation_per_replica=2,
            checkpoints__checkpoint_interval=INTERVAL,
        )
        (folder / name / "run.yaml").write_text(yaml.safe_dump(values))
    with two_machines() as machines:
        ranks, last = launch(folder / "cut", machines), random_numbers.randint(1, STEPS // 3)
        while num_steps(folder / "cut") < last:
            assert all(rank.poll() is None for rank in ranks), ends(ranks)
            time.sleep(0.01)
        time.sleep(random_numbers.random() / 10)
        machine = random_numbers.choice(machines)
        machine.link("down")
        began = time.monotonic()
        tell(f"the link of {machine.interface} goes down after step {last}")
        for rank, (code, said) in enumerate(ends(ranks)):
            assert code == codes.INTERNAL_ERROR, said
            assert "failed first" in said.splitlines()[-1], said
            assert rank == 1 or f"failed first: rank {1 - rank} " in said, "rank 0 holds the store, and can ask"
        assert time.monotonic() - began < ENDS_WITHIN_S
        for machine in machines:
            machine.link("up")
        for code, said in ends(launch(folder / "cut", machines)):
            assert code == codes.DONE, said
    plain = start(folder / "plain", "nanotron")
    assert plain.wait() == codes.DONE, plain.communicate()
    assert metrics_of(folder / "cut" / "run") == metrics_of(folder / "plain" / "run")
    assert different(folder / "cut" / "run" / str(STEPS), folder / "plain" / "run" / str(STEPS)) == []
