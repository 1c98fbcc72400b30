"""What would change the order of a stage that was begun is refused on resume, by its key and both values."""

import json
import logging

import pytest
import torch

from nanotron.config import get_config_from_dict
from nanotron.data.order.changes import order_changes
from nanotron.errors import ConfigError
from nanotron.parallel.mesh import Mesh
from nanotron.training.topology import mesh_axes
from nanotron.training.trainer import train
from tests.checkpoint.runs import metrics_of, values_of
from tests.data.fixtures import make_config
from tests.data.test_stream import EXAMPLES

FOLDERS = {"dataset_folder": ["x", "y"], "dataset_weights": [1, 3]}
CUSTOM = {"python": f"{EXAMPLES}:counting", "arguments": {"step": 2}}
HUB = {"hf_dataset_or_datasets": ["x", "y"], "streaming": True}


def plain(dataset, *, sequence_length=8, stage=None, **data):
    stages = [
        {"name": "first", "start_training_step": 1},
        {"name": "a", "start_training_step": 5, "data": {"dataset": dataset, **data}, **(stage or {})},
    ]
    return make_config(data_stages=stages, sequence_length=sequence_length).to_dict()


def changes(saved, now, *, begun=160, is_stream=False):
    lines = order_changes(saved, now, {"first": 0, "a": begun}, {"a": {}} if is_stream else {}, {})
    return [line.removesuffix(", 160 samples into stage 'a'") for line in lines]


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ({"seed": 42}, {"seed": 43}, "data_stages[1].data.seed was 42 in the checkpoint and is 43 now"),
        ({"shuffle_block": 8}, {}, "data_stages[1].data.shuffle_block was 8 in the checkpoint and is null now"),
        (
            {"dataset": {**FOLDERS, "dataset_weights": [1, 2]}},
            {},
            "data_stages[1].data.dataset.dataset_weights was [1.0, 2.0] in the checkpoint and is [1.0, 3.0] now",
        ),
        ({"sequence_length": 16}, {}, "tokens.sequence_length was 16 in the checkpoint and is 8 now"),
        (
            {},
            {"stage": {"sequence_length": 16}},
            "data_stages[1].sequence_length was 8 in the checkpoint and is 16 now",
        ),
        (
            {"dataset": CUSTOM},
            {"dataset": {**CUSTOM, "arguments": {"step": 3}}},
            'data_stages[1].data.dataset.arguments was {"step": 2} in the checkpoint and is {"step": 3} now',
        ),
        (
            {"dataset": HUB},
            {"dataset": {**HUB, "hf_dataset_or_datasets": "x"}},
            'data_stages[1].data.dataset.hf_dataset_or_datasets was ["x", "y"] in the checkpoint and is "x" now',
        ),
    ],
)
def test_a_key_that_decides_the_order_is_named_with_both_values(before, after, line):
    saved, now = plain(**{"dataset": FOLDERS, **before}), plain(**{"dataset": FOLDERS, **after})
    assert changes(saved, now) == [line]
    assert changes(saved, now, begun=0) == []  # a stage that is not begun may be anything


def test_what_leaves_the_order_as_it_is_may_change():
    saved = plain(FOLDERS, num_loading_workers=1)
    for now in (
        saved,
        plain({**FOLDERS, "dataset_weights": [2, 6]}, num_loading_workers=3, repeat=False),
        plain({**FOLDERS, "dataset_folder": ["elsewhere/x", "elsewhere/y"]}),  # fingerprints know what they hold
        plain(FOLDERS, stage={"start_training_step": 3, "sequence_length": 8}),
        plain({"dataset_folder": "z"}, stage={"name": "b"}),
    ):
        assert changes(saved, now) == []


def test_the_seed_matters_to_a_stream_only_where_it_is_shuffled():
    assert changes(plain(HUB, seed=1), plain(HUB, seed=2), is_stream=True) == []
    (line,) = changes(plain(CUSTOM, seed=1), plain(CUSTOM, seed=2))  # rows, then
    assert line.startswith("data_stages[1].data.seed was 1")
    (line,) = changes(plain(HUB, seed=1, shuffle_block=4), plain(HUB, seed=2, shuffle_block=4), is_stream=True)
    assert line.startswith("data_stages[1].data.seed was 1")
    (line,) = changes(plain(HUB), plain(HUB, shuffle_block=4), is_stream=True)
    assert line.startswith("data_stages[1].data.shuffle_block was null")


def test_a_run_refuses_to_go_on_in_another_order_unless_it_is_allowed(tmp_path, caplog):
    def run(*, name="only", allow_data_change=False, **data):
        values = values_of(tmp_path, checkpoints__checkpoint_interval=2, tokens__train_steps=steps)
        values["data_stages"][0] |= {"name": name, "data": values["data_stages"][0]["data"] | data}
        config = get_config_from_dict(values)
        return train(config, Mesh(mesh_axes(config), 0), torch.device("cpu"), allow_data_change=allow_data_change)

    steps = 2
    run()
    steps = 3
    with pytest.raises(ConfigError) as caught:
        run(seed=6, shuffle_block=2)
    key = "the data changed since the checkpoint: data_stages[0].data"
    fix = "samples into stage 'only'; put it back, or continue with --allow-data-change"
    consumed = metrics_of(tmp_path)[-1]["consumed_samples"]
    assert caught.value.problems == [
        f"{key}.seed was 5 in the checkpoint and is 6 now, {consumed} {fix}",
        f"{key}.shuffle_block was null in the checkpoint and is 2 now, {consumed} {fix}",
    ]
    assert len(metrics_of(tmp_path)) == 2
    with caplog.at_level(logging.WARNING, logger="nanotron"):
        assert run(seed=6, allow_data_change=True) == 0
    assert any("data.seed was 5" in record.getMessage() for record in caplog.records)
    steps = 4
    assert run(name="renamed") == 0  # a new stage, so nothing of it changed
    assert [row["consumed_tokens"] for row in metrics_of(tmp_path)] == [192, 384, 576, 768]
    state = json.loads((tmp_path / "4" / "state.json").read_text())
    assert state["consumed"] == {"only": 36, "renamed": 12}
    assert list(state["data"]) == ["only", "renamed"]
