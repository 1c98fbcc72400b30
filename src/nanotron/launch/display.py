"""The live display of a run, drawn from its metrics.jsonl: by ``nanotron train`` on a terminal, by ``nanotron watch``.

my-run  ━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━  412/1000  41%  eta 3m20s
loss    ▇▆▅▄▄▃▃▂▂▂▁▁▁                      3.2184
speed   52.1K tokens/s · 6.51K per device · 157 ms per step
health  grad norm 0.81 · lr 0.0003 · 0.31 GiB · stage main
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nanotron.errors import visible
from nanotron.logging import human_duration, human_format
from nanotron.metrics.columns import EXPERT_LOAD, SLOWEST_RANK, SLOWEST_RANK_MS
from nanotron.metrics.record import straggler_text
from nanotron.metrics.step_clock import TimeLeft

if TYPE_CHECKING:
    from rich.console import Console

    from nanotron.config import Config

BARS = "▁▂▃▄▅▆▇█"
WIDTH = 40  # characters of the progress bar and of the sparkline


class Tail:
    """Follows a metrics.jsonl: ``read`` returns the rows that are new since the last call.

    ``only_new_file``: rows count from the moment the file is replaced (a run replaces it when it starts).
    """

    def __init__(self, path: Path, *, only_new_file: bool = False) -> None:
        self._path, self._offset = path, 0
        self._old_inode = path.stat().st_ino if only_new_file and path.exists() else None
        self._inode: int | None = None

    def read(self) -> list[dict[str, Any]]:
        """The complete lines written since the last call; a replaced file is read from its start."""
        try:
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode == self._old_inode:
                    return []
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(complete) + len(newline)
        return [json.loads(line) for line in complete.splitlines()]


class Display:
    """The picture of one run; ``refresh`` draws the rows that have arrived."""

    def __init__(self, tail: Tail, config: Config, *, console: Console | None = None) -> None:
        self._tail, self._config, self._name = tail, config, visible(config.general.project)
        self._losses: deque[float] = deque(maxlen=4096)
        self._left = TimeLeft()
        self._row: dict[str, Any] | None = None
        self._slowest: dict[str, Any] | None = None  # the last row that tells of the slowest rank
        self.live = Live(self._draw(), console=console, refresh_per_second=8, transient=False)

    @property
    def step(self) -> int:
        """The newest step seen."""
        return int(self._row["step"]) if self._row else 0

    def refresh(self) -> None:
        """Read what is new and draw it."""
        rows = self._tail.read()
        for row in rows:
            self._row = row
            self._slowest = row if SLOWEST_RANK in row else self._slowest
            self._left.add(row)
            self._losses.append(row["lm_loss"] if row["lm_loss"] is not None else math.nan)
        if rows:
            self.live.update(self._draw())

    def print(self, line: str) -> None:
        """Show a line of the run's own output above the display."""
        self.live.console.print(visible(line), markup=False, highlight=False)

    def _draw(self) -> Group | Text:
        if self._row is None:
            return Text(f"{self._name}  waiting for the first step …", style="dim")
        row, last = self._row, self._config.tokens.last_step
        table = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=last, completed=self.step, width=WIDTH)
        eta = human_duration(self._left.seconds(self._config.steps_left(self.step)))
        share = 100 * self.step / last
        table.add_row(Text(self._name, style="bold"), bar, f"{self.step}/{last}  {share:.0f}%  eta {eta}")
        loss = self._losses[-1]
        style = "bold red" if not math.isfinite(loss) else "bold"
        table.add_row("loss", sparkline(list(self._losses), WIDTH), Text(f"{loss:.6g}", style=style))
        speed = f"{human_format(row['tokens_per_sec'])} tokens/s"
        per_device = f"{human_format(row['tokens_per_sec_per_device'])} per device"
        mfu = f" · MFU {100 * row['mfu']:.1f}%" if row.get("mfu") else ""
        table.add_row("speed", f"{speed} · {per_device}", f"{human_format(row['time_per_iteration_ms'])} ms/step{mfu}")
        norm = f"grad norm {human_format(row['grad_norm'])} · " if row.get("grad_norm") is not None else ""
        load = f" · expert load {row[EXPERT_LOAD]:.2f}" if row.get(EXPERT_LOAD) is not None else ""
        table.add_row(
            "health", f"{norm}lr {human_format(row['lr'])}{load}", f"{human_format(row['memory_gib'])} GiB on rank 0"
        )
        if self._slowest is not None:
            row = self._slowest
            what = f"rank {row[SLOWEST_RANK]}{straggler_text(row)}".rstrip(",")
            table.add_row("slowest", what, f"{human_format(row[SLOWEST_RANK_MS])} ms of work at step {row['step']}")
        return Group(table)


def sparkline(values: list[float], width: int) -> str:
    """The whole history of a number in ``width`` characters: the mean of each stretch, low ▁ to high █."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    count = min(width, len(finite))
    edges = [len(finite) * i // count for i in range(count + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)
