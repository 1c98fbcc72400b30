"""The wall clock is for records; whatever is waited for or measured goes by a clock that nobody can set."""

from __future__ import annotations

import ast
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src" / "nanotron"
WALL_CLOCKS = {"time.time", "time.time_ns", "datetime.now", "datetime.datetime.now"}
RECORDS = {
    "launch/failures.py: time.time",  # when a rank failed
    "launch/host.py: time.time",  # when a rank was seen to be killed
    "doctor/measure.py: time.time",  # how far hosts' clocks are apart
    "metrics/starts.py: time.time",  # when a run went on
    "metrics/record.py: time.time",  # when a step was made, for what restarts cost
    "pipeline/engine.py: time.time",  # where a trace begins
    "data/tokenize/chat.py: datetime.datetime.now",  # what a chat template asks for
}


def test_only_records_know_what_time_it_is() -> None:
    found = set()
    for path in SOURCES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                name = next((f"time.{alias.name}" for alias in node.names if alias.name.startswith("time")), "")
            if name in WALL_CLOCKS:
                found.add(f"{path.relative_to(SOURCES)}: {name}")
    assert found == RECORDS
