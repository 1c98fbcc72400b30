"""When a run was started, and what it took back: ``starts.jsonl``, a line for each start that the run is left with."""

from __future__ import annotations

import json
import time
from pathlib import Path

from nanotron.checkpoint.storage import LocalFolder
from nanotron.metrics.columns import LAYOUT, UNIX_S
from nanotron.metrics.sinks import read_rows

STARTS_FILE, TAKEN_BACK = "starts.jsonl", "taken_back"


def note_start(run_dir: Path, start_step: int, layout: str) -> None:
    """Note a start that goes on after ``start_step``, before it takes back what metrics.jsonl has of later steps."""
    taken_back = sum(row["step"] > start_step for row in read_rows(run_dir / "metrics.jsonl"))
    now = {"step": start_step + 1, UNIX_S: time.time(), LAYOUT: layout, TAKEN_BACK: taken_back}
    rows = [*(read_rows(run_dir / STARTS_FILE) if start_step else []), now]
    LocalFolder(str(run_dir)).write(STARTS_FILE, [json.dumps(row).encode() + b"\n" for row in rows])
