"""One self-contained HTML page of a run: no script, no outside file, legible in light and dark.

facts      the run's last numbers at a glance
health     spikes, numbers that were not finite, failures, the slowest rank
charts     loss, learning rate, gradient norm, throughput, step time, memory, …; layers when they were measured; experts
timeline   of the last traced step
config and environment
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from nanotron.metrics.columns import FULLEST_RANK_GIB, MEDIAN_RANK_MS, SLOWEST_RANK_MS
from nanotron.pipeline.draw import Panel, to_svg
from nanotron.report.chart import legend, line_chart
from nanotron.report.experts import expert_charts, heat_legend, heat_maps
from nanotron.report.facts import facts, health
from nanotron.report.layers import TITLES, layer_charts
from nanotron.report.run import RunFiles, read_run
from nanotron.report.series import series_of

# title, whether its scale may be logarithmic, and its (column, name of the line); lines without numbers are left out
CHARTS: tuple[tuple[str, bool, tuple[tuple[str, str], ...]], ...] = (
    ("Loss", False, (("lm_loss", "training loss"), ("val_loss", "validation loss"))),
    ("z-loss", False, (("z_loss", "z-loss"),)),
    ("Router losses", False, (("balance_loss", "balance"), ("router_z_loss", "z-loss of routers"))),
    ("Learning rate", False, (("lr", "learning rate"),)),
    ("Gradient norm, before clipping", True, (("grad_norm", "gradient norm"),)),
    ("Tokens per second", False, (("tokens_per_sec", "tokens/s"),)),
    ("Time of a step, ms", False, (("time_per_iteration_ms", "ms"),)),
    ("Model FLOPs utilization", False, (("mfu", "MFU"),)),
    ("Memory, GiB", False, (("memory_gib", "rank 0"), (FULLEST_RANK_GIB, "fullest rank"))),
    ("Work of a step, ms", False, ((SLOWEST_RANK_MS, "slowest rank"), (MEDIAN_RANK_MS, "median rank"))),
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
.legend{margin:0 0 4px;font-size:12px;color:var(--soft);line-height:1.7}.legend span{margin-right:12px}
.legend i{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:5px}
.health{margin:0;padding-left:20px}.health .bad{color:#c22}
.timeline{overflow-x:auto}.timeline svg{max-width:100%;height:auto}
pre{background:var(--panel);border:1px solid var(--line);border-radius:8px;padding:12px;overflow:auto;
 font:12.5px/1.45 ui-monospace,Menlo,Consolas,monospace;max-height:520px}
table{border-collapse:collapse;font-size:14px}td{padding:3px 18px 3px 0;vertical-align:top;overflow-wrap:anywhere}
td:first-child{color:var(--soft);white-space:nowrap}
summary{cursor:pointer;font-weight:600}
"""


def write_report(folder: Path, output: Path | None = None) -> Path:
    """Write the page of a run directory, ``report.html`` in it unless ``output`` says otherwise; returns its path."""
    path = output or folder / "report.html"
    page = report(read_run(folder))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    return path


def report(run: RunFiles) -> str:
    """The page as text."""
    title = escape(_name(run))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>\n<body>\n'
        + "\n".join([f"<h1>{title}</h1>", *_sections(run)])
        + "\n</body></html>\n"
    )


def _sections(run: RunFiles) -> Iterator[str]:
    name = run.config.get("general", {}).get("run")
    yield f'<p class="sub">{escape(str(run.folder))}{f" · {escape(str(name))}" if name else ""}</p>'
    yield (
        '<section class="facts">'
        + "".join(f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in facts(run))
        + "</section>"
    )
    yield "<h2>Health</h2>" + _health(run)
    yield '<h2>Course</h2><section class="charts">' + "".join(_charts(run.rows)) + "</section>"
    layers = layer_charts(run.rows)
    if layers:
        figures = (
            _figure(title, line_chart(s, logarithmic=title != TITLES["weight_norm"]), legend(s))
            for title, s in layers.items()
        )
        yield '<h2>Layers</h2><section class="charts">' + "".join(figures) + "</section>"
    if run.expert_loads:
        lines = expert_charts(run.rows, run.expert_loads).items()
        maps = [_figure(title, drawing, heat_legend()) for title, drawing in heat_maps(run.expert_loads)]
        charts = [_figure(title, line_chart(s), legend(s)) for title, s in lines]
        yield f'<h2>Experts</h2><section class="charts">{"".join(charts + maps)}</section>'
    if run.timeline is not None:
        step, timeline = run.timeline
        drawing = to_svg([Panel(f"{timeline.name}, measured in step {step}", timeline)], "s")
        yield f'<h2>Timeline</h2><section class="timeline">{drawing}</section>'
    yield "<h2>Environment</h2>" + _table(run.environment)
    config = f"<pre>{escape(run.config_text)}</pre>" if run.config_text else "<p>The run left no config.yaml.</p>"
    yield f"<h2>Config</h2><details><summary>config.yaml, with every default</summary>{config}</details>"


def _charts(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for title, logarithmic, lines in CHARTS:
        found = [series_of(rows, column, name) for column, name in lines]
        series = [one for one in found if one is not None]
        if series:
            yield _figure(title, line_chart(series, logarithmic=logarithmic), legend(series))


def _figure(title: str, drawing: str, names: str) -> str:
    return f"<figure><h3>{escape(title)}</h3>{names}{drawing}</figure>"


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


def _name(run: RunFiles) -> str:
    general = run.config.get("general", {})
    return str(general.get("project") or run.folder.resolve().name)
