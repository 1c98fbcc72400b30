"""From the command to the first step, to the exit, and the memory of each rank: ours and torchtitan, taking turns.

    python -m bench first [--rounds 3] [--steps 20] [--json FILE]

Eight processes train the tiny example (dp 2 · tp 2 · pp 2): `nanotron train`, the same under torchrun, and torchtitan's
own entry under torchrun. A round that is not counted comes first. Memory is the proportional set size (a page that n
processes share counts 1/n in each) when half of the steps are made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from bench.environments import ROOT, python_of
from bench.machine import describe, machine_facts
from bench.report import Spread

RANKS = 8
EXAMPLE = "examples/config_tiny_llama.yaml"
DATA = ROOT / "data" / "python-bpe4096"
LIMIT_S = 600.0
ENTRY = "bench.peers.torchtitan_train"


@dataclass(frozen=True)
class Starter:
    """A way to start a training run."""

    name: str
    command: Callable[[int, Path], list[str]]
    """From the number of steps and a folder for what the run writes."""
    step: str
    """What its line of a step looks like; the group is the step's number."""


@dataclass(frozen=True)
class Run:
    """What was seen of one run."""

    first_step_s: float
    exit_s: float
    ranks: list[int]
    """Proportional set size of every rank, in bytes, half way."""
    parent: int
    """And of the process that was started."""


class Failed(Exception):
    """A run ended badly or said nothing of its first step; the message ends in its last lines."""


def overrides(steps: int, folder: Path) -> list[str]:
    """The example, shorter, in a folder of its own, with AdamW and torchtitan's batch."""
    changed = {
        "tokens.batch_accumulation_per_replica": 4,
        "optimizer.optimizer_factory": "{name: adamW}",
        "tokens.train_steps": steps,
        "checkpoints.checkpoints_path": folder,
        "logging.iteration_step_info_interval": 1,
    }
    return [f"--override={key}={value}" for key, value in changed.items()]


def nanotron(steps: int, folder: Path) -> list[str]:
    """One parent that imports torch once and forks the ranks."""
    return [str(Path(sys.executable).with_name("nanotron")), "train", EXAMPLE, "--plain", *overrides(steps, folder)]


def torchrun(steps: int, folder: Path) -> list[str]:
    """Every rank a program of its own."""
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={RANKS}"]
    return [*launch, "run_train.py", "--config-file", EXAMPLE, *overrides(steps, folder)]


def torchtitan(steps: int, folder: Path) -> list[str]:
    """The same model and layout with torchtitan."""
    launch = [python_of("torchtitan"), "-m", "torch.distributed.run", f"--nproc_per_node={RANKS}", "-m", ENTRY]
    asked = ["--module", ENTRY, "--config", "tiny_llama", "--training.steps", str(steps), "--dump_folder", str(folder)]
    return [*launch, *asked]


STARTERS = (
    Starter("nanotron train", nanotron, r"iteration: (\d+) / "),
    Starter("torchrun run_train.py", torchrun, r"iteration: (\d+) / "),
    Starter("torchrun torchtitan", torchtitan, r"step: +(\d+)  loss: "),
)


def watch(starter: Starter, steps: int) -> Run:
    """Start a run and follow it to its end. Raises Failed."""
    with tempfile.TemporaryDirectory() as folder:
        command = starter.command(steps, Path(folder))
        start = perf_counter()
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        limit = threading.Timer(LIMIT_S, kill, [process])
        limit.start()
        try:
            return _follow(process, starter, steps, start)
        finally:
            limit.cancel()
            kill(process)


