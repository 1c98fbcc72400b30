"""How a run's experts are used: heat maps of layer × expert at the end, and of expert × step where use is least even.

A cell's colour is the expert's load over an even one. Cells of one colour are one path, so that a map of many layers
and experts stays small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from nanotron.errors import ConfigError
from nanotron.metrics.columns import EXPERT_LOAD, ROUTER_ENTROPY
from nanotron.metrics.experts import LOADS_FILE
from nanotron.metrics.sinks import read_rows
from nanotron.report.chart import HEIGHT, WIDTH
from nanotron.report.series import Series, series_of

LEFT, RIGHT, TOP, BOTTOM = 58, 12, 10, 26  # margins around a map, pixels
LAST = 10  # records that are the end of a run
MOST_STEPS = 80  # columns of a map over steps
MOST_LAYERS = 4  # that have one
MOST_LABELS = 8  # beside a map
LEVELS = (  # percent of an even load below which a cell has the colour
    (0.5, "#0b2f57", "none"),
    (35.0, "#2a6fb0", "< ⅓"),
    (71.0, "#94bfe6", "< 0.7"),
    (141.0, "#e9edf1", "even"),
    (283.0, "#f7b98c", "< 2.8"),
    (566.0, "#e5772e", "< 5.7"),
    (float("inf"), "#a51f0b", "more"),
)
Table = list[list[float]]


class Loads(NamedTuple):
    """A record: each expert's load in percent of an even one, layer by layer."""

    step: int
    by_layer: dict[str, list[float]]


def read_loads(folder: Path) -> list[Loads]:
    """The records of a run directory, none for a dense model; raises ConfigError where one is damaged."""
    path = folder / LOADS_FILE
    records = [_record(path, row) for row in read_rows(path)]
    for record in records:
        shape = {layer: len(loads) for layer, loads in record.by_layer.items()}
        if shape != {layer: len(loads) for layer, loads in records[0].by_layer.items()} or not all(shape.values()):
            raise ConfigError(f"{path}: step {record.step}: not the layers and experts of step {records[0].step}")
    return records


def _record(path: Path, row: dict[str, Any]) -> Loads:
    layers = {}
    for layer, text in row.items():
        if layer == "step":
            continue
        words = text.split() if isinstance(text, str) else ["none"]
        if not all(word.isascii() and word.isdigit() and len(word) <= 7 for word in words):
            raise ConfigError(
                f"{path}: step {row['step']}: {layer} is no row of loads in percent; mend or remove the line"
            )
        layers[layer.removeprefix("layers.")] = [float(word) for word in words]
    return Loads(row["step"], layers)


def expert_charts(rows: Sequence[dict[str, Any]], records: Sequence[Loads]) -> dict[str, list[Series]]:
    """Title -> a line for each layer."""
    layers = records[0].by_layer if records else {}
    charts = {}
    for column, title in ((EXPERT_LOAD, "Load of the busiest expert by layer, 1 is even"), (ROUTER_ENTROPY, _ENTROPY)):
        found = (series_of(rows, f"{column}/layers.{layer}", f"layer {layer}", most=120) for layer in layers)
        if series := [one for one in found if one is not None]:
            charts[title] = series
    return charts


_ENTROPY = "Router entropy by layer, 1 is all experts alike"


def least_even(records: Sequence[Loads]) -> list[str]:
    """The layers, the one with the busiest expert at the run's end first."""
    loads = _at_the_end(records)
    return sorted(loads, key=lambda layer: -max(loads[layer]))


def expert_lines(records: Sequence[Loads]) -> Iterator[tuple[str, bool]]:
    """(line, whether it is bad news) of the layers that are used least evenly at the run's end."""
    if not records:
        return
    loads = _at_the_end(records)
    for layer in least_even(records)[:3]:
        numbers = loads[layer]
        busiest, unused = max(range(len(numbers)), key=numbers.__getitem__), sum(load < 0.5 for load in numbers)
        yield (
            f"experts of layer {layer}: at the end the busiest, {busiest}, gets {numbers[busiest] / 100:.2f} times an"
            f" even load, and {unused} of {len(numbers)} get nothing",
            unused > 0,
        )


