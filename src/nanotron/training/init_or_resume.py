"""Where a run starts: weights, optimizer state and position from the right checkpoint, or from nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.distributed import ReduceOp

from nanotron.checkpoint.compare import changed_keys, check_model, saved_config
from nanotron.checkpoint.documents import read_state
from nanotron.checkpoint.format import StateShard
from nanotron.checkpoint.read import load
from nanotron.checkpoint.resume import AUTO, KEY, Resume, agree_resume, check_shared
from nanotron.config import ExistingCheckpointInit
from nanotron.convert.sources import load_weights
from nanotron.launch.place import has_compiler
from nanotron.logging import get_logger
from nanotron.models.families import flops_per_step
from nanotron.parallel.agreement import Agreement
from nanotron.parallel.comm import all_reduce_
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.store import Store
from nanotron.training.step import Training
from nanotron.training.topology import parameter_specs

if TYPE_CHECKING:
    from nanotron.config import CheckpointsArgs, Config

logger = get_logger(__name__)

FLOPS_OF_A_LONG_RUN = 10**15
"""Of each rank: two hours of two cores that train at 140 GFLOP/s."""


class StartingPoint(NamedTuple):
    """Where a run begins; ``state`` and ``config`` are a checkpoint's, None for a fresh start."""

    step: int = 0
    state: dict[str, Any] | None = None
    config: dict[str, Any] | None = None


def settle_compile(config: Config, mesh: Mesh, device: torch.device, resume: Resume | None) -> None:
    """Decide ``model.compile: auto``, once for a run: it goes on as it began, and all ranks do alike."""
    if config.model.compile != "auto":
        return
    began = read_state(resume.checkpoint).get("compile") if resume else None
    if began is None:
        everywhere = torch.tensor(float(has_compiler(device) and pays_to_compile(config, device)), device=device)
        began = bool(all_reduce_(everywhere, mesh.world_group(), ReduceOp.MIN))
    config.model.compile = began


def pays_to_compile(config: Config, device: torch.device) -> bool:
    """Whether steps win more time than compiling takes: on a CPU some per cent of them, against a minute."""
    if device.type != "cpu":
        return True
    samples, length = config.samples_by(config.tokens.train_steps), config.tokens.sequence_length
    flops = flops_per_step(config.model.model_config, num_samples=samples, sequence_length=length)
    return flops >= FLOPS_OF_A_LONG_RUN * config.parallelism.world_size


def init_or_resume(
    training: Training, config: Config, mesh: Mesh, store: Store | None, resume: Resume | None
) -> StartingPoint:
    """Fill weights and optimizer from the checkpoint to ``resume`` from, or begin afresh."""
    if resume is None:
        _begin(training, config, mesh, store)
        return StartingPoint()
    checkpoints = config.checkpoints
    for line in resume.notices if mesh.rank == 0 else ():
        logger.warning(line)
    plain, shapes = config.to_dict(), {name: spec.shape for name, spec in parameter_specs(config).items()}
    check_model(resume.checkpoint, shapes, plain["model"]["model_config"])
    for line in changed_keys(resume.checkpoint, plain):
        logger.info(f"changed on resume: {line}")
    state = read_state(resume.checkpoint, position=True)
    imported = "imported_from" in state  # weights without a position, even where they lie in the run's own folder
    going_on = resume.own and not imported
    if going_on and mesh.rank == 0 and (spent := _spent(checkpoints, resume.checkpoint)):
        logger.warning(
            f"{', '.join(spent)}: for the first start only; this run goes on from its own step {resume.step} (to start"
            " once more with that, name another checkpoints.checkpoints_path)"
        )
    load_optimizer = going_on or checkpoints.load_optimizer
    unused = load(resume.checkpoint, training.state_shards() if load_optimizer else _weights(training))
    if load_optimizer:
        if unused and mesh.rank == 0:
            name = config.optimizer.optimizer_factory.name
            key = "ema_decay=null" if unused == ["ema"] else f"optimizer_factory.name={name}"
            logger.warning(
                f"{' and '.join(unused)} of {resume.checkpoint} are left behind: "
                f"optimizer.{key} keeps none, and its checkpoints will have none"
            )
        training.optimizer.updates.fill_(state["optimizer_updates"])
    else:
        training.optimizer.start_average()
    if imported or not (going_on or checkpoints.load_lr_scheduler):
        logger.info(f"starting at step 0 with the weights of {resume.checkpoint}")
        return StartingPoint()
    logger.info(f"resuming from {resume.checkpoint}, step {resume.step}")
    return StartingPoint(resume.step, state, saved_config(resume.checkpoint))


def _spent(checkpoints: CheckpointsArgs, own: str) -> list[str]:
    """What the config says of a first start, as key=value: another place than that of the ``own`` step, flags."""
    values = {name: getattr(checkpoints, name) for name in ("load_optimizer", "load_lr_scheduler")}
    spent = [f"checkpoints.{name}=false" for name, value in values.items() if not value]
    wish = checkpoints.resume_checkpoint_path or "auto"
    if wish.lower() in AUTO or wish.rstrip("/") in (own, own.rpartition("/")[0]):
        return spent
    return [f"{KEY}={wish}", *spent]


def checkpoint_to_resume(config: Config, mesh: Mesh, store: Store | None) -> Resume | None:
    """The checkpoint to continue from by the rules of resuming, the same on every rank."""
    checkpoints, timeout_s = config.checkpoints, config.general.timeout_s
    path, copy = config.checkpoint_places
    for place in (path, copy):
        if place is not None:
            check_shared(place, mesh.rank, mesh.world, store, timeout_s=timeout_s)
    wish, verify = checkpoints.resume_checkpoint_path, checkpoints.verify
    return agree_resume(path, wish, mesh.rank, mesh.world, store, copy=copy, verify=verify, timeout_s=timeout_s)


def _begin(training: Training, config: Config, mesh: Mesh, store: Store | None) -> None:
    """Draw the initial weights, or take an existing model's."""
    init = config.model.init_method
    if isinstance(init, ExistingCheckpointInit):
        agreement = Agreement("weights", mesh.rank, mesh.world, store, timeout_s=config.general.timeout_s)
        verify = config.checkpoints.verify
        load_weights(init.path, _weights(training), config.model.model_config, agreement, verify=verify)
        training.optimizer.start_average()
        logger.info(f"starting from the weights of {init.path}")
    else:
        training.initialize()


def _weights(training: Training) -> Iterator[StateShard]:
    """The weights and their masters."""
    return (piece for piece in training.state_shards() if piece.kind in {"weight", "master"})
