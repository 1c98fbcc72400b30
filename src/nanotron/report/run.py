"""What a run directory tells: the run's numbers and the files beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from typing_extensions import TypedDict

from nanotron.errors import ConfigError
from nanotron.launch.failures import Failure, failure_in
from nanotron.metrics.columns import LAYOUT, SLOWEST_HOST
from nanotron.metrics.sinks import read_rows
from nanotron.metrics.spikes import LossSpikes, Spike
from nanotron.metrics.starts import STARTS_FILE
from nanotron.pipeline.timeline import Timeline
from nanotron.pipeline.trace import MissingTrace, read_trace
from nanotron.report.experts import Loads, read_loads
from nanotron.untrusted import Count, Number, checked, parse_json, parse_yaml

T = TypeVar("T")


NEEDED = ("lm_loss", "consumed_tokens", "time_per_iteration_ms", "tokens_per_sec", "memory_gib")


class Tokens(TypedDict, total=False):
    """The section ``tokens`` of config.yaml."""

    train_steps: Count


class SavedConfig(TypedDict, total=False):
    """config.yaml, as far as the page looks into it."""

    general: dict[str, Any]
    tokens: Tokens


class Environment(TypedDict, total=False):
    """environment.json, as far as the page looks into it."""

    layout: dict[str, Count]


class Start(TypedDict):
    """A line of starts.jsonl."""

    step: Count
    unix_s: Number
    layout: str
    taken_back: Count


CONFIG, ENVIRONMENT, START = TypeAdapter(SavedConfig), TypeAdapter(Environment), TypeAdapter(Start)


@dataclass(frozen=True)
class RunFiles:
    """A run directory, read."""

    folder: Path
    rows: list[dict[str, Any]]
    config_text: str
    config: dict[str, Any]
    """The resolved config; empty when the run left none."""
    environment: dict[str, Any]
    failures: list[Failure]
    timeline: tuple[int, Timeline] | None
    """The last traced step and when each of its pipeline actions ran."""
    expert_loads: list[Loads]
    """Of a sparse model's run."""
    starts: list[dict[str, Any]]
    """The lines of starts.jsonl, which earlier versions did not write."""

    @property
    def name(self) -> str:
        """The project's, which stays when a run is resumed, or the folder's."""
        return str(self.config.get("general", {}).get("project") or self.folder.resolve().name)

    def spikes(self) -> list[Spike]:
        """The loss spikes that the run was warned of."""
        watch = LossSpikes()
        found = (watch.add(row["step"], row["lm_loss"], row.get("stage", "")) for row in self.rows)
        return [spike for spike in found if spike is not None]


def read_run(folder: Path) -> RunFiles:
    """Read a run directory; raises ConfigError when it holds no numbers, or a file of it is damaged."""
    rows = read_rows(folder / "metrics.jsonl")
    if not rows:
        raise ConfigError(f"{folder}: no metrics.jsonl with a step in it; name a run directory (general.run_dir)")
    _check_rows(folder / "metrics.jsonl", rows)
    records = sorted((folder / "failures").glob("rank-*.json"), key=lambda path: (len(path.name), path.name))
    return RunFiles(
        folder=folder,
        rows=rows,
        config_text=_read(folder / "config.yaml", str) or "",
        config=_read(folder / "config.yaml", lambda text: _checked(CONFIG, parse_yaml(text))) or {},
        environment=_read(folder / "environment.json", lambda text: _checked(ENVIRONMENT, parse_json(text))) or {},
        failures=[failure for path in records if (failure := _read(path, failure_in))],
        timeline=_timeline(folder / "traces"),
        expert_loads=read_loads(folder),
        starts=_starts(folder / STARTS_FILE),
    )


def _read(path: Path, parse: Callable[[str], T]) -> T | None:
    """What a file says, None when it is not there; raises ConfigError with its name when it is damaged."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError(f"{path} is damaged ({error}); mend it, or remove it to leave it out") from error


def _checked(schema: TypeAdapter[Any], value: Any) -> Any:
    """The whole of a value that keeps to a schema where it looks."""
    checked(schema, value)
    return value


def _check_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Refuse a row in which something else stands in a number's place; of a loss that is not finite it is null."""
    for row in rows:
        for key, value in {**dict.fromkeys(NEEDED, "missing"), **row}.items():
            is_number = type(value) is int or (type(value) is float and isfinite(value))
            may_be_null = key not in NEEDED or key == "lm_loss"
            if key not in ("stage", LAYOUT, SLOWEST_HOST) and not is_number and not (value is None and may_be_null):
                raise ConfigError(
                    f"{path}: step {row['step']}: {key} is {value!r}, where a number belongs; mend or remove the line"
                )


def _starts(path: Path) -> list[dict[str, Any]]:
    rows = read_rows(path)
    for row in rows:
        try:
            checked(START, row)
        except ValueError as error:
            raise ConfigError(f"{path}: step {row['step']}: {error}; mend or remove the line") from error
    return rows


def _timeline(traces: Path) -> tuple[int, Timeline] | None:
    try:
        return read_trace(traces)
    except MissingTrace:
        return None
