"""Writing safetensors files, one tensor in memory at a time; and the names of dtypes in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

import torch
import xxhash

from nanotron.checkpoint.format import ITEM_SIZE, header_bytes
from nanotron.checkpoint.storage import CHUNK_BYTES, Chunk, Folder

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I64": torch.int64,
    "I32": torch.int32,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class Planned(NamedTuple):
    """A tensor to be written: ``make`` computes it, or its bytes, when its turn comes."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor | memoryview]

    @property
    def size(self) -> int:
        return prod(self.shape) * ITEM_SIZE[self.dtype]


class Written(NamedTuple):
    """A file that was written: its size, and the xxh3-64 of each tensor by key."""

    size: int
    digests: dict[str, str]


def split_by_size(tensors: list[Planned], max_bytes: int) -> list[list[Planned]]:
    """Consecutive groups of at most ``max_bytes``; a larger tensor is a group of its own."""
    groups: list[list[Planned]] = []
    room = 0
    for tensor in tensors:
        if not groups or tensor.size > room:
            groups.append([])
            room = max_bytes
        groups[-1].append(tensor)
        room -= tensor.size
    return groups


def write_file(folder: Folder, name: str, tensors: list[Planned], metadata: dict[str, str] | None = None) -> Written:
    """Write one safetensors file; wider elements come first, so that every tensor is aligned."""
    ordered = sorted(tensors, key=lambda tensor: -ITEM_SIZE[tensor.dtype])
    header = header_bytes({tensor.key: (tensor.dtype, tensor.shape) for tensor in ordered}, metadata)
    digests: dict[str, str] = {}

    def content() -> Iterator[Chunk]:
        yield header
        for tensor in ordered:
            made = tensor.make()
            data = bytes_of(made) if isinstance(made, torch.Tensor) else made
            assert len(data) == tensor.size, f"{tensor.key} has {len(data)} bytes, not {tensor.size}"
            digest = xxhash.xxh3_64()
            for start in range(0, len(data), CHUNK_BYTES):
                digest.update(data[start : start + CHUNK_BYTES])
                yield data[start : start + CHUNK_BYTES]
            digests[tensor.key] = digest.hexdigest()

    folder.write(name, content())
    return Written(len(header) + sum(tensor.size for tensor in ordered), digests)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a CPU tensor, row-major."""
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
