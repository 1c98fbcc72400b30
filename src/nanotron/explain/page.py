"""The page of a step: one file that needs no other. Its script draws what ``explanation.py`` found."""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from nanotron.explain.explanation import Data, explain
from nanotron.plan.command import Progress
from nanotron.report.chart import as_json, policy
from nanotron.report.page import STYLE

if TYPE_CHECKING:
    from nanotron.config import Config

OWN_STYLE = """
body{max-width:none;display:grid;grid-template-columns:minmax(0,1fr) minmax(300px,420px);gap:28px}
aside{position:sticky;top:16px;max-height:calc(100vh - 32px);overflow:auto;border-left:1px solid var(--line);
 padding-left:20px}
aside h2{margin-top:0;overflow-wrap:anywhere}aside h3{margin-top:14px}aside ol{padding-left:28px}
aside pre{margin:2px 0 8px;padding:8px;max-height:none;white-space:pre-wrap}mark{background:#fc06;color:inherit}
.at{margin:6px 0 0;font-size:13px}
button{font:inherit;font-size:13px;color:inherit;background:var(--panel);border:1px solid var(--line);border-radius:5px;
 padding:1px 7px;margin:1px;cursor:pointer;text-align:left}
button.event{border-left-width:5px}button.met{background:#fc06;border-color:#c90}
#mesh td{padding:3px 10px;white-space:nowrap;overflow-wrap:normal}
#mesh td:first-of-type{color:inherit}#mesh small{display:block;color:var(--soft)}
#mesh th{font-weight:400;color:var(--soft)}.held{overflow-x:auto;max-height:420px}
.swim{display:flex;max-height:70vh;overflow-y:auto}.swim .wide{margin:0;flex:1}#names{flex:none;width:74px}
#names button{display:block;height:28px;width:70px;margin:0 0 2px}
#lanes text{font:11px system-ui,sans-serif;fill:#fff;pointer-events:none}#lanes path{fill:var(--soft)}
.cell{cursor:pointer}.chosen rect,.chosen path{stroke:var(--ink);stroke-width:2}
.facts b{font-size:15px}.arrows{pointer-events:none}.arrows line{stroke-width:1.5;opacity:.2}
.arrows .met line{opacity:1}.arrows text{display:none}
#lanes .arrows .met text{display:block;fill:var(--ink);stroke:var(--paper);stroke-width:3;paint-order:stroke}
.shards{width:100%;height:120px;border:1px solid var(--line);background:var(--panel)}
.shards rect{stroke:var(--paper);stroke-width:.4}.legend i{height:8px}
@media(max-width:900px){body{display:block}aside{position:static;max-height:none}}
"""
SCHEDULE = "".join(
    f'<span><i style="background:{colour}"></i>{text}</span>'
    for colour, text in (
        ("#4a86c5", "F forward"),
        ("#4f9d69", "B backward of inputs"),
        ("#d9a03f", "W of weights"),
        ("#3f8f8f", "BW of both"),
        ("#8b93a1", "around the pipeline"),
    )
)


def write_explanation(config: Config, output: Path) -> Path:
    """Write the page of a config that has been checked; returns its path."""
    text = page(explain(config, Progress()))
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(text, encoding="utf-8")
    return output


def page(step: Data) -> str:
    """The page as text."""
    title, script = escape(f"A step of {step['name']}"), _script()
    facts = "".join(
        f"<div><span>{escape(name)}</span><b>{escape(text)}</b></div>" for name, text in step["facts"].items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta http-equiv="Content-Security-Policy" content="{policy(script)}">
<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}{OWN_STYLE}</style></head>
<body><main><h1>{title}</h1>
<p class="sub">Choose a rank, an action, a parameter. The step is the trainer's own, run on tensors without values.</p>
<section class="facts">{facts}</section>
<h2>Mesh: who sits where</h2><div class="wide"><table><tbody id="mesh"></tbody></table></div>
<h2>One step: what happens when</h2>
<p class="legend">{SCHEDULE}<br>Stripes: collectives along <span id="legend"></span> triangles: transfers between
stages · lengths: FLOPs, around the pipeline not to scale</p>
<p class="sub">Go through the lanes with Tab, then ← → ↑ ↓, Home and End.</p>
<div class="swim"><div id="names"></div><div class="wide">
<svg id="lanes" tabindex="0" role="img" aria-label="What every rank does, in order of time"></svg></div></div>
<h2>Parameters: who holds what</h2><label>With <input type="search" id="filter"> in their name</label>
<div class="held"><table><tbody id="parameters"></tbody></table></div></main>
<aside id="details" aria-live="polite"></aside>
<noscript><p>The page is drawn by its script, which the browser was told not to run.</p></noscript>
<script type="application/json" id="step">{as_json(step)}</script>
<script>{script}</script></body></html>
"""


def _script() -> str:
    return files("nanotron.explain").joinpath("explain.js").read_text(encoding="utf-8")
