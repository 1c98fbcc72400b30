"""Figures of lines: their numbers as JSON, their names, and an empty picture that ``chart.js`` draws them into."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from nanotron.report.series import Point, Series

WIDTH, HEIGHT = 560, 220
COLOURS = ("#2a6fb0", "#d9662b", "#3b8f57", "#8e5bb5", "#b8860b", "#c2407a")
DASHES = ("", "6 3", "2 3")  # of a run's first, second and third line in a chart
MOST_NAMES = 12  # in a legend
Marks = Sequence[tuple[int, str]]
"""(step, text) of what is marked in every chart."""


@cache
def script() -> str:
    """The page's only script."""
    return files("nanotron.report").joinpath("chart.js").read_text(encoding="utf-8")


def policy(text: str) -> str:
    """What a browser may do with a page: run its only script, use the page's own style, and load nothing at all."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def figure(title: str, runs: Sequence[Sequence[Series]], marks: Marks = (), *, logarithmic: bool = False) -> str:
    """The lines of each run in one picture, the first in front; at first on a logarithmic scale where that is asked
    for and they span a power of ten.
    """
    lines = _lines(runs)
    points = [point for series in runs for line in series for point in line.points]
    low, high = min(point.low for point in points), max(point.high for point in points)
    data = {"logarithmic": logarithmic and 0 < 10 * low <= high, "lines": lines, "marks": list(marks)}
    label = escape(f"{title}: {', '.join(line['name'] for line in lines)}")
    return (
        f'<figure class="lines"><h3>{escape(title)}</h3><label class="log"><input type="checkbox"> log</label>'
        f"{_legend(lines)}"
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}" tabindex="0"></svg>'
        f'<output></output><script type="application/json">{as_json(data)}</script></figure>'
    )


def _lines(runs: Sequence[Sequence[Series]]) -> list[dict[str, Any]]:
    """One run's lines differ in colour; those of several have their run's colour, and differ in their dashes."""
    if len(runs) == 1:
        looks = [[(colour, "") for colour in _colours(len(runs[0]))]]
    else:
        colours = _colours(len(runs))
        looks = [
            [(colour, DASHES[index % len(DASHES)]) for index in range(len(series))]
            for colour, series in zip(colours, runs, strict=True)
        ]
    return [
        {
            "name": line.name,
            "colour": colour,
            "dash": dash,
            "points": [_numbers(point) for point in line.points],
            "gaps": line.not_finite,
        }
        for series, styles in zip(runs, looks, strict=True)
        for line, (colour, dash) in zip(series, styles, strict=True)
    ]


def _numbers(point: Point) -> list[float]:
    """Six digits are what a reader is told."""
    return [point.step, *(float(f"{value:.6g}") for value in (point.mean, point.low, point.high))]


def as_json(value: Any) -> str:
    """As text that no name in it can end the element of."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _legend(lines: Sequence[dict[str, Any]]) -> str:
    """The names of several lines, beside their colours; of many layers, some at equal distances."""
    if len(lines) < 2:
        return ""
    if len(lines) > MOST_NAMES:
        lines = [lines[i * (len(lines) - 1) // (MOST_NAMES - 1)] for i in range(MOST_NAMES)]
    items = (
        f'<span><i style="border-top:3px {"dashed" if line["dash"] else "solid"} {line["colour"]}"></i>'
        f"{escape(line['name'])}</span>"
        for line in lines
    )
    return f'<p class="legend">{"".join(items)}</p>'


def _colours(count: int) -> list[str]:
    """Distinct colours for a few lines; from blue over violet to orange for more, which are layers in their order."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    return [f"hsl({215 + 170 * i / (count - 1):.0f} 60% 50%)" for i in range(count)]
