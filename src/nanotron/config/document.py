"""A YAML file as plain values together with the place where each was written.

Scalars are read as YAML 1.2 and people mean them: `3e-4` is a number, `no` and `2024-01-01` are text, `010` is ten.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from nanotron.config.keys import KeyPath, dotted, is_section

DEEPEST = 100  # mappings and lists inside each other
MOST_VALUES = 100_000
MOST_DIGITS = 1000  # of a number; Python reads no more than 4,300

_PLAIN_SCALARS = [
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"^(?:[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+)$"), list("-+0123456789")),
    (
        "float",
        re.compile(
            r"^(?:[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
    ("merge", re.compile(r"^<<$"), ["<"]),
]


@dataclass(frozen=True, order=True)
class Position:
    """Where something was written: in an override (after every line of the file), or at a line and column from 1."""

    override: str = ""
    line: int = 1
    column: int = 1


@dataclass(frozen=True)
class Problem:
    """One mistake: which key (empty when the file itself is at fault), what is wrong, and where it stands."""

    path: KeyPath
    text: str
    place: Position

    def line(self, name: str) -> str:
        """Return the message: `file.yaml:3: section.key: text`."""
        override = self.place.override
        where = f"--override {override[:80]}{'…' * (len(override) > 80)}" if override else f"{name}:{self.place.line}"
        key = dotted(self.path)
        return f"{where}: {key}: {self.text}" if key else f"{where}: {self.text}"


@dataclass
class Document:
    """Values of a file, the places of their keys, and what was wrong with the file as YAML."""

    values: dict[Any, Any] = field(default_factory=dict)
    places: dict[KeyPath, Position] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def place_of(self, path: KeyPath) -> Position:
        """Return where a key, or else one inside it (an override's), or else the mapping around it was written."""
        inside = [known for known in self.places if path and known[: len(path)] == path]
        if inside and path not in self.places:
            return self.places[inside[0]]
        for end in range(len(path), 0, -1):
            if path[:end] in self.places:
                return self.places[path[:end]]
        return Position()

    def report(self, path: KeyPath, text: str) -> None:
        """Add a problem at a key's place."""
        self.problems.append(Problem(path, text, self.place_of(path)))


class _TooMuch(yaml.MarkedYAMLError):
    """Deeper or larger than any config is, perhaps only once its aliases are written out."""


class _Loader(yaml.SafeLoader):
    """Composes YAML 1.2 plain scalars, to a bounded depth, and counts the values that aliases stand for."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth, self._values = 0, 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth += 1
        if self._depth > DEEPEST:
            raise _too_deep(self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def count(self, node: yaml.Node) -> None:
        """Note that a value is read; raises _TooMuch when there are too many."""
        self._values += 1
        if self._values > MOST_VALUES:
            text = f"more than {MOST_VALUES:,} values, with aliases written out; no config needs as many"
            raise _TooMuch(None, None, text, node.start_mark)


class _Dumper(yaml.SafeDumper):
    """Quotes a string that either YAML version would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in _PLAIN_SCALARS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, _first)


def dump(values: Any) -> str:
    """Write plain values as YAML that `parse` reads back to equal values."""
    text: str = yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def show(value: Any) -> str:
    """Write a value as it would stand in YAML, shortened; lists and mappings by their kind."""
    if isinstance(value, dict) or is_section(value):
        return "a mapping"
    if isinstance(value, list):
        is_long = len(value) > 8 or any(isinstance(item, dict | list) or is_section(item) for item in value)
        return "a list" if is_long else f"[{', '.join(show(item) for item in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = str(value).replace("\n", "\\n")
    return text if len(text) <= 60 else text[:57] + "…"


def parse(text: str) -> Document:
    """Read YAML text. A text that is no mapping gives an empty document with a problem."""
    document = Document()
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            document.report((), "the file is empty; `nanotron init` writes a config to start from")
        elif not isinstance(node, yaml.MappingNode):
            document.report((), f"{_kind(node)} where a mapping of sections belongs; write `model:` and so on")
        else:
            document.values = _mapping(loader, node, (), document, ())
    except yaml.YAMLError as error:
        document = Document(problems=[_syntax_problem(error)])
    finally:
        if loader is not None:
            loader.dispose()
    return document


