"""µP: initial weights and learning rates by which a model's width leaves the best learning rate where it is. No torch.

    matrix [out, in]    std 1/√in · min(1, √(out/in))    learning rate · base/in (AdamW), · out/in (SGD), · 1 (Muon)
    embedding           std 1                            learning rate
    norms, biases                                        learning rate

So each matrix's first values and updates have a spectral norm of the order of √(out/in), and change its output as much
at every width (arXiv 2310.17813; AdamW's elements all move alike, so what it does to an output grows with the input's
width). Scores are divided by a head's dims e instead of √e: the queries' weights are smaller by √e, and so are their
updates, which is the same model without a multiplier in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING

from nanotron.models.specs import EMBED
from nanotron.parallel.params import Init, ParamSpec

if TYPE_CHECKING:
    from nanotron.config import RandomInit


def width_independent(specs: Mapping[str, ParamSpec], init: RandomInit, head_dim: int) -> dict[str, ParamSpec]:
    """The parameters under µP; of their own standard deviations only what part of ``init.std`` they are counts."""
    return {name: _width_independent(spec, init, head_dim) for name, spec in specs.items()}


def _width_independent(spec: ParamSpec, init: RandomInit, head_dim: int) -> ParamSpec:
    if spec.name == EMBED:
        return replace(spec, init=Init("normal", 1.0))
    smaller = 1 / sqrt(head_dim) if ".attn.q." in spec.name else 1.0
    if not spec.decay:  # a norm or a bias
        return replace(spec, lr_scale=spec.lr_scale * smaller)
    rows, columns = spec.shape[-2:]
    first = min(1.0, sqrt(rows / columns)) / sqrt(columns)
    rate = {"adamW": init.mup_base_width / columns, "sgd": rows / columns * smaller, "muon": 1.0}[spec.optimizer]
    return replace(
        spec,
        init=Init("normal", first * smaller * spec.init.std / init.std),
        lr_scale=spec.lr_scale * rate * smaller,
    )
