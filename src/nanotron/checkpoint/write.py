"""Saving: a copy to host memory while training waits, then files behind the next steps.

    main thread     save: copy ──► training goes on …                     poll: errors
                            │
    writer thread           └► shard, fsync, rename ─► report ─► answer
                                                         │         ▲
    rank 0's writer thread                               └► state.json … index.json, latest.txt, old steps deleted

The checkpoint exists once index.json does, and rank 0 writes that only when every rank has reported its shard.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from nanotron.checkpoint.commit import attempt, describe, report_of, write_index
from nanotron.checkpoint.format import (
    INDEX,
    LATEST,
    STATE,
    StateShard,
    key_of,
    shard_name,
)
from nanotron.checkpoint.retention import delete_old_steps, delete_step
from nanotron.checkpoint.safetensors import DTYPE_NAMES, Planned, write_file
from nanotron.checkpoint.storage import Folder, open_folder
from nanotron.ops.host_memory import host_memory
from nanotron.parallel.agreement import Agreement
from nanotron.parallel.store import LostPeers, Store


class Snapshot:
    """Host memory that holds what a rank writes, laid out as the data part of its file; kept from save to save."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self.pieces: list[StateShard] = []

    def take(self, pieces: Sequence[StateShard]) -> None:
        """Copy the pieces this rank writes; returns when the copy is complete."""
        written = [piece for piece in pieces if piece.writes and piece.box.numel]
        self.pieces = sorted(written, key=lambda piece: -piece.tensor.element_size())  # keeps every tensor aligned
        size = sum(piece.tensor.numel() * piece.tensor.element_size() for piece in self.pieces)
        on_device = any(not piece.tensor.is_cpu for piece in self.pieces)
        if self._buffer.numel() != size:
            self._buffer = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._buffer = host_memory(size, {piece.tensor.device.type for piece in self.pieces})
        for piece, start, stop in self._ranges():
            assert tuple(piece.tensor.shape) == piece.box.shape, f"{piece.name}: {piece.tensor.shape} is no {piece.box}"
            host = self._buffer[start:stop].view(piece.tensor.dtype).view(piece.box.shape)
            host.copy_(piece.tensor.detach(), non_blocking=on_device)
        if on_device:
            torch.accelerator.current_stream().synchronize()

    def parts(self) -> Iterator[tuple[StateShard, memoryview]]:
        """Each piece with its bytes, in file order."""
        whole = memoryview(self._buffer.numpy())  # type: ignore[arg-type]
        for piece, start, stop in self._ranges():
            yield piece, whole[start:stop]

    def _ranges(self) -> Iterator[tuple[StateShard, int, int]]:
        start = 0
        for piece in self.pieces:
            stop = start + piece.tensor.numel() * piece.tensor.element_size()
            yield piece, start, stop
            start = stop