def parse_value(text: str) -> Any:
    """Read the value of an override. Raises yaml.YAMLError."""
    document = parse(f"value: {text}\n" if "\n" not in text else text)
    if document.problems:
        raise yaml.YAMLError(document.problems[0].text)
    return document.values["value"]


def _syntax_problem(error: yaml.YAMLError) -> Problem:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    told = [getattr(error, name, None) for name in ("context", "problem", "reason")]
    reason = ", ".join(part for part in told if part) or str(error).splitlines()[0]
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    where = "" if isinstance(error, _TooMuch) else f"not YAML at column {column}: "
    return Problem((), f"{where}{reason}", Position("", line, column))


def _too_deep(mark: Any) -> _TooMuch:
    return _TooMuch(None, None, f"nested more than {DEEPEST} deep; no config needs it", mark)


def _kind(node: yaml.Node) -> str:
    if isinstance(node, yaml.MappingNode):
        return "a mapping"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a single value"


def _place(node: yaml.Node) -> Position:
    return Position("", node.start_mark.line + 1, node.start_mark.column + 1)


def _value(loader: _Loader, node: yaml.Node, path: KeyPath, document: Document, above: tuple[yaml.Node, ...]) -> Any:
    if node in above:
        document.report(path, "this alias contains itself")
        return None
    loader.count(node)
    if len(path) > DEEPEST:
        raise _too_deep(node.start_mark)
    if isinstance(node, yaml.MappingNode):
        return _mapping(loader, node, path, document, (*above, node))
    if isinstance(node, yaml.SequenceNode):
        values = []
        for index, child in enumerate(node.value):
            document.places[(*path, index)] = _place(child)
            values.append(_value(loader, child, (*path, index), document, (*above, node)))
        return values
    return _scalar(node, path, document)


def _mapping(
    loader: _Loader, node: yaml.MappingNode, path: KeyPath, document: Document, above: tuple[yaml.Node, ...]
) -> dict[Any, Any]:
    lines: dict[Any, int] = {}
    for key_node, _ in node.value:
        name = _key_name(key_node)
        if name in lines and name != "<<":
            text = f"written twice, first on line {lines[name]}; keep one"
            document.problems.append(Problem((*path, name), text, _place(key_node)))
        lines.setdefault(name, key_node.start_mark.line + 1)
    loader.flatten_mapping(node)  # resolves `<<: *anchor`
    values: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        name = _key_name(key_node)
        document.places[(*path, name)] = _place(key_node)
        values[name] = _value(loader, value_node, (*path, name), document, above)
    return values


def _key_name(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode):
        return f"({_kind(node)})"
    return str(node.value).encode(errors="backslashreplace").decode()


def _scalar(node: yaml.Node, path: KeyPath, document: Document) -> Any:
    text: str = node.value
    kind = node.tag.removeprefix("tag:yaml.org,2002:")
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int" and len(text) > MOST_DIGITS:
        document.report(path, f"a number of {len(text)} digits; no key needs as many")
        return None
    if kind == "int":
        return _integer(text)
    if kind == "float":
        return _float(text)
    if kind != "str":
        document.report(path, f"the YAML tag {node.tag!r} has no meaning here; leave it out")
    return _encodable(text, path, document)


def _encodable(text: str, path: KeyPath, document: Document) -> str:
    """The text; half of a character's code (`"\\ud800"`), which no file can hold, is a problem."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        text = text.encode(errors="backslashreplace").decode()
        document.report(path, f"{text} holds half of a character's code (a lone surrogate); write the whole character")
    return text


def _integer(text: str) -> int:
    digits = text.replace("_", "").lower()
    return int(digits, 16 if digits.startswith("0x") else 8 if digits.startswith("0o") else 10)


def _float(text: str) -> float:
    digits = text.replace("_", "").lower()
    return float(digits.replace(".inf", "inf").replace(".nan", "nan"))
