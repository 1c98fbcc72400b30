"""What ``nanotron train``, ``doctor`` and ``watch`` do: check, start the ranks, show the run, say how it ended."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from nanotron.errors import ConfigError, complain, say
from nanotron.launch import codes
from nanotron.launch.display import Display, Tail
from nanotron.launch.failures import Failure, first_of, judged_by_stack, read_failures, stack_path, verdict
from nanotron.launch.folder import run_directory
from nanotron.launch.host import Workers, exit_code, start_workers, watch_workers
from nanotron.launch.run import SAVE_MARGIN_S, checked_config, run_train
from nanotron.launch.signals import StopSignals
from nanotron.metrics.columns import TIME_MS
from nanotron.metrics.record import STEP_LINE_START, step_line
from nanotron.metrics.step_clock import TimeLeft

if TYPE_CHECKING:
    from nanotron.config import Config

LATE_IMPORTS = ("numpy.random", "encodings.idna", "encodings.ascii")
"""What ranks would import while they start: the generator of initial weights, names of hosts, /proc."""
TENSORBOARD = ("torch.utils.tensorboard", "tensorboard.compat.proto.summary_pb2")
"""And what rank 0 would, if asked for: some 350 modules, clouds' among them."""


def train(
    config_file: str,
    overrides: Sequence[str] = (),
    *,
    nproc: int | None = None,
    plain: bool = False,
    allow_data_change: bool = False,
    preflight: bool = False,
    stop_signals: StopSignals | None = None,
) -> int:
    """Train on this machine with one rank per process and return the run's exit code.

    ``plain``: the ranks' own log lines also on a terminal. ``stop_signals``: heard since this process began.
    Raises ConfigError for a mistake in the config.
    """
    config, _ = checked_config(config_file, overrides, world=nproc)
    run_dir = run_directory(config)
    argv = arguments(config_file, overrides)
    argv += [f"--override=general.run={config.general.run}"]  # its date is the parent's
    argv += ["--allow-data-change"] * allow_data_change + ["--preflight"] * preflight
    tail = Tail(run_dir / "metrics.jsonl", only_new_file=True)
    live = not plain and sys.stdout.isatty()
    earlier = read_failures(run_dir)
    tracked = TENSORBOARD if config.logging.tensorboard else ()
    for module in ("nanotron.training.trainer", *LATE_IMPORTS, *tracked):  # once, for all ranks that are forked
        importlib.import_module(module)
    workers = start_workers(nproc or config.parallelism.world_size, argv, piped=live, entry=run_train)
    if stop_signals is not None:
        stop_signals.workers = workers
    with _shown(config, tail, workers) as refresh:
        grace = config.checkpoints.preempt_grace_s + SAVE_MARGIN_S
        watch_workers(workers, stop_grace_s=grace, refresh=refresh)
    code = exit_code(workers)
    for line in closing_lines(code, workers, run_dir, earlier, preflight=preflight):
        complain(line)
    return code


def arguments(config_file: str, overrides: Sequence[str]) -> list[str]:
    """The options of ``run_train.py`` that name a config."""
    return ["--config-file", config_file, *(f"--override={change}" for change in overrides)]


def doctor(config_file: str, overrides: Sequence[str] = (), *, nproc: int | None = None, as_json: bool = False) -> int:
    """Measure the machines of a run and return the exit code; as one of its ranks, where a launcher says which."""
    argv = [*arguments(config_file, overrides), f"--preflight={'json' if as_json else 'only'}"]
    if "WORLD_SIZE" in os.environ:
        return run_train(argv)
    config, _ = checked_config(config_file, overrides, world=nproc)
    importlib.import_module("nanotron.doctor.examine")  # once, for all ranks that are forked
    workers = start_workers(nproc or config.parallelism.world_size, argv, piped=False, entry=run_train)
    watch_workers(workers, stop_grace_s=0.0, refresh=lambda: None)
    return exit_code(workers)


@contextmanager
def _shown(config: Config, tail: Tail, workers: Workers) -> Iterator[Callable[[], None]]:
    """The live display, fed by the ranks' piped output; without a pipe the ranks speak for themselves."""
    if workers.output is None:
        yield lambda: None
        return
    display = Display(tail, config)
    output = workers.output
    os.set_blocking(output, False)
    unfinished = b""

    def refresh() -> None:
        nonlocal unfinished
        with suppress(BlockingIOError):
            while data := os.read(output, 65536):
                *lines, unfinished = (unfinished + data).split(b"\n")
                for line in lines:
                    if STEP_LINE_START.encode() not in line:  # the display shows the steps
                        display.print(line.decode(errors="replace"))
        display.refresh()

    with display.live:
        yield refresh
    os.close(output)


def closing_lines(
    code: int, workers: Workers, run_dir: Path, earlier: Sequence[Failure], *, preflight: bool = False
) -> list[str]:
    """What the parent says last; of a failure, the rank where it began.

    ``earlier``: the failures that were on record before the run. ``preflight``: ranks that end without any may have
    found something out of line, and said so.
    """
    if code == codes.PREEMPTED:
        return ["stopped after a complete checkpoint; the same command goes on from it"]
    if code == codes.PREEMPTED_UNSAVED:
        return ["stopped before a checkpoint was complete; the same command goes on from the newest complete one"]
    if code != codes.INTERNAL_ERROR:
        return []
    accounts = [failure for failure in read_failures(run_dir) if failure not in earlier]
    killed = workers.killed()
    recorded = [*(judged_by_stack(failure, run_dir) for failure in killed), *accounts]
    first = first_of(recorded)
    if first is None:
        bad = None if preflight else workers.first_bad
        return [f"failed first: rank {bad[0]}, exit status {bad[1]}"] if bad else []
    told = accounts or any(stack_path(run_dir, failure.rank).exists() for failure in killed)
    lines = [f"the ranks' own accounts are in {run_dir / 'failures'}"] if told else []
    silent = sorted(set(workers.ended) - {failure.rank for failure in recorded})
    return [*lines, verdict(first, silent)]


def watch(run: str, *, plain: bool = False) -> int:
    """Show a run that some other process trains, until its last step or Ctrl-C."""
    run_dir = Path(run)
    from nanotron.config import get_config_from_file

    if not (run_dir / "metrics.jsonl").exists():
        raise ConfigError(f"{run} holds no metrics.jsonl; name the directory of a run (general.run_dir)")
    config = get_config_from_file(run_dir / "config.yaml")
    tail = Tail(run_dir / "metrics.jsonl")
    with suppress(KeyboardInterrupt):
        if plain or not sys.stdout.isatty():
            _print_steps(tail, config)
        else:
            display = Display(tail, config)
            with display.live:
                while display.step < config.tokens.last_step:
                    display.refresh()
                    time.sleep(0.2)
    return codes.DONE


def _print_steps(tail: Tail, config: Config) -> None:
    step, left, last = 0, TimeLeft(), config.tokens.last_step
    while step < last:
        for row in tail.read():
            step, tokens = row["step"], row["tokens_per_sec"] * row[TIME_MS] / 1e3
            left.add(row)
            eta = left.seconds(config.steps_left(step))
            say(step_line(row, train_steps=last, batch_tokens=round(tokens), eta=eta))
        time.sleep(0.2)
