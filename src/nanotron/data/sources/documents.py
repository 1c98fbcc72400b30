"""Where texts come from: plain text, JSONL (also .gz and .zst), parquet, folders of them, Hugging Face data sets.

Input is cut into pieces that workers read independently: a byte range of a JSONL file, a row group range of a parquet
file, a range of rows of a data set, or a whole file that cannot be cut.
"""

from __future__ import annotations

import glob
import itertools
import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from nanotron.data.sources.compressed import COMPRESSED_SUFFIXES, open_decompressed
from nanotron.errors import ConfigError

FORMATS = {
    "text": (".txt", ".text", ".md", ".py"),
    "lines": (".jsonl", ".json", ".ndjson"),
    "parquet": (".parquet",),
}
"""Kind -> what its files' names end in; `_file_pieces` says how such a file is cut, `READERS` how a piece is read."""
ROWS_PER_PIECE = 10_000
CHUNK = 2**20
CHOOSE_COLUMN = "choose with --column, in a config with text_column_name"
HALF_CHARACTER = re.compile("[\ud800-\udfff]")
SUFFIXES = tuple(suffix for suffixes in FORMATS.values() for suffix in suffixes)


class InputPart(NamedTuple):
    """A part of the input. `size` is in bytes on disk, or in rows for a Hugging Face data set."""

    kind: str
    """text | lines | parquet | hf | hf-streaming"""
    path: str
    start: int
    stop: int
    size: int


class Text(NamedTuple):
    """A document as it is read; `size` is its part of the piece's size."""

    text: str
    size: int
    place: int | None
    """The byte where its line begins, or its row; None: it is all that the file holds, if anything."""
    is_mended: bool = False
    """Whether it held halves of characters' codes, which are U+FFFD now."""


class HubDataset(NamedTuple):
    """How a Hugging Face data set is opened."""

    config_name: str | None = None
    split: str = "train"
    streaming: bool = False
    fraction: float = 1.0
    """Of the rows, from the first on; not for streams."""
    only: bool = False
    """A name is a data set even where a file or folder of that name exists."""


def find_pieces(inputs: Sequence[str], hub: HubDataset, *, piece_size: int) -> list[InputPart]:
    """Cut the inputs (files, globs, folders, data set names) into pieces of about `piece_size` bytes."""
    pieces: list[InputPart] = []
    for name in inputs:
        if hub.only or _is_saved_dataset(name):
            pieces += _hub_pieces(name, hub)
            continue
        paths = _find_files(name)
        if not paths and any(character in name for character in "*?["):
            raise ConfigError(f"no file matches {name!r}")
        # No data set on the hub is called like a file of texts, or like a path.
        if not paths and (_format(name) is not None or name.startswith((".", "/", "~")) or name.endswith("/")):
            raise ConfigError(f"{name!r}: no such file or folder")
        if not paths:
            pieces += _hub_pieces(name, hub)
        for path in paths:
            pieces += _file_pieces(path, piece_size)
    return pieces


def _is_saved_dataset(name: str) -> bool:
    """Whether save_to_disk of `datasets` wrote this folder."""
    return os.path.exists(os.path.join(name, "state.json"))


def _find_files(name: str) -> list[str]:
    if os.path.isfile(name):
        return [name]
    if os.path.isdir(name):
        walked = (os.path.join(folder, file) for folder, _, files in os.walk(name) for file in files)
        found = sorted(path for path in walked if _format(path) is not None)
        if not found:
            raise ConfigError(f"folder {name!r} holds no file ending in {', '.join(SUFFIXES)} (.gz and .zst too)")
        return found
    return sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))


def _format(path: str) -> str | None:
    """The kind of a file, by its name without its compression; None when the name says nothing."""
    for compression in COMPRESSED_SUFFIXES:
        path = path.removesuffix(compression)
    return next((kind for kind, suffixes in FORMATS.items() if path.endswith(suffixes)), None)


