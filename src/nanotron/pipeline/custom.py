"""A user's own schedule, given as `parallelism.pp_engine`: a CSV of actions per rank, or a Python function.

CSV: one line per rank, one cell per action: stage, kind, microbatch. This is 1f1b on two ranks with two microbatches,
    0F0, 0F1, 0BW0, 0BW1
    1F0, 1B0, 1W0, 1F1, 1BW1
A stage belongs to the rank in whose line it stands. Empty cells and lines that begin with # are skipped.

Python, `path/to/file.py:name`: a function `name(rank, ranks, microbatches)` that yields (kind, microbatch, chunk), and
beside it, if stages do not run round the ranks, `placement(rank, chunk, ranks)` that returns a stage.

Either is proven like the built-in ones before it may run.
"""

from __future__ import annotations

import csv
import importlib.util
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

from nanotron.errors import ConfigError
from nanotron.pipeline.schedules import Action, Schedule, get_schedule, loop, schedule_problems
from nanotron.pipeline.simulate import prove

T = TypeVar("T")
_KEY = "parallelism.pp_engine"
_CELL = re.compile(r"(\d+)(F|BW|B|W)(\d+)")


def is_custom(name: str) -> bool:
    """Whether a `parallelism.pp_engine` names a file rather than a built-in schedule."""
    return name.endswith(".csv") or is_code(name)


def is_code(name: str) -> bool:
    """Whether a `parallelism.pp_engine` names Python code, which runs as soon as its schedule is asked for."""
    return ".py:" in name


def find_schedule(name: str, ranks: int, virtual_stages: int) -> Schedule:
    """The schedule that a `parallelism.pp_engine` names, built-in or custom."""
    find = custom_schedule if is_custom(name) else get_schedule
    return find(name, ranks, virtual_stages)


def find_problems(name: str, ranks: int, virtual_stages: int, microbatches: int) -> list[str]:
    """Why that schedule cannot run with these numbers, one line each; empty when it is proven that it can."""
    if not is_custom(name):
        return schedule_problems(name, ranks, virtual_stages, microbatches)
    try:
        prove(custom_schedule(name, ranks, virtual_stages), microbatches)
    except ConfigError as error:
        return error.problems
    return []


def custom_schedule(name: str, ranks: int, virtual_stages: int) -> Schedule:
    """The schedule in a file, for this many ranks and stages per rank. Raises ConfigError when it cannot be read."""
    path = Path(name if name.endswith(".csv") else name.rpartition(":")[0])
    if not path.is_file():
        raise ConfigError(f"{_KEY}={name}: there is no file {path}; give its path from the working directory")
    if name.endswith(".csv"):
        return _from_csv(path, ranks, virtual_stages)
    return _from_python(path, name.rpartition(":")[2], ranks, virtual_stages)


def to_csv(schedule: Schedule, microbatches: int) -> str:
    """Any schedule as CSV: a start for one of your own."""
    lines = []
    for rank in range(schedule.ranks):
        actions = schedule.actions(rank, microbatches)
        lines.append(",".join(f"{schedule.placement(rank, chunk)}{kind}{number}" for kind, number, chunk in actions))
    return "\n".join(lines) + "\n"


def _from_csv(path: Path, ranks: int, virtual_stages: int) -> Schedule:
    rows = list(_read_cells(path))
    if len(rows) != ranks:
        raise ConfigError(f"{_KEY}={path} has lines for {len(rows)} ranks; parallelism.pp={ranks} needs one for each")
    stages = [sorted({stage for stage, _, _ in row}) for row in rows]  # rank -> its stages, by chunk
    for rank, held in enumerate(stages):
        if len(held) != virtual_stages:
            raise ConfigError(
                f"{_KEY}={path}: rank {rank} has {len(held)} stages, parallelism.pp_virtual_stages={virtual_stages}; "
                f"give every rank as many stages as pp_virtual_stages says"
            )

    count = len({microbatch for row in rows for _, _, microbatch in row})

    def order(rank: int, ranks: int, microbatches: int) -> list[Action]:
        if microbatches != count:
            raise ConfigError(
                f"tokens.batch_accumulation_per_replica={microbatches} does not fit {_KEY}={path}, "
                f"which is written for {count} microbatches"
            )
        return [Action(kind, microbatch, stages[rank].index(stage)) for stage, kind, microbatch in rows[rank]]

    return Schedule(str(path), ranks, virtual_stages, lambda rank, chunk, ranks: stages[rank][chunk], order)


def _read_cells(path: Path) -> Iterator[list[tuple[int, str, int]]]:
    """Each rank's (stage, kind, microbatch)."""
    with path.open(newline="", encoding="utf-8") as file:
        for number, line in enumerate(csv.reader(file, skipinitialspace=True), start=1):
            cells = [cell.strip() for cell in line if cell.strip()]
            if not cells or cells[0].startswith("#"):
                continue
            row = []
            for cell in cells:
                match = _CELL.fullmatch(cell)
                if match is None:
                    raise ConfigError(
                        f"{_KEY}={path}, line {number}: {cell!r} is not an action; "
                        f"write stage, then F, B, W or BW, then microbatch, as in 0F3"
                    )
                row.append((int(match[1]), match[2], int(match[3])))
            yield row


def _from_python(path: Path, function: str, ranks: int, virtual_stages: int) -> Schedule:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    name = f"{path}:{function}"
    _call(f"{_KEY}={name}: importing it", partial(spec.loader.exec_module, module))
    if not callable(getattr(module, function, None)):
        raise ConfigError(f"{_KEY}={name}: {path} has no function {function}; name one that it defines")
    place = getattr(module, "placement", loop)

    def order(rank: int, ranks: int, microbatches: int) -> list[Action]:
        what = f"{_KEY}={name}: {function}(rank={rank}, ranks={ranks}, microbatches={microbatches})"
        actions = _call(
            what, lambda: [Action(*action) for action in getattr(module, function)(rank, ranks, microbatches)]
        )
        for action in actions:
            if action.kind not in ("F", "B", "W", "BW"):
                raise ConfigError(f"{what} yields {tuple(action)}; the kind must be F, B, W or BW")
        return actions

    def placement(rank: int, chunk: int, ranks: int) -> int:
        what = f"{_KEY}={name}: placement(rank={rank}, chunk={chunk}, ranks={ranks})"
        return _call(what, lambda: int(place(rank, chunk, ranks)))

    return Schedule(name, ranks, virtual_stages, placement, order)


def _call(what: str, function: Callable[[], T]) -> T:
    """Call the user's code; what it raises becomes the user's error."""
    try:
        return function()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{what} raised {type(error).__name__}: {error}") from error
