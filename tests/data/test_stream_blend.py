"""Several streams blended by weight, in their own order or shuffled: shares, layouts, positions."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotron.data.feed import Feed
from nanotron.data.sources.shuffled_stream import ShuffledStream
from nanotron.data.sources.stream import EndOfData
from nanotron.data.tokenize.tokenizer import END_OF_TEXT, save_tokenizer, train_bpe
from nanotron.errors import ConfigError
from nanotron.parallel.mesh import Mesh
from tests.data.fixtures import make_config, random_documents, write_nanoset
from tests.data.test_stream import EXAMPLES, config_for, global_tokens, stream

THREE = {
    "python": [f"{EXAMPLES}:counting", f"{EXAMPLES}:RandomWalks", f"{EXAMPLES}:counting"],
    "arguments": [{"step": 0}, {"seed": 3}, {"step": 5}],
    "dataset_weights": [5, 2, 1],
}


def numbers(count, **options):
    """A stream whose window i is [i, i + 1], of `count` windows and for ever again, unless told otherwise."""
    return stream([[number] for number in range(count + 1)], 1, **options)


def take(source, count):
    return [int(source.next().tokens[0]) for _ in range(count)]


@given(length=st.integers(1, 60), block=st.integers(1, 25))
def test_each_block_of_the_stream_is_given_once_before_the_next_and_a_short_one_ends_it(length, block):
    source = ShuffledStream(numbers(length, repeat=False), block, 7, "a", 0)
    given_out = take(source, length)
    for first in range(0, length, block):
        whole = list(range(first, min(first + block, length)))
        assert sorted(given_out[first : first + block]) == whole
    for _ in range(2):
        with pytest.raises(EndOfData, match="no documents left"):
            source.next()


@given(block=st.integers(1, 12), stops=st.lists(st.integers(0, 13), max_size=3), repeat=st.booleans())
def test_a_shuffled_stream_resumes_from_its_position_again_and_again(block, stops, repeat):
    source, resumed = (ShuffledStream(numbers(45, repeat=repeat), block, 7, "a", 0) for _ in range(2))
    for count in [*stops, 5]:
        for _ in range(count):
            assert take(source, 1) == take(resumed, 1)
        position = json.loads(json.dumps(source.state_dict()))
        assert resumed.state_dict() == position
        resumed = ShuffledStream(numbers(45, repeat=repeat), block, 7, "a", 0)
        resumed.load_state_dict(position)


def test_every_block_seed_stage_and_source_has_an_order_of_its_own():
    orders = [
        tuple(number - first for number in take(ShuffledStream(numbers(99, repeat=False), 30, *key), 90)[first:][:30])
        for key in [(7, "a", 0), (8, "a", 0), (7, "b", 0), (7, "a", 1)]
        for first in (0, 30, 60)
    ]
    assert len(set(orders)) == len(orders) == 12
    assert take(ShuffledStream(numbers(99), 30, 7, "a", 0), 90) == take(ShuffledStream(numbers(99), 30, 7, "a", 0), 90)


def test_a_block_is_finished_as_it_was_begun_when_seed_and_size_change():
    source = ShuffledStream(numbers(99), 30, 7, "a", 0)
    uninterrupted = take(ShuffledStream(numbers(99), 30, 7, "a", 0), 30)
    begun = take(source, 12)
    other = ShuffledStream(numbers(99), 10, 8, "a", 0)
    other.load_state_dict(source.state_dict())
    assert begun + take(other, 18) == uninterrupted
    assert sorted(take(other, 10)) == list(range(30, 40))


def test_one_window_is_read_for_one_given_and_no_more_than_a_block_is_kept():
    source = numbers(99, repeat=False)
    shuffled = ShuffledStream(source, 10, 7, "a", 0)
    read = []
    original = source.next
    source.next = lambda: read.append(1) or original()
    for given_out in range(1, 61):
        shuffled.next()
        assert len(read) == 10 + given_out


@pytest.mark.parametrize("shuffle_block", [None, 3, 64])
def test_shares_of_streams_follow_their_weights_within_one_sample(shuffle_block):
    rows, state = global_tokens(config_for(THREE, shuffle_block=shuffle_block), 40)
    taken = [0, 0, 0]
    for n, row in enumerate(rows, 1):
        differences = {after - before for before, after in itertools.pairwise(row)}
        taken[0 if differences == {0} else 1 if differences & {1, -1, 255, -255} else 2] += 1
        assert all(abs(count - n * weight / 8) < 1 for count, weight in zip(taken, (5, 2, 1), strict=True))
    assert list(state["consumed_per_source"]["a"].values()) == taken
    _, state = global_tokens(config_for({**THREE, "dataset_weights": None}), 3)
    assert list(state["consumed_per_source"]["a"].values()) == [4, 4, 4]


@pytest.mark.parametrize("shuffle_block", [None, 1, 5, 64])
def test_blended_streams_do_not_depend_on_the_layout_nor_on_a_stop(shuffle_block):
    reference, whole = global_tokens(config_for(THREE, shuffle_block=shuffle_block), 8)
    assert len(whole["streams"]["a"]["sources"]) == 3
    other = make_config(
        data_stages=[
            {"name": "a", "start_training_step": 1, "data": {"dataset": THREE, "shuffle_block": shuffle_block}}
        ],
        dp=4, micro_batch_size=1, batch_accumulation_per_replica=1,
    )  # fmt: skip
    assert global_tokens(other, 8) == (reference, whole)
    for stop in range(1, 8):
        first, state = global_tokens(config_for(THREE, shuffle_block=shuffle_block), stop)
        rest, resumed = global_tokens(other, 8 - stop, first=stop + 1, state=state)
        assert first + rest == reference
        assert resumed == whole


@pytest.mark.parametrize("kind", ["stream", "shuffled stream", "folders"])
def test_a_blend_with_rare_sources_resumes_at_every_step_again_and_again(nanoset, tmp_path, kind):
    dataset = {**THREE, "dataset_weights": [14, 1, 1]}  # a rare one gives a row in four steps
    if kind == "folders":
        folders = [
            write_nanoset(tmp_path / name, random_documents(9, seed=seed)).parent for seed, name in enumerate("ab")
        ]
        dataset = {"dataset_folder": [str(nanoset), *map(str, folders)], "dataset_weights": [14, 1, 1]}
    config = config_for(dataset, shuffle_block=3 if kind == "shuffled stream" else None)
    reference, whole = global_tokens(config, 6)
    rows, state = global_tokens(config, 0)
    for step in range(1, 7):
        for steps in (0, 0, 1):  # two runs are stopped before their first step
            before = state
            more, state = global_tokens(config, steps, first=step, state=before)
            rows += more
            assert steps or state == before
    assert (rows, state) == (reference, whole)


def test_a_shuffled_block_changes_the_order_and_the_data_seed_changes_it_again():
    orders = [
        global_tokens(config_for({"python": THREE["python"][0]}, shuffle_block=block, seed=seed), 8)[0]
        for block, seed in [(None, 1), (16, 1), (16, 2)]
    ]
    assert sorted(orders[0][:16]) == sorted(orders[1][:16]) == sorted(orders[2][:16])
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_streamed_hub_data_sets_are_blended_by_weight_and_resumed(tmp_path, monkeypatch):
    from datasets import Dataset

    monkeypatch.chdir(tmp_path)
    for name in "ab":
        Dataset.from_dict({"text": [name * (20 + number) for number in range(60)]}).save_to_disk(name)
    save_tokenizer(train_bpe(["ab"], 258), "tokenizer", eos=END_OF_TEXT)
    dataset = {"hf_dataset_or_datasets": ["a", "b"], "dataset_weights": [1, 3], "streaming": True}

    def config(dp):
        stages = [{"name": "a", "start_training_step": 1, "data": {"dataset": dataset, "shuffle_block": 6}}]
        return make_config(data_stages=stages, dp=dp, tokenizer={"tokenizer_name_or_path": "tokenizer"},
                           model_config={"vocab_size": 260})  # fmt: skip

    reference, whole = global_tokens(config(1), 8)
    assert whole["consumed_per_source"] == {"a": {"0:a": 8, "1:b": 24}}
    first, state = global_tokens(config(1), 4)
    rest, resumed = global_tokens(config(2), 2, first=5, state=state)
    assert first + rest == reference
    assert resumed == whole
    del dataset["streaming"]
    monkeypatch.setattr("nanotron.data.tokenize.prepare.CACHE_FOLDER", str(Path("cache")))
    assert global_tokens(config(1), 8)[1]["consumed_per_source"] == {"a": {"0:a": 8, "1:b": 24}}


def test_positions_of_other_streams_and_rows_among_streams_are_refused():
    one = {"python": THREE["python"][:1], "arguments": {"step": 1}}
    saved = {
        (name, block): global_tokens(config_for(dataset, shuffle_block=block), 1)[1]
        for name, dataset in (("one", one), ("three", THREE))
        for block in (None, 4)
    }
    for held, (dataset, block) in [
        (("three", None), (one, None)),
        (("one", None), (one, 4)),
        (("one", 4), (one, None)),
    ]:
        config, state = config_for(dataset, shuffle_block=block), saved[held]
        for rank in (0, 1):  # the second rank of a pipeline reads no stream, and refuses with the first
            with pytest.raises(ConfigError, match=r"positions of stage 'a' .* put them and data.shuffle_block back"):
                Feed(config, Mesh({"pp": 2}, rank), device=torch.device("cpu"), state=state)
    rows = {"python": [f"{EXAMPLES}:counting", f"{EXAMPLES}:Squares"], "arguments": [{}, {"sequence_length": 8}]}
    with pytest.raises(ConfigError, match=r"custom_data.py:Squares gives rows by number and others .* are streams"):
        global_tokens(config_for(rows), 1)
