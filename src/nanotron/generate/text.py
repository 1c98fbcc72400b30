"""From token ids to text on a terminal: whole characters only, and rows that advance together shown one by one."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nanotron.errors import ConfigError, say

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Steps = Iterable[Sequence["int | None"]]
"""The next token of every row, again and again; None where a row has ended."""


def read_prompts(path: str) -> list[str]:
    """One prompt per line that is not blank; in a .jsonl file each line is a string, or an object with "prompt"."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise ConfigError(f"--batch-file {path}: {reason.lower()}") from None
    rows = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ConfigError(f"--batch-file {path}: holds no prompt; write one per line")
    return [_prompt(path, number, line) if path.endswith(".jsonl") else line for number, line in rows]


def _prompt(path: str, number: int, line: str) -> str:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    prompt = value.get("prompt") if isinstance(value, dict) else value
    if not isinstance(prompt, str):
        raise ConfigError(f'--batch-file {path}:{number}: neither a JSON string nor an object with a string "prompt"')
    return prompt


class Row:
    """A prompt and what has been made of it."""

    def __init__(self, prompt: str, tokenizer: Tokenizer) -> None:
        self.prompt, self.ids, self.ended = prompt, list[int](), False
        self._tokenizer, self._unseen = tokenizer, prompt
        self._window, self._shown = 0, 0

    def add(self, token: int | None) -> None:
        """Append a token; a character is held back until its last byte has come, or the text has ended."""
        if token is None:
            self.end()
            return
        self.ids.append(token)
        self._show(whole=True)

    def end(self) -> None:
        """Nothing more comes."""
        if not self.ended:
            self._show(whole=False)
            self._unseen += "\n"
            self.ended = True

    def take(self) -> str:
        """The text that was not taken yet, the prompt first."""
        text, self._unseen = self._unseen, ""
        return text

    @property
    def text(self) -> str:
        """All that follows the prompt."""
        return self._decode(0, len(self.ids))

    def _show(self, *, whole: bool) -> None:
        """Add the tokens since ``_shown`` to the text, unless they end inside a character and it must be ``whole``.

        They are decoded with those from ``_window`` on, for a token's text may depend on the one before it.
        """
        before, after = self._decode(self._window, self._shown), self._decode(self._window, len(self.ids))
        if whole and after.endswith("\N{REPLACEMENT CHARACTER}"):
            return
        self._unseen += after[len(before) :]
        self._window, self._shown = self._shown, len(self.ids)

    def _decode(self, lo: int, hi: int) -> str:
        decoded: str = self._tokenizer.decode(self.ids[lo:hi])
        return decoded


def as_text(prompts: Sequence[str], steps: Steps, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield pieces to print: each prompt, its continuation and a newline.

    The first row that has not ended is shown as it comes, those behind it when it is their turn.
    """
    rows = [Row(prompt, tokenizer) for prompt in prompts]
    turn = 0
    yield rows[0].take()
    for tokens in steps:
        for row, token in zip(rows, tokens, strict=True):
            row.add(token)
        while turn < len(rows):
            yield rows[turn].take()
            if not rows[turn].ended:
                break
            turn += 1
    for row in rows[turn:]:
        row.end()
        yield row.take()


def as_json(prompts: Sequence[str], steps: Steps, tokenizer: Tokenizer) -> Iterator[str]:
    """Yield one line of JSON per prompt: {"prompt": …, "text": what follows it, "tokens": …}."""
    rows = [Row(prompt, tokenizer) for prompt in prompts]
    for tokens in steps:
        for row, token in zip(rows, tokens, strict=True):
            row.add(token)
    for row in rows:
        yield json.dumps({"prompt": row.prompt, "text": row.text, "tokens": row.ids}, ensure_ascii=False) + "\n"


def write(text: str) -> None:
    """Print a piece of what the model wrote: to a file or a pipe as it is, to a terminal as `say` does."""
    if sys.stdout.isatty():
        say(text, end="")
    else:
        sys.stdout.write(text)
        sys.stdout.flush()
