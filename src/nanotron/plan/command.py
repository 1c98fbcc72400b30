"""`nanotron plan`: one layout predicted, or the best one found."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from nanotron.errors import ConfigError, complain, say
from nanotron.plan.fixes import cheapest_fixes
from nanotron.plan.hardware import find_cluster
from nanotron.plan.layouts import changed
from nanotron.plan.predict import Planner
from nanotron.plan.search import search
from nanotron.plan.text import fixes_text, plan_text, search_text

if TYPE_CHECKING:
    from nanotron.config import Config

FITS, DOES_NOT_FIT = 0, 3
SOON_S, LINE_S = 2.0, 10.0


def plan(config: Config, *, gpu: str, per_node: int, nodes: int | None) -> int:
    """Print the plan of a config that has been checked; returns 0, or 3 when it does not fit."""
    cluster = find_cluster(gpu, per_node)
    world = config.parallelism.world_size
    if nodes is not None and nodes * per_node != world:
        raise ConfigError(
            f"--nodes {nodes} of {per_node} devices are {nodes * per_node}, but parallelism.dp · cp · tp · pp = {world}"
            f"; use --nodes {-(-world // per_node)}, change the layout, or add --search to find one"
        )
    planner = Planner(cluster)
    found = planner.plan(config, every_layer=True)
    say(plan_text(found, planner.ramp(config)))
    if found.fits:
        return FITS
    say("", fixes_text(cheapest_fixes(planner, config)))
    return DOES_NOT_FIT


class Progress:
    """Tells how far something is, on standard error: once it has taken 2 s, and then every 10 s."""

    def __init__(self) -> None:
        self._next = time.monotonic() + SOON_S

    def __call__(self, line: str) -> None:
        if time.monotonic() >= self._next:
            complain(line)
            self._next = time.monotonic() + LINE_S


def plan_search(config: Config, *, gpu: str, per_node: int, nodes: int | None, output: Path) -> int:
    """Print the fastest layouts on these nodes and write the best one's config; returns 0, or 3 when none fits."""
    if output.exists():
        raise ConfigError(f"--output {output}: exists already; name another file, or delete it")
    planner = Planner(find_cluster(gpu, per_node))
    devices = nodes * per_node if nodes is not None else config.parallelism.world_size
    found = search(planner, config, devices, tell=Progress())
    say(search_text(found))
    if not found.best:
        say(f"None of {found.num_legal} legal layouts fits on {devices} × {planner.cluster.device.name}.")
        return DOES_NOT_FIT
    change, best = found.best[0][0], planner.plan(found.best[0][1].config, every_layer=True)
    header = f"The fastest of {found.num_legal} layouts on {devices} × {planner.cluster.device.name}, as predicted"
    changed(config, change).save_as_yaml(output, resolved=True, header=header)
    say("", plan_text(best, planner.ramp(best.config)), "", f"{output}: the first of them, to train with")
    return FITS
