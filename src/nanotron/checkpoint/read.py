"""Loading: each rank fills the boxes it holds from whatever boxes were saved, by intersection.

    saved by 2 ranks      +-----+-----+        wanted by 3 ranks    +---+---+---+
                          |  A  |  B  |                             |   |A|B|   |
                          +-----+-----+                             +---+---+---+

Local files are memory-mapped, so a rank reads the pages of its intersections and nothing else; remote ones are asked
for the rows of each intersection.

Where a kind is missing, because the dtype or the optimizer changed:

    master   ← weight                                          (a run in fp32, or an imported model, has no master)
    weight   ← master, if the run's dtype is wider than the saved weight's    (bf16 with masters → fp32: nothing lost)
    ema      ← what weight is filled from                      (the average begins with the weights as they are)
    exp_avg, exp_avg_sq, momentum: an error that says so; with checkpoints.load_optimizer: false they are not asked for

Values are cast to the dtype of the tensor they fill.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import Protocol

import torch

from nanotron.checkpoint.format import ITEM_SIZE, Damaged, Entry, Index, StateShard, StoredBox
from nanotron.checkpoint.retention import read_index
from nanotron.checkpoint.safetensors import DTYPES
from nanotron.checkpoint.storage import Folder, open_folder, read_header
from nanotron.errors import ConfigError, shorten
from nanotron.parallel.params import Box, intersect


def load(checkpoint: str, pieces: Iterable[StateShard]) -> list[str]:
    """Fill every piece's tensor from a complete checkpoint, saved under any layout.

    Returns the kinds of optimizer state that it has and no piece asks for: those of another optimizer.
    Raises ConfigError when the checkpoint lacks what is asked for, or a file of it is damaged.
    """
    tensors, pieces = CheckpointTensors(open_folder(checkpoint)), list(pieces)
    fill(tensors, pieces)
    kinds = {key.partition("/")[0] for key in tensors.index.tensors}
    return sorted(kinds - {"weight", "master"} - {piece.kind for piece in pieces})


class Tensors(Protocol):
    """Where tensors can be had from, by kind and global name."""

    def shape(self, kind: str, name: str) -> tuple[int, ...] | None: ...
    def dtype(self, kind: str, name: str) -> torch.dtype: ...
    def read_into(self, target: torch.Tensor, kind: str, name: str, box: Box) -> None: ...


def fill(tensors: Tensors, pieces: Iterable[StateShard]) -> None:
    """Fill the pieces' tensors; all that is missing or has another shape is refused at once."""
    problems: list[str] = []
    plan: list[tuple[StateShard, str]] = []
    for piece in pieces:
        kind = source_kind(tensors, piece)
        found = tensors.shape(kind, piece.name)
        if found is None:
            problems.append(_missing(piece))
        elif found != piece.shape:
            problems.append(f"{piece.name} has shape {list(found)} there, and {list(piece.shape)} in this run")
        else:
            plan.append((piece, kind))
    if problems:
        lines = shorten(list(dict.fromkeys(problems)))  # a weight is several pieces
        raise ConfigError([f"the checkpoint does not fit this run: {line}" for line in lines])
    with torch.no_grad():
        for piece, kind in plan:
            tensors.read_into(piece.tensor, kind, piece.name, piece.box)


def _missing(piece: StateShard) -> str:
    if piece.kind in {"weight", "master"}:
        return f"it has no {piece.kind} of {piece.name}"
    return (
        f"it has no {piece.kind}, being another optimizer's or imported; continue with that optimizer, or start with"
        " checkpoints.load_optimizer: false from there, in another checkpoints.checkpoints_path"
    )


def source_kind(tensors: Tensors, piece: StateShard) -> str:
    """The kind a piece is filled from: its own, or the other of weight and master, or one of them for an average."""
    has = {kind: tensors.shape(kind, piece.name) is not None for kind in ("weight", "master", "ema")}
    if piece.kind == "master" and not has["master"]:
        return "weight"
    if (piece.kind == "weight" or (piece.kind == "ema" and not has["ema"])) and has["master"]:
        wider = not has["weight"] or piece.tensor.dtype.itemsize > tensors.dtype("weight", piece.name).itemsize
        return "master" if wider else "weight"
    return "weight" if piece.kind == "ema" and not has["ema"] else piece.kind


class CheckpointTensors:
    """The tensors of one of our checkpoints."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.index: Index = read_index(folder)
        self._headers: dict[str, dict[str, Entry]] = {}

    def shape(self, kind: str, name: str) -> tuple[int, ...] | None:
        tensor = self.index.tensors.get(f"{kind}/{name}")
        return tensor.shape if tensor else None

    def dtype(self, kind: str, name: str) -> torch.dtype:
        return DTYPES[self.index.tensors[f"{kind}/{name}"].dtype]

    def read_into(self, target: torch.Tensor, kind: str, name: str, box: Box) -> None:
        """Copy ``box`` of a global tensor into ``target``, cast to its dtype."""
        filled = 0
        for stored in self.index.tensors[f"{kind}/{name}"].boxes:
            shared = intersect(box, stored.box)
            if shared is None:
                continue
            target[shared.slices(box)].copy_(self._read(stored, shared))
            filled += shared.numel
        if filled != box.numel:
            raise Damaged(
                f"{self.folder.path}: its boxes hold {filled} of the {box.numel} elements of {kind}/{name} that are"
                " needed"
            )

    def _read(self, stored: StoredBox, shared: Box) -> torch.Tensor:
        if stored.file not in self._headers:
            self._headers[stored.file] = read_header(self.folder, stored.file)[0]
        entry = self._headers[stored.file].get(stored.key)
        if entry is None or entry.shape != stored.box.shape:
            raise Damaged(f"{self.folder.path}/{stored.file} has no tensor {stored.key} of shape {stored.box.shape}")
        return read_box(self.folder, stored.file, entry, Box(*_within(shared, stored.box)))


def _within(inner: Box, outer: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return tuple(i - o for i, o in zip(inner.offset, outer.offset, strict=True)), inner.shape


def read_box(folder: Folder, file: str, entry: Entry, box: Box) -> torch.Tensor:
    """A box of a stored tensor, in the stored dtype: a view of the mapped file, or the rows fetched for it."""
    if box.numel == 0 or not entry.shape:
        first, rows = 0, entry.shape[0] if entry.shape else 1
    else:
        first, rows = box.offset[0], box.shape[0]
    row_bytes = prod(entry.shape[1:]) * ITEM_SIZE[entry.dtype]
    data = folder.read(file, entry.start + first * row_bytes, entry.start + (first + rows) * row_bytes)
    tensor = torch.frombuffer(data, dtype=DTYPES[entry.dtype]).view(rows, *entry.shape[1:])
    if not entry.shape:
        return tensor[0]
    return tensor[Box((0, *box.offset[1:]), box.shape).slices()]
