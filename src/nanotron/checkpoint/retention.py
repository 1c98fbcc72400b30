"""Which steps a folder holds, and which of them may go.

A step is complete when its index.json exists and parses; a save that was cut short leaves a folder without one.
Only files that a checkpoint is made of are ever deleted: a folder may hold other things.
"""

from __future__ import annotations

import re

from nanotron.checkpoint.format import INDEX, Damaged, Index
from nanotron.checkpoint.storage import Folder, read_text

SHARD = re.compile(r"shard-\d{5,}-of-\d{5,}\.safetensors(\.tmp)?")
TEXT = re.compile(r"(state\.json|config\.yaml|model_config\.json|index\.json)(\.tmp)?")


def step_names(folder: Folder) -> list[int]:
    """Steps that have a folder, complete or not, ascending."""
    return sorted(int(name) for name in folder.names() if re.fullmatch(r"\d+", name))


def read_index(checkpoint: Folder) -> Index:
    """The index of one step; raises ``Damaged`` when there is none, or it does not parse, or is of another step."""
    try:
        index = Index.from_json(read_text(checkpoint, INDEX))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise Damaged(f"{checkpoint.path}: it has no index.json, so its save was never completed") from error
    except Damaged:
        raise
    except ValueError as error:
        raise Damaged(f"{checkpoint.path}: index.json does not parse ({error})") from error
    name = checkpoint.path.rpartition("/")[2]
    if re.fullmatch(r"\d+", name) and int(name) != index.step:
        raise Damaged(f"{checkpoint.path}: index.json is of step {index.step}, not of the step that the folder names")
    return index


def complete_steps(folder: Folder) -> list[int]:
    """Steps that can be resumed from, ascending, by the existence of their index alone."""
    return [step for step in step_names(folder) if INDEX in folder.join(str(step)).names()]


def delete_step(checkpoint: Folder) -> None:
    """Delete a checkpoint's files, the index first, so that at no moment it looks complete without being it."""
    names = checkpoint.names()
    if not any(name == INDEX or SHARD.fullmatch(name) for name in names):
        return  # not one of ours
    try:
        listed = set(read_index(checkpoint).files)
    except Damaged:
        listed = set()
    checkpoint.remove(INDEX)
    for name in names:
        if name in listed or SHARD.fullmatch(name) or TEXT.fullmatch(name):
            checkpoint.remove(name)


def delete_old_steps(folder: Folder, step: int, keep_last_n: int | None, keep_every: int | None) -> None:
    """After ``step`` was completed: keep the last n steps up to it and every multiple of ``keep_every``.

    Half-written steps before it go too. Newer steps, of a run that was taken up again earlier, stay.
    """
    if keep_last_n is None:
        return
    steps = [other for other in step_names(folder) if other <= step]
    complete = [other for other in complete_steps(folder) if other <= step]
    kept = set(complete[-keep_last_n:]) | {other for other in complete if keep_every and other % keep_every == 0}
    for other in steps:
        if other not in kept:
            old = folder.join(str(other))
            delete_step(old)
            old.remove_folder()
