"""The measured timeline of a step: written by every rank of one pipeline, read back for pictures, costs and Perfetto.

A file is a Chrome trace: chrome://tracing and https://ui.perfetto.dev open it as it is. Times are the host's clock, so
ranks on several hosts are aligned as well as their clocks are.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from typing_extensions import TypedDict

from nanotron.errors import ConfigError
from nanotron.pipeline.timeline import Span, StageCost, Timeline
from nanotron.untrusted import Count, Number, checked, parse_json

if TYPE_CHECKING:
    from nanotron.parallel.mesh import Mesh
    from nanotron.pipeline.engine import Pipeline


class MissingTrace(ConfigError):
    """No trace was recorded, or not all ranks' files are here."""


class _Facts(TypedDict):
    microbatch: Count
    chunk: Annotated[Count, Field(lt=1000)]
    stage: Count


class _Action(TypedDict):
    tid: Count
    cat: Literal["F", "B", "W", "BW"]
    ts: Number
    dur: Number
    args: _Facts


class _Metadata(TypedDict):
    schedule: str
    ranks: Count


class _Trace(TypedDict):
    metadata: _Metadata
    traceEvents: list[dict[str, Any]]


TRACE, ACTION = TypeAdapter(_Trace), TypeAdapter(_Action)
"""A recorded file, and those of its events that are actions."""


def recorder(
    pipeline: Pipeline, mesh: Mesh, steps: Sequence[int], folder: Path
) -> Callable[[int], AbstractContextManager[None]]:
    """`with recorder(...)(step):` around a training step records it if it is one of `steps`.

    Written by the pipeline of the first replica: `pipeline-step-<step>-rank-<pipeline rank>.json`.
    """
    writes = mesh.rank_at(pp=0) == 0

    @contextmanager
    def record(step: int) -> Iterator[None]:
        if not writes or step not in steps:
            yield
            return
        spans: list[Span] = []
        pipeline.spans = spans
        try:
            yield
        finally:
            pipeline.spans = None
        timeline = Timeline(pipeline.schedule.name, pipeline.schedule.ranks, spans)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"pipeline-step-{step}-rank-{pipeline.rank}.json"
        path.write_text(json.dumps(to_chrome([("measured", timeline)])), encoding="utf-8")

    return record


def to_chrome(processes: Sequence[tuple[str, Timeline]]) -> dict[str, Any]:
    """Timelines in seconds as one Chrome trace: a process each, a thread per rank, waiting times included."""
    events: list[dict[str, Any]] = []
    for process, (name, timeline) in enumerate(processes):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"{timeline.name}, {name}"}})
        for rank in range(timeline.ranks):
            row = timeline.of_rank(rank)
            if row:
                thread = {"name": f"rank {rank}"}
                events.append({"ph": "M", "name": "thread_name", "pid": process, "tid": rank, "args": thread})
            for before, span in zip([None, *row], row, strict=False):
                if before is not None and span.start > before.end:
                    events.append(_event(process, rank, "wait", "wait", before.end, span.start, {}))
                facts = {"microbatch": span.microbatch, "chunk": span.chunk, "stage": span.stage}
                label = f"{span.kind}{span.microbatch}"
                events.append(_event(process, rank, label, span.kind, span.start, span.end, facts))
    metadata = {"schedule": processes[0][1].name, "ranks": processes[0][1].ranks}
    return {"displayTimeUnit": "ms", "metadata": metadata, "traceEvents": events}


def read_trace(folder: Path, step: int | None = None) -> tuple[int, Timeline]:
    """The recorded timeline of a step in a run's `traces` folder (its last recorded one when None), and the step.

    Raises MissingTrace when none is there, or not every rank's, and ConfigError when a file is damaged.
    """
    found: dict[int, list[Path]] = defaultdict(list)
    for path in sorted(folder.glob("pipeline-step-*-rank-*.json")):
        if named := re.match(r"pipeline-step-(\d+)-", path.name):
            found[int(named[1])].append(path)
    if not found or (step is not None and step not in found):
        raise MissingTrace(
            f"{folder} holds no pipeline trace{'' if step is None else f' of step {step}'}; "
            f"record one with profiler.pipeline_trace.steps"
        )
    step = max(found) if step is None else step
    spans: list[Span] = []
    for path in found[step]:
        try:
            trace = checked(TRACE, parse_json(path.read_text(encoding="utf-8")))
            actions = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") != "wait"]
            spans += [_span(checked(ACTION, event), trace["metadata"]["ranks"]) for event in actions]
        except ValueError as error:
            raise ConfigError(f"{path} is no pipeline trace ({error}); record it again, or remove it") from error
    metadata = trace["metadata"]
    if len(found[step]) < metadata["ranks"]:
        raise MissingTrace(
            f"{folder} holds step {step} of {len(found[step])} of {metadata['ranks']} ranks; collect all their files"
        )
    return step, Timeline(metadata["schedule"], metadata["ranks"], spans)


def _span(event: _Action, ranks: int) -> Span:
    if event["tid"] >= ranks:
        raise ValueError(f"tid is {event['tid']}, of {ranks} ranks")
    facts, start = event["args"], event["ts"] / 1e6
    place = (facts["microbatch"], facts["chunk"], facts["stage"])
    return Span(event["tid"], event["cat"], *place, start, start + event["dur"] / 1e6)


def costs_of(timeline: Timeline) -> StageCost:
    """What an action of each stage took: the median over its microbatches. A fused BW counts as B."""
    parts: dict[tuple[str, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in timeline.spans:
        kind = span.kind[0] if span.kind == "BW" else span.kind
        parts[kind, span.stage][span.microbatch] += span.end - span.start  # W may have run in pieces
    costs = {key: median(times.values()) for key, times in parts.items()}
    return lambda kind, stage: costs.get((kind, stage), 0.0)


def _event(
    process: int, rank: int, name: str, category: str, start: float, end: float, facts: dict[str, int]
) -> dict[str, Any]:
    microseconds = {"ts": start * 1e6, "dur": (end - start) * 1e6}
    return {"ph": "X", "name": name, "cat": category, "pid": process, "tid": rank, **microseconds, "args": facts}