def heat_maps(records: Sequence[Loads]) -> Iterator[tuple[str, str]]:
    """(title, drawing): all layers at the end of the run, then over its steps those that are used least evenly."""
    loads = _at_the_end(records)
    experts = [str(expert) for expert in range(max(map(len, loads.values())))]
    yield "Load of layer × expert, at the end", _heat_map(list(loads.values()), list(loads), experts, "layer")
    if len(records) < 2:
        return
    count = min(MOST_STEPS, len(records))
    stretches = [records[lo:hi] for lo, hi in pairwise(len(records) * i // count for i in range(count + 1))]
    steps = [str(stretch[-1].step) for stretch in stretches]
    for layer in least_even(records)[:MOST_LAYERS]:
        columns = [_mean([record.by_layer[layer] for record in stretch]) for stretch in stretches]
        table = [list(row) for row in zip(*columns, strict=True)]  # [experts][steps]
        yield f"Load of expert × step, layer {layer}", _heat_map(table, experts, steps, "expert")


def heat_legend() -> str:
    """What the colours mean."""
    items = (
        f'<span><i style="height:10px;background:{colour}"></i>{escape(name)}</span>' for _, colour, name in LEVELS
    )
    return f'<p class="legend">{"".join(items)}</p>'


def _at_the_end(records: Sequence[Loads]) -> dict[str, list[float]]:
    last = records[-LAST:]
    return {layer: _mean([record.by_layer[layer] for record in last]) for layer in last[0].by_layer}


def _mean(rows: Table) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


def _heat_map(table: Table, rows: Sequence[str], columns: Sequence[str], what: str) -> str:
    """A table of loads in percent as one picture; ``what``: a row is."""
    width, height = (WIDTH - LEFT - RIGHT) / len(columns), (HEIGHT - TOP - BOTTOM) / len(rows)
    paths = "".join(f'<path fill="{colour}" d="{path}"/>' for colour, path in _paths(table))
    cells = f'<g transform="translate({LEFT} {TOP}) scale({width:.4f} {height:.4f})" shape-rendering="crispEdges">'
    labels = [
        f'<text x="{LEFT - 6}" y="{TOP + (index + 0.5) * height + 4:.1f}" text-anchor="end">'
        f"{escape(rows[index])}</text>"
        for index in _some(len(rows))
    ] + [
        f'<text x="{LEFT + (index + 0.5) * width:.1f}" y="{HEIGHT - 8}" text-anchor="middle">'
        f"{escape(columns[index])}</text>"
        for index in _some(len(columns))
    ]
    hover = (
        f'<rect class="hover" x="{LEFT}" y="{TOP + index * height:.1f}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{height:.1f}"><title>{what} {escape(rows[index])}: {min(loads) / 100:.2f} to {max(loads) / 100:.2f}'
        " times an even load</title></rect>"
        for index, loads in enumerate(table)
    )
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="loads by {what}">'
        f"{cells}{paths}</g>{''.join(labels)}{''.join(hover)}</svg>"
    )


def _paths(table: Table) -> Iterator[tuple[str, str]]:
    """(colour, path in units of cells): neighbours of one colour in a row are one box."""
    boxes: dict[str, list[str]] = {}
    for y, row in enumerate(table):
        x = 0
        for colour, run in groupby(row, key=_colour):
            length = len(list(run))
            boxes.setdefault(colour, []).append(f"M{x} {y}h{length}v1h-{length}z")
            x += length
    for colour, found in boxes.items():
        yield colour, "".join(found)


def _colour(load: float) -> str:
    return next(colour for limit, colour, _ in LEVELS if load < limit)


def _some(count: int) -> list[int]:
    """A few of so many places, at equal distances."""
    stride = -(-count // MOST_LABELS)
    return list(range(0, count, stride))
