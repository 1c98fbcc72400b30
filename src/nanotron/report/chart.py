"""Line charts as inline SVG: one scale of steps, one of numbers, a line for each series; no script, no outside file.

A line goes through means of stretches of steps; the pale band around it holds every number, so no spike is hidden.
Red marks at the bottom are steps whose number was not finite. Hovering over a stretch tells its numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from nanotron.logging import human_format
from nanotron.report.series import Series

WIDTH, HEIGHT = 560, 220
LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 26  # margins around the lines, pixels
COLOURS = ("#2a6fb0", "#d9662b", "#3b8f57")
MOST_NAMES = 12  # in a legend
Scale = Callable[[float], float]


def line_chart(series: Sequence[Series], *, logarithmic: bool = False) -> str:
    """The series in one picture, the first in front; on a logarithmic scale only where they span a power of ten."""
    low = min(point.low for line in series for point in line.points)
    high = max(point.high for line in series for point in line.points)
    steps = [point.step for line in series for point in line.points] + [n for line in series for n in line.not_finite]
    logarithmic = logarithmic and 0 < 10 * low <= high
    ticks = _powers(low, high) if logarithmic else _round_numbers(low, high)
    low, high = min(low, ticks[0]), max(high, ticks[-1])
    x = _scale(min(steps), max(steps), LEFT, WIDTH - RIGHT)
    y = _scale(low, high, HEIGHT - BOTTOM, TOP, logarithmic=logarithmic)
    body = [_grid(ticks, y), _step_axis(min(steps), max(steps), x)]
    for line, colour in reversed(list(zip(series, _colours(len(series)), strict=True))):
        body.append(_line(line, colour, x, y))
    body += [_hover(series, x), *(_marks(line, x) for line in series)]
    label = escape(", ".join(line.name for line in series))
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">' + "".join(body) + "</svg>"
    )


def legend(series: Sequence[Series]) -> str:
    """The names of several lines, beside their colours."""
    if len(series) < 2:
        return ""
    pairs = list(zip(series, _colours(len(series)), strict=True))
    if len(pairs) > MOST_NAMES:  # of many layers, some at equal distances
        pairs = [pairs[i * (len(pairs) - 1) // (MOST_NAMES - 1)] for i in range(MOST_NAMES)]
    items = (f'<span><i style="background:{colour}"></i>{escape(line.name)}</span>' for line, colour in pairs)
    return f'<p class="legend">{"".join(items)}</p>'


def _colours(count: int) -> list[str]:
    """Distinct colours for a few lines; from blue over violet to orange for more, which are layers in their order."""
    if count <= len(COLOURS):
        return list(COLOURS[:count])
    return [f"hsl({215 + 170 * i / (count - 1):.0f} 60% 50%)" for i in range(count)]


def _line(line: Series, colour: str, x: Scale, y: Scale) -> str:
    upper = [f"{x(point.step):.1f},{y(point.high):.1f}" for point in line.points]
    lower = [f"{x(point.step):.1f},{y(point.low):.1f}" for point in reversed(line.points)]
    middle = " ".join(f"{x(point.step):.1f},{y(point.mean):.1f}" for point in line.points)
    dot = ""
    if len(line.points) == 1:  # a line of one point shows nothing
        dot = f'<circle cx="{x(line.points[0].step):.1f}" cy="{y(line.points[0].mean):.1f}" r="3" fill="{colour}"/>'
    return (
        f'<polygon points="{" ".join(upper + lower)}" fill="{colour}" opacity="0.18"/>'
        f'<polyline points="{middle}" fill="none" stroke="{colour}" stroke-width="1.6"/>{dot}'
    )


def _grid(ticks: Sequence[float], y: Scale) -> str:
    return "".join(
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>'
        f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{_number(tick)}</text>'
        for tick in ticks
    )


def _step_axis(first: int, last: int, x: Scale) -> str:
    ticks = [tick for tick in _round_numbers(first, last) if first <= tick <= last and tick == int(tick)] or [first]
    return "".join(
        f'<text x="{x(tick):.1f}" y="{HEIGHT - 8}" text-anchor="middle">{_number(tick)}</text>' for tick in ticks
    )


def _marks(line: Series, x: Scale) -> str:
    return "".join(
        f'<rect class="none" x="{x(step) - 1:.1f}" y="{HEIGHT - BOTTOM - 8}" width="2" height="8">'
        f"<title>step {step}: {escape(line.name)} is not finite</title></rect>"
        for step in line.not_finite
    )


def _hover(series: Sequence[Series], x: Scale) -> str:
    """Invisible columns that tell the first series' numbers, and those of a few others at the same place."""
    points = series[0].points
    edges = [x(point.step) for point in points]
    columns = []
    for index, point in enumerate(points):
        lo = (edges[index - 1] + edges[index]) / 2 if index else LEFT
        hi = (edges[index] + edges[index + 1]) / 2 if index + 1 < len(edges) else WIDTH - RIGHT
        told = [f"step {point.step}"]
        for line in series[: len(COLOURS)]:
            nearest = min(line.points, key=lambda other: abs(other.step - point.step))
            told.append(f"{line.name} {nearest.mean:.6g}")
        columns.append(
            f'<rect class="hover" x="{lo:.1f}" y="{TOP}" width="{max(hi - lo, 0.1):.1f}" '
            f'height="{HEIGHT - TOP - BOTTOM}"><title>{escape(chr(10).join(told))}</title></rect>'
        )
    return "".join(columns)


def _scale(low: float, high: float, start: float, end: float, *, logarithmic: bool = False) -> Scale:
    """Numbers to pixels; a range of one number lies in the middle."""
    if logarithmic:
        inner = _scale(math.log(low), math.log(high), start, end)
        return lambda value: inner(math.log(value))
    if high == low:
        return lambda value: (start + end) / 2
    return lambda value: start + (value - low) / (high - low) * (end - start)


def _round_numbers(low: float, high: float) -> list[float]:
    """Three to seven multiples of 1, 2 or 5 · 10ⁿ that reach over the range."""
    if high == low:
        return [low]
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten that reach over the range."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, (last - first) // 6)
    return [10.0**power for power in range(first, last + stride, stride)]


def _number(value: float) -> str:
    return human_format(value) if value == 0 or abs(value) >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")
