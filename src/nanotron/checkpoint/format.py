"""The bytes of a checkpoint: names, the safetensors header, the index.

    <step>/shard-00000-of-00008.safetensors    one per writing rank
    <step>/state.json, …                       text files of rank 0
    <step>/index.json                          written last: with it the checkpoint is complete

A safetensors file is: header length (8 bytes, little-endian) · header (JSON) · the tensors' bytes back to back.
No torch here: ``nanotron check`` reads these too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from nanotron.parallel.params import Box

if TYPE_CHECKING:
    import torch

FORMAT = "nanotron-checkpoint"
VERSION = 1
INDEX, STATE, LATEST = "index.json", "state.json", "latest.txt"
CONFIG, MODEL_CONFIG = "config.yaml", "model_config.json"
KINDS = ("weight", "master", "exp_avg", "exp_avg_sq")
ITEM_SIZE = {"F64": 8, "F32": 4, "I64": 8, "I32": 4, "F16": 2, "BF16": 2, "U16": 2, "U8": 1, "I8": 1, "BOOL": 1}
"""Bytes per element of the data types, by their safetensors names."""


class Damaged(Exception):
    """A file of a checkpoint is not what its index says; the message names the file."""


class Piece(NamedTuple):
    """The part of one global tensor that a rank holds: what is saved, and what is filled on load.

    ``kind`` is weight, master, exp_avg or exp_avg_sq; ``shape`` is global; ``tensor`` has the box's shape and may be a
    view. Of the ranks that hold a box exactly one ``writes`` it.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: torch.Tensor
    writes: bool = True


class StoredBox(NamedTuple):
    """Where a box of a global tensor lies: a key of a file, and the xxh3-64 of its bytes."""

    box: Box
    file: str
    key: str
    xxh3: str


class StoredTensor(NamedTuple):
    """A global tensor of a checkpoint: its boxes cover it exactly once."""

    shape: tuple[int, ...]
    dtype: str
    boxes: tuple[StoredBox, ...]


class StoredFile(NamedTuple):
    """Size in bytes, and the xxh3-64 of the whole for files that hold no boxes."""

    size: int
    xxh3: str | None = None


@dataclass(frozen=True)
class Index:
    """index.json: what a complete checkpoint holds. Tensors are keyed ``<kind>/<global name>``."""

    step: int
    files: dict[str, StoredFile]
    tensors: dict[str, StoredTensor]

    def to_json(self) -> str:
        """The text of the file, a tensor a line."""
        tensors = {
            key: {
                "shape": tensor.shape,
                "dtype": tensor.dtype,
                "boxes": [
                    {"offset": box.offset, "shape": box.shape, "file": file, "key": name, "xxh3": xxh3}
                    for box, file, name, xxh3 in tensor.boxes
                ],
            }
            for key, tensor in self.tensors.items()
        }
        files = {name: {k: v for k, v in file._asdict().items() if v is not None} for name, file in self.files.items()}
        facts = {"format": FORMAT, "version": VERSION, "step": self.step, "files": files}
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(tensor)}" for key, tensor in tensors.items())
        return f'{json.dumps(facts)[:-1]},\n"tensors": {{\n{lines}\n}}}}\n'

    @staticmethod
    def from_json(text: str) -> Index:
        """Raises ``Damaged`` when the text is not an index that this version reads."""
        try:
            whole = json.loads(text)
            if whole["format"] != FORMAT or whole["version"] != VERSION:
                raise Damaged(f"index.json has format {whole['format']!r} {whole['version']}; this reads {VERSION}")
            files = {name: StoredFile(file["size"], file.get("xxh3")) for name, file in whole["files"].items()}
            return Index(whole["step"], files, {key: _tensor(entry) for key, entry in whole["tensors"].items()})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise Damaged(f"index.json does not parse ({type(error).__name__}: {error})") from error


def _tensor(entry: dict[str, Any]) -> StoredTensor:
    boxes = (
        StoredBox(Box(tuple(box["offset"]), tuple(box["shape"])), box["file"], box["key"], box["xxh3"])
        for box in entry["boxes"]
    )
    return StoredTensor(tuple(entry["shape"]), entry["dtype"], tuple(boxes))


def missing_elements(tensor: StoredTensor) -> int:
    """How many elements the boxes leave out; negative when boxes overlap."""
    return prod(tensor.shape) - sum(stored.box.numel for stored in tensor.boxes)


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
    """Tensors, in file order, and metadata of a safetensors header, given without its length."""
    header = json.loads(text)
    metadata = header.pop("__metadata__", {})
    start = 8 + len(text)
    entries = {
        key: Entry(entry["dtype"], tuple(entry["shape"]), *(start + offset for offset in entry["data_offsets"]))
        for key, entry in header.items()
    }
    return dict(sorted(entries.items(), key=lambda item: item[1].start)), metadata
