"""`nanotron timeline`: when every action of a run's pipeline will happen, and when it did."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from nanotron.errors import ConfigError
from nanotron.pipeline.custom import is_custom, to_csv
from nanotron.pipeline.draw import Panel, to_html, to_svg, to_terminal
from nanotron.pipeline.schedules import SCHEDULE_NAMES, default_virtual_stages
from nanotron.pipeline.simulate import Peak, simulate
from nanotron.pipeline.timeline import StageCost, Timeline
from nanotron.pipeline.trace import costs_of, read_trace, to_chrome
from nanotron.plan.layouts import layout_problems
from nanotron.plan.stage_costs import counted_costs, given_costs, profiled_costs
from nanotron.training.topology import pipeline_schedule

if TYPE_CHECKING:
    from nanotron.config import Config


@dataclass(frozen=True)
class Picture:
    """Timelines to be drawn below each other, in one unit of time, and what each schedule keeps in memory."""

    panels: list[Panel]
    unit: str
    peaks: dict[str, list[Peak]]

    def text(self, width: int | None = None) -> str:
        """For the terminal."""
        return "\n".join([to_terminal(self.panels, self.unit, width), "", *_table(self.peaks)])

    def write(self, path: Path) -> None:
        """As the file's suffix says: .svg, .html, or .json, a Chrome trace."""
        if path.suffix == ".svg":
            text = to_svg(self.panels, self.unit)
        elif path.suffix == ".html":
            text = to_html(self.panels, self.unit)
        elif path.suffix == ".json":
            text = json.dumps(to_chrome([(panel.title, panel.timeline) for panel in self.panels]))
        else:
            raise ConfigError(
                f"--output {path}: end the name in .svg, .html, .json (a Chrome trace) or .csv (the schedule)"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def predict(
    config: Config,
    *,
    costs: str | None = None,
    transfer: float = 0.0,
    schedules: Sequence[str] = (),
    run: Path | None = None,
    step: int | None = None,
) -> Picture:
    """The timeline of `config` under each schedule (its own when none is named), below that of a measured step.

    `costs`: `F:B:W`, `flops`, `profile`, or `trace` (of the measured step); None is the last of these that there is.
    `transfer`: time of one transfer, in the costs' unit. `run`: a run's folder with a pipeline trace.
    """
    panels, peaks = [], {}
    measured: Timeline | None = None
    if run is not None:
        found, measured = read_trace(run / "traces", step)
        panels.append(Panel(f"{measured.name}, measured in step {found}", measured))
    costs = costs or ("trace" if measured else "profile")
    unit = "s" if costs in ("profile", "trace") else "units"
    if measured and unit != "s":
        raise ConfigError(f"--costs {costs} has no seconds to set beside --run {run}; use trace or profile")
    for name in schedules or [config.parallelism.pp_engine]:
        one = _with_schedule(config, name)
        simulation = simulate(
            pipeline_schedule(one),
            one.tokens.batch_accumulation_per_replica,
            _costs(one, costs, measured),
            transfer=transfer,
            eager_weights=unit == "s" and _ranks_wait_on_the_host(),
        )
        panels.append(Panel(f"{name}, predicted", simulation.timeline))
        peaks[name] = simulation.peaks
    return Picture(panels, unit, peaks)


def as_csv(config: Config) -> str:
    """The config's schedule as CSV, which `parallelism.pp_engine` accepts."""
    return to_csv(pipeline_schedule(config), config.tokens.batch_accumulation_per_replica)


def _ranks_wait_on_the_host() -> bool:
    """Whether ranks of this machine can do a pending W while they wait: over gloo yes, devices queue their work."""
    from nanotron.launch.place import Place, choose_device

    return choose_device(Place())[1] == "gloo"


def _with_schedule(config: Config, name: str) -> Config:
    """The config with another schedule; raises ConfigError when it cannot run it."""
    layout = config.parallelism
    if name == layout.pp_engine:
        return config
    if not is_custom(name) and name not in SCHEDULE_NAMES:
        legal = ", ".join(SCHEDULE_NAMES)
        raise ConfigError(f"--schedule {name}: not one of {legal}, a .csv file or file.py:function")
    virtual_stages = default_virtual_stages(name)
    pp_layers = layout.pp_layers if virtual_stages == layout.pp_virtual_stages else None
    changed = replace(layout, pp_engine=name, pp_virtual_stages=virtual_stages, pp_layers=pp_layers)
    other = replace(config, parallelism=changed)
    if problems := layout_problems(other):
        raise ConfigError(problems)
    return other


def _costs(config: Config, costs: str, measured: Timeline | None) -> StageCost:
    if costs == "flops":
        return counted_costs(config)
    if costs == "profile":
        return profiled_costs(config)
    if costs != "trace":
        return given_costs(config, costs)
    if measured is None:
        raise ConfigError("--costs trace needs --run, the folder of a run with a pipeline trace")
    stages = {span.stage for span in measured.spans}
    if stages != set(pipeline_schedule(config).holders):
        raise ConfigError(
            f"--run has a trace of {len(stages)} stages, {config.parallelism.pp_engine} has "
            f"{pipeline_schedule(config).num_stages} here; use --costs profile"
        )
    return costs_of(measured)


def _table(peaks: dict[str, list[Peak]]) -> list[str]:
    """What each rank holds at most."""
    lines = ["microbatches of a chunk that a rank holds at most: waiting for B, waiting for W, together"]
    for name, ranks in peaks.items():
        cells = [f"{peak.activations}, {peak.stashes}, {peak.held}" for peak in ranks]
        lines.append(f"{name:<18} " + "   ".join(f"rank {rank}: {cell}" for rank, cell in enumerate(cells)))
    return lines
