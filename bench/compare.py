"""Two runs of the bench beside each other, by their ratios: where ours is less ahead of a peer than it was.

    python -m bench compare OLD.json NEW.json [--worse 0.95]

Each file is one that ``python -m bench --json`` wrote. A ratio (ours ÷ peer) belongs to one run, so it may be held
against another's; tokens per second may not. It is *worse* when its median is below ``--worse`` times the old one
and its quartiles do not reach those of the old one: then, or when a line of ours fails that did not, the exit code
is 1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import strftime
from typing import Any, NamedTuple

from bench.contenders import OURS
from bench.machine import was_busy
from bench.report import Spread

WORSE = 0.95
Told = Mapping[str, Any]
"""What a run has written."""


class Change(NamedTuple):
    """What became of a contender's line."""

    subject: str
    contender: str
    old: Spread | None
    new: Spread | None
    says: str
    worse: bool


class NotARun(Exception):
    """A file is not one of ``--json``; the message says which and why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what has changed; 1 when something is worse, 2 when the files cannot be compared, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m bench compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, metavar="OLD.json")
    parser.add_argument("new", type=Path, metavar="NEW.json")
    parser.add_argument("--worse", type=float, default=WORSE, help="of the old ratio: what is below may be worse")
    options = parser.parse_args(arguments)
    try:
        old, new = read(options.old), read(options.new)
    except NotARun as problem:
        parser.error(str(problem))
    if differ := other_work(old, new):
        parser.error(f"the two measured other work: {', '.join(differ)}")
    return report(old, new, options.worse)


def report(old: Told, new: Told, worse: float = WORSE) -> int:
    """Print two runs beside each other; 1 when something is worse, else 0."""
    found = changes(old, new, worse)
    print("\n".join(["", *_circumstances(old, new), *table(found)]), flush=True)
    return int(any(change.worse for change in found))


def changes(old: Told, new: Told, worse: float = WORSE) -> list[Change]:
    """What became of every line that has a ratio, and of those of ours, in the order of the new run."""
    found = []
    for subject in {**new["subjects"], **old["subjects"]}:
        before, now = (told["subjects"].get(subject, {"contenders": {}})["contenders"] for told in (old, new))
        for name in {**now, **before}:
            change = _change(subject, name, before.get(name), now.get(name), worse)
            found += [change] if change.says or change.old or change.new else []
    return found


def _change(subject: str, name: str, before: Told | None, now: Told | None, worse: float) -> Change:
    is_ours = name.split(",")[0] == OURS  # its ratio, if any, is to another of ours
    old, new = (None if line is None or is_ours else _ratio(line) for line in (before, now))
    says, fell = "", False
    if before is None or now is None:
        says = "only in the old run" if now is None else "new"
    elif now["failure"]:
        says, fell = f"fails: {now['failure']}", is_ours and not before["failure"]
    elif before["failure"]:
        says = "failed before"
    elif old and new:
        apart = new.high < old.low or old.high < new.low
        fell = apart and new.median < worse * old.median
        says = "worse" if fell else "better" if apart and worse * new.median > old.median else ""
    return Change(subject, name, old, new, says, fell)


def _ratio(line: Told) -> Spread | None:
    return Spread(**line["ours_over_it"]) if line["ours_over_it"] else None


def table(found: Sequence[Change]) -> list[str]:
    """The changes as lines to print."""
    rows = [("", "ours ÷ it before", "now", "now ÷ before", "")]
    for change in found:
        quotient = f"{change.new.median / change.old.median:.3f}" if change.old and change.new else ""
        rows.append(
            (f"{change.subject}: {change.contender}", _cell(change.old), _cell(change.new), quotient, change.says)
        )
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    return [
        "  ".join([f"{row[0]:<{widths[0]}}", *(f"{row[i]:>{widths[i]}}" for i in (1, 2, 3)), row[4]]).rstrip()
        for row in rows
    ]


def _cell(spread: Spread | None) -> str:
    return f"{spread.median:.3f} ({spread.low:.3f} – {spread.high:.3f})" if spread else ""


def _circumstances(old: Told, new: Told) -> list[str]:
    """When and where the runs were made, as far as that differs."""
    lines = [f"before: {old['machine']['date']}, now: {new['machine']['date']}"]
    if machine_of(old) != machine_of(new):
        lines.append(
            f"other machines ({' and '.join(map(machine_of, (old, new)))}): what differs may be the processor's"
        )
    before, now = (told["machine"]["versions"] for told in (old, new))
    for name in now:
        for package, version in now[name].items():
            if before.get(name, {}).get(package, version) != version:
                lines.append(f"{name}: {package} {before[name][package]} before, {version} now")
    if any(was_busy(told["machine"]) for told in (old, new)):
        lines.append("A machine was busy when one of them began: measure again before you believe it.")
    return lines


def machine_of(told: Told) -> str:
    """What has to be the same for two runs to be of one kind of machine."""
    return f"{told['machine']['processor']}, {told['machine']['cores']} cores"


def read(path: Path) -> dict[str, Any]:
    """What a run has written. Raises NotARun."""
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        raise NotARun(f"{path}: {problem}") from None
    if not (isinstance(told, dict) and {"machine", "shape", "steps", "subjects"} <= set(told)):
        raise NotARun(f"{path} is not what `python -m bench --json` writes")
    return told


def keep(told: Told, folder: Path) -> Told | None:
    """Add a run to the folder of earlier ones; of these, return the newest of the same work on the same machine."""
    folder.mkdir(parents=True, exist_ok=True)
    alike = None
    for path in sorted(folder.glob("*.json")):
        with suppress(NotARun):
            one = read(path)
            alike = one if machine_of(one) == machine_of(told) and not other_work(one, told) else alike
    (folder / f"{strftime('%Y-%m-%dT%H-%M-%S')}.json").write_text(json.dumps(told, indent=1) + "\n")
    return alike


def other_work(old: Told, new: Told) -> list[str]:
    """What two runs were asked for, as far as it differs."""
    return [f"{key} {old[key]} and {new[key]}" for key in ("shape", "steps") if old[key] != new[key]]
