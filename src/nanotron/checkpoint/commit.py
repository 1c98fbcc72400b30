"""What makes a checkpoint complete: the index over all ranks' boxes, written when every file is in place. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

import xxhash

from nanotron.checkpoint.format import INDEX, STATE, Index, StoredBox, StoredFile, StoredTensor, key_of
from nanotron.checkpoint.storage import Folder
from nanotron.parallel.params import Box


def write_index(step: int, folder: Folder, documents: Mapping[str, str], reports: list[dict[str, Any]]) -> None:
    """Write the text files and then index.json; ``reports`` are ``report_of`` each rank's file."""
    files = {report["file"]: StoredFile(report["size"]) for report in reports if report["file"]}
    for name, text in documents.items():
        data = text.encode()
        folder.write(name, [data])
        files[name] = StoredFile(len(data), xxhash.xxh3_64_hexdigest(data))
    index = Index(step, files, merge_boxes(reports))
    went_back = bool(json.loads(documents.get(STATE, "{}")).get("rollbacks"))
    folder.write(INDEX, [index.to_json(least_version=2 if went_back else 1).encode()])


def report_of(
    file: str, size: int, boxes: Iterable[tuple[str, tuple[int, ...], str, Box]], digests: Mapping[str, str]
) -> dict[str, Any]:
    """What is told of a file of boxes: each (tensor, global shape, dtype, box), with its digest by its key."""
    entries = [
        {"tensor": tensor, "shape": shape, "dtype": dtype, "box": box, "key": key, "xxh3": digests[key]}
        for tensor, shape, dtype, box in boxes
        for key in [key_of(tensor, box)]
    ]
    return {"file": file, "size": size, "boxes": entries}


def merge_boxes(reports: list[dict[str, Any]]) -> dict[str, StoredTensor]:
    """The global tensors that all ranks' boxes make up; an incomplete one is refused."""
    facts: dict[str, tuple[tuple[int, ...], str]] = {}
    boxes: dict[str, list[StoredBox]] = {}
    for report in reports:
        for entry in report["boxes"]:
            mine = (tuple(entry["shape"]), entry["dtype"])
            assert facts.setdefault(entry["tensor"], mine) == mine, f"ranks differ about {entry['tensor']}"
            offset, shape = map(tuple, entry["box"])
            stored = StoredBox(offset, shape, report["file"], entry["key"], entry["xxh3"])
            boxes.setdefault(entry["tensor"], []).append(stored)
    tensors = {
        key: StoredTensor(shape, dtype, tuple(sorted(boxes[key], key=lambda stored: stored.offset)))
        for key, (shape, dtype) in sorted(facts.items())
    }
    for key, tensor in tensors.items():
        missing = prod(tensor.shape) - sum(stored.box.numel for stored in tensor.boxes)
        assert missing == 0, f"{key}: the ranks' boxes miss {missing} elements of {tensor.shape}"
    return tensors


def attempt(action: Callable[[], object]) -> list[str]:
    """Run it; what went wrong, as lines that another rank can print."""
    try:
        action()
    except Exception as error:
        return [describe(error)]
    return []


def describe(error: Exception) -> str:
    """One line: the system's words and the file for an I/O error, else the exception."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}"
