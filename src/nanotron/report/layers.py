"""Charts of a run's measurements at level 1: one line per layer, coloured in their order."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, sqrt
from typing import Any

from nanotron.metrics.columns import ACTIVATION_NORM, GRAD_NORM, NORMS, UPDATE_RATIO, WEIGHT_NORM
from nanotron.report.series import Series, series_of

TITLES = {
    WEIGHT_NORM: "Weight norm by layer",
    GRAD_NORM: "Gradient norm by layer",
    UPDATE_RATIO: "Update-to-weight ratio by layer",
    ACTIVATION_NORM: "Activation norm by layer, of a token",
}
MOST_POINTS = 120


def layer_charts(rows: Sequence[dict[str, Any]]) -> dict[str, list[Series]]:
    """Title -> a series for each layer; empty when nothing was measured."""
    measured = [_by_layer(row) for row in rows if any(key.startswith(WEIGHT_NORM + "/") for key in row)]
    charts: dict[str, list[Series]] = {}
    for kind in NORMS:
        layers = list(dict.fromkeys(key[1] for row in measured for key in row if key[0] == kind))
        tables = {
            layer: [{"step": row["", "step"], "value": row[kind, layer]} for row in measured if (kind, layer) in row]
            for layer in layers
        }
        found = (series_of(table, "value", layer, most=MOST_POINTS) for layer, table in tables.items())
        series = [one for one in found if one is not None]
        if series:
            charts[TITLES[kind]] = series
    return charts


def _by_layer(row: dict[str, Any]) -> dict[tuple[str, str], float | None]:
    """(kind, layer) -> norm: of a layer's parameters together, the root of the sum of their squares."""
    squares: dict[tuple[str, str], float] = {}
    for key, value in row.items():
        kind, _, name = key.partition("/")
        if kind not in NORMS or not name:
            continue
        number = float("nan") if value is None else value
        if kind == UPDATE_RATIO:  # back to the update's norm: ratios do not add up
            weight = row.get(f"{WEIGHT_NORM}/{name}")
            number = float("nan") if weight is None else number * weight
        layer = _layer(name)
        squares[kind, layer] = squares.get((kind, layer), 0.0) + number**2
    norms: dict[tuple[str, str], float | None] = {}
    for (kind, layer), square in squares.items():
        if kind == UPDATE_RATIO:
            square /= squares.get((WEIGHT_NORM, layer)) or float("nan")
        norms[kind, layer] = sqrt(square) if isfinite(square) else None
    norms["", "step"] = row["step"]
    return norms


def _layer(name: str) -> str:
    """layers.3.attn.q.weight -> layer 3; embed.weight -> embed."""
    parts = name.split(".")
    return f"layer {parts[1]}" if parts[0] == "layers" else parts[0]
