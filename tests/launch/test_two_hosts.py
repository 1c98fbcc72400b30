"""Two hosts, root only: network namespaces with a link between them, a torchrun and two ranks on each.

Whatever happens to one host, both end in seconds and leave no process behind, a line names who it was and where, and
the same command goes on to the last bit.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from nanotron.launch import codes
from tests.checkpoint.runs import SAMPLES, different, metrics_of, values_of
from tests.commands import LONGEST_S, Command
from tests.torture.links import ADDRESS, Machine, num_steps, two_machines, why_not

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"needs two network namespaces: {why_not()}")
HEARTBEAT_S = 5.0
NAMED_WITHIN_S = 30.0
STEPS, INTERVAL = 40, 2
PORT = 29510
SCRIPT = Path(__file__).parents[1] / "torture" / "trapped.py"


def launch(folder: Path, machine: Machine, *options: str, own_folder: Path | None = None) -> Command:
    """Start torchrun on a host, as somebody would by hand; ``own_folder`` is one that the host does not share."""
    environment = {"NETNS": machine.name, "HOST": machine.name, "GLOO_SOCKET_IFNAME": machine.interface}
    environment |= {} if own_folder is None else {"OWN_FOLDER": str(own_folder)}
    environment |= {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": str(int("--nnodes=1:2" in options))}
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={ADDRESS}:{PORT}", "--rdzv-id=x", "--shutdown-timeout=60"]
    number = int(machine.interface[-1])
    rendezvous += [
        f"--local-addr=10.77.0.{1 + number}",
        f"--rdzv-conf=is_host={1 - number},join_timeout=300,last_call_timeout=15",
    ]
    command = (*rendezvous, *options, SCRIPT, "--config-file", "x.yaml")
    return Command(folder, SCRIPT, "torchrun", *command, environment=environment)


def processes(machine: Machine) -> list[int]:
    """Those of a host that run."""
    here, found = Path("/run/netns", machine.name).stat().st_ino, []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (path / "ns" / "net").stat().st_ino == here and "\nState:\tZ" not in (path / "status").read_text():
                found.append(int(path.name))
    return found


def send(machine: Machine, number: signal.Signals) -> None:
    """Send a signal to all of a host's processes."""
    for process in processes(machine):
        with suppress(ProcessLookupError):
            os.kill(process, number)


def values(folder: Path, **changes: Any) -> dict[str, Any]:
    usual = {
        "general__heartbeat_s": HEARTBEAT_S,
        "general__timeout_s": 600.0,
        "general__threads_per_rank": 1,
        "tokens__train_steps": STEPS,
        "checkpoints__checkpoint_interval": INTERVAL,
    }
    return values_of(folder / "run", (1, 2, 2), **usual | changes)


@contextmanager
def running(folder: Path, machines: list[Machine], until: int, *options: str) -> Iterator[list[Command]]:
    """A launch on both hosts that has made so many steps; it is gone afterwards."""
    hosts = [launch(folder, machine, *options) for machine in machines]
    try:
        wait_for(hosts, lambda: num_steps(folder) >= until)
        yield hosts
    finally:
        for machine in machines:
            send(machine, signal.SIGKILL)


def ended(hosts: list[Command], machines: list[Machine], since: float) -> list[str]:
    """What each host said, once all its processes are gone, which they are in time."""
    while any(processes(machine) for machine in machines):
        assert time.monotonic() < since + NAMED_WITHIN_S + 15, [host._texts() for host in hosts]
        time.sleep(0.1)
    return ["".join(host.communicate()) for host in hosts]


def cut(machines: list[Machine]) -> None:
    machines[1].link("down")


def kill(machines: list[Machine]) -> None:
    send(machines[1], signal.SIGKILL)


def freeze(machines: list[Machine]) -> None:
    send(machines[1], signal.SIGSTOP)


def stop_one_rank(machines: list[Machine]) -> None:
    ranks = {rank_of(process): process for process in processes(machines[1])}
    os.kill(ranks["3"], signal.SIGSTOP)


def rank_of(process: int) -> str:
    """RANK of a process; "" of one that is none."""
    with suppress(OSError):
        variables = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        return next((value.decode()[5:] for value in variables if value.startswith(b"RANK=")), "")
    return ""


NODES = ("--nnodes=2", "--nproc_per_node=2")
DEEDS: dict[Callable[[list[Machine]], None], tuple[str, ...]] = {
    cut: ("failed first: rank 2 on {there} (stage 1, step ", "no sign of life", ", nor of rank 3"),
    freeze: ("failed first: rank 2 on {there} (stage 1, step ", "no sign of life", ", nor of rank 3"),
    stop_one_rank: ("failed first: rank 3 on {there} (stage 1, step ", "no sign of life"),
    kill: ("failed first: rank",),
}


