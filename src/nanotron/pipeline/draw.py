"""Pictures of timelines: coloured boxes in the terminal, and one self-contained SVG or HTML file.

One row per rank, time to the right. F is a microbatch's forward, B its backward up to the chunk's input, W its weight
gradients; paler colours are a rank's later chunks; what is blank is idle.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from nanotron.pipeline.timeline import Span, Timeline

COLOURS = {"F": (66, 133, 200), "B": (232, 126, 48), "W": (72, 160, 92), "BW": (200, 92, 60)}
ROW, LEFT, WIDTH = 26, 64, 1180  # pixels


class Panel(NamedTuple):
    """One timeline of a picture, with what is said about it."""

    title: str
    timeline: Timeline


def caption(panel: Panel, unit: str) -> str:
    """`zbv, predicted: bubble 5.9 %, 51.0 ms`."""
    factor, name = (1000.0, "ms") if unit == "s" else (1.0, unit)
    timeline = panel.timeline
    return f"{panel.title}: bubble {timeline.bubble:.1%}, {timeline.duration * factor:.4g} {name}".replace("%", " %")


def to_terminal(panels: Sequence[Panel], unit: str, width: int | None = None, *, colour: bool | None = None) -> str:
    """The panels as text that fits the terminal; coloured when it is one."""
    width = width or shutil.get_terminal_size((120, 24)).columns
    colour = sys.stdout.isatty() if colour is None else colour
    lines = []
    for panel in panels:
        start, columns = panel.timeline.start, width - 9
        scale = columns / _longest(panels)
        lines.append(caption(panel, unit))
        for rank in range(panel.timeline.ranks):
            cells = ["."] * columns
            for span in panel.timeline.of_rank(rank):
                lo, hi = round((span.start - start) * scale), round((span.end - start) * scale)
                cells[lo:hi] = _box(span, hi - lo, colour=colour)
            lines.append(f"rank {rank:<3} {''.join(cells).rstrip('.')}")
    return "\n".join(lines)


def _box(span: Span, columns: int, *, colour: bool) -> list[str]:
    """A span as that many cells; the first ones carry its label if there is room for it."""
    if columns == 0:
        return []
    label = _label(span) if span.kind == "F" else f"{span.kind.lower()}{_label(span)}"
    text = label[:columns].ljust(columns) if len(label) <= columns else span.kind[0].lower() * columns
    if not colour:
        return list(text)
    red, green, blue = _shade(span)
    cells = list(text)
    cells[0] = f"\x1b[48;2;{red};{green};{blue};38;2;255;255;255m{cells[0]}"
    cells[-1] += "\x1b[0m"
    return cells


def to_svg(panels: Sequence[Panel], unit: str) -> str:
    """The panels below each other on one scale of time, as an SVG document without outside references."""
    scale = (WIDTH - LEFT - 10) / _longest(panels)
    body: list[str] = []
    y = 8
    for panel in panels:
        body.append(f'<text class="title" x="0" y="{y + 14}">{escape(caption(panel, unit))}</text>')
        y += 24
        for rank in range(panel.timeline.ranks):
            body.append(f'<text x="0" y="{y + 17}">rank {rank}</text>')
            body.append(
                f'<rect class="idle" x="{LEFT}" y="{y}" width="{_longest(panels) * scale:.1f}" height="{ROW - 4}"/>'
            )
            body += [_svg_box(span, panel.timeline.start, scale, y) for span in panel.timeline.of_rank(rank)]
            y += ROW
        y += 14
    body.append(_legend(y))
    style = (
        "text{font:12px system-ui,sans-serif;fill:#333}.title{font-weight:600}.idle{fill:#8882}"
        ".box text{fill:#fff;text-anchor:middle;font-size:11px;pointer-events:none}"
        "@media(prefers-color-scheme:dark){text{fill:#ddd}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 28}" width="{WIDTH}" height="{y + 28}">\n'
        f"<style>{style}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def to_html(panels: Sequence[Panel], unit: str) -> str:
    """The same as a page that stands alone; hovering over a box tells what it is."""
    title = escape(", ".join(panel.title for panel in panels))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        "<style>:root{color-scheme:light dark}body{margin:24px}svg{max-width:100%;height:auto}</style></head>\n"
        f"<body>\n{to_svg(panels, unit)}</body></html>\n"
    )


def _svg_box(span: Span, start: float, scale: float, y: int) -> str:
    x, width = LEFT + (span.start - start) * scale, (span.end - span.start) * scale
    tip = f"{span.kind} of microbatch {span.microbatch} in stage {span.stage}, {span.end - span.start:.4g}"
    label = f'<text x="{x + width / 2:.1f}" y="{y + 15}">{_label(span)}</text>' if width > 7 * len(_label(span)) else ""
    return (
        f'<g class="box"><title>{escape(tip)}</title><rect x="{x:.1f}" y="{y}" width="{max(width - 0.6, 0.4):.1f}" '
        f'height="{ROW - 4}" rx="2" fill="rgb{_shade(span)}"/>{label}</g>'
    )


def _legend(y: int) -> str:
    names = {"F": "forward", "B": "backward, input", "W": "backward, weights", "BW": "backward, both"}
    parts = []
    for index, (kind, colour) in enumerate(COLOURS.items()):
        x = LEFT + index * 160
        parts.append(f'<rect x="{x}" y="{y}" width="14" height="14" rx="2" fill="rgb{colour}"/>')
        parts.append(f'<text x="{x + 20}" y="{y + 12}">{kind} {names[kind]}</text>')
    return "\n".join(parts)


def _label(span: Span) -> str:
    return f"{span.microbatch}" + "'" * span.chunk


def _shade(span: Span) -> tuple[int, int, int]:
    """A kind's colour, paler for each further chunk."""
    pale = 1 - 0.72**span.chunk
    red, green, blue = (round(value + (235 - value) * pale * 0.8) for value in COLOURS[span.kind])
    return red, green, blue


def _longest(panels: Sequence[Panel]) -> float:
    return max(panel.timeline.duration for panel in panels)
