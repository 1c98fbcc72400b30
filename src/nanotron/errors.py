"""The one exception that means "the user can fix this", and the one place where commands print."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """The text with escapes for what a terminal would obey: control characters but tab and newline, and directions."""
    return CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(*lines: object, to: TextIO | None = None, end: str = "\n") -> None:
    """Print lines, at once, to standard output unless told otherwise.

    All that a command says passes here: names and data of others' are shown to the terminal, not obeyed by it.
    """
    print(visible("\n".join(map(str, lines))), end=end, file=to, flush=True)


def complain(*lines: object, end: str = "\n") -> None:
    """Print lines to standard error."""
    say(*lines, to=sys.stderr, end=end)


def brief(value: object) -> str:
    """A value as JSON, cut after 120 characters."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 120 else f"{text[:117]}…"


def shorten(lines: list[str], limit: int = 8) -> list[str]:
    """The first lines, and how many more there are."""
    return lines if len(lines) <= limit else [*lines[:limit], f"and {len(lines) - limit} more"]


class ConfigError(ValueError):
    """A mistake of the user's: one line per problem, each naming the key, the value, the rule and the fix.

    Entry points print the lines once, without a traceback, and exit with code 2.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [visible(line) for line in ([problems] if isinstance(problems, str) else problems)]
        super().__init__("\n".join(self.problems))


@contextmanager
def at_key(key: str) -> Iterator[None]:
    """Put the key of the config that names what is wrong in front of what is said of it."""
    try:
        yield
    except ConfigError as error:
        section = key.partition("[")[0]
        said = (line if line.startswith((section, "tokenizer.")) else f"{key}: {line}" for line in error.problems)
        raise ConfigError([line.replace(": python: ", ".python: ", 1) for line in said]) from error
