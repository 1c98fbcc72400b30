"""Loss spikes: one line each, by a rule on the losses alone, also across a resume; and the line about slow ranks."""

from __future__ import annotations

import logging
import math
import random
from pathlib import Path

import pytest
import torch

from nanotron.metrics.record import Metrics
from nanotron.metrics.spikes import NEEDED, WINDOW, LossSpikes, Spike
from nanotron.parallel.mesh import Mesh
from tests.metrics.test_record import config, values


def spikes_of(losses: list[float | None], stages: list[str] | None = None) -> list[Spike]:
    watch = LossSpikes()
    found = [watch.add(n + 1, loss, stages[n] if stages else "main") for n, loss in enumerate(losses)]
    return [spike for spike in found if spike is not None]


def falling(count: int, noise: float = 0.02) -> list[float]:
    """A loss as runs have it: steep at first, then flat and noisy."""
    draw = random.Random(0)
    return [2.5 + 8 * math.exp(-step / 30) + draw.gauss(0, noise) for step in range(count)]


def test_an_ordinary_run_has_no_spikes() -> None:
    assert spikes_of(list(falling(2000))) == []


def test_a_spike_is_told_once_at_its_first_step() -> None:
    losses = falling(400)
    losses[300:305] = [4.0, 6.0, 5.0, 4.0, 3.5]
    losses[350] = 3.5
    first, second = spikes_of(list(losses))
    assert (first.step, first.loss, second.step) == (301, 4.0, 351)
    assert first.usual == pytest.approx(2.5, abs=0.02)
    assert str(first).startswith("step 301: loss spike, 4 where 2.49")


def test_a_small_rise_of_a_quiet_loss_is_no_spike() -> None:
    assert spikes_of([2.0] * 100 + [2.09]) == []
    assert len(spikes_of([2.0] * 100 + [2.11])) == 1


def test_a_new_level_is_normal_after_a_while() -> None:
    assert [spike.step for spike in spikes_of([2.0] * 100 + [3.0] * (WINDOW + NEEDED) + [5.0])] == [
        101,
        100 + WINDOW + NEEDED + 1,
    ]


def test_the_first_losses_of_a_data_stage_are_its_own_measure() -> None:
    losses = [2.0] * 100 + [3.0] * 30
    assert len(spikes_of(list(losses))) == 1
    assert spikes_of(list(losses), ["one"] * 100 + ["two"] * 30) == []


def test_losses_that_are_none_are_passed_over() -> None:
    assert spikes_of([2.0] * 50 + [None, math.nan, math.inf] + [2.0] * 50) == []


def test_a_resumed_run_warns_as_one_that_never_stopped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Metrics(config(), Mesh(), tmp_path, device=torch.device("cpu"))
    for step in range(1, 31):
        first.log(step, values(step, lm_loss=2.0))
    first.close()
    resumed = Metrics(config(), Mesh(), tmp_path, device=torch.device("cpu"), start_step=25)
    with caplog.at_level(logging.WARNING, logger="nanotron"):
        resumed.log(26, values(26, lm_loss=3.0, first_sample=500))
    resumed.close()
    assert caplog.messages == ["step 26: loss spike, 3 where 2 was usual; its first sample is 500 of its data stage"]


def test_the_line_about_ranks_names_their_coordinates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    measured = {
        "slowest_rank": 5,
        "slowest_rank_ms": 400.0,
        "median_rank_ms": 320.0,
        "fullest_rank": 0,
        "fullest_rank_gib": 1.5,
    }
    metrics = Metrics(config(), Mesh({"pp": 2, "dp": 1, "tp": 4}), tmp_path, device=torch.device("cpu"))
    with caplog.at_level(logging.INFO, logger="nanotron"):
        metrics.log(1, values(1, **measured))
    metrics.close()
    assert caplog.messages[-1] == (
        "step 1: rank 5 (pp 1, tp 1) worked longest, 400 ms, 80% of the step, 1.25 times the median rank; "
        "rank 0 (pp 0, tp 0) holds most, 1.5 GiB"
    )