def _follow(process: subprocess.Popen[str], starter: Starter, steps: int, start: float) -> Run:
    first_step_s, ranks, parent, said = None, list[int](), 0, list[str]()
    assert process.stdout is not None
    for line in process.stdout:
        said.append(line)
        found = re.search(starter.step, line)
        if found and first_step_s is None:
            first_step_s = perf_counter() - start
        if found and not ranks and int(found[1]) >= steps // 2:
            with suppress(OSError):  # it is ending
                ranks = [proportional_set_size(rank) for rank in ranks_below(process.pid)]
                parent = proportional_set_size(process.pid)
    code = process.wait()
    if code or first_step_s is None or len(ranks) != RANKS:
        seen = f"{starter.name}: exit code {code}, {len(ranks)} ranks seen"
        raise Failed(f"{seen}\n{''.join(said[-20:])}")
    return Run(first_step_s, perf_counter() - start, ranks, parent)


def kill(process: subprocess.Popen[str]) -> None:
    """End what is left of a run; torchrun's ranks are in sessions of their own."""
    if process.poll() is None:
        for each in [*descendants(process.pid), process.pid]:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        process.wait()


def ranks_below(parent: int) -> list[int]:
    """The process ids of the ranks that a launcher has started: its descendants that have torch loaded."""
    found = []
    for process in descendants(parent):
        with suppress(OSError):  # it has ended meanwhile
            if "libtorch_cpu" in Path(f"/proc/{process}/maps").read_text():
                found.append(process)
    return found


def descendants(parent: int) -> list[int]:
    """The process ids of what a process has started, and of what those have."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            status = (folder / "stat").read_text()
            children.setdefault(int(status.rpartition(")")[2].split()[1]), []).append(int(folder.name))
    found = list(children.get(parent, []))
    for process in found:  # which grows
        found += children.get(process, [])
    return found


def proportional_set_size(process: int) -> int:
    """Bytes of memory of a process, its share of shared pages included."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def table(runs: dict[str, list[Run]]) -> list[str]:
    """Medians over the rounds, and the range of what was seen of the first step."""
    lines = [f"{'':<24}  first step s  {'quartiles':>13}  exit s  MB per rank  largest rank  parent MB"]
    for name, found in runs.items():
        first, end = (Spread.of([getattr(run, key) for run in found]) for key in ("first_step_s", "exit_s"))
        mean = Spread.of([sum(run.ranks) / len(run.ranks) / 1e6 for run in found]).median
        largest, parent = (Spread.of([size / 1e6 for size in sizes]).median for sizes in _largest_and_parents(found))
        spread = f"{first.low:.1f} – {first.high:.1f}"
        lines.append(
            f"  {name:<22}{first.median:>14.1f}  {spread:>13}{end.median:>8.1f}"
            f"{mean:>13.0f}{largest:>14.0f}{parent:>11.0f}"
        )
    return lines


def _largest_and_parents(found: Sequence[Run]) -> tuple[list[int], list[int]]:
    return [max(run.ranks) for run in found], [run.parent for run in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the rounds and print the table; 1 when a run failed, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bench first", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="runs of each that are counted")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all that was measured")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a run is ended on the way out
    facts = machine_facts([None, "torchtitan"])
    print("\n".join(describe(facts)), flush=True)
    if not DATA.exists():
        subprocess.run([str(Path(sys.executable).with_name("nanotron")), "tokenize", "--stdlib"], cwd=ROOT, check=True)
    runs: dict[str, list[Run]] = {starter.name: [] for starter in STARTERS}
    for turn in range(options.rounds + 1):
        for starter in STARTERS:
            print(f"round {turn} of {options.rounds}: {starter.name}", file=sys.stderr, flush=True)
            try:
                runs[starter.name].append(watch(starter, options.steps))
            except Failed as failure:
                print(failure, file=sys.stderr)
                return 1
    counted = {name: found[1:] for name, found in runs.items()}
    print(f"\nfirst: {RANKS} processes, the tiny example for {options.steps} steps; medians of {options.rounds} runs")
    print("\n".join(table(counted)))
    if options.json:
        told = {name: [vars(run) for run in found] for name, found in counted.items()}
        options.json.write_text(json.dumps({"machine": facts, "steps": options.steps, "runs": told}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
