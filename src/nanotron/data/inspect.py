"""`nanotron inspect DATASET`: what a folder of token files holds, drawn in the terminal."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from nanotron.data.order.permutation import Indices
from nanotron.data.order.windows import TokenFile
from nanotron.data.sources.empty_documents import IndexedFile, first_empty_document
from nanotron.data.sources.nanoset import read_metadata
from nanotron.data.sources.remote import local_path
from nanotron.data.sources.token_files import find_token_files, open_token_files
from nanotron.data.tokenize.tokenizer import load_tokenizer, tokenizer_file, vocab_size
from nanotron.errors import ConfigError
from nanotron.logging import human_format

if TYPE_CHECKING:
    from tokenizers import Tokenizer

BAR_WIDTH = 40
SHOWN_CHARACTERS = 300
BLOCK = 10_000
MOST_BLOCKS = 200


def is_dataset(path: str) -> bool:
    """Whether a path holds token files of any format that training reads."""
    try:
        return bool(find_token_files(local_path(path)))
    except ConfigError:  # a URL of something else
        return False


def inspect_dataset(path: str, *, token_bytes: int | None = None, num_documents: int = 3) -> Iterator[str]:
    """Lines for the terminal; raises ConfigError at the first corrupt file."""
    files = open_token_files(local_path(path), token_bytes=token_bytes)
    indexed = [file for file in files if isinstance(file, IndexedFile) and file.num_tokens]
    num_tokens = sum(file.num_tokens for file in files)
    documents = sum(file.num_documents for file in indexed)
    name = _tokenizer_name(local_path(path), files)
    tokenizer = load_tokenizer(name) if name and tokenizer_file(name) else None
    yield f"{path}: {type(files[0]).__name__.removesuffix('File')}, {len(files)} file{'s' * (len(files) > 1)}"
    yield f"tokens      {num_tokens:,} ({human_format(num_tokens)})"
    yield f"documents   {documents:,}" if indexed else "documents   unknown: the files have no index of them"
    yield f"tokenizer   {name or 'unknown'}" + (f", vocabulary {vocab_size(tokenizer)}" if tokenizer else "")
    if num_tokens:
        yield f"token ids   {_token_ids(files, num_tokens)}"
    if indexed:
        yield from _histogram(indexed)
    yield from _first_documents(indexed or files, tokenizer, num_documents)


def _tokenizer_name(path: str, files: Sequence[TokenFile]) -> str | None:
    if os.path.isdir(path) and (inside := tokenizer_file(path)):
        return inside
    metadata = read_metadata(files[0].path)
    return metadata.tokenizer if metadata else None


def _token_ids(files: Sequence[TokenFile], num_tokens: int) -> str:
    """The smallest and the largest one, of all tokens or of evenly spread blocks of them."""
    step = max(BLOCK, -(-num_tokens // MOST_BLOCKS))
    low, high, count = 2**63, 0, 0
    for file in files:
        for first in range(0, file.num_tokens, step):
            tokens = file.read(first, min(first + BLOCK, file.num_tokens))
            low, high, count = min(low, int(tokens.min())), max(high, int(tokens.max())), count + len(tokens)
    return f"{low} … {high}" + (f" (of {count:,} tokens)" if count < num_tokens else "")


def _histogram(files: Sequence[IndexedFile]) -> Iterator[str]:
    """Lengths of documents by powers of two, from all of them or from evenly spread blocks of them."""
    lengths, sampled = _lengths(files)
    first, count = first_empty_document(files), np.count_nonzero(lengths == 0)
    if first or count:
        of = f"{len(lengths):,} documents" + (" looked at" if sampled else "")
        yield f"notice      {count:,} of {of} have no tokens" + (f"; {first}" if first else "")
    yield (
        f"lengths     {human_format(lengths.min())} … {human_format(lengths.max())} tokens, "
        f"mean {human_format(lengths.mean())}, median {human_format(float(np.median(lengths)))}"
        + (f" (of {len(lengths):,} documents)" if sampled else "")
    )
    powers = np.frexp(lengths)[1]  # length 2**(p-1) … 2**p - 1 gives p
    counts = np.bincount(powers)
    for power in range(int(powers.min()), len(counts)):
        low, high = (0, 0) if power == 0 else (2 ** (power - 1), 2**power - 1)
        bar = "█" * round(BAR_WIDTH * counts[power] / counts.max()) or ("▏" if counts[power] else "")
        yield f"{low:>11,} – {high:<11,} {bar:<{BAR_WIDTH}} {100 * counts[power] / len(lengths):5.1f}%"


def _lengths(files: Sequence[IndexedFile]) -> tuple[Indices, bool]:
    """Document lengths and whether they are only a sample."""
    blocks = [(file, first) for file in files for first in range(0, file.num_documents, BLOCK)]
    step = max(1, -(-len(blocks) // MOST_BLOCKS))
    found = []
    for file, first in blocks[::step]:
        last = min(first + BLOCK, file.num_documents)
        before = file.ends(first - 1, first) if first else np.zeros(1, np.int64)
        found.append(np.diff(np.concatenate([before, file.ends(first, last)])))
    return np.concatenate(found), step > 1


def _first_documents(files: Sequence[TokenFile], tokenizer: Tokenizer | None, count: int) -> Iterator[str]:
    """The beginnings of the first documents, decoded if the tokenizer is at hand."""
    file = next((file for file in files if file.num_tokens), None)
    if file is None:
        return
    if isinstance(file, IndexedFile) and file.num_documents:
        ends = file.ends(0, min(count, file.num_documents)).tolist()
    else:
        ends = [min(file.num_tokens, SHOWN_CHARACTERS)]
    for number, (start, stop) in enumerate(zip([0, *ends], ends, strict=False)):
        tokens = file.read(start, min(stop, start + SHOWN_CHARACTERS)).tolist() if stop > start else []
        text = " ".join(map(str, tokens[:40]))
        if tokenizer is not None:
            size = vocab_size(tokenizer)
            if tokens and max(tokens) >= size:
                raise ConfigError(f"{file.path}: token id {max(tokens)} in document {number} is not below {size}")
            text = tokenizer.decode(tokens, skip_special_tokens=False)
        shown = text[:SHOWN_CHARACTERS].replace("\n", "⏎")
        yield f"document {number} ({stop - start} tokens): {shown}{'…' if len(text) > len(shown) else ''}"
