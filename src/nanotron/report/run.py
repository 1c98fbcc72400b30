"""What a run directory tells: the run's numbers and the files beside them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nanotron.errors import ConfigError
from nanotron.launch.failures import Failure, read_failures
from nanotron.metrics.sinks import read_rows
from nanotron.metrics.spikes import LossSpikes, Spike
from nanotron.pipeline.timeline import Timeline
from nanotron.pipeline.trace import read_trace


@dataclass(frozen=True)
class RunFiles:
    """A run directory, read."""

    folder: Path
    rows: list[dict[str, Any]]
    config_text: str
    environment: dict[str, Any]
    failures: list[Failure]
    timeline: tuple[int, Timeline] | None
    """The last traced step and when each of its pipeline actions ran."""

    @property
    def config(self) -> dict[str, Any]:
        """The resolved config; empty when the run left none."""
        return yaml.safe_load(self.config_text) or {}

    def spikes(self) -> list[Spike]:
        """The loss spikes that the run was warned of."""
        watch = LossSpikes()
        found = (watch.add(row["step"], row["lm_loss"], row.get("stage", "")) for row in self.rows)
        return [spike for spike in found if spike is not None]


def read_run(folder: Path) -> RunFiles:
    """Read a run directory; raises ConfigError when it holds no numbers."""
    rows = read_rows(folder / "metrics.jsonl")
    if not rows:
        raise ConfigError(f"{folder}: no metrics.jsonl with a step in it; name a run directory (general.run_dir)")
    environment = _text(folder / "environment.json")
    return RunFiles(
        folder=folder,
        rows=rows,
        config_text=_text(folder / "config.yaml"),
        environment=json.loads(environment) if environment else {},
        failures=read_failures(folder),
        timeline=_timeline(folder / "traces"),
    )


def _timeline(traces: Path) -> tuple[int, Timeline] | None:
    try:
        return read_trace(traces)
    except ConfigError:  # none was recorded, or not all ranks' files are here
        return None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
