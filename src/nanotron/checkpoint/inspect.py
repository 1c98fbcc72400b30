"""``nanotron inspect CHECKPOINT``: what is in it, how large it is, and whether every byte is as it was written."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod, sqrt
from typing import TYPE_CHECKING, Any

from nanotron.checkpoint.documents import read_state
from nanotron.checkpoint.format import INDEX, ITEM_SIZE, KINDS, Damaged, Index, StoredTensor
from nanotron.checkpoint.resume import newest_complete
from nanotron.checkpoint.retention import read_index, step_names
from nanotron.checkpoint.storage import Folder, open_folder
from nanotron.checkpoint.verify import damaged_files
from nanotron.errors import ConfigError

if TYPE_CHECKING:
    from nanotron.checkpoint.read import CheckpointTensors


def is_checkpoint(path: str) -> bool:
    """Whether a folder is a step, or holds steps (complete or not)."""
    folder = open_folder(path)
    return INDEX in folder.names() or any(
        name.startswith("shard-") or name == INDEX
        for step in step_names(folder)
        for name in folder.join(str(step)).names()
    )


def inspect_checkpoint(path: str) -> Iterator[str]:
    """Lines that describe a step, or the newest complete one of a folder of steps; damage is raised at the end."""
    folder = open_folder(path)
    checkpoint = path.rstrip("/") if INDEX in folder.names() else newest_complete(path)
    if checkpoint is None:
        raise ConfigError(f"{path}: none of its steps has an index.json, so none is complete")
    folder = open_folder(checkpoint)
    index = read_index(folder)
    yield f"checkpoint   {checkpoint}"
    yield f"step         {index.step}"
    yield from _state_lines(checkpoint)
    yield from _size_lines(index)
    damage = damaged_files(folder, index)
    if not damage:
        yield ""
        yield from _tensor_lines(folder)
    yield ""
    yield f"integrity    {'damaged' if damage else f'all {len(index.files)} files are as they were written'}"
    if damage:
        raise Damaged(damage)


def _state_lines(checkpoint: str) -> Iterator[str]:
    try:
        state = read_state(checkpoint)
    except Damaged:  # told at the end, with the other damage
        yield "state        unreadable"
        return
    for key in ("layout", "consumed", "lr", "device", "threads_per_rank", "versions", "imported_from"):
        if state.get(key) is not None:
            yield f"{key.replace('_', ' '):<12} {_plain(state[key])}"
    for back in state.get("rollbacks", ()):
        ranges = (f"{first} to {end - 1} of {stage}" for stage, (first, end) in back["left_out"].items())
        yield f"rollback     from step {back['bad_step']} to {back['step']}, without samples {', '.join(ranges)}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return " · ".join(f"{key} {_plain(item)}" for key, item in value.items())
    return str(value)


def _size_lines(index: Index) -> Iterator[str]:
    by_kind: dict[str, list[StoredTensor]] = {}
    for key, tensor in index.tensors.items():
        by_kind.setdefault(key.partition("/")[0], []).append(tensor)
    weights = by_kind.get("weight") or by_kind.get("master") or []
    yield f"parameters   {sum(prod(tensor.shape) for tensor in weights):,} in {len(weights)} tensors"
    for kind in sorted(by_kind, key=_kind_order):
        held = by_kind[kind]
        size = sum(_bytes(tensor) for tensor in held)
        dtypes = ", ".join(sorted({tensor.dtype for tensor in held}))
        yield f"{kind:<12} {size / 2**20:,.2f} MiB of {dtypes} in {sum(len(tensor.boxes) for tensor in held)} boxes"
    yield f"files        {sum(file.size for file in index.files.values()) / 2**20:,.2f} MiB in {len(index.files)} files"


def _kind_order(kind: str) -> int:
    """Weights first, then their masters and moments."""
    return KINDS.index(kind) if kind in KINDS else len(KINDS)


def _tensor_lines(folder: Folder) -> Iterator[str]:
    from nanotron.checkpoint.read import CheckpointTensors  # imports torch

    tensors = CheckpointTensors(folder)
    width = max((len(key) for key in tensors.index.tensors), default=10)
    yield f"{'tensor':<{width}}  {'shape':<18} {'dtype':<5} {'norm':>12} {'rms':>12} {'largest':>12}"
    for key, tensor in sorted(tensors.index.tensors.items(), key=lambda item: _kind_order(item[0].partition("/")[0])):
        squares, largest = _measure(tensors, key)
        norm, rms = sqrt(squares), sqrt(squares / max(1, prod(tensor.shape)))
        shape = "×".join(str(size) for size in tensor.shape) or "scalar"
        yield f"{key:<{width}}  {shape:<18} {tensor.dtype:<5} {norm:>12.5g} {rms:>12.5g} {largest:>12.5g}"


def _measure(tensors: CheckpointTensors, key: str) -> tuple[float, float]:
    """(sum of squares, largest magnitude) of a tensor, box by box."""
    import torch

    kind, _, name = key.partition("/")
    squares, largest = 0.0, 0.0
    for stored in tensors.index.tensors[key].boxes:
        values = torch.empty(stored.box.shape, dtype=torch.float32)
        tensors.read_into(values, kind, name, stored.box)
        squares += float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2
        largest = max(largest, float(values.abs().max()))
    return squares, largest


def _bytes(tensor: StoredTensor) -> int:
    return prod(tensor.shape) * ITEM_SIZE[tensor.dtype]