class Saver:
    """Saves a run's checkpoints under ``checkpoints_path``; every rank has one and calls it for the same steps.

    ``store`` is torch.distributed's (None for one process). ``keep_last_n`` complete steps are kept, and those that
    ``keep_every`` divides; None keeps all. A save waits for other ranks as long as they write; at most ``timeout_s``
    for one that gives no sign of life.
    ``copy_to`` is a second folder, such as an object store, that gets every checkpoint once it is complete here.
    ``last_complete`` is the step that the run goes on from, if it does.
    """

    def __init__(
        self,
        checkpoints_path: str,
        rank: int = 0,
        world: int = 1,
        store: Store | None = None,
        *,
        keep_last_n: int | None = None,
        keep_every: int | None = None,
        copy_to: str | None = None,
        last_complete: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self.last_complete = last_complete
        self._folder = open_folder(checkpoints_path)
        self._copy = open_folder(copy_to) if copy_to else None
        self._rank, self._world = rank, world
        self._keep = (keep_last_n, keep_every)
        self._agreement = Agreement("checkpoint/save", rank, world, store, timeout_s=timeout_s)
        self._snapshot = Snapshot()
        self._thread: threading.Thread | None = None
        self._errors: SimpleQueue[str] = SimpleQueue()
        self._saves = 0
        self._succeeded = True
        self._lost: LostPeers | None = None

    def save(
        self, step: int, pieces: Sequence[StateShard], state: Mapping[str, Any], texts: Mapping[str, str] | None = None
    ) -> None:
        """Begin saving a step: copies the pieces that this rank writes, then returns.

        ``state`` and the step become state.json and ``texts`` further files (name -> content), all by rank 0. A save
        still in flight is waited for, so at most one copy of the state is in host memory.
        """
        self.wait()
        self._snapshot.take(pieces)
        self._saves += 1
        documents = {STATE: json.dumps({"step": step, **state}, indent=1) + "\n", **(texts or {})}
        self._thread = threading.Thread(target=self._run, args=(step, documents), name=f"save {step}", daemon=True)
        self._thread.start()

    def poll(self) -> list[str]:
        """Lines about saves that failed since the last call; training may go on, the next save tries again."""
        return [self._errors.get() for _ in range(self._errors.qsize())]

    def wait(self) -> bool:
        """Block until no save is in flight; whether the last one is complete (True if there was none).

        Raises LostPeers, which names them, once a save has waited in vain for other ranks.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._lost is not None:
            raise self._lost
        return self._succeeded

    def _run(self, step: int, documents: Mapping[str, str]) -> None:
        """The writer thread."""
        problems = self._try(self._folder, step, documents)
        self._succeeded = not problems
        if problems:
            last = self.last_complete
            standing = "no checkpoint is complete yet" if last is None else f"the last is {last}"
            self._report(f"checkpoint of step {step} failed, {standing}", problems)
            return
        self.last_complete = step
        if self._copy:
            problems = self._try(self._copy, step, documents)
            self._report(f"copy of step {step} to {self._copy.path} failed", problems)

    def _report(self, what: str, problems: list[str]) -> None:
        for line in problems:
            self._errors.put(f"{what}: {line}")

    def _try(self, place: Folder, step: int, documents: Mapping[str, str]) -> list[str]:
        """Write a step into a folder of steps; whatever goes wrong is told, or every other rank would hang."""
        try:
            return self._write_step(place, step, documents)
        except LostPeers as error:
            self._lost = LostPeers(f"saving step {step} to {place.path}: {error}", error.ranks)
            return [str(error)]
        except Exception as error:
            return [f"rank {self._rank}: {describe(error)}"]

    def _write_step(self, place: Folder, step: int, documents: Mapping[str, str]) -> list[str]:
        folder = place.join(str(step))
        question = f"{self._saves}-{step}{'-copy' if place is self._copy else ''}"
        problems: list[str] = self._agreement.decide(
            f"{question}-open", None, lambda _: attempt(lambda: self._open(folder)), doing=f"clearing {folder.path}"
        )
        if problems:
            return problems
        report: dict[str, Any] = {}
        with self._agreement.at_work(f"writing {folder.path}/{shard_name(self._rank, self._world)}"):
            report["problems"] = attempt(lambda: report.update(self._write_shard(folder)))
        problems = self._agreement.decide(
            f"{question}-commit",
            report,
            lambda reports: self._commit(step, folder, documents, reports),
            doing=f"writing {folder.path}/{INDEX}",
        )
        if problems:
            attempt(lambda: folder.remove(shard_name(self._rank, self._world)))
        elif self._rank == 0:
            with self._agreement.at_work(f"deleting old steps of {place.path}"):
                untidy = attempt(lambda: self._tidy(place, step))
            self._report(f"checkpoint {folder.path} is complete, but", untidy)
        return problems

    def _open(self, folder: Folder) -> None:
        """Rank 0, before any file is written: an older checkpoint of this step must not look complete meanwhile."""
        folder.make()
        delete_step(folder)

    def _write_shard(self, folder: Folder) -> dict[str, Any]:
        """Write this rank's file; returns what rank 0 needs for the index."""
        name = shard_name(self._rank, self._world)
        parts = list(self._snapshot.parts())
        if not parts:
            return {"file": None, "boxes": []}
        planned = [
            Planned(_key(piece), DTYPE_NAMES[piece.tensor.dtype], piece.box.shape, partial(_itself, data))
            for piece, data in parts
        ]
        assert len({tensor.key for tensor in planned}) == len(parts), "two pieces of this rank are the same box"
        written = write_file(folder, name, planned)
        boxes = (
            (tensor_of(piece), piece.shape, tensor.dtype, piece.box)
            for (piece, _), tensor in zip(parts, planned, strict=True)
        )
        return report_of(name, written.size, boxes, written.digests)

    def _commit(
        self, step: int, folder: Folder, documents: Mapping[str, str], reports: list[dict[str, Any]]
    ) -> list[str]:
        """Rank 0, when every rank has reported: write index.json, and with it complete the checkpoint."""
        problems = [f"rank {rank}: {line}" for rank, report in enumerate(reports) for line in report["problems"]]
        problems = problems or attempt(lambda: write_index(step, folder, documents, reports))
        if problems:
            attempt(lambda: folder.remove(INDEX))  # written but perhaps not durable, while shards are about to go
        return problems

    def _tidy(self, place: Folder, step: int) -> None:
        """Rank 0, after the commit: what may fail without harm to the checkpoint."""
        place.write(LATEST, [f"{step}\n".encode()])
        delete_old_steps(place, step, *self._keep)


def tensor_of(piece: StateShard) -> str:
    """The tensor of the index that a piece is a part of."""
    return f"{piece.kind}/{piece.name}"


def _key(piece: StateShard) -> str:
    return key_of(tensor_of(piece), piece.box)


def _itself(data: memoryview) -> memoryview:
    return data
