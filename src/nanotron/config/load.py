"""From a YAML file and overrides to a Config, with every mistake named at once and where it stands."""

from __future__ import annotations

import copy
import os
import re
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter, ValidationError

from nanotron.config.compat.retired import MODEL_CONFIG
from nanotron.config.compat.translate import translate
from nanotron.config.config import Config
from nanotron.config.document import Document, Problem, parse
from nanotron.config.keys import KeyPath, overlap
from nanotron.config.messages import UNKNOWN, Mistake, explain, meant, mistakes, nearest
from nanotron.config.model import FAMILIES
from nanotron.config.override import apply_override
from nanotron.errors import ConfigError
from nanotron.models import families

_ADAPTER = TypeAdapter(Config)
LARGEST = 2**20  # bytes
_ROUNDS = 6  # of validation; each finds what the mistakes of the one before it hid


@dataclass
class Reading:
    """What a file says: the config that its sound keys make, its document, and the keys that are not to be trusted.

    `config` is None only when the file is no mapping of sections at all.
    """

    name: str
    document: Document
    config: Config | None
    broken: set[KeyPath]
    notices: list[Problem] = field(default_factory=list)
    """A line for every key in it that is taken without effect."""

    def is_sound(self, path: KeyPath) -> bool:
        """Tell whether a key can be reasoned about: neither it nor anything around or inside it is at fault."""
        return not any(overlap(path, bad) for bad in self.broken)

    def report(self, path: KeyPath, text: str) -> None:
        """Add a problem at a key's place."""
        self.document.report(path, text)

    def lines(self) -> list[str]:
        """Return the messages, sorted by position; those about overrides come last."""
        ordered = sorted(self.document.problems, key=lambda problem: problem.place)
        return list(dict.fromkeys(problem.line(self.name) for problem in ordered))

    def value(self) -> Config:
        """Return the config. Raises ConfigError with every mistake."""
        if lines := self.lines():
            raise ConfigError(lines)
        assert self.config is not None
        return self.config


def get_config_from_file(config_path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Config:
    """Read a config file, with overrides `a.b.c=value`. Raises ConfigError with every mistake."""
    return read_file(config_path, overrides).value()


def get_config_from_dict(values: dict[str, Any]) -> Config:
    """Build a config from plain values. Raises ConfigError with every mistake."""
    return read_document("config", Document(values=copy.deepcopy(values))).value()


def read_file(config_path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Reading:
    """Read a config file without raising for what it says. Raises ConfigError when it cannot be read at all."""
    name = os.fspath(config_path)
    document = parse(read_text(name))
    if document.problems and not document.values:
        return Reading(name, document, None, set())
    for override in overrides:
        apply_override(document, override)
    return read_document(name, document)


def read_text(name: str) -> str:
    """What a config file says. Raises ConfigError when it is not there, no text, or larger than any config is."""
    try:
        with open(name, "rb") as file:
            content = file.read(LARGEST + 1)
            is_pipe = not stat.S_ISREG(os.fstat(file.fileno()).st_mode)
    except OSError as error:
        raise ConfigError(f"{name}: {(error.strerror or str(error)).lower()}; give the path of a YAML config") from None
    if len(content) > LARGEST:
        raise ConfigError(f"{name}: larger than {LARGEST >> 20} MiB; no config is, give the path of a YAML config")
    if is_pipe and not content:
        raise ConfigError(f"{name}: a pipe that gives nothing, perhaps no longer; write the config to a file")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not a text file (byte {error.start} is not UTF-8)") from None


@contextmanager
def lasting(name: str) -> Iterator[str]:
    """The path of a config that can be read any number of times: its own, or while open that of a pipe's copy."""
    if not os.path.exists(name) or os.path.isfile(name):
        yield name
        return
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="config-", suffix=".yaml") as copy:
        copy.write(read_text(name))
        copy.flush()
        yield copy.name


def read_document(name: str, document: Document) -> Reading:
    """Validate a document as far as it goes: report what is wrong, put it aside, and look at the rest again."""
    foreign = _family_that_is_not_here(document)
    notices = translate(document)
    broken = {problem.path for problem in document.problems if problem.path} | foreign
    reading = Reading(name, document, None, broken, notices)
    values = copy.deepcopy(document.values)
    for _ in range(_ROUNDS):
        try:
            reading.config = _ADAPTER.validate_python(values)
        except ValidationError as error:
            _collect(reading, values, mistakes(error))
        else:
            break
    return reading


def _family_that_is_not_here(document: Document) -> set[KeyPath]:
    """Report a marker of a family that is not available; the whole section, whose keys are that family's, is broken."""
    section: KeyPath = ("model", "model_config")
    values = _value_at(document.values, section)
    for name in values if isinstance(values, dict) else ():
        marker = re.fullmatch(r"is_(\w+)_config", str(name))
        if marker is None or name in FAMILIES or not values[name]:
            continue
        if name not in MODEL_CONFIG:  # else it is refused in words of its own
            guess = nearest(marker[1], families.FAMILIES)
            fix = f"did you mean is_{guess}_config?" if guess else f"use {', '.join(FAMILIES)}"
            document.report((*section, name), f"the family {marker[1]} is not available; {fix}")
            del values[name]
        return {section}
    return set()


def _collect(reading: Reading, values: dict[str, Any], found: list[Mistake]) -> None:
    """Report mistakes and change the values so that validation gets past them.

    A key that is missing because its name is misspelt is one mistake, not two.
    """
    reading.broken |= {path for mistake in found if (path := meant(mistake)) and path not in reading.document.places}
    sound = [mistake for mistake in found if reading.is_sound(mistake.path) and not mistake.is_missing_section]
    for mistake in sound:
        reading.report(mistake.path, explain(mistake, _value_at(values, mistake.path)))
    for mistake in found:
        _put_aside(values, mistake)
    reading.broken |= {mistake.path for mistake in sound}


def _put_aside(values: dict[str, Any], mistake: Mistake) -> None:
    """Put an example in the place of what is missing, or wrong and required, and leave out what else is wrong.

    A required key may be the one that tells what its section is: without it, another section's would be missed.
    """
    holder: dict[Any, Any] = values
    name: str | int = ""
    inside: Any = values
    for part in mistake.path:
        if inside is None and mistake.kind == "missing":  # an empty section
            holder[name] = inside = {}
        if isinstance(inside, dict):
            holder, name, inside = inside, part, inside.get(part)
        elif isinstance(inside, list) and isinstance(part, int) and part < len(inside):
            inside = inside[part]
    if mistake.is_missing_section:
        holder[name] = {}
    elif "instead" in mistake.context:
        holder.update(mistake.context["instead"])
    elif mistake.example is not None and mistake.kind != UNKNOWN:
        holder[name] = mistake.example
    else:
        holder.pop(name, None)


def _value_at(values: Any, path: KeyPath) -> Any:
    for part in path:
        if isinstance(values, dict):
            values = values.get(part)
        elif isinstance(values, list) and isinstance(part, int) and part < len(values):
            values = values[part]
    return values
