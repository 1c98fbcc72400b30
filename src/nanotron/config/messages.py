"""What pydantic finds wrong, in words: the key, the value, the rule and the fix."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from nanotron.config.compat.retired import retired_of
from nanotron.config.config import Config
from nanotron.config.document import show
from nanotron.config.keys import KeyPath, dotted, fields_of, section_classes
from nanotron.config.model import FAMILIES

UNKNOWN = "unexpected_keyword_argument"
"""What pydantic calls a key that a section does not have."""


@dataclass(frozen=True)
class Mistake:
    """One of pydantic's errors, with the section class and the declaration of the key it is about."""

    path: KeyPath
    kind: str
    context: dict[str, Any]
    owner: type[Any]
    declaration: FieldInfo | None

    @property
    def example(self) -> Any:
        """A legal value of a required key."""
        examples = self.declaration.examples if self.declaration is not None else None
        return examples[0] if examples else None

    @property
    def is_missing_section(self) -> bool:
        """Whether a whole required section is missing: what matters is which of its keys are."""
        return self.kind == "missing" and isinstance(self.example, dict)


def mistakes(error: ValidationError) -> list[Mistake]:
    """Return pydantic's errors with the names of union branches taken out of their paths."""
    found = []
    for item in error.errors(include_url=False):
        path, owner, declaration = _locate(item["loc"])
        context = item.get("ctx", {})
        if "key" in context:  # a rule of a whole section, which names the key it blames
            path = (*path, context["key"])
        found.append(Mistake(path, item["type"], context, owner, declaration))
    return found


def _locate(location: Iterable[str | int]) -> tuple[KeyPath, type[Any], FieldInfo | None]:
    path: list[str | int] = []
    owner: type[Any] = Config
    inside: list[type[Any]] = [Config]
    declaration: FieldInfo | None = None
    for part in location:
        branch = [cls for cls in inside if cls.__name__ == part]
        if branch or (isinstance(part, str) and part.startswith("<")):
            inside = branch
            continue
        if part == "[key]":  # of a mapping, named by the part before
            continue
        path.append(part)
        if inside and isinstance(part, str):
            owner = inside[0]
            declaration = fields_of(owner).get(part)
            inside = section_classes(declaration.annotation) if declaration is not None else []
    return tuple(path), owner, declaration


def explain(mistake: Mistake, value: Any) -> str:
    """Say what is wrong with a key whose written value is `value`, and what would be right."""
    if mistake.kind == "missing":
        assert mistake.declaration is not None
        description = (mistake.declaration.description or "").rstrip(".")
        return f"missing: {description[0].lower()}{description[1:]}, e.g. `{mistake.path[-1]}: {mistake.example}`"
    if mistake.kind == UNKNOWN:
        return _unknown_key(mistake, value)
    if mistake.kind in _WORDS:
        return _WORDS[mistake.kind](show(value), mistake.context)
    if mistake.kind in ("dataclass_type", "dict_type", "union_tag_invalid"):
        keys = f"; its keys are {', '.join(_keys_of(mistake))}" if _keys_of(mistake) else ""
        return f"{show(value)} where a mapping belongs{keys}"
    if mistake.kind == "literal_error":
        return _not_a_choice(mistake.context["expected"], value)
    assert mistake.kind in ("rule", "number"), f"no words for pydantic's {mistake.kind!r} at {dotted(mistake.path)}"
    return mistake.context.get("text") or f"{show(value)} is not a number"


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that was probably meant."""
    by_lower = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


def _not_a_choice(expected: str, value: Any) -> str:
    named = expected.replace(" or ", ", ").split(", ")
    choices = [part.strip("'") if part.startswith("'") else part.lower() for part in named]  # true as YAML has it
    guess = nearest(str(value), choices)
    if len(choices) == 1:
        return f"{show(value)} is not legal; only {choices[0]} is"
    hint = f"; did you mean {guess}?" if guess else ""
    return f"{show(value)} is not one of {', '.join(choices)}{hint}"


def meant(mistake: Mistake) -> KeyPath | None:
    """Return the path of the key that was probably meant by an unknown one."""
    guess = nearest(str(mistake.path[-1]), fields_of(mistake.owner)) if mistake.kind == UNKNOWN else None
    return (*mistake.path[:-1], guess) if guess else None


def _unknown_key(mistake: Mistake, value: Any) -> str:
    name, guess = str(mistake.path[-1]), meant(mistake)
    if name in FAMILIES:
        fix = "leave it out" if not value else "keep the marker of one family"
        return f"the model is read as {mistake.owner.__name__}; {fix}"
    what = "unknown section" if mistake.owner is Config else f"unknown key of {mistake.owner.__name__}"
    elsewhere = [path for path in all_keys() if path[-1] == name]
    if elsewhere:
        return f"{what}; it belongs to {dotted(elsewhere[0][:-1]) or 'the top level'}"
    return f"{what}; did you mean {guess[-1]}?" if guess else f"{what}; docs/config.md lists every key"


def all_keys(cls: type[Any] = Config, path: KeyPath = ()) -> list[KeyPath]:
    """Return the path of every key that every section class takes; items of lists are left out of the path."""
    paths: list[KeyPath] = [(*path, name) for name in retired_of(cls)]
    for name, info in fields_of(cls).items():
        paths.append((*path, name))
        for inside in section_classes(info.annotation):
            paths += all_keys(inside, (*path, name))
    return paths


def _keys_of(mistake: Mistake) -> list[str]:
    classes = section_classes(mistake.declaration.annotation) if mistake.declaration is not None else []
    return [name for name in fields_of(classes[0]) if not name.startswith("_")][:6] if classes else []


def _limit(relation: str, name: str) -> Callable[[str, dict[str, Any]], str]:
    return lambda value, context: f"{value} is out of range; it must be {relation} {show(context[name])}"


def _kind(kind: str) -> Callable[[str, dict[str, Any]], str]:
    return lambda value, _: f"{value} is not {kind}"


_WORDS: dict[str, Callable[[str, dict[str, Any]], str]] = {
    "int_type": _kind("a whole number"),
    "int_parsing": _kind("a whole number"),
    "int_parsing_size": _kind("a whole number"),
    "int_from_float": _kind("a whole number"),
    "float_type": _kind("a number"),
    "float_parsing": _kind("a number"),
    "finite_number": _kind("a finite number"),
    "bool_type": _kind("true or false"),
    "bool_parsing": _kind("true or false"),
    "string_type": lambda value, _: f'{value} is not text; to mean text, quote it: "{value}"',
    "list_type": lambda value, _: f"{value} where a list belongs",
    "greater_than": _limit(">", "gt"),
    "greater_than_equal": _limit(">=", "ge"),
    "less_than": _limit("<", "lt"),
    "less_than_equal": _limit("<=", "le"),
    "multiple_of": lambda value, context: f"{value} is not a multiple of {context['multiple_of']}",
    "string_too_short": lambda _, __: "empty; write a name",
    "too_short": lambda _, __: "empty; list at least one, or leave the key out",
}