@pytest.mark.nightly
def test_whatever_befalls_a_host_is_named_in_seconds_and_the_run_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    for name in ("hurt", "plain"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.yaml").write_text(yaml.safe_dump(values(tmp_path / name)))
    hurt, plain = tmp_path / "hurt", tmp_path / "plain"
    with two_machines() as machines:
        here, there = machines
        for number, (deed, told) in enumerate(DEEDS.items(), 1):
            with running(hurt, machines, 8 * number, *NODES) as hosts:
                began = time.monotonic()
                deed(machines)
                while processes(here):
                    assert time.monotonic() < began + NAMED_WITHIN_S + 15, hosts[0]._texts()
                    time.sleep(0.1)
                send(there, signal.SIGCONT)
                said, _ = ended(hosts, machines, time.monotonic())
                assert all(part.format(there=there.name) in said for part in told), said
                assert hosts[0].wait() == 1
                if deed is not kill:
                    assert f"rank 0 on {here.name}: stage 0, step " in said, said
                    assert "failed first: rank 0" not in said
            there.link("up")
        for host in [launch(hurt, machine, *NODES) for machine in machines]:
            assert host.wait() == codes.DONE, host.communicate()
    done = Command(plain, "train", "x.yaml")
    assert done.wait() == codes.DONE, done.communicate()
    assert metrics_of(hurt / "run") == metrics_of(plain / "run")
    assert different(hurt / "run" / str(STEPS), plain / "run" / str(STEPS)) == []


EIGHT = ("--nnodes=2", "--nproc_per_node=4")


@pytest.mark.nightly
def test_eight_ranks_over_two_hosts_lose_one_and_go_on_to_the_last_bit(tmp_path: Path) -> None:
    for name in ("hurt", "plain"):
        (tmp_path / name).mkdir()
        config = values(tmp_path / name, parallelism__dp=2, tokens__train_steps=12)
        config["tokens"] |= {"micro_batch_size": SAMPLES // 4, "batch_accumulation_per_replica": 2}
        (tmp_path / name / "x.yaml").write_text(yaml.safe_dump(config))
    hurt, plain = tmp_path / "hurt", tmp_path / "plain"
    with two_machines() as machines:
        with running(hurt, machines, 5, *EIGHT) as hosts:
            began = time.monotonic()
            kill(machines)
            said, _ = ended(hosts, machines, began)
            assert f"failed first: ranks 4, 5, 6, 7 on {machines[1].name} left and said nothing; " in said, said
            assert hosts[0].wait() == 1
        for host in [launch(hurt, machine, *EIGHT) for machine in machines]:
            assert host.wait() == codes.DONE, host.communicate()
    done = Command(plain, "train", "x.yaml")
    assert done.wait() == codes.DONE, done.communicate()
    assert metrics_of(hurt / "run") == metrics_of(plain / "run")
    assert different(hurt / "run" / "12", plain / "run" / "12") == []


@pytest.mark.nightly
def test_a_folder_that_hosts_do_not_share_is_one_line_before_training(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "x.yaml").write_text(yaml.safe_dump(values(tmp_path)))
    with two_machines() as machines:
        own = [None, tmp_path / "run"]
        hosts = [
            launch(tmp_path, machine, *NODES, own_folder=folder) for machine, folder in zip(machines, own, strict=True)
        ]
        said = "".join("".join(host.communicate()) for host in hosts)
    lines = [line for line in said.splitlines() if line.startswith("checkpoints.checkpoints_path=")]
    path = f"checkpoints.checkpoints_path={tmp_path / 'run'}"
    assert lines == [
        f"{path} is not one folder for all ranks: rank 2 does not see what rank 0 writes; use a shared file system or"
        " an object store"
    ], said
    assert "src/nanotron" not in said, "no traceback of ours"
    assert num_steps(tmp_path) == 0


@pytest.mark.nightly
def test_a_run_goes_on_with_one_host_and_with_two_again_and_its_curve_does_not_tell(tmp_path: Path) -> None:
    changed = {"parallelism__dp": "auto", "parallelism__pp": 1, "tokens__global_batch_size": SAMPLES}
    for name in ("elastic", "plain"):
        (tmp_path / name).mkdir()
        config = values(tmp_path / name, **changed, tokens__micro_batch_size=2, tokens__train_steps=100_000)
        config["model"]["dtype"] = "float64"  # so that rounding has not grown to anything in some hundred steps
        config["checkpoints"]["keep_last_n"] = 2
        del config["tokens"]["batch_accumulation_per_replica"]
        (tmp_path / name / "x.yaml").write_text(yaml.safe_dump(config))
    elastic, plain = tmp_path / "elastic", tmp_path / "plain"
    options = ("--nnodes=1:2", "--nproc_per_node=2", "--max-restarts=3")
    with two_machines() as machines:
        there = machines[1]
        with running(elastic, machines, 10, *options) as hosts:
            send(there, signal.SIGKILL)
            wait_for(hosts[:1], lambda: layouts(elastic)[-1:] == ["tp 2"])
            hosts[1] = launch(elastic, there, *options)
            wait_for(hosts, lambda: layouts(elastic)[1:] == ["tp 2", "dp 2 · tp 2"])
            last = num_steps(elastic) + 5
            wait_for(hosts, lambda: num_steps(elastic) > last)
    done = Command(plain, "train", "x.yaml", "--smoke", last)
    assert done.wait() == codes.DONE, done.communicate()
    curves = [[row["lm_loss"] for row in metrics_of(folder / "run")[:last]] for folder in (elastic, plain)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-5)


def layouts(folder: Path) -> list[str]:
    """Those that a run has had, in order."""
    rows = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [row["layout"] for row in rows if "layout" in row]


def wait_for(hosts: list[Command], happened: Callable[[], bool]) -> None:
    """Wait while these hosts are at work."""
    deadline = time.monotonic() + LONGEST_S
    while not happened():
        assert all(host.poll() is None for host in hosts), [host.communicate() for host in hosts]
        assert time.monotonic() < deadline, [host._texts() for host in hosts]
        time.sleep(0.05)
