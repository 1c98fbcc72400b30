"""The bytes of a checkpoint: names, the safetensors header, the index.

    <step>/shard-00000-of-00008.safetensors    one per writing rank
    <step>/state.json, …                       text files of rank 0
    <step>/index.json                          written last: with it the checkpoint is complete

A safetensors file is: header length (8 bytes, little-endian) · header (JSON) · the tensors' bytes back to back.
No torch here: ``nanotron check`` reads these too.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from pydantic import TypeAdapter

from nanotron.checkpoint import schema
from nanotron.checkpoint.schema import Digest, FileName, Shape, StoredType
from nanotron.errors import ConfigError
from nanotron.parallel.params import Box
from nanotron.untrusted import MAPPING, Count, checked, parse_json

if TYPE_CHECKING:
    import torch

FORMAT = get_args(schema.Format)[0]
INDEX, STATE, LATEST = "index.json", "state.json", "latest.txt"
CONFIG, MODEL_CONFIG = "config.yaml", "model_config.json"
KINDS = ("weight", "master", "ema", "exp_avg", "exp_avg_sq", "momentum")
OF_VERSION_2 = {"ema", "momentum"}
"""Kinds that make a checkpoint one of version 2, which readers of version 1 alone refuse. So do rollbacks in its state:
who does not know of them would go on with the samples that they leave out.
"""
ITEM_SIZE = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("U8", "I8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
"""Bytes per element of the data types, by their safetensors names."""


class Damaged(ConfigError):
    """A file of a checkpoint is not what it should be, or not what the index says; each line names checkpoint or file.

    Resuming falls back a step for it. Wherever else it is met it is what the user is told.
    """


class StateShard(NamedTuple):
    """The part of one global tensor that a rank holds: what is saved, and what is filled on load.

    ``kind`` is one of ``KINDS``; ``shape`` is global; ``tensor`` has the box's shape and may be a
    view. Of the ranks that hold a box exactly one ``writes`` it.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    writes: bool = True


@dataclass(frozen=True)
class StoredBox:
    """Where a box of a global tensor lies: a key of a file, and the xxh3-64 of its bytes."""

    offset: Shape
    shape: Shape
    file: FileName
    key: str
    xxh3: Digest

    @property
    def box(self) -> Box:
        """The box itself."""
        return Box(self.offset, self.shape)


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor of a checkpoint: its boxes cover it exactly once."""

    shape: Shape
    dtype: StoredType
    boxes: tuple[StoredBox, ...]


@dataclass(frozen=True)
class StoredFile:
    """Size in bytes, and the xxh3-64 of the whole for files that hold no boxes."""

    size: Count
    xxh3: Digest | None = None


@dataclass(frozen=True)
class Index:
    """index.json: what a complete checkpoint holds. Tensors are keyed ``<kind>/<global name>``."""

    step: Count
    files: dict[FileName, StoredFile]
    tensors: dict[str, StoredTensor]

    def to_json(self, *, least_version: int = 1) -> str:
        """The text of the file, a tensor a line; ``least_version``: what the other files need."""
        files = {name: {k: v for k, v in vars(file).items() if v is not None} for name, file in self.files.items()}
        version = 2 if OF_VERSION_2 & {key.partition("/")[0] for key in self.tensors} else least_version
        facts = {"format": FORMAT, "version": version, "step": self.step, "files": files}
        lines = ",\n".join(
            f"{json.dumps(key)}: {json.dumps({**vars(tensor), 'boxes': list(map(vars, tensor.boxes))})}"
            for key, tensor in self.tensors.items()
        )
        return f'{json.dumps(facts)[:-1]},\n"tensors": {{\n{lines}\n}}}}\n'

    @staticmethod
    def from_json(text: str) -> Index:
        """Raises ValueError when the text is not an index that this version reads."""
        whole = parse_json(text)
        checked(schema.FORMAT, whole)
        return checked(_INDEX, whole)


_INDEX = TypeAdapter(Index)


def tiles(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether boxes cover a tensor of this shape exactly once: no gap, no overlap, nothing outside, none empty.

    The corners of every box are counted, the sign of one turning with each dim in which it is the far one. Differences
    of indicators determine the indicators, so the sums are those of the whole tensor if and only if the boxes tile it.
    """
    if any(len(box.offset) != len(shape) or len(box.shape) != len(shape) or 0 in box.shape for box in boxes):
        return False
    signs = [(corner, (-1) ** sum(corner)) for corner in product((0, 1), repeat=len(shape))]
    counts: Counter[tuple[int, ...]] = Counter()
    whole = [] if 0 in shape else [Box((0,) * len(shape), shape)]
    for (offset, sizes), sign in [*((box, 1) for box in boxes), *((box, -1) for box in whole)]:
        for corner, parity in signs:
            counts[tuple(o + n * far for o, n, far in zip(offset, sizes, corner, strict=True))] += sign * parity
    return not any(counts.values())


def shard_name(rank: int, world: int) -> str:
    """The file that a rank writes."""
    return f"shard-{rank:05d}-of-{world:05d}.safetensors"


def key_of(tensor: str, box: Box) -> str:
    """The key in its file of a box of ``<kind>/<global name>``: ``weight/layers.0.attn.kv.weight@0,64,0``."""
    return f"{tensor}@{','.join(str(offset) for offset in box.offset)}"


class Entry(NamedTuple):
    """One tensor of a safetensors file; its bytes are [start, stop), counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def header_bytes(tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str] | None = None) -> bytes:
    """Header of a safetensors file that holds tensors of these (dtype, shape) back to back, in this order."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for key, (dtype, shape) in tensors.items():
        end = offset + ITEM_SIZE[dtype] * prod(shape)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def parse_header(text: bytes) -> tuple[dict[str, Entry], dict[str, str]]:
    """Tensors, in file order, and metadata of a safetensors header, given without its length.

    Raises ValueError when it is none, or when its tensors are not as long as they are wide, or not back to back.
    """
    header = checked(MAPPING, parse_json(text.decode()))
    metadata = checked(schema.HEADER_METADATA, header.pop("__metadata__", {}))
    start = 8 + len(text)
    found = checked(schema.HEADER, header)
    entries = [
        (key, Entry(entry["dtype"], entry["shape"], start + entry["data_offsets"][0], start + entry["data_offsets"][1]))
        for key, entry in found.items()
    ]
    entries.sort(key=lambda item: (item[1].start, item[1].stop))
    for key, entry in entries:
        if entry.dtype not in ITEM_SIZE:
            raise ValueError(f"{key} has dtype {entry.dtype!r}, which is none of {', '.join(ITEM_SIZE)}")
        if entry.start != start or entry.stop - start != ITEM_SIZE[entry.dtype] * prod(entry.shape):
            raise ValueError(
                f"{key}, {entry.dtype} of shape {list(entry.shape)}, does not fill its bytes"
                f" {entry.start} to {entry.stop}, or does not begin where the one before it ends"
            )
        start = entry.stop
    return dict(entries), metadata
