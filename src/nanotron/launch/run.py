"""One rank of a run, from its command line to its exit code.

1  the config, checked before torch is imported: a mistake costs half a second and is printed once
2  threads, device, the store through which ranks agree, process groups with a timeout each
3  nanotron.training.trainer.train
4  a clean end: groups taken down; or a record of the failure, and a last line that names who failed first
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nanotron.errors import ConfigError
from nanotron.launch import codes
from nanotron.launch.failures import STACK_SIGNAL, Failure, failure_of, record_path, write_failure
from nanotron.launch.folder import claim_folders, describe_run, name_of_run, on_rank_0, run_directory
from nanotron.launch.peers import Peers
from nanotron.launch.place import (
    Place,
    choose_device,
    keep_few_shapes,
    keep_freed_memory,
    num_threads,
    schedule_as_batch,
)
from nanotron.logging import get_logger, set_up_logging

if TYPE_CHECKING:
    import torch

    from nanotron.config import Config
    from nanotron.parallel.mesh import Mesh

logger = get_logger(__name__)

MEETING_TIMEOUT = timedelta(minutes=10)
OTHERS_WAIT_S = 1.0  # for rank 0 to have said a mistake that every rank knows of
ALONE_WAIT_S = 5.0  # for the launcher to end this rank, as it does when rank 0 found the same mistake


def parser() -> argparse.ArgumentParser:
    """The options of ``run_train.py``."""
    parser = argparse.ArgumentParser(
        prog="run_train.py",
        description="Train a model. torchrun starts one process per rank; without it, one process is the run.",
        epilog="exit codes: 0 done, 1 our bug, 2 your mistake, 4 stopped by on_nan, 75 preempted and saved, "
        "76 preempted and not saved",
    )
    parser.add_argument("--config-file", required=True, metavar="X.yaml", help="the run's config")
    parser.add_argument(
        "--override", action="append", default=[], metavar="a.b=c", help="change one key of the config; repeatable"
    )
    parser.add_argument(
        "--allow-data-change", action="store_true", help="resume although the data differs from the checkpoint's"
    )
    return parser


def run_train(argv: Sequence[str] | None = None) -> int:
    """Run this rank and return its exit code (see ``codes``)."""
    arguments = parser().parse_args(argv)
    place = Place.from_environment(os.environ)
    peers = Peers(place)
    config: Config | None = None
    notices: list[str] = []
    mistakes: list[str] = []
    # torchrun sends SIGTERM to all ranks as soon as one has exited: not before rank 0 has said why
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        config, notices = checked_config(arguments.config_file, arguments.override, world=place.world)
    except ConfigError as error:
        mistakes = error.problems
    if mistakes and not _may_be_alone(place):
        return _say_once(mistakes, place)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if place.world > 1:
        peers.meet(MEETING_TIMEOUT)
        mistakes = peers.compare(config, mistakes, MEETING_TIMEOUT)
        if mistakes:
            return _say_once(mistakes, place)
    assert config is not None
    config.general.run = peers.agree_on("run", config.general.run)  # its date may differ by a second
    return _train(config, place, peers, notices, allow_data_change=arguments.allow_data_change)


def _may_be_alone(place: Place) -> bool:
    """Whether a mistake of this rank may be its alone, so that the ranks have to ask each other, which takes seconds.

    On one machine rank 0 does not ask, and when it has ended over the same mistake, the launcher ends the others.
    """
    deadline = time.monotonic() + ALONE_WAIT_S
    while place.num_nodes == 1 and place.rank > 0 and signal.SIGTERM not in signal.sigpending():
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return place.num_nodes > 1


def checked_config(config_file: str, overrides: Sequence[str], *, world: int | None) -> tuple[Config, list[str]]:
    """The config without mistakes, every derived key filled in, and a line for each legal thing that may surprise.

    ``world`` is the number of launched ranks, None when that is not decided. Raises ConfigError with every mistake;
    one is a layout that does not fit the ranks.
    """
    from nanotron.check import examine

    checked = examine(config_file, overrides, world)
    checked.config.general.run = name_of_run(checked.config.general.run)
    return checked.config, checked.notices


def _say_once(mistakes: Sequence[str], place: Place) -> int:
    """Print mistakes that every rank knows of: rank 0 does, the others give it time to."""
    if place.rank == 0:
        print(*mistakes, sep="\n", file=sys.stderr, flush=True)
    else:
        time.sleep(OTHERS_WAIT_S)
    return codes.USER_MISTAKE


def _train(config: Config, place: Place, peers: Peers, notices: list[str], *, allow_data_change: bool) -> int:
    """Set this rank up, train, and end: cleanly, or with a record of what failed."""
    faulthandler.register(STACK_SIGNAL)
    run_dir = run_directory(config)
    claimed: ExitStack | None = None
    try:
        device, mesh = _set_up(config, place, peers)
        claimed = _open_folders(config, mesh, peers)
        with suppress(OSError):  # an older run's, told apart by its time
            record_path(run_dir, place.rank).unlink(missing_ok=True)
        if place.rank == 0:
            for notice in notices:
                logger.info(notice)
        from nanotron.training.trainer import train

        code = train(
            config,
            mesh,
            device,
            store=peers.training_store,
            allow_data_change=allow_data_change,
            before_training=partial(_describe, run_dir, config, mesh, device, peers),
        )
        peers.disband()
        return code
    except ConfigError as mistake:
        code = peers.say_once(str(mistake))
    except SystemExit as leaving:
        code = peers.say_once(_who_left(leaving))
    except KeyboardInterrupt:
        code = codes.PREEMPTED_UNSAVED
    except Exception as error:
        code = _record_failure(failure_of(error, place.rank), run_dir, peers)
    finally:
        if claimed is not None:
            claimed.close()
    leave(code, place)
    return code


def _set_up(config: Config, place: Place, peers: Peers) -> tuple[torch.device, Mesh]:
    """Threads, data that is made on the spot, device, process groups, mesh."""
    import torch

    from nanotron.data.tokenize.prepare import may_stream, prepare_data
    from nanotron.parallel.mesh import Mesh
    from nanotron.training.topology import mesh_axes, parameter_specs, tied_stages

    general, mesh = config.general, Mesh(mesh_axes(config), place.rank)
    set_up_logging(config.logging.log_level, config.logging.log_level_replica, mesh)
    prepare_data(config)  # before any group's timeout runs
    torch.set_num_threads(num_threads(general.threads_per_rank, place, os.environ))
    device, backend = choose_device(place)
    if device.type == "cpu":
        keep_freed_memory()
        keep_few_shapes(os.environ)
    if place.world > 1:
        if backend == "gloo":
            schedule_as_batch()
        timeout = timedelta(seconds=general.timeout_s)
        peers.gather(backend, device, timeout)
        (holders,) = tied_stages(config).values() or [()]  # the embedding is all that is ever tied
        reductions = {spec.reduce_axes(mesh) for spec in parameter_specs(config).values()}
        mesh.create_groups(reductions, holders, timeout, rows=may_stream(config))
    layout = " ".join(f"{axis}={mesh.size(axis)}" for axis in ("dp", "tp", "pp"))
    between = f", {backend}" if place.world > 1 else ""
    logger.info("%s on %s%s, threads per rank: %d", layout, device, between, torch.get_num_threads())
    return device, mesh


def _open_folders(config: Config, mesh: Mesh, peers: Peers) -> ExitStack | None:
    """Rank 0 makes and claims the run's folders, and returns what holds the claim."""
    return on_rank_0("claim", partial(claim_folders, config), config, mesh, peers.training_store)


