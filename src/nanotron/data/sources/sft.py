"""Supervised fine-tuning data: prompts and completions, or chat messages, packed into rows with loss on completions.

    columns prompt, completion    text = prompt + completion + end token; targets: completion and end token
    column  messages              text = the tokenizer's chat template; targets: what the assistant says

Examples are tokenized once into a Nanoset with a `.ds.loss` file. A row is as many whole examples, in their order, as
fit into S+1 tokens, then padding; a longer example is cut off. `_use_doc_masking` keeps the examples of a row apart.

    row:  [ p p c c e | p c c c e | . . . ]     | starts a document; only c and e are targets, padding never is
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nanotron.checkpoint.storage import LocalFolder
from nanotron.data.order.windows import Window, read_tokens
from nanotron.data.sources.nanoset import NanosetFile, memory_map
from nanotron.data.tokenize.chat import ChatTemplate
from nanotron.data.tokenize.nanoset_writer import NanosetWriter, token_bytes_for
from nanotron.data.tokenize.tokenizer import TextTokenizer, open_tokenizer, vocab_size
from nanotron.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BATCH = 1000


class Example(NamedTuple):
    """A text and the character ranges of it that are to be learned."""

    text: str
    learned: list[tuple[int, int]]
    is_rendered: bool
    """A chat template wrote it, with the special tokens that begin and end it; else it is plain text."""


def write_examples(
    name: str, rows: Iterable[Mapping[str, Any]], path: str, tokenizer_name: str, *, read_special_tokens: bool = False
) -> list[int]:
    """Tokenize rows of the data set `name` into the Nanoset file `path` with its `.loss`.

    It appears whole or not at all. Returns the numbers of the rows that are left out: none of their tokens is a target.
    """
    left_out: list[int] = []
    template = ChatTemplate(tokenizer_name)
    plain = open_tokenizer(tokenizer_name, read_special_tokens=read_special_tokens)
    rendered = replace(open_tokenizer(tokenizer_name, read_special_tokens=True), begin=(), end=None)
    special = None if read_special_tokens else _special_tokens(plain.tokenizer)
    examples = (_example(row, template, special, f"{name}: row {number}") for number, row in enumerate(rows))
    first = 0
    token_bytes = token_bytes_for(vocab_size(plain.tokenizer))
    with NanosetWriter(path, tokenizer=tokenizer_name, token_bytes=token_bytes) as writer:
        for batch in _batches(examples):
            encoded = _encode(batch, rendered if batch[0].is_rendered else plain)
            kept = [one for one in encoded if any(one.targets)]
            writer.write([one.ids for one in kept], [one.targets for one in kept])
            left_out += [first + number for number, one in enumerate(encoded) if not any(one.targets)]
            first += len(batch)
    return left_out


def _batches(examples: Iterator[Example]) -> Iterator[list[Example]]:
    """Consecutive examples of one kind."""
    for _, alike in groupby(examples, key=lambda example: example.is_rendered):
        while batch := list(islice(alike, BATCH)):
            yield batch


class _Encoded(NamedTuple):
    ids: list[int]
    targets: list[bool]


def _encode(batch: Sequence[Example], tokenizer: TextTokenizer) -> list[_Encoded]:
    """A token with any learned character is a target, and so is the end of the text, but never what begins it."""
    encodings = tokenizer.tokenizer.encode_batch([example.text for example in batch], add_special_tokens=False)
    begin, end = [*tokenizer.begin], [] if tokenizer.end is None else [tokenizer.end]
    encoded = []
    for example, encoding in zip(batch, encodings, strict=True):
        targets = [
            any(start < hi and lo < max(stop, start + 1) for lo, hi in example.learned)  # some have no character
            for start, stop in encoding.offsets
        ]
        ids = [*begin, *encoding.ids, *end]
        encoded.append(_Encoded(ids, [*([False] * len(begin)), *targets, *([True] * len(end))]))
    return encoded


def _example(row: Mapping[str, Any], template: ChatTemplate, special: re.Pattern[str] | None, where: str) -> Example:
    if row.get("messages") is not None:
        turns = row["messages"]
        if not isinstance(turns, list) or not all(isinstance(turn, Mapping) for turn in turns):
            raise ConfigError(f"{where}: 'messages' is not a list of mappings with 'role' and 'content'")
        try:
            _refuse_special_tokens(row["messages"], special)
            return Example(*template.render(row["messages"]), is_rendered=True)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    if not isinstance(row.get("prompt"), str) or not isinstance(row.get("completion"), str):
        raise ConfigError(
            f"{where} has the columns {', '.join(map(repr, row))}; an SFT data set has either 'messages' or the "
            "texts 'prompt' and 'completion'"
        )
    text = row["prompt"] + row["completion"]
    return Example(text, [(len(row["prompt"]), len(text))], is_rendered=False)


def _special_tokens(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """What finds a special token in a text, if there are any."""
    spelled = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    return re.compile("|".join(map(re.escape, spelled))) if spelled else None


def _refuse_special_tokens(messages: Any, special: re.Pattern[str] | None) -> None:
    """A rendered conversation is read with its special tokens, so that what is said in it must not spell one."""
    if special is None:
        return
    for number, message in enumerate(messages):
        for found in filter(None, map(special.search, _texts(message))):
            raise ConfigError(
                f"message {number} spells the special token {found[0]!r}, which would be read as that token; take it "
                "out, or set tokenizer.read_special_tokens: true to mean the token"
            )


def _texts(value: Any) -> Iterator[str]:
    """Every text in a message, however its content is nested."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(item)


