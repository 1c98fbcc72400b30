"""What ranks must have alike: who is named, with which key and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanotron.config import get_config_from_dict
from nanotron.launch import alike
from nanotron.launch.alike import (
    Facts,
    data_disagreements,
    device_problems,
    differences,
    disagreements,
    facts_of,
    named,
    told,
)
from nanotron.launch.place import Place
from nanotron.parallel.agreement import Agreement
from tests.checkpoint.runs import values_of


def accounts(*mistakes: list[str], hosts: str = "aabb") -> list[dict[str, Any]]:
    return [{"host": host, "mistakes": lines} for host, lines in zip(hosts, mistakes, strict=True)]


@pytest.mark.parametrize(
    ("finders", "line"),
    [
        ([0, 1, 2, 3], "x: wrong"),
        ([2, 3], "on b: x: wrong"),
        ([1], "rank 1: x: wrong"),
        ([0, 2, 3], "ranks 0, 2, 3: x: wrong"),
    ],
)
def test_a_mistake_is_told_once_with_who_found_it(finders: list[int], line: str) -> None:
    found = accounts(*(["x: wrong"] if rank in finders else [] for rank in range(4)))
    assert told(found, local_world=2) == [line]


def test_many_ranks_are_counted() -> None:
    assert named([3]) == "rank 3"
    assert named(range(1, 101)) == "ranks 1, 2, 3, 4, 5, 6, 7, 8 and 92 more"


CHANGES = {
    "optimizer.learning_rate_scheduler.learning_rate": 2e-2,
    "general.seed": 4,
    "data_stages[0].data.seed": 6,
    "optimizer.clip_grad": 0.5,
    "model.model_config.rope_theta": 500000.0,
    "model.model_config.hidden_size": 64,
    "tokens.batch_accumulation_per_replica": 3,
    "tokens.train_steps": 9,  # from which lr_decay_steps follows
}


def changed(key: str, value: Any) -> dict[str, Any]:
    values = values_of("run")
    target: Any = values
    *path, last = key.replace("[0]", ".0").split(".")
    for part in path:
        target = target[int(part) if part.isdigit() else part]
    target[last] = value
    return values


@pytest.mark.parametrize("key", CHANGES)
def test_another_value_on_one_rank_is_named_with_both(key: str) -> None:
    mine = facts_of(get_config_from_dict(values_of("run")))
    theirs = facts_of(get_config_from_dict(changed(key, CHANGES[key])))
    before = mine.values[key]
    assert differences([mine, theirs, mine]) == [
        f"{key}: {CHANGES[key]} on rank 1, {before} on ranks 0, 2; give every rank the same config"
    ]


def test_versions_differ_in_a_line_of_their_own_and_what_only_follows_is_told_when_nothing_else_is() -> None:
    mine = Facts({"version of torch": "2.8.0", "model.model_config.vocab_size": 64}, [])
    theirs = Facts({"version of torch": "2.9.1", "model.model_config.vocab_size": 64}, [])
    assert differences([mine, theirs]) == [
        'version of torch: "2.8.0" on rank 0, "2.9.1" on rank 1; install the same on every machine'
    ]
    other = Facts({"version of torch": "2.8.0"}, [])  # the tokenizers differ
    assert differences([mine, other]) == [
        "model.model_config.vocab_size: 64 on rank 0, absent on rank 1; give every rank the same config"
    ]


def test_the_date_in_the_runs_name_is_no_difference() -> None:
    first, second = values_of("run"), values_of("run")
    first["general"]["run"], second["general"]["run"] = "a-1", "a-2"
    assert facts_of(get_config_from_dict(first)) == facts_of(get_config_from_dict(second))


def compare(rank: int, world: int, values: list[dict[str, Any]], mistakes: list[list[str]]) -> list[str]:
    import torch.distributed as dist

    agreement = Agreement("config", rank, world, dist.distributed_c10d._get_default_store())
    config = None if mistakes[rank] else get_config_from_dict(values[rank])
    return disagreements(agreement, Place(rank, world, rank, world), config, mistakes[rank])


def test_all_ranks_hear_what_one_has_otherwise_or_found_alone(pool) -> None:
    plain, other = values_of("run"), changed("optimizer.clip_grad", 0.5)
    assert pool.run(3, compare, [plain] * 3, [[], [], []]) == [[]] * 3
    line = "optimizer.clip_grad: 0.5 on rank 1, 1.0 on ranks 0, 2; give every rank the same config"
    assert pool.run(3, compare, [plain, other, plain], [[], [], []]) == [[line]] * 3
    assert pool.run(3, compare, [plain, other, plain], [[], [], ["x: wrong"]]) == [["rank 2: x: wrong"]] * 3


@pytest.mark.parametrize(
    ("devices", "told"),
    [
        ([("cpu", None)] * 3, []),
        ([("cuda", "a"), ("cuda", "b")], []),
        ([("cuda", None), ("cuda", None)], []),  # a kind of device that has no such name
        ([("cuda", "a"), ("cuda", "b"), ("cuda", "a")], ["ranks 0, 2 have one cuda device (a) between them; start"]),
        ([("cuda", "a"), ("cpu", None), ("cuda", "b")], ["cpu on rank 1, cuda on ranks 0, 2; let"]),
    ],
    ids=["CPUs", "one each", "unknown", "shared", "mixed"],
)
def test_each_rank_needs_a_device_of_its_own_and_all_of_one_kind(devices: list[Any], told: list[str]) -> None:
    found = device_problems(devices)
    assert len(found) == len(told)
    assert all(part in line for part, line in zip(told, found, strict=True))


def test_the_hosts_are_named_where_there_are_several() -> None:
    facts = [Facts({"a.b": 1}, ["a.b"], "node1"), Facts({"a.b": 1}, ["a.b"], "node1"), Facts({"a.b": 2}, [], "node2")]
    assert differences(facts) == ["a.b: 2 on rank 2 (node2), 1 on ranks 0, 1 (node1); give every rank the same config"]


def test_other_code_under_the_same_version_is_a_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = get_config_from_dict(values_of("run"))
    before = facts_of(config).values
    (tmp_path / "nanotron/launch").mkdir(parents=True)
    (tmp_path / "nanotron/launch/alike.py").write_text("# another state of the same version")
    monkeypatch.setattr(alike, "__file__", str(tmp_path / "nanotron/launch/alike.py"))
    after = facts_of(config).values
    assert {key for key in before if before[key] != after[key]} == {"version of nanotron's code"}


def compare_data(rank: int, world: int, fingerprints: list[dict[str, Any]]) -> list[str]:
    import torch.distributed as dist

    agreement = Agreement("data", rank, world, dist.distributed_c10d._get_default_store())
    return data_disagreements(agreement, fingerprints[rank])


def test_data_that_a_rank_has_otherwise_is_named(pool) -> None:
    one, other = ({"main": [{"name": "corpus", "size": size, "windows": 64}]} for size in (100, 90))
    assert pool.run(2, compare_data, [one, one]) == [[], []]
    line = "data of main[0].size: 100 on rank 0, 90 on rank 1; let every rank read the same files"
    assert pool.run(2, compare_data, [one, other]) == [[line]] * 2
