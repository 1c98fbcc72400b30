"""One self-contained HTML page of a run, or of several beside each other: no outside file, legible in light and dark.

facts      the runs' last numbers at a glance, and the settings in which several differ
health     spikes, numbers that were not finite, failures, the slowest rank
charts     loss, learning rate, gradient norm, throughput, step time, memory, …: one line for each run
time       where it went, and every start
layers, experts, timeline of the last traced step, environment, config: of each run
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path
from typing import Any

from nanotron.metrics.columns import FULLEST_RANK_GIB, MEDIAN_RANK_MS, SLOWEST_RANK_MS
from nanotron.pipeline.draw import Panel, to_svg
from nanotron.report.chart import figure, policy, script
from nanotron.report.experts import expert_charts, heat_legend, heat_maps
from nanotron.report.facts import facts, health
from nanotron.report.layers import TITLES, layer_charts
from nanotron.report.run import RunFiles, read_run
from nanotron.report.series import Series, series_of
from nanotron.report.starts import marks, time_section

# title, whether its scale may be logarithmic, and its (column, name of the line); lines without numbers are left out
CHARTS: tuple[tuple[str, bool, tuple[tuple[str, str], ...]], ...] = (
    ("Loss", False, (("lm_loss", "training loss"), ("val_loss", "validation loss"))),
    ("z-loss", False, (("z_loss", "z-loss"),)),
    ("Router losses", False, (("balance_loss", "balance"), ("router_z_loss", "z-loss of routers"))),
    ("Learning rate", False, (("lr", "learning rate"),)),
    ("Gradient norm, before clipping", True, (("grad_norm", "gradient norm"),)),
    ("Tokens per second", False, (("tokens_per_sec", "tokens/s"),)),
    (
        "Time of a step, ms",
        False,
        (
            ("time_per_iteration_ms", "whole step"),
            (SLOWEST_RANK_MS, "work of the slowest rank"),
            (MEDIAN_RANK_MS, "work of the median rank"),
        ),
    ),
    ("Model FLOPs utilization", False, (("mfu", "MFU"),)),
    ("Memory, GiB", False, (("memory_gib", "rank 0"), (FULLEST_RANK_GIB, "fullest rank"))),
)

STYLE = """
:root{color-scheme:light dark;--ink:#1d2430;--soft:#5b6675;--line:#dfe3e8;--paper:#fff;--panel:#f7f8fa}
@media(prefers-color-scheme:dark){:root{--ink:#e3e6ea;--soft:#9aa4b2;--line:#333b46;--paper:#14181d;--panel:#1b2027}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1240px;padding:28px 24px 60px;background:var(--paper);color:var(--ink);
 font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
h1{font-size:24px;margin:0}h2{font-size:17px;margin:36px 0 12px}h3{font-size:14px;margin:0 0 4px;font-weight:600}
.sub{color:var(--soft);margin:2px 0 20px}
.facts{display:grid;grid-template-columns:repeat(auto-fill,minmax(150px,1fr));gap:10px}
.facts div{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:10px 12px}
.facts b{display:block;font-size:18px;overflow-wrap:anywhere}.facts span{color:var(--soft);font-size:13px}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(460px,100%),1fr));gap:18px}
figure{margin:0;border:1px solid var(--line);border-radius:8px;padding:12px 12px 4px;min-width:0}
.chart{width:100%;height:auto;display:block}
.chart text{font:11px system-ui,sans-serif;fill:var(--soft)}
.grid{stroke:var(--line)}.none{fill:#d22}.hover{fill:transparent}.hover:hover{fill:#8883}
.cursor{stroke:var(--soft)}.start{stroke:var(--ink);stroke-dasharray:2 4;stroke-width:1.5}
.lines{position:relative}.lines svg{touch-action:pan-y}.lines output{display:block;min-height:36px;font-size:12px}
.log{position:absolute;right:12px;top:12px;font-size:12px;color:var(--soft)}
#controls{display:flex;flex-wrap:wrap;gap:6px 24px;margin:0 0 14px;font-size:13px;color:var(--soft)}
#controls label{display:flex;align-items:center;gap:7px}output{font-variant-numeric:tabular-nums;color:var(--soft)}
:focus-visible{outline:2px solid #2a6fb0;outline-offset:2px}
.legend{margin:0 0 4px;font-size:12px;color:var(--soft);line-height:1.7}.legend span{margin-right:12px}
.legend i{display:inline-block;width:12px;min-height:0;margin-right:5px;vertical-align:middle}
.bar{display:flex;height:22px;border-radius:4px;overflow:hidden;margin:0 0 6px}.wide{margin:10px 0;overflow-x:auto}
.health{margin:0;padding-left:20px}.health .bad{color:#c22}
.timeline{overflow-x:auto}.timeline svg{max-width:100%;height:auto}
pre{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px;overflow:auto;
 font:12.5px/1.45 ui-monospace,Menlo,Consolas,monospace;max-height:520px}
table{border-collapse:collapse;font-size:14px}td{padding:3px 18px 3px 0;vertical-align:top;overflow-wrap:anywhere}
td:first-child{color:var(--soft);white-space:nowrap}th{padding:3px 18px 3px 0;text-align:left;font-weight:600}
@media print{#controls,.log{display:none}figure,table,.facts div{break-inside:avoid}body{padding:0}pre{max-height:none}
 *{print-color-adjust:exact}}
summary{cursor:pointer;font-weight:600}
"""


CONTROLS = """<form id="controls" name="controls">
<label>Smoothing <input type="range" name="smoothing" min="0" max="0.98" step="0.02" value="0">
<output name="told">0</output></label>
<label><input type="checkbox" name="steps"> steps on a logarithmic scale</label>
<span>Point at a chart, or choose it with Tab and go with ← →, Home and End.</span></form>
<noscript><p>The charts are drawn by a script of this page, which the browser was told not to run.</p></noscript>"""


def write_report(folders: Sequence[Path], output: Path | None = None) -> Path:
    """Write the page of run directories, ``report.html`` in the first unless ``output`` says otherwise; returns its
    path.
    """
    path = output or folders[0] / "report.html"
    page = report([read_run(folder) for folder in folders])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def report(runs: Sequence[RunFiles]) -> str:
    """The page as text."""
    names = _names(runs)
    title = escape(" and ".join(names))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy(script())}">\n'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>\n<body>\n'
        + "\n".join([f"<h1>{title}</h1>", *_sections(dict(zip(names, runs, strict=True)))])
        + f"\n<script>{script()}</script></body></html>\n"
    )


def _names(runs: Sequence[RunFiles]) -> list[str]:
    """What tells the runs apart: their projects, or where two are of one project, their folders."""
    count = Counter(run.name for run in runs)
    return [run.name if count[run.name] == 1 else str(run.folder) for run in runs]


def _sections(runs: dict[str, RunFiles]) -> Iterator[str]:
    for run in runs.values():
        name = run.config.get("general", {}).get("run")
        yield f'<p class="sub">{escape(str(run.folder))}{f" · {escape(str(name))}" if name else ""}</p>'
    yield from _compared(runs) if len(runs) > 1 else _facts(*runs.values())
    for name, run in runs.items():
        yield f"<h2>Health{_of(name, runs)}</h2>" + _health(run)
    yield f'<h2>Course</h2>{CONTROLS}<section class="charts">' + "".join(_charts(runs)) + "</section>"
    for name, run in runs.items():
        yield f"<h2>Time{_of(name, runs)}</h2>" + time_section(run)
    for name, run in runs.items():
        yield from _parts(run, _of(name, runs))


def _of(name: str, runs: dict[str, RunFiles]) -> str:
    """What the heading of a part says when there are several runs."""
    return f" of {escape(name)}" if len(runs) > 1 else ""


def _facts(run: RunFiles) -> Iterator[str]:
    cards = "".join(f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in facts(run))
    yield f'<section class="facts">{cards}</section>'


def _compared(runs: dict[str, RunFiles]) -> Iterator[str]:
    """The facts of several runs beside each other, then the settings in which they differ."""
    yield _columns(runs, [dict(facts(run)) for run in runs.values()])
    settings = [_flat(run.config) for run in runs.values()]
    keys = dict.fromkeys(key for one in settings for key in one)
    differing = [key for key in keys if len({json.dumps(one.get(key), default=str) for one in settings}) > 1]
    yield "<h2>Settings that differ</h2>" + (
        _columns(runs, [{key: _shown(one.get(key, "")) for key in differing} for one in settings])
        if differing
        else "<p>None.</p>"
    )


def _columns(runs: dict[str, RunFiles], values: Sequence[dict[str, str]]) -> str:
    """A table with a column for each run."""
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in runs)
    rows = (
        f"<tr><td>{escape(key)}</td>{''.join(f'<td>{escape(one.get(key, chr(8212)))}</td>' for one in values)}</tr>"
        for key in dict.fromkeys(key for one in values for key in one)
    )
    return f"<table><thead><tr><th></th>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted keys; lists are values."""
    if not isinstance(value, dict) or not value:
        return {prefix: value} if prefix else {}
    return {
        key: leaf
        for name, inner in value.items()
        for key, leaf in _flat(inner, f"{prefix}.{name}" if prefix else str(name)).items()
    }


def _charts(runs: dict[str, RunFiles]) -> Iterator[str]:
    marked = [
        (step, f"{name}: {text}" if len(runs) > 1 else text) for name, run in runs.items() for step, text in marks(run)
    ]
    for title, logarithmic, lines in CHARTS:
        series = [
            [replace(one, name=f"{name}: {one.name}") if len(runs) > 1 else one for one in _found(run.rows, lines)]
            for name, run in runs.items()
        ]
        if any(series):
            yield figure(title, series, marked, logarithmic=logarithmic)


def _found(rows: Sequence[dict[str, Any]], lines: Sequence[tuple[str, str]]) -> list[Series]:
    found = (series_of(rows, column, name) for column, name in lines)
    return [one for one in found if one is not None]


def _parts(run: RunFiles, of: str) -> Iterator[str]:
    """What one run has; ``of`` says in every heading which."""
    layers = layer_charts(run.rows)
    if layers:
        figures = (figure(title, [s], logarithmic=title != TITLES["weight_norm"]) for title, s in layers.items())
        yield f'<h2>Layers{of}</h2><section class="charts">{"".join(figures)}</section>'
    if run.expert_loads:
        charts = [figure(title, [s]) for title, s in expert_charts(run.rows, run.expert_loads).items()]
        maps = [
            f"<figure><h3>{escape(title)}</h3>{heat_legend()}{drawing}</figure>"
            for title, drawing in heat_maps(run.expert_loads)
        ]
        yield f'<h2>Experts{of}</h2><section class="charts">{"".join(charts + maps)}</section>'
    if run.timeline is not None:
        step, timeline = run.timeline
        drawing = to_svg([Panel(f"{timeline.name}, measured in step {step}", timeline)], "s")
        yield f'<h2>Timeline{of}</h2><section class="timeline">{drawing}</section>'
    yield f"<h2>Environment{of}</h2>" + _table(run.environment)
    config = f"<pre>{escape(run.config_text)}</pre>" if run.config_text else "<p>The run left no config.yaml.</p>"
    yield f"<h2>Config{of}</h2><details><summary>config.yaml, with every default</summary>{config}</details>"


def _health(run: RunFiles) -> str:
    items = "".join(f'<li class="{"bad" if bad else "good"}">{escape(line)}</li>' for line, bad in health(run))
    return f'<ul class="health">{items}</ul>'


def _table(values: dict[str, Any]) -> str:
    if not values:
        return "<p>The run left no environment.json.</p>"
    rows = "".join(f"<tr><td>{escape(key)}</td><td>{escape(_shown(value))}</td></tr>" for key, value in values.items())
    return f"<table>{rows}</table>"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {inner}" for key, inner in value.items() if inner is not None)
    if isinstance(value, list):
        return " ".join(map(str, value))
    return value if isinstance(value, str) else json.dumps(value)
