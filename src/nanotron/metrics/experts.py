"""How evenly experts are used: what a step's row tells of it, the file behind the heat maps, and collapsed routers.

    L layers that have experts   E experts of a layer   k experts of each token

An expert's load is how many tokens of the step's global batch chose it, over an even load: what each would get if all
were used alike, k/E of the tokens. The counts are those of the control word, so every layout tells the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from nanotron.metrics.columns import DROPPED_TOKENS, EXPERT_LOAD, EXPERT_LOAD_LAYER, ROUTER_ENTROPY
from nanotron.metrics.sinks import JsonLines, Row

if TYPE_CHECKING:
    from nanotron.config import Config

Numbers = npt.NDArray[np.float64]

LOADS_FILE = "expert_loads.jsonl"
RECORDS = 200
"""How often the loads of all experts are kept in a run, unless the config says otherwise."""
STEPS = 20
"""In a row, after which a router is said to have collapsed."""
FEW = 16.0
"""Tokens that an expert gets when all are used alike: with fewer, one that got none proves nothing."""


class Told(NamedTuple):
    """What routers tell of one step."""

    columns: dict[str, float]
    """Of the step's row."""
    loads: Row | None
    """The step's line in the file of the loads, in steps that have one."""
    collapses: list[str]
    """A line for each layer whose router has collapsed, once."""


class ExpertUse:
    """How a run's experts are used, in order of step."""

    def __init__(self, config: Config, run_dir: Path, start_step: int) -> None:
        """Raises OSError where the file of the loads cannot be opened."""
        model, moe = config.model.model_config, config.model.model_config.moe_config
        assert moe is not None
        self._layers, self._experts, self._top_k = model.sparse_layers, moe.num_experts, moe.top_k
        self._interval = config.metrics_logging.expert_interval or max(1, config.tokens.train_steps // RECORDS)
        self._collapsed_for = np.zeros(len(self._layers), dtype=np.int64)
        self._told: set[int] = set()
        self.file = JsonLines(run_dir / LOADS_FILE, start_step=start_step)

    def step(self, step: int, vectors: Mapping[str, Sequence[float]]) -> Told:
        """Take the next step's; ``vectors``: "load" [L·E] and "entropy" [L] of the control word."""
        counts = np.array(vectors["load"]).reshape(len(self._layers), self._experts)
        even = counts.mean(1, keepdims=True)  # [L, 1] tokens
        entropy = np.array(vectors["entropy"]) / (even[:, 0] * self._experts / self._top_k)
        entropy /= math.log(self._experts) or 1.0
        loads = counts / even
        is_recorded = step == 1 or step % self._interval == 0
        return Told(
            self._columns(loads, entropy, each_layer=is_recorded),
            self._row(step, loads) if is_recorded else None,
            list(self._collapses(step, loads, float(even[0, 0]))),
        )

    def _columns(self, loads: Numbers, entropy: Numbers, *, each_layer: bool) -> dict[str, float]:
        most = loads.max(1)
        worst = int(most.argmax())
        columns = {
            EXPERT_LOAD: float(most[worst]),
            EXPERT_LOAD_LAYER: self._layers[worst],
            ROUTER_ENTROPY: float(entropy.mean()),
            DROPPED_TOKENS: 0,
        }
        for name, numbers in ((EXPERT_LOAD, most), (ROUTER_ENTROPY, entropy)) if each_layer else ():
            pairs = zip(self._layers, numbers.tolist(), strict=True)
            columns |= {f"{name}/layers.{layer}": number for layer, number in pairs}
        return columns

    def _row(self, step: int, loads: Numbers) -> Row:
        """Each expert's load in percent, a text for each layer: short, and legible."""
        percent = np.rint(100 * loads).astype(int).astype(str).tolist()
        texts = {f"layers.{layer}": " ".join(row) for layer, row in zip(self._layers, percent, strict=True)}
        return {"step": step, **texts}

    def _collapses(self, step: int, loads: Numbers, tokens: float) -> Iterator[str]:
        """``tokens``: an even load."""
        even = self._top_k / self._experts
        shares, unused = loads.max(1) * even, (loads == 0).sum(1)
        collapsed = (shares > (1 + even) / 2) | ((unused > 0) & (tokens >= FEW))
        self._collapsed_for = np.where(collapsed, self._collapsed_for + 1, 0)
        for index in np.flatnonzero(self._collapsed_for >= STEPS):
            if (layer := self._layers[index]) not in self._told:
                self._told.add(layer)
                yield (
                    f"step {step}: the router of layer {layer} has collapsed, since {STEPS} steps: {unused[index]} of"
                    f" {self._experts} experts get no token, and expert {loads[index].argmax()} gets"
                    f" {shares[index]:.0%} of all tokens, where {even:.0%} would be even"
                )


def worst_load(row: Mapping[str, Any]) -> str:
    """The busiest expert's load over an even one, and its layer, for the console."""
    return f"{row[EXPERT_LOAD]:.2f} in layer {row[EXPERT_LOAD_LAYER]}"
