"""Supervised fine-tuning data: prompts and completions, or chat messages, packed into rows with loss on completions.

    columns prompt, completion    text = prompt + completion + end token; targets: completion and end token
    column  messages              text = the tokenizer's chat template; targets: what the assistant says

Examples are tokenized once into a Nanoset with a `.ds.loss` file. A row is as many whole examples, in their order, as
fit into S+1 tokens, then padding; a longer example is cut off. `_use_doc_masking` keeps the examples of a row apart.

    row:  [ p p c c e | p c c c e | . . . ]     | starts a document; only c and e are targets, padding never is
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nanotron.data.order.windows import Window, read_tokens
from nanotron.data.sources.nanoset import NanosetFile, memory_map
from nanotron.data.tokenize.chat import ChatTemplate
from nanotron.data.tokenize.nanoset_writer import NanosetWriter, token_bytes_for, write_atomically
from nanotron.data.tokenize.tokenizer import end_of_document_token, load_tokenizer, vocab_size
from nanotron.errors import ConfigError

BATCH = 1000


class Example(NamedTuple):
    """A text and the character ranges of it that are to be learned."""

    text: str
    learned: list[tuple[int, int]]


def write_examples(name: str, rows: Iterable[Mapping[str, Any]], path: str, tokenizer_name: str) -> list[int]:
    """Tokenize rows of the data set `name` into the Nanoset file `path` with its `.loss`.

    It appears whole or not at all. Returns the numbers of the rows that are left out: none of their tokens is a target.
    """
    left_out: list[int] = []
    tokenizer = load_tokenizer(tokenizer_name)
    template = ChatTemplate(tokenizer_name)
    end = end_of_document_token(tokenizer_name)
    examples = (_example(row, template, end, f"{name}: row {number}") for number, row in enumerate(rows))
    first = 0
    with NanosetWriter(path, tokenizer=tokenizer_name, token_bytes=token_bytes_for(vocab_size(tokenizer))) as writer:
        for batch in _batches(examples):
            encodings = tokenizer.encode_batch([example.text for example in batch], add_special_tokens=False)
            targets = [
                [any(start <= offset < stop for start, stop in example.learned) for offset, _ in encoding.offsets]
                for example, encoding in zip(batch, encodings, strict=True)
            ]
            kept = [number for number, learned in enumerate(targets) if any(learned)]
            writer.write([encodings[number].ids for number in kept], [targets[number] for number in kept])
            left_out += [first + number for number, learned in enumerate(targets) if not any(learned)]
            first += len(batch)
    return left_out


def _batches(examples: Iterator[Example]) -> Iterator[list[Example]]:
    while batch := list(islice(examples, BATCH)):
        yield batch


def _example(row: Mapping[str, Any], template: ChatTemplate, end: str | None, where: str) -> Example:
    if row.get("messages") is not None:
        try:
            return Example(*template.render(row["messages"]))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    if not isinstance(row.get("prompt"), str) or not isinstance(row.get("completion"), str):
        raise ConfigError(
            f"{where} has the columns {', '.join(map(repr, row))}; an SFT data set has either 'messages' or the "
            "texts 'prompt' and 'completion'"
        )
    text = row["prompt"] + row["completion"] + (end or "")
    return Example(text, [(len(row["prompt"]), len(text))])


def pack(path: str, ends: npt.NDArray[np.uint64], sequence_length: int) -> None:
    """Write `path`: the first example of each row, for rows of sequence_length + 1 tokens."""
    firsts, example, total = [], 0, len(ends)
    while example < total:
        firsts.append(example)
        limit = (int(ends[example - 1]) if example else 0) + sequence_length + 1
        example = max(example + 1, int(ends.searchsorted(np.uint64(limit), side="right")))
    write_atomically(path, np.array(firsts, dtype="<u8").tobytes())


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
