"""One rank of a run, from its command line to its exit code.

1  the config, checked before torch is imported: a mistake costs half a second and is printed once
2  threads, device, the store through which ranks agree, process groups with a timeout each; a look at the machines
3  nanotron.training.trainer.train
4  a clean end: groups taken down; or a record of the failure, and a last line that names who failed first
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from nanotron.config.paths import expanded
from nanotron.errors import ConfigError, complain
from nanotron.launch import codes
from nanotron.launch.failures import (
    STACK_SIGNAL,
    Failure,
    failure_of,
    record_collectives,
    record_path,
    stacks_on_record,
    tell_torchrun,
    verdict,
    write_failure,
)
from nanotron.launch.folder import claim_folders, describe_run, name_of_run, on_rank_0, run_directory
from nanotron.launch.peers import Peers
from nanotron.launch.place import (
    Place,
    choose_device,
    grow_segments,
    keep_few_shapes,
    keep_freed_memory,
    num_threads,
    repeat_bits,
    schedule_as_batch,
)
from nanotron.launch.roll import claimed
from nanotron.launch.watch import Watch, leave_now
from nanotron.logging import get_logger, set_up_logging

if TYPE_CHECKING:
    import torch

    from nanotron.config import Config
    from nanotron.parallel.mesh import Mesh

logger = get_logger(__name__)

MEETING_S = 600.0  # for ranks to meet where a config is too wrong to say
RECORD_WAIT_S = 5.0
ALONE_WAIT_S = 5.0  # for the launcher to end this rank, as it does when rank 0 found the same mistake
SAVE_MARGIN_S = 30.0  # beyond checkpoints.preempt_grace_s, for a rank to end after its last save


def parser() -> argparse.ArgumentParser:
    """The options of ``run_train.py``."""
    parser = argparse.ArgumentParser(
        prog="run_train.py",
        description="Train a model. torchrun starts one process per rank; without it, one process is the run.",
        epilog="exit codes: 0 done, 1 an internal error, 2 your mistake, 4 stopped by on_nan, 5 replicas differ: some "
        "rank's memory is corrupt, 75 preempted and saved, 76 preempted and not saved",
    )
    parser.add_argument("--config-file", required=True, metavar="X.yaml", help="the run's config")
    parser.add_argument(
        "--override", action="append", default=[], metavar="a.b=c", help="change one key of the config; repeatable"
    )
    parser.add_argument(
        "--allow-data-change", action="store_true", help="resume although the data differs from the checkpoint's"
    )
    parser.add_argument(
        "--preflight",
        nargs="?",
        const="train",
        choices=["train", "only", "json"],
        help="first measure devices, links, clocks and storage, and exit with 1 if one is out of line; `only`: do no "
        "more than that, as `nanotron doctor` does; `json`: and print every number",
    )
    return parser


def run_train(argv: Sequence[str] | None = None) -> int:
    """Run this rank and return its exit code (see ``codes``)."""
    arguments = parser().parse_args(argv)
    try:
        place = Place.from_environment(os.environ)
    except ConfigError as mistake:
        complain(mistake)
        return codes.USER_MISTAKE
    peers = Peers(place)
    watch = Watch(place, peers)
    config: Config | None = None
    notices: list[str] = []
    mistakes: list[str] = []
    try:
        config, notices = checked_config(expanded(arguments.config_file), arguments.override, world=place.world)
    except ConfigError as error:
        mistakes = error.problems
    if mistakes and not _may_be_alone(place, watch):
        return peers.say_known(mistakes)

    def work() -> int:
        found = mistakes
        if place.world > 1:
            peers.meet(MEETING_S if config is None else config.general.timeout_s)
            found = peers.compare(config, mistakes)
        if found or config is None:
            return peers.say_known(found)
        config.general.run = peers.agree_on("run", config.general.run)  # its date may differ by a second
        world = config.parallelism.world_size
        if place.rank >= world:
            return _wait_as_spare(config, peers, watch)
        if world < place.world:
            dp, spares = config.parallelism.dp, place.world - world
            notices.append(f"parallelism.dp: auto is {dp}; of {place.world} ranks {spares} wait as spares")
        place_in_run = peers.leave_spares(world)
        if arguments.preflight in ("only", "json"):
            config.logging.log_level = "warning"
        device, mesh = _set_up(config, place_in_run, peers)
        if arguments.preflight is not None:
            from nanotron.doctor.examine import examine

            as_json = arguments.preflight == "json"
            code = examine(config, place_in_run, mesh, device, peers.training_store, as_json=as_json)
            if code and arguments.preflight == "train" and place.rank == 0:
                logger.error("no step is made: --preflight ends a start where something is out of line")
            if code or arguments.preflight != "train":
                return code
        allowed = arguments.allow_data_change
        return _train(config, mesh, device, peers, watch, notices, allow_data_change=allowed)

    if config is not None:
        watch.beat_within(config.general.heartbeat_s, config.general.timeout_s)
    watch.begin()
    return _to_the_end(work, None if config is None else run_directory(config), place, peers, watch)


def _may_be_alone(place: Place, watch: Watch) -> bool:
    """Whether a mistake of this rank may be its alone, so that the ranks have to ask each other, which takes seconds.

    On one machine rank 0 does not ask, and when it has ended over the same mistake, the launcher ends the others.
    """
    deadline = time.monotonic() + ALONE_WAIT_S
    while place.num_nodes == 1 and place.rank > 0 and not watch.was_told:
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


def _to_the_end(work: Callable[[], int], run_dir: Path | None, place: Place, peers: Peers, watch: Watch) -> int:
    """Call ``work`` and end: cleanly with the code that it returns, or with a record of what failed."""
    record = partial(_record_failure, run_dir=run_dir, peers=peers)
    watch.record = record
    try:
        code = work()
        watch.end(code)
        peers.disband(code)
        return code
    except ConfigError as mistake:
        watch.end(codes.USER_MISTAKE)
        code = peers.say_once(str(mistake))
    except SystemExit as leaving:
        watch.end(codes.USER_MISTAKE)
        code = peers.say_once(_who_left(leaving))
    except Exception as error:
        watch.end(codes.INTERNAL_ERROR)
        code = record(failure_of(error, place.rank))
    if place.world > 1:  # groups cannot be taken down with the others: their destructors would wait for lost peers
        leave_now(code)
    return code


def _wait_as_spare(config: Config, peers: Peers, watch: Watch) -> int:
    """Wait outside every group, ready for the launcher to start the ranks anew without one that was lost."""
    told = threading.Event()
    with watch.training(told.set, grace_s=config.checkpoints.preempt_grace_s + SAVE_MARGIN_S):
        return peers.wait_as_spare(told.is_set)


def _train(
    config: Config,
    mesh: Mesh,
    device: torch.device,
    peers: Peers,
    watch: Watch,
    notices: list[str],
    *,
    allow_data_change: bool,
) -> int:
    """Train on a rank that is set up."""
    run_dir = run_directory(config)
    by_rank_0 = partial(on_rank_0, config=config, mesh=mesh, store=peers.training_store)
    with by_rank_0("claim", partial(claim_folders, config)) or nullcontext():
        with suppress(OSError):  # an older run's, told apart by its time
            record_path(run_dir, mesh.rank).unlink(missing_ok=True)
        if mesh.rank == 0:
            for notice in notices:
                logger.info(notice)
        from nanotron.training.trainer import train

        with stacks_on_record(run_dir, mesh.rank):
            return train(
                config,
                mesh,
                device,
                store=peers.training_store,
                allow_data_change=allow_data_change,
                before_training=partial(by_rank_0, "description", partial(describe_run, run_dir, config, mesh, device)),
                stoppable=partial(watch.training, grace_s=config.checkpoints.preempt_grace_s + SAVE_MARGIN_S),
            )


def _set_up(config: Config, place: Place, peers: Peers) -> tuple[torch.device, Mesh]:
    """Threads, data that is made on the spot, device, process groups, mesh."""
    import torch

    from nanotron.data.tokenize.prepare import may_stream, prepare_data
    from nanotron.parallel.mesh import Mesh
    from nanotron.training.topology import has_owners, mesh_axes, parameter_specs, pipeline_schedule, tied_stages

    faulthandler.register(STACK_SIGNAL)
    general, mesh = config.general, Mesh(mesh_axes(config), place.rank)
    set_up_logging(config.logging.log_level, config.logging.log_level_replica, mesh)
    prepare_data(config)  # before any group's timeout runs
    torch.set_num_threads(num_threads(general.threads_per_rank, place, os.environ))
    device, backend = choose_device(place)
    if general.deterministic:
        repeat_bits(os.environ)
    if device.type == "cuda":
        grow_segments(os.environ)
    if device.type == "cpu":
        keep_freed_memory()
        keep_few_shapes(os.environ)
    if place.world > 1:
        timeout = timedelta(seconds=general.timeout_s)
        if backend == "gloo":
            schedule_as_batch()
        else:
            record_collectives(os.environ, run_directory(config))
            timeout += timedelta(seconds=general.heartbeat_s)  # its watchdog lets no rank say anything: ours is first
        peers.gather(backend, device, timeout)
        (holders,) = tied_stages(config).values() or [()]  # the embedding is all that is ever tied
        reductions = {spec.reduce_axes(mesh) for spec in parameter_specs(config).values()}
        edges, rows, owners = pipeline_schedule(config).edges, may_stream(config), has_owners(config)
        mesh.create_groups(reductions, holders, timeout, edges=edges, rows=rows, owners=owners)
    sizes = mesh.layout()
    axes = ["dp", *(axis for axis in ("dp_shard", "ep", "cp") if sizes.get(axis, 1) > 1), "tp", "pp"]
    layout = " ".join(f"{axis}={sizes[axis]}" for axis in axes)
    between = f", {backend}" if place.world > 1 else ""
    logger.info("%s on %s%s, threads per rank: %d", layout, device, between, torch.get_num_threads())
    return device, mesh


def _record_failure(failure: Failure, run_dir: Path | None, peers: Peers) -> int:
    """Say and record a failure, and let the last line name the rank that failed first. Returns the exit code.

    Nothing here waits long: the run's folder, the store and the other ranks may all be out of reach.
    """
    if failure.kind != "own" and peers.mistake_was_said():
        return codes.USER_MISTAKE
    if peers.roll is not None:  # it may be a while until the verdict
        complain(failure)
    writing = threading.Thread(target=_write_record, args=(failure, run_dir), daemon=True)
    writing.start()
    writing.join(RECORD_WAIT_S)  # a file system that hangs may be what failed
    first, silent = claimed(peers.roll, failure)
    if first.rank == failure.rank:
        complain(failure.traceback, end="")
    line = verdict(first, silent, peers.roll.hosts(silent) if peers.roll is not None and silent else [])
    complain(line)
    tell_torchrun(line, first, failure)
    return codes.INTERNAL_ERROR


def _write_record(failure: Failure, run_dir: Path | None) -> None:
    try:
        if run_dir is not None:
            write_failure(run_dir, failure)
    except OSError as error:  # a full disk may be what failed
        complain(f"rank {failure.rank}'s failure is not on record ({error})")


def _who_left(leaving: SystemExit) -> str:
    """What to tell of code of the user's that ends the run as if it were a program of its own."""
    frames = traceback.extract_tb(leaving.__traceback__)
    last = [frame for frame in frames if "_sitebuiltins" not in frame.filename][-1]  # where exit() lives
    return (
        f"{last.filename}, line {last.lineno}, in {last.name}: sys.exit({leaving.code!r}) ended the run; code that a "
        "config names has to return, or to raise an error"
    )
