"""Which checkpoint a run continues from. No torch.

A run's own steps come first: those in checkpoints_path, or else in the folder that gets copies of them. Without any,

``resume_checkpoint_path``    what happens
    omitted, null, auto       a fresh start
    never                     a fresh start; while there are own steps it is refused
    a path or URL             that step, or the newest complete step of that folder

So a path counts for the first start only, and the same command goes on from what it saved itself.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from nanotron.checkpoint.format import INDEX, Damaged
from nanotron.checkpoint.retention import complete_steps, read_index, step_names
from nanotron.checkpoint.storage import Folder, LocalFolder, open_folder
from nanotron.checkpoint.verify import agree_on_damage
from nanotron.errors import ConfigError
from nanotron.parallel.agreement import Agreement
from nanotron.parallel.store import Store

KEY = "checkpoints.resume_checkpoint_path"
AUTO = {"auto", "null", "none"}
OTHER_FORMATS = {
    "checkpoint_metadata.json": "a checkpoint of Hugging Face's Nanotron",
    "config.json": "a Hugging Face model",
}


@dataclass(frozen=True)
class Resume:
    """A checkpoint to continue from: a step of the run's ``own``, or one of ``resume_checkpoint_path``.

    ``notices`` are lines the user should read.
    """

    checkpoint: str
    step: int
    notices: tuple[str, ...] = ()
    own: bool = True


def newest_complete(checkpoints_path: str, before: int | None = None) -> str | None:
    """The folder of the newest complete step (below ``before``), or None. Only its index is parsed."""
    found, _ = _newest([open_folder(checkpoints_path)], before=before)
    return found.checkpoint if found else None


def find_resume(
    checkpoints_path: str,
    resume_checkpoint_path: str | None,
    *,
    copy: str | None = None,
    damaged: Collection[str] = (),
) -> Resume | None:
    """The checkpoint that a run with these two keys continues from; None is a fresh start.

    ``copy`` is the folder that gets copies of the run's steps; checkpoints in ``damaged`` are passed over. Raises
    ConfigError when the rules refuse, a path leads to no complete checkpoint, or every own step is damaged.
    """
    wish = str(resume_checkpoint_path or "auto")
    try:
        own = [open_folder(place) for place in (checkpoints_path, copy) if place is not None]
        if wish.lower() == "never":
            _refuse_steps(own)
            return None
        found, notices = _newest(own, damaged=damaged)
        if found:
            return replace(found, notices=notices)
        places = [folder.path for folder in own]
        if damaged or any(complete_steps(folder) for folder in own):  # they were complete once: no fresh start
            raise ConfigError([*notices, f"no complete, undamaged checkpoint is left in {' or '.join(places)}"])
        if wish.lower() in AUTO:
            return None
        other = open_folder(wish)
        if other.path in places and not OTHER_FORMATS.keys() & set(other.names()):  # nothing of its own yet
            return None
        found = _from_path(other)
        return replace(found, notices=notices + found.notices, own=False)
    except OSError as error:
        raise ConfigError(
            f"{KEY}={wish}: cannot read {error.filename or checkpoints_path} ({error.strerror})"
        ) from error


def agree_resume(
    checkpoints_path: str,
    resume_checkpoint_path: str | None,
    rank: int = 0,
    world: int = 1,
    store: Store | None = None,
    *,
    copy: str | None = None,
    verify: bool = True,
    timeout_s: float = 600.0,
) -> Resume | None:
    """``find_resume`` for all ranks: rank 0 looks, the files are verified by all, every rank gets the same answer.

    A damaged checkpoint is named. Of the run's own steps the one before it is then taken, and a line says so; a path
    is refused, with the one before it as the offer. Raises the same ConfigError on every rank.
    """
    agreement = Agreement("checkpoint/resume", rank, world, store, timeout_s=timeout_s)
    damaged: list[str] = []
    notices: list[str] = []

    def look(_: list[Any]) -> dict[str, Any]:
        try:
            found = find_resume(checkpoints_path, resume_checkpoint_path, copy=copy, damaged=damaged)
        except ConfigError as error:
            return {"problems": error.problems}
        return {"found": found and [found.checkpoint, found.step, found.notices, found.own]}

    while True:
        where = str(len(damaged))
        doing = f"looking for a checkpoint in {checkpoints_path}"
        answer = agreement.decide(f"{where}/candidate", None, look, doing=doing)
        if "problems" in answer:
            raise ConfigError(_once([*notices, *answer["problems"]]))
        if answer["found"] is None:
            return None
        checkpoint, step, lines, own = answer["found"]
        notices = _once([*notices, *lines])
        damage = agree_on_damage(agreement, where, checkpoint, checksums=verify)
        if not damage:
            return Resume(checkpoint, step, tuple(notices), own)
        if not own:
            raise ConfigError([*damage, _offer(checkpoint, step)])
        notices += [*damage, f"step {step} is damaged: looking for the one before it"]
        damaged.append(checkpoint)


def _once(lines: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(lines))


def _offer(damaged: str, step: int) -> str:
    parent, _, name = damaged.rpartition("/")
    earlier = newest_complete(parent, before=step) if name.isdigit() else None
    advice = (
        f"the complete checkpoint before it is {earlier}" if earlier else "there is no complete checkpoint before it"
    )
    return f"{KEY}={damaged}: the checkpoint is damaged; {advice}"


def _newest(
    folders: Sequence[Folder], *, before: int | None = None, damaged: Collection[str] = ()
) -> tuple[Resume | None, tuple[str, ...]]:
    """The newest complete step of the first folder that has one, and a line for each newer one that is none."""
    notices: list[str] = []
    for folder in folders:
        for step in reversed(step_names(folder)):
            checkpoint = folder.join(str(step))
            if checkpoint.path in damaged or (before is not None and step >= before):
                continue
            try:
                return Resume(checkpoint.path, read_index(checkpoint).step), tuple(notices)
            except Damaged as error:
                notices.append(f"ignoring {error}")
    return None, tuple(notices)


def _refuse_steps(folders: Sequence[Folder]) -> None:
    for folder in folders:
        steps = complete_steps(folder)
        if steps:
            some = ", ".join(str(step) for step in steps[-5:])
            raise ConfigError(
                f"{KEY}=never, but {folder.path} holds checkpoints (steps … {some}); "
                f"use {KEY}: auto to continue, another checkpoints.checkpoints_path, or delete them"
            )


def _from_path(folder: Folder) -> Resume:
    names = folder.names()
    if INDEX in names:
        try:
            return Resume(folder.path, read_index(folder).step)
        except Damaged as error:
            raise ConfigError(f"{KEY}={error}") from error
    found, notices = _newest([folder])
    if found:
        return replace(found, notices=notices)
    raise ConfigError(f"{KEY}={folder.path}: {_why_no_checkpoint(folder, names)}")


def _why_no_checkpoint(folder: Folder, names: list[str]) -> str:
    if not names:
        return "there is no such folder, or it is empty; name a step or a folder of steps, or use auto for the newest"
    for file, what in OTHER_FORMATS.items():
        if file in names:
            return f"this is {what}, which has no training state for us; take its weights with model.init_method.path"
    if any(re.fullmatch(r"\d+", name) for name in names):
        return "none of its steps has an index.json, so none is complete"
    parent, _, name = folder.path.rpartition("/")
    if name.isdigit():
        earlier = newest_complete(parent)
        advice = f"the newest complete one is {earlier}" if earlier else "no other step there is complete"
        return f"it has no index.json, so its save was never completed; {advice}"
    return "it holds neither an index.json nor steps"


def check_shared(
    checkpoints_path: str, rank: int, world: int, store: Store | None, *, timeout_s: float = 600.0
) -> None:
    """Refuse a checkpoints_path that not every rank sees: rank 0 writes a file there, all others look for it."""
    folder = open_folder(checkpoints_path)
    if world == 1 or not isinstance(folder, LocalFolder):
        return
    agreement = Agreement("checkpoint/shared", rank, world, store, timeout_s=timeout_s)

    def write(_: list[Any]) -> dict[str, str]:
        name = f".shared-{uuid4().hex}"
        try:
            folder.make()
            folder.write(name, [b""])
        except OSError as error:
            return {"problem": f"checkpoints.checkpoints_path={folder.path} cannot be written ({error.strerror})"}
        return {"name": name}

    written = agreement.decide("write", None, write, doing=f"writing to {folder.path}")
    if "problem" in written:
        raise ConfigError(written["problem"])
    sees = written["name"] in folder.names()
    blind = agreement.decide("seen", sees, lambda seen: [other for other, sees in enumerate(seen) if not sees])
    if rank == 0:
        folder.remove(written["name"])
    if blind:
        raise ConfigError(
            f"checkpoints.checkpoints_path={folder.path} is not one folder for all ranks: rank {blind[0]} does not see "
            "what rank 0 writes; use a shared file system or an object store"
        )