def pack(path: str, ends: npt.NDArray[np.uint64], sequence_length: int) -> None:
    """Write `path`: the first example of each row, for rows of sequence_length + 1 tokens."""
    firsts, example, total = [], 0, len(ends)
    while example < total:
        firsts.append(example)
        limit = (int(ends[example - 1]) if example else 0) + sequence_length + 1
        example = max(example + 1, int(ends.searchsorted(np.uint64(limit), side="right")))
    LocalFolder(os.path.dirname(path)).write(os.path.basename(path), [np.array(firsts, dtype="<u8").tobytes()])


def pack_path(path: str, sequence_length: int) -> str:
    """Where the rows of a Nanoset file are kept for a sequence length."""
    return f"{path}.rows-{sequence_length}"


class PackedWindows:
    """The rows of one tokenized SFT data set; its row table is memory-mapped, like its tokens."""

    def __init__(self, name: str, file: NanosetFile, sequence_length: int, *, vocab_size: int | None = None) -> None:
        self.name = name
        self._file = file
        self._sequence_length = sequence_length
        self._vocab_size = vocab_size
        self._num_rows = os.path.getsize(pack_path(file.path, sequence_length)) // 8

    @cached_property
    def _firsts(self) -> npt.NDArray[np.uint64]:
        return np.frombuffer(memory_map(pack_path(self._file.path, self._sequence_length)), "<u8")

    def __len__(self) -> int:
        return self._num_rows

    def window(self, index: int) -> Window:
        """Row number `index`."""
        ends = self._file.document_ends
        assert ends is not None
        first = int(self._firsts[index])
        after = int(self._firsts[index + 1]) if index + 1 < self._num_rows else len(ends)
        start = int(ends[first - 1]) if first else 0
        length = self._sequence_length + 1
        stop = min(int(ends[after - 1]), start + length)
        tokens, targets = np.zeros(length, np.int64), np.zeros(length, np.bool_)
        used = stop - start
        tokens[:used] = read_tokens(self._file, start, stop, self._vocab_size)
        targets[:used] = self._file.targets(start, stop)
        starts = self._file.starts(start, stop)
        assert starts is not None
        padding = [used] if used < length else []
        return Window(tokens, np.concatenate([starts - start, np.array(padding, dtype=np.int64)]), targets)

    def fingerprint(self) -> dict[str, Any]:
        """As of any token file; the rows follow from it."""
        from nanotron.data.sources.fingerprint import fingerprint_files

        return {**fingerprint_files([self._file.path]), "windows": self._num_rows}