def _file_pieces(path: str, piece_size: int) -> list[InputPart]:
    size = os.path.getsize(path)
    kind = _format(path)
    if kind is None:
        raise ConfigError(f"{path} ends in none of {', '.join(SUFFIXES)} (.gz and .zst too); rename it or convert it")
    if kind == "parquet":
        return _parquet_pieces(path, size, piece_size)
    if kind == "text" or path.endswith(COMPRESSED_SUFFIXES):
        return [InputPart(kind, path, 0, size, size)]
    count = max(1, round(size / piece_size))
    edges = [size * number // count for number in range(count + 1)]
    return [InputPart(kind, path, start, stop, stop - start) for start, stop in itertools.pairwise(edges)]


def _parquet_pieces(path: str, size: int, piece_size: int) -> list[InputPart]:
    groups = _open_parquet(path).num_row_groups
    count = max(1, min(groups, round(size / piece_size)))
    edges = [groups * number // count for number in range(count + 1)]
    return [InputPart("parquet", path, start, stop, size // count) for start, stop in itertools.pairwise(edges)]


def _open_parquet(path: str) -> Any:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise ConfigError("reading parquet needs pyarrow: pip install pyarrow") from None
    try:
        return parquet.ParquetFile(path)
    except (ArrowInvalid, OSError) as error:
        if isinstance(error, OSError) and error.errno:
            raise  # the disk's
        raise ConfigError(f"{path} is not a complete parquet file: {error}") from None


def _hub_pieces(name: str, hub: HubDataset) -> list[InputPart]:
    dataset = open_hub_dataset(name, hub)
    if hub.streaming:
        shards = dataset.num_shards
        return [InputPart("hf-streaming", name, number, shards, 0) for number in range(shards)]
    rows = int(len(dataset) * hub.fraction)
    count = max(1, -(-rows // ROWS_PER_PIECE))
    edges = [rows * number // count for number in range(count + 1)]
    return [InputPart("hf", name, start, stop, stop - start) for start, stop in itertools.pairwise(edges)]


def open_hub_dataset(name: str, hub: HubDataset) -> Any:
    """The split of a Hugging Face data set: a folder written by save_to_disk, or a name on the hub."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{name!r} is no file, glob or folder; to read it as a Hugging Face data set: pip install datasets"
        ) from None
    try:
        if _is_saved_dataset(name):
            dataset = datasets.load_from_disk(name)
            return dataset.to_iterable_dataset() if hub.streaming else dataset
        return datasets.load_dataset(name, hub.config_name, split=hub.split, streaming=hub.streaming)
    except Exception as error:  # the library raises many kinds, each with a message for the user
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{name!r} is no file, glob or folder, and as a Hugging Face data set: {reason}") from None


def read_texts(piece: InputPart, column: str, hub: HubDataset) -> Iterator[Text]:
    """The texts of a piece, those without a character too."""
    reader = READERS.get(piece.kind)
    for text in reader(piece, column) if reader else _read_hub(piece, column, hub):
        whole = encodable(text.text)
        yield text if whole is text.text else text._replace(text=whole, is_mended=True)


def encodable(text: str) -> str:
    """The text itself, or one with U+FFFD for each half of a character's code, as scraped JSON has them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return HALF_CHARACTER.sub("\ufffd", text)
    return text


def place_of(piece: InputPart, place: int | None) -> str:
    """What a person needs to find a text: its file, and the line or row in it. Lines before it are counted."""
    if place is None:
        return piece.path
    if piece.kind == "lines":
        return f"{piece.path}: line {_line_number(piece.path, place)} (byte {place})"
    shard = f"shard {piece.start}, " if piece.kind == "hf-streaming" else ""
    return f"{piece.path}: {shard}row {place}"


def _line_number(path: str, offset: int) -> int:
    """The number, from 1, of the line that begins at a byte of the file, decompressed."""
    with open_decompressed(path) as file:
        lengths = [CHUNK] * (offset // CHUNK) + [offset % CHUNK]
        return 1 + sum(file.read(length).count(b"\n") for length in lengths)


def _read_text(piece: InputPart, column: str) -> Iterator[Text]:
    with open_decompressed(piece.path) as file:
        try:
            text = file.read().decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{piece.path}: byte {error.start} is not UTF-8; convert the file") from None
    yield Text(text, piece.size, None)


def _read_lines(piece: InputPart, column: str) -> Iterator[Text]:
    """The lines that begin in [start, stop); the line that straddles `start` belongs to the piece before."""
    compressed = piece.path.endswith(COMPRESSED_SUFFIXES)
    with open_decompressed(piece.path) as file:
        offset = 0
        if piece.start > 0:
            file.seek(piece.start - 1)
            offset = piece.start - 1 + len(file.readline())
        while compressed or offset < piece.stop:
            line = file.readline()
            if not line:
                break
            if not line.isspace():
                yield Text(_parse(line, piece, offset, column), len(line), offset)
            offset += len(line)
    if offset == 0:
        yield Text("", 0, None)


def _parse(line: bytes, piece: InputPart, offset: int, column: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{place_of(piece, offset)} is not JSON: {error}") from None
    if isinstance(row, dict) and isinstance(text := row.get(column), str):
        return text
    where = place_of(piece, offset)
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not a JSON object")
    return text_of(row, column, where)


def text_of(row: dict[str, Any], column: str, where: str) -> str:
    """The text in a row's column; `where` begins the line for the user if there is none."""
    if column not in row:
        raise ConfigError(f"{where} has no column {column!r}, only {', '.join(map(repr, row))}; {CHOOSE_COLUMN}")
    text = row[column]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise ConfigError(f"{where}: column {column!r} holds {type(text).__name__}, not text")
    return text


def _read_parquet(piece: InputPart, column: str) -> Iterator[Text]:
    file = _open_parquet(piece.path)
    names = file.schema_arrow.names
    if column not in names:
        raise ConfigError(f"{piece.path} has no column {column!r}, only {', '.join(map(repr, names))}; {CHOOSE_COLUMN}")
    sizes = [file.metadata.row_group(group).num_rows for group in range(piece.stop)]
    row, rows = sum(sizes[: piece.start]), sum(sizes[piece.start :])
    if rows == 0:
        yield Text("", piece.size, None)
    batches = file.iter_batches(batch_size=1000, row_groups=list(range(piece.start, piece.stop)), columns=[column])
    while True:
        try:
            batch = next(batches, None)
        except (ValueError, OSError) as error:  # Arrow raises either for a damaged page
            raise ConfigError(f"{piece.path}: row {row} or one soon after is damaged: {error}") from None
        if batch is None:
            return
        for text in batch.column(0).to_pylist():
            if not isinstance(text, str | None):
                raise ConfigError(f"{piece.path}: row {row}: column {column!r} holds {type(text).__name__}, not text")
            yield Text(text or "", piece.size // rows, row)
            row += 1


def _read_hub(piece: InputPart, column: str, hub: HubDataset) -> Iterator[Text]:
    dataset = open_hub_dataset(piece.path, hub)
    if piece.kind == "hf-streaming":
        rows, first = (dataset.shard(num_shards=piece.stop, index=piece.start) if piece.stop > 1 else dataset), 0
    else:
        rows, first = dataset.select(range(piece.start, piece.stop)), piece.start
    for number, row in enumerate(rows, first):
        yield Text(text_of(row, column, place_of(piece, number)), 1, number)


READERS = {"text": _read_text, "lines": _read_lines, "parquet": _read_parquet}
