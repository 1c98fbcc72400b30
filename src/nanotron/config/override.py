"""Changes to single keys from the command line: `a.b.c=value`."""

from __future__ import annotations

from typing import Any

import yaml

from nanotron.config.document import DEEPEST, Document, Position, Problem, parse_value
from nanotron.config.keys import KeyPath, dotted, path_of


def apply_override(document: Document, override: str) -> None:
    """Set one key of a document, creating the sections around it; the value is YAML.

    Items of lists are named by number from 0: `data_stages[0].start_training_step=1`. What is wrong with the override
    is reported in the document.
    """
    place = Position(override)
    name, equals, text = override.partition("=")
    path = _path(name)
    if not equals or path is None:
        document.problems.append(Problem((), "not of the form section.key=value", place))
        return
    if len(path) > DEEPEST:
        document.problems.append(Problem((), f"more than {DEEPEST} names; no key lies so deep", place))
        return
    try:
        value = parse_value(text)
    except yaml.YAMLError as error:
        document.problems.append(Problem(path, f"the value is not YAML: {error}", place))
        return
    if problem := _set(document.values, path, value):
        document.problems.append(Problem(path, problem, place))
        return
    for written in [known for known in document.places if known[: len(path)] == path]:
        del document.places[written]
    document.places[path] = place
    document.problems = [problem for problem in document.problems if problem.path[: len(path)] != path]


def _path(name: str) -> KeyPath | None:
    """Read a dotted name; None when a part of it is empty."""
    path = path_of(name.strip())
    return path if all(part != "" for part in path) else None


def _set(values: Any, path: KeyPath, value: Any) -> str:
    """Set a value inside nested mappings and lists; return what is in the way, if anything."""
    for depth, part in enumerate(path):
        last = depth == len(path) - 1
        if isinstance(values, list):
            if not isinstance(part, int) or part >= len(values):
                return f"{dotted(path[:depth])} is a list of {len(values)}; name an item by number from 0"
        elif not isinstance(values, dict):
            return f"{dotted(path[:depth])} is a single value, which has no keys"
        if last:
            values[part] = value
        elif isinstance(values, dict) and values.get(part) is None:
            values[part] = {}
        values = values[part]
    return ""
