"""Where a step's numbers go besides the console: metrics.jsonl, TensorBoard, Weights & Biases.

    <run_dir>/
      metrics.jsonl     one JSON object per step, exactly one per step ever
      tensorboard/      event files; the steps after a resumed one are purged
      wandb/            Weights & Biases' own files, and the id under which a resumed run goes on

A sink writes a step once and never changes it. All of them live on rank 0.
"""

from __future__ import annotations

import json
import math
import os
import uuid
from pathlib import Path
from typing import Any, Protocol

from nanotron.untrusted import parse_json

Row = dict[str, "float | int | str"]


class Sink(Protocol):
    """One destination of the numbers."""

    def write(self, step: int, row: Row) -> None:
        """Add the row of one step."""

    def close(self) -> None:
        """Bring everything written to its destination."""


class JsonLines:
    """``metrics.jsonl`` at full double precision; a number that is not finite becomes null (JSON knows none).

    What a full disk refuses is kept, and written before the next row: no row is lost or cut once there is room again.
    """

    def __init__(self, path: Path, *, start_step: int) -> None:
        keep_steps(path, last=start_step)
        self._file = path.open("ab", buffering=0)  # a killed process keeps what was written
        self._unwritten = b""

    def write(self, step: int, row: Row) -> None:
        finite = {key: value if _is_finite(value) else None for key, value in row.items()}
        self._unwritten += json.dumps(finite, allow_nan=False).encode() + b"\n"
        self._write_out()

    def close(self) -> None:
        try:
            self._write_out()
        finally:
            self._file.close()

    def _write_out(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]


def keep_steps(path: Path, *, last: int) -> None:
    """Rewrite a metrics.jsonl to its steps up to ``last``, atomically; a line cut short by a kill is dropped."""
    kept = [json.dumps(row) + "\n" for row in read_rows(path) if row["step"] <= last]
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines(kept)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl in order, without a line that is still being written, or that a crash destroyed."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            row = parse_json(line.decode())
        except ValueError:
            continue
        if isinstance(row, dict) and type(row.get("step")) is int:
            rows.append(row)
    return rows


class TensorBoard:
    """One series of float32 per key; steps after ``start_step`` left by an earlier run are purged.

    TensorBoard's default loader draws nothing else: it passes over float64 without a word.
    """

    def __init__(self, folder: Path, *, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=start_step + 1)

    def write(self, step: int, row: Row) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from torch.utils.tensorboard.summary import scalar

        summary = Summary()  # one event for the whole row: a quarter of the time of one for each number
        for key, value in row.items():
            if key != "step" and not isinstance(value, str):
                summary.MergeFrom(scalar(key, value, new_style=True))  # type: ignore[no-untyped-call]
        self._writer.file_writer.add_summary(summary, step)  # type: ignore[attr-defined]

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run in Weights & Biases under the id kept in the run directory, so that a resumed run goes on in place."""

    def __init__(self, run_dir: Path, *, project: str, name: str, config: dict[str, Any]) -> None:
        import wandb

        self._run = wandb.init(
            project=project, name=name, id=_kept_id(run_dir / "wandb"), dir=str(run_dir), resume="allow", config=config
        )

    def write(self, step: int, row: Row) -> None:
        self._run.log({key: value for key, value in row.items() if key != "step"}, step=step)

    def close(self) -> None:
        self._run.finish()


def _kept_id(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "run_id.txt"
    if not file.exists():
        file.write_text(uuid.uuid4().hex[:12] + "\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


def _is_finite(value: float | int | str) -> bool:
    return isinstance(value, str) or math.isfinite(value)
