"""Where a step's numbers go besides the console: metrics.jsonl, TensorBoard, Weights & Biases, Trackio.

    <run_dir>/
      metrics.jsonl     one JSON object per step, exactly one per step ever
      expert_loads.jsonl   of sparse models: each expert's load in some steps, for heat maps
      tensorboard/      event files; the steps after a resumed one are purged
      wandb/            Weights & Biases' own files, and the id under which a resumed run goes on
      trackio/          the name under which a resumed run goes on in Trackio, whose files lie elsewhere

A sink writes a step once and never changes it. All of them live on rank 0.
"""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from nanotron.checkpoint.storage import LocalFolder
from nanotron.errors import ConfigError
from nanotron.logging import get_logger
from nanotron.untrusted import parse_json

logger = get_logger(__name__)

ANSWER_S = 30.0  # that Weights & Biases has to take a run, and to take what is left when it ends

Row = dict[str, "float | int | str"]


class JsonLines:
    """``metrics.jsonl``, or another file of rows, at full double precision.

    A number that is not finite becomes null (JSON knows none).

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
    kept = [json.dumps(row).encode() + b"\n" for row in read_rows(path) if row["step"] <= last]
    LocalFolder(str(path.parent)).write(path.name, kept)


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
    """A run in Weights & Biases under the id kept in the run directory, so that a resumed run goes on in place.

    Raises ConfigError where the service takes no run. A run that is ``resumed`` goes on all the same: what it tells is
    kept in the folder, from where ``wandb sync`` sends it.
    """

    def __init__(self, run_dir: Path, *, project: str, name: str, config: dict[str, Any], resumed: bool) -> None:
        import wandb

        self._folder, self._error = run_dir / "wandb", wandb.Error
        settings = wandb.Settings(init_timeout=ANSWER_S, finish_timeout=ANSWER_S, finish_timeout_raises=True)
        open_run = partial(
            wandb.init, project=project, name=name, id=_kept(self._folder / "run_id.txt", uuid.uuid4().hex[:12]),
            dir=str(run_dir), resume="allow", config=config, settings=settings,
        )  # fmt: skip
        try:
            self._run = open_run()
        except wandb.Error as error:
            reason = _reason(error)
            if not resumed:
                raise ConfigError(
                    f"logging.wandb: true, but Weights & Biases takes no run ({reason}); log in with `wandb login`, "
                    "set WANDB_MODE=offline in the environment to keep the numbers here, or set it to false"
                ) from error
            logger.warning(f"Weights & Biases takes no run ({reason}); the run goes on, and {self._kept()}")
            wandb.teardown()  # it would not open another run of this id
            self._run = open_run(mode="offline")

    def _kept(self) -> str:
        return f"what is not sent is kept in {self._folder}, for `wandb sync`"

    def write(self, step: int, row: Row) -> None:
        with self._as_os_error():
            self._run.log({key: value for key, value in row.items() if key != "step"}, step=step)

    def close(self) -> None:
        with self._as_os_error():
            self._run.finish()

    @contextmanager
    def _as_os_error(self) -> Iterator[None]:
        """Tell of the service's failures as of any other sink's."""
        try:
            yield
        except (self._error, TimeoutError) as error:
            raise OSError(f"{_reason(error)}: {self._kept()}") from error


class Trackio:
    """A run in Trackio, which is open source, keeps runs on this machine and is used like Weights & Biases.

    It knows runs by their names: this one's is kept in the run directory, so that a resumed run goes on in place.
    Raises ConfigError where Trackio takes no run; a server that is gone later is Trackio's to bridge.
    """

    def __init__(self, run_dir: Path, *, project: str, name: str, config: dict[str, Any]) -> None:
        import trackio

        name = _kept(run_dir / "trackio" / "run_name.txt", f"{name}-{uuid.uuid4().hex[:6]}")
        try:
            self._run = trackio.init(project=project, name=name, config=config, resume="allow")
        except Exception as error:  # it has no class of its own for what its environment asks for in vain
            raise ConfigError(
                f"logging.trackio: true, but Trackio takes no run ({_reason(error)}); mend or unset the TRACKIO_… "
                "variables of the environment, or set it to false"
            ) from error
        self._finish = trackio.finish  # a run's own method leaves it open for the end of the process

    def write(self, step: int, row: Row) -> None:
        self._run.log({key: value for key, value in row.items() if key != "step"}, step=step)

    def close(self) -> None:
        self._finish()


Sink = JsonLines | TensorBoard | WeightsAndBiases | Trackio


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__


def _kept(file: Path, fresh: str) -> str:
    """What identifies the run to a tracker: of its first start, also in every later one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        file.write_text(fresh + "\n", encoding="utf-8")
    return file.read_text(encoding="utf-8").strip()


def _is_finite(value: float | int | str) -> bool:
    return isinstance(value, str) or math.isfinite(value)
