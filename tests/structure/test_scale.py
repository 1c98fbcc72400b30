"""What a rank does at its start among 4,096, counted and timed without the others, in a group that pretends."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from nanotron.check import examine
from nanotron.config.presets import starter
from nanotron.data.feed import Feed
from nanotron.parallel import mesh as module
from nanotron.parallel.mesh import Mesh, training_axes
from nanotron.training.topology import mesh_axes, parameter_specs, tied_stages

WORLD = 4096
AXES = training_axes(dp=64, tp=8, pp=8, num_key_value_heads=4)


@pytest.fixture
def pretended() -> Iterator[None]:
    dist.init_process_group("fake", rank=1234, world_size=WORLD, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("pretended")
def test_a_rank_creates_one_group_for_each_purpose_and_product_of_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[list[int]] = []
    new_group = dist.new_group

    def counted(ranks: list[int], **options: Any) -> Any:
        created.append(ranks)
        assert options["use_local_synchronization"]
        return object() if options["backend"] == "gloo" else new_group(ranks, **options)  # rows: from host to host

    monkeypatch.setattr(dist, "new_group", counted)
    mesh = Mesh(AXES, 1234)
    mesh.create_groups([("dp",)], tied_stages=(0, 7), rows=True)
    # of tp: compute, gradients, and tp_rep; of dp: control, gradients, weights; rows; to and from two stages
    assert len(created) == 11
    assert all(1234 in ranks for ranks in created)


def test_where_the_world_splits_every_rank_asks_for_the_same_groups_and_finds_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    splits: list[list[list[int]]] = []
    urgent: list[bool] = []

    def split(split_ranks: list[list[int]], timeout: Any, pg_options: Any) -> object | None:
        splits.append(split_ranks)
        urgent.append(pg_options is not None and pg_options.is_high_priority_stream)
        return object() if any(rank in group for group in split_ranks) else None

    monkeypatch.setattr(module, "_can_split", lambda: True)
    monkeypatch.setattr(dist, "new_group", lambda ranks, backend, **_: backend == "gloo" or 1 / 0)  # of rows alone
    monkeypatch.setattr(dist, "split_group", split)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=SimpleNamespace), raising=False)
    axes = training_axes(dp=4, tp=4, pp=3, num_key_value_heads=2, cp=2, ep=2)
    asked = []
    for rank in range(96):
        mesh = Mesh(axes, rank)
        mesh.create_groups([("edp",)], tied_stages=(0, 2), rows=True)
        assert mesh.group("tp_rep", purpose="gradients") is not None
        here, after = mesh.coord("pp"), (mesh.coord("pp") + 1) % 3
        assert mesh.edge_group(here, after) is not mesh.edge_group(after, here)
        asked.append(splits[:])
        splits.clear()
    assert all(one == asked[0] for one in asked)
    assert urgent == urgent[: len(asked[0])] * 96
    waited_for = [groups[0] for groups, first in zip(asked[0], urgent, strict=False) if first]
    inside = [list(Mesh(axes, 0).ranks_along(axis)) for axis in ("tp", "cp", "ep")]
    assert waited_for == [*inside, *([0, 32], [0, 32], [0, 64], [0, 64], [0], [0])]  # of edges, to and fro
    for groups in asked[0]:
        members = [rank for group in groups for rank in group]
        assert len(members) == len(set(members)), "no rank is in two"
    assert [sum(map(len, groups)) for groups in asked[0]].count(96) == len(asked[0]) - 1, "all but the tied"


def process_seconds(action: Any) -> float:
    began = time.process_time()
    action()
    return time.process_time() - began


def peak_bytes(action: Any) -> int:
    tracemalloc.start()
    action()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.usefixtures("pretended")
def test_the_start_of_a_rank_takes_two_seconds_and_no_memory_that_grows_with_the_world(tmp_path: Path) -> None:
    text = starter("70b", WORLD).replace("train_steps: 100000", "train_steps: 1000")
    path = tmp_path / "x.yaml"
    path.write_text(text.replace("    vocab_size: 128256 # at least the tokenizer's", "    vocab_size: 128256"))

    def start() -> None:
        config = examine(path, ["data_stages=[{name: a, start_training_step: 1, data: {dataset: null}}]"], WORLD).config
        mesh = Mesh(mesh_axes(config), 1234)
        (holders,) = tied_stages(config).values() or [()]
        mesh.create_groups({spec.reduce_axes(mesh) for spec in parameter_specs(config).values()}, holders)
        feed = Feed(config, mesh, device=torch.device("cpu"))
        feed.step(1)
        feed.close()

    start()  # what is imported or made once is made here
    assert process_seconds(start) < 2.0
    assert peak_bytes(start) < 2 * 2**20
    few, many = (peak_bytes(partial(create_groups, dp)) for dp in (8, 64))
    assert many - few < 16 * WORLD, "not even a number for each rank"


def create_groups(dp: int = 64) -> None:
    axes = training_axes(dp=dp, tp=8, pp=8, num_key_value_heads=4)
    Mesh(axes, 123).create_groups([("dp",)], tied_stages=(0, 7))  # no rows: hosts that are not there cannot meet


@pytest.mark.usefixtures("pretended")
def test_a_split_of_the_world_into_groups_is_quick_and_small_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_can_split", lambda: True)
    monkeypatch.setattr(dist, "split_group", lambda split_ranks, timeout, pg_options: object())

    assert process_seconds(create_groups) < 1.0
    assert peak_bytes(create_groups) < 256 * WORLD