def _describe(run_dir: Path, config: Config, mesh: Mesh, device: torch.device, peers: Peers) -> None:
    """Rank 0 writes what describes the run."""
    describe = partial(describe_run, run_dir, config, mesh, device)
    on_rank_0("description", describe, config, mesh, peers.training_store)


def _record_failure(failure: Failure, run_dir: Path, peers: Peers) -> int:
    """Put a failure on record and let the last line name the rank that failed first. Returns the exit code."""
    try:
        write_failure(run_dir, failure)
    except OSError as error:  # a full disk may be what failed
        print(f"rank {failure.rank}'s failure is not on record ({error})", file=sys.stderr)
    if peers.mistake_was_said():
        return codes.USER_MISTAKE
    first = peers.claim(failure)
    if first.rank == failure.rank:
        print(failure.traceback, file=sys.stderr, end="")
    print(f"failed first: {first}", file=sys.stderr, flush=True)
    return codes.OUR_BUG


def _who_left(leaving: SystemExit) -> str:
    """What to tell of code of the user's that ends the run as if it were a program of its own."""
    frames = traceback.extract_tb(leaving.__traceback__)
    last = [frame for frame in frames if "_sitebuiltins" not in frame.filename][-1]  # where exit() lives
    return (
        f"{last.filename}, line {last.lineno}, in {last.name}: sys.exit({leaving.code!r}) ended the run; code that a "
        "config names has to return, or to raise an error"
    )


def leave(code: int, place: Place) -> None:
    """End a rank that cannot take its groups down with the others: their destructors would wait for lost peers."""
    if place.world > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
