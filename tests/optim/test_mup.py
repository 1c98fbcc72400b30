"""µP: what a step changes does not depend on the width, and the model is an ordinary one."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest

from bench.mup import DOCS, HEAD_DIM, config_of, coordinates, drawing, sweeps
from nanotron.training.topology import parameter_specs

RATE = 2.0**-7
OPTIMIZERS: list[dict[str, Any]] = [{}, {"optimizer_factory": {"name": "muon", "muon_scale": "spectral"}}]


def spread(found: list[dict[str, float]]) -> float:
    """The largest ratio between widths of how far an output has come."""
    return max(max(by_name) / min(by_name) for by_name in zip(*(each.values() for each in found), strict=True))


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=["adamW", "muon"])
@pytest.mark.parametrize("widths", [(64, 256), pytest.param((64, 128, 256, 512, 1024), marks=pytest.mark.nightly)])
def test_outputs_change_as_much_at_every_width(widths: tuple[int, ...], optimizer: dict[str, Any]) -> None:
    configs = [config_of(width, RATE, mup=True, steps=10, data=False, **optimizer) for width in widths]
    assert spread([coordinates(config) for config in configs]) < 2.0


def test_without_mup_they_do_not() -> None:
    configs = [config_of(width, RATE, mup=False, steps=10, data=False) for width in (64, 256)]
    assert spread([coordinates(config) for config in configs]) > 3.0


def test_the_picture_in_the_docs_is_that_of_its_tables_whose_best_rates_stay_or_fall() -> None:
    found = sweeps((DOCS / "optimizers.md").read_text(encoding="utf-8"))
    assert (DOCS / "mup.svg").read_text(encoding="utf-8") == drawing(found)
    best = {name: [line.index(min(line)) for line in table.values()] for name, table in found.items()}
    assert best == {"µP": [5, 5, 5, 5], "without": [4, 2, 1, 0]}


def test_each_matrix_has_the_std_and_the_learning_rate_of_its_shape() -> None:
    specs = parameter_specs(config_of(256, RATE, mup=True, steps=1, data=False))
    found = {name: (spec.init.std, spec.lr_scale) for name, spec in specs.items()}
    quarter = 64 / 256  # base_width over the width
    assert found["embed.weight"] == (1.0, 1.0)
    assert found["norm.weight"] == (0.0, 1.0)
    assert found["head.weight"] == pytest.approx((1 / 16, quarter))
    assert found["layers.0.attn.kv.weight"] == pytest.approx((1 / 16, quarter))
    assert found["layers.0.attn.q.weight"] == pytest.approx((1 / 16 / sqrt(HEAD_DIM), quarter / sqrt(HEAD_DIM)))
    assert found["layers.0.mlp.gate_up.weight"] == pytest.approx((1 / 16, quarter))
    residual = sqrt(2 * 2)  # two layers: scaling_method
    assert found["layers.1.attn.out.weight"] == pytest.approx((1 / 16 / residual, quarter))
    assert found["layers.1.mlp.down.weight"] == pytest.approx((sqrt(1 / 3) / sqrt(768) / residual, quarter / 3))
