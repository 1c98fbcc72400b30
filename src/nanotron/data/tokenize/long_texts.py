"""Long texts, tokenized a piece at a time: of what it sees at once the library keeps 140 bytes for every character.

… the end of a line.\n|And the next one …        a cut lies before a word, at best at the beginning of a line,
                 └── left ──┘└── right ──┘         and where both sides alone have the tokens that they have together
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from nanotron.errors import ConfigError

PIECE = 2**20  # characters
LONGEST = 4 * PIECE  # of a piece in which no cut is found
AROUND = 512  # characters on either side, by whose tokens a cut is judged
TRIES = 100  # of cuts for a piece, at beginnings of lines and then at spaces

Encode = Callable[[str], list[int]]


class NoCut(ConfigError):
    """A text too long to be tokenized as a whole that cannot be cut; `number` is its own among the texts."""

    def __init__(self, number: int, size: int) -> None:
        super().__init__(
            f"a text of {size:,} characters in which the tokenizer sees nowhere to cut, such as a word without end;"
            f" leave it out, or split it into documents of at most {LONGEST:,}"
        )
        self.number = number


def pieces(text: str, encode: Encode, number: int) -> Iterator[str]:
    """The text in pieces whose tokens, one after the other, are its own. Raises NoCut."""
    start = 0
    while len(text) - start > PIECE:
        cut = next((cut for cut in _cuts(text, start + PIECE // 2, start + PIECE) if _is_safe(text, cut, encode)), None)
        if cut is None:
            if len(text) - start > LONGEST:
                raise NoCut(number, len(text))
            break
        yield text[start:cut]
        start = cut
    yield text[start:]


def _cuts(text: str, first: int, last: int) -> Iterator[int]:
    """Places to cut in [first, last], from the last one down: before a line that begins with a word, else a space."""
    for mark, after in (("\n", 1), (" ", 0)):
        place, tries = last, TRIES
        while tries and (place := text.rfind(mark, first, place)) >= 0:
            if not text[place + 1].isspace() and not text[place - 1].isspace():
                tries -= 1
                yield place + after


def _is_safe(text: str, cut: int, encode: Encode) -> bool:
    left, right = text[cut - AROUND : cut], text[cut : cut + AROUND]
    return encode(left) + encode(right) == encode(left + right)
