"""The feed: a sample depends on (data seed, stage, sample index) and on nothing else."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from nanotron.batch import IGNORED_LABEL, document_spans
from nanotron.data.feed import Feed
from nanotron.data.sources.stream import EndOfData
from nanotron.errors import ConfigError
from nanotron.parallel.mesh import Mesh
from tests.data.fixtures import make_config, random_documents, write_nanoset

CPU = torch.device("cpu")


def stage(folder, *, name="stable", start=1, sequence_length=None, **data):
    more = data.pop("dataset", {})
    dataset = None if folder is None else {"dataset_folder": folder, **more}
    args = {"name": name, "start_training_step": start, "data": {"dataset": dataset, **data}}
    return args | ({} if sequence_length is None else {"sequence_length": sequence_length})


def make_feed(config, *, rank=0, state=None, **sizes):
    mesh = Mesh({"pp": sizes.get("pp", 1), "dp": config.parallelism.dp, "tp": sizes.get("tp", 1)}, rank=rank)
    return Feed(config, mesh, device=CPU, state=state)


def global_rows(stages, steps, *, state=None, first_step=1, **changes):
    """Rows of tokens of the given steps in global order, gathered from every dp rank, and the feed of rank 0."""
    config = make_config(data_stages=stages, **changes)
    feeds = [make_feed(config, rank=rank, state=state) for rank in range(config.parallelism.dp)]
    rows = []
    for step in range(first_step, first_step + steps):
        for feed in feeds:
            for batch in feed.step(step).microbatches:
                rows += torch.cat([batch.tokens, batch.labels], dim=1).tolist()
    for feed in feeds:
        feed.close()
    return rows, feeds[0]


@pytest.mark.parametrize("dummy", [True, False])
def test_rows_do_not_depend_on_dp_nor_on_the_micro_batch_size(nanoset, dummy):
    stages = [stage(None if dummy else str(nanoset))]
    reference, _ = global_rows(stages, 4, dp=1, micro_batch_size=12, batch_accumulation_per_replica=1)
    for dp, size, accumulation in [(1, 1, 12), (2, 3, 2), (3, 2, 2), (4, 1, 3), (12, 1, 1)]:
        rows, _ = global_rows(stages, 4, dp=dp, micro_batch_size=size, batch_accumulation_per_replica=accumulation)
        assert rows == reference


def test_rows_do_not_depend_on_a_global_batch_that_changes(nanoset):
    reference, _ = global_rows([stage(str(nanoset))], 6)
    first, feed = global_rows([stage(str(nanoset))], 2)
    rest, _ = global_rows(
        [stage(str(nanoset))], 2, first_step=3, dp=2, micro_batch_size=4, batch_accumulation_per_replica=1,
        state=feed.state_dict(),
    )  # fmt: skip
    assert first + rest == reference


RAMP = {
    "batch_accumulation_per_replica": None,
    "global_batch_size": 12,
    "batch_ramp": [{"global_batch_size": 4, "steps": 2}, {"global_batch_size": 8, "steps": 3}],
}  # 4 4 8 8 8 12 12 …


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6])
def test_a_batch_that_grows_takes_the_same_rows_in_the_same_order_whatever_resumes_it(nanoset, tmp_path, stop):
    write_nanoset(tmp_path / "late", random_documents(40, seed=9))
    stages = [stage(str(nanoset)), stage(str(tmp_path / "late"), name="late", start=4, sequence_length=16)]
    reference = [
        *global_rows(stages[:1], 4)[0],  # 16 rows of the first stage, in batches of 4
        *global_rows([stages[1] | {"start_training_step": 1}], 10)[0],  # 40 of the second
    ]
    whole, straight = global_rows(stages, 7, **RAMP)
    assert whole == reference
    first, feed = global_rows(stages, stop, **RAMP)
    state = json.loads(json.dumps(feed.state_dict()))
    rest, resumed = global_rows(stages, 7 - stop, first_step=stop + 1, state=state, dp=2, **RAMP)
    assert first + rest == whole
    assert resumed.state_dict() == straight.state_dict()
    assert resumed.consumed == {"stable": 16, "late": 40}
    assert resumed.consumed_tokens == 16 * 8 + 40 * 16


def test_steps_of_a_ramp_tell_their_size_and_validation_keeps_its_own(nanoset):
    stages = [stage(str(nanoset)) | {"validation": {"dataset_folder": str(nanoset)}}]
    feed = make_feed(make_config(data_stages=stages, limit_val_batches=1, **RAMP))
    steps = [feed.step(n) for n in range(1, 8)]
    assert [step.num_samples for step in steps] == [4, 4, 8, 8, 8, 12, 12]
    assert [len(step.microbatches) for step in steps] == [2, 2, 4, 4, 4, 6, 6]
    assert [step.num_tokens for step in steps[:3]] == [32, 32, 64]
    assert [step.first_sample for step in steps] == [0, 4, 8, 16, 24, 32, 44]
    ((first,), (last,)) = (list(feed.validation(n)) for n in (1, 7))
    assert [batch.tokens.tolist() for batch in first] == [batch.tokens.tolist() for batch in last]
    assert len(first) == 6
    feed.close()


def test_all_ranks_of_a_replica_read_the_same_rows(nanoset):
    config = make_config(data_stages=[stage(str(nanoset))], dp=2)
    feeds = [make_feed(config, rank=rank, pp=2, tp=2) for rank in range(8)]
    tokens = [torch.cat([batch.tokens for batch in feed.step(1).microbatches]) for feed in feeds]
    replicas = [feed_rank // 2 % 2 for feed_rank in range(8)]  # ranks are pp, dp, tp from slow to fast
    for rank in range(8):
        assert torch.equal(tokens[rank], tokens[replicas.index(replicas[rank])])
    assert not torch.equal(tokens[0], tokens[2])
    for feed in feeds:
        feed.close()


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 7])
def test_resuming_at_any_step_continues_the_order_through_stages(nanoset, tmp_path, stop):
    write_nanoset(tmp_path / "late", random_documents(40, seed=9))
    stages = [
        stage(str(nanoset), name="stable"),
        stage([str(nanoset), str(tmp_path / "late")], name="decay", start=5, sequence_length=16,
              dataset={"dataset_weights": [1, 3]}),
    ]  # fmt: skip
    reference, whole = global_rows(stages, 8)
    first, feed = global_rows(stages, stop)
    rest, resumed = global_rows(
        stages, 8 - stop, first_step=stop + 1, state=feed.state_dict(), dp=2, micro_batch_size=1
    )
    assert first + rest == reference
    assert resumed.state_dict() == whole.state_dict()
    assert whole.consumed == {"stable": 16, "decay": 16}
    assert whole.consumed_tokens == 16 * 8 + 16 * 16
    assert whole.counters() == f"stable 16 | decay 16 ({nanoset} 4, {tmp_path / 'late'} 12)"
    assert whole.consumed_per_source()["decay"] == {f"0:{nanoset}": 4, f"1:{tmp_path / 'late'}": 12}


def test_counters_add_up_what_was_read_and_a_stage_that_comes_back_goes_on_whatever_the_config_became(tmp_path):
    for seed, name in enumerate("ab"):
        write_nanoset(tmp_path / name, random_documents(40, seed=seed))
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    reference, _ = global_rows([stage(a, name="first")], 4)
    runs = [
        (2, stage(a, name="first"), {"first": 8}, 64, {"first": {f"0:{a}": 8}}),
        (1, stage(a, name="first", sequence_length=16), {"first": 12}, 128, {"first": {f"0:{a}": 12}}),
        (1, stage(b, name="renamed"), {"first": 12, "renamed": 4}, 160, {"renamed": {f"0:{b}": 4}}),
        (1, stage(a, name="first"), {"first": 16, "renamed": 4}, 192, {"first": {f"0:{a}": 16}}),
        (1, stage([a, b], name="first", dataset={"dataset_weights": [1, 1]}), {"first": 20, "renamed": 4}, 224,
         {"first": {f"0:{a}": 18, f"1:{b}": 2}}),
    ]  # fmt: skip
    state, step = None, 0
    for steps, of_stage, consumed, tokens, per_source in runs:
        rows, feed = global_rows([of_stage], steps, first_step=step + 1, state=state)
        state, step = json.loads(json.dumps({**feed.state_dict(), "data": feed.fingerprints()})), step + steps
        assert (state["consumed"], state["consumed_tokens"]) == (consumed, tokens)
        assert per_source.items() <= state["consumed_per_source"].items()
        if step == 5:
            assert rows == reference[12:]
    assert set(state["data"]) == set(state["consumed_per_source"]) == {"first", "renamed"}
    assert feed.counters() == f"first 20 ({a} 18, {b} 2) | renamed 4"


def test_an_epoch_reads_every_window_once_and_the_next_epoch_in_another_order(tmp_path):
    write_nanoset(tmp_path / "a", [list(range(8 * 12 + 1))])
    rows, _ = global_rows([stage(str(tmp_path / "a"))], 6, micro_batch_size=4, batch_accumulation_per_replica=1)
    first, second = rows[:12], rows[12:]
    assert sorted(first) == sorted(second)
    assert len({tuple(row) for row in first}) == 12
    assert first != second


def test_labels_are_the_next_tokens_and_seeds_change_the_order(nanoset):
    config = make_config(data_stages=[stage(None)])
    feed = make_feed(config)
    batch = feed.step(1).microbatches[0]
    feed.close()
    assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
    assert batch.tokens.shape == batch.labels.shape == batch.positions.shape == (2, 8)
    assert batch.tokens.dtype == torch.int64
    assert global_rows([stage(str(nanoset), seed=1)], 2)[0] != global_rows([stage(str(nanoset), seed=2)], 2)[0]
    assert global_rows([stage(None, seed=1)], 2)[0] != global_rows([stage(None, seed=2)], 2)[0]
    assert global_rows([stage(None, name="a")], 2)[0] != global_rows([stage(None, name="b")], 2)[0]


@pytest.mark.parametrize("masking", [False, True])
def test_positions_restart_per_document_and_masking_hides_what_crosses(tmp_path, masking):
    write_nanoset(tmp_path / "a", [[10, 11, 12], [20, 21], [30, 31, 32, 33]])
    config = make_config(
        data_stages=[stage(str(tmp_path / "a"))], micro_batch_size=1, batch_accumulation_per_replica=1,
        model_config={"is_qwen2_config": True, "_use_doc_masking": masking},
    )  # fmt: skip
    feed = make_feed(config)
    batch = feed.step(1).microbatches[0]
    feed.close()
    assert batch.tokens.tolist() == [[10, 11, 12, 20, 21, 30, 31, 32]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    if masking:
        assert batch.labels.tolist() == [[11, 12, IGNORED_LABEL, 21, IGNORED_LABEL, 31, 32, 33]]
        assert batch.spans == document_spans([[0, 3, 5]], 8)
    else:
        assert batch.labels.tolist() == [[11, 12, 20, 21, 30, 31, 32, 33]]
        assert batch.spans is None


def test_masking_of_rows_that_are_one_document_each_needs_no_spans(tmp_path):
    write_nanoset(tmp_path / "a", [list(range(8)), list(range(9))])
    config = make_config(
        data_stages=[stage(str(tmp_path / "a"))], micro_batch_size=2, batch_accumulation_per_replica=1,
        model_config={"is_qwen2_config": True, "_use_doc_masking": True},
    )  # fmt: skip
    feed = make_feed(config)
    batch = feed.step(1).microbatches[0]
    feed.close()
    assert batch.spans is None
    assert sorted(batch.labels[:, -1].tolist()) == [IGNORED_LABEL, 8]


def test_data_that_may_not_repeat_ends_with_a_line(tmp_path):
    write_nanoset(tmp_path / "a", [list(range(8 * 10 + 1))])
    config = make_config(data_stages=[stage(str(tmp_path / "a"), repeat=False)])
    feed = make_feed(config)
    assert [feed.step(n).num_samples for n in (1, 2)] == [4, 4]
    with pytest.raises(EndOfData, match="'stable' has no data left for step 3: 8 of 10 samples are consumed"):
        feed.step(3)
    assert feed.consumed == {"stable": 8}
    feed.close()


def test_data_that_may_not_repeat_and_fills_no_step_is_refused_at_the_start(tmp_path):
    write_nanoset(tmp_path / "a", [list(range(8 * 3 + 1))])
    config = make_config(data_stages=[stage(str(tmp_path / "a"), repeat=False)])
    with pytest.raises(ConfigError, match="'stable' gives 3 samples, and a step takes 4 of 8 tokens; set repeat: true"):
        make_feed(config)
    write_nanoset(tmp_path / "a", [list(range(8 * 4 + 1))])
    make_feed(config).close()


def test_the_next_step_is_loaded_ahead_and_a_jump_is_still_right(nanoset):
    config = make_config(data_stages=[stage(str(nanoset))])
    feed, other = make_feed(config), make_feed(config)
    feed.step(1)
    assert [load.step for load in feed._loads] == [2, 3]
    expected = [other.step(n).microbatches[0].tokens for n in (1, 2, 3)]
    assert torch.equal(feed.step(2).microbatches[0].tokens, expected[1])
    feed.consumed["stable"] = 0
    assert torch.equal(feed.step(1).microbatches[0].tokens, expected[0])
    feed.close()
    other.close()


@pytest.mark.parametrize("workers", [0, 3])
def test_rows_do_not_depend_on_the_number_of_loading_threads(nanoset, workers):
    reference, _ = global_rows([stage(str(nanoset))], 5)
    assert global_rows([stage(str(nanoset), num_loading_workers=workers)], 5)[0] == reference


def test_a_new_epoch_is_logged(tmp_path, caplog):
    write_nanoset(tmp_path / "a", [list(range(8 * 4 + 1))])
    with caplog.at_level("INFO", logger="nanotron"):
        global_rows([stage(str(tmp_path / "a"))], 2)
    assert [record.getMessage().split(" is ")[1] for record in caplog.records] == [
        f"used up; epoch {n} begins" for n in (2, 3)
    ]


def test_rounded_shares_are_logged(nanoset, tmp_path, caplog):
    write_nanoset(tmp_path / "b", [[256] * 500])
    stages = [stage([str(nanoset), str(tmp_path / "b")], dataset={"dataset_weights": [2, 1]})]
    with caplog.at_level("INFO", logger="nanotron"):
        make_feed(make_config(data_stages=stages)).close()
    (record,) = caplog.records
    assert f"{nanoset} 0.666672, {tmp_path / 'b'} 0.333328" in record.getMessage()


def test_an_error_while_loading_ahead_is_raised_by_the_step_that_needs_it(tmp_path):
    write_nanoset(tmp_path / "a", [[7] * (8 * 64), [999]])
    config = make_config(data_stages=[stage(str(tmp_path / "a"))])
    feed = make_feed(config)
    steps = (feed.step(n) for n in range(1, 20))
    with pytest.raises(ConfigError, match="token id 999"):
        list(steps)
    feed.close()


def test_a_rank_on_token_files_imports_nothing_heavy(nanoset):
    script = (
        "import sys, nanotron.data.feed\n"
        "from tests.data.test_feed import *\n"
        f"feed = make_feed(make_config(data_stages=[stage({str(nanoset)!r})])); feed.step(1); feed.close()\n"
        "print(sorted({'transformers', 'datasets', 'pyarrow', 'tokenizers', 'pandas'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_blended_stage_draws_each_folder_by_weight(nanoset, tmp_path):
    write_nanoset(tmp_path / "b", [[256] * 500])
    stages = [stage([str(nanoset), str(tmp_path / "b")], dataset={"dataset_weights": [3, 1]})]
    rows, _ = global_rows(stages, 10)
    from_b = np.array([row == [256] * 16 for row in rows])
    assert from_b.sum() == 10
    assert np.abs(np.cumsum(from_b) - np.arange(1, 41) / 4).max() < 1


def validation_rows(stages, dp, size, accumulation, **changes):
    """Rows of labels of one validation in global order."""
    config = make_config(
        data_stages=stages, dp=dp, micro_batch_size=size, batch_accumulation_per_replica=accumulation, **changes
    )
    feeds = [make_feed(config, rank=rank) for rank in range(dp)]
    rows = []
    for batches in zip(*(feed.validation(1) for feed in feeds), strict=True):
        for microbatches in batches:
            assert len(microbatches) == accumulation
            rows += [row for batch in microbatches for row in batch.labels.tolist()]
    for feed in feeds:
        feed.close()
    return rows


@pytest.mark.parametrize("limit", [0, 2])
def test_validation_reads_the_same_rows_once_on_every_layout(nanoset, tmp_path, limit):
    write_nanoset(tmp_path / "held out", [[number % 257 for number in range(8 * 29 + 1)]])
    stages = [stage(str(nanoset)) | {"validation": {"dataset_folder": str(tmp_path / "held out")}}]
    reference = validation_rows(stages, 1, 12, 1, limit_val_batches=limit)
    full = [row for row in reference if row != [IGNORED_LABEL] * 8]
    assert len({tuple(row) for row in full}) == len(full) == (24 if limit else 29)
    assert len(reference) == (24 if limit else 36)
    for layout in [(2, 3, 2), (3, 2, 2), (12, 1, 1)]:
        assert validation_rows(stages, *layout, limit_val_batches=limit) == reference


def test_validation_takes_nothing_from_training_and_repeats_itself(nanoset):
    stages = [stage(str(nanoset)) | {"validation": {"dataset_folder": str(nanoset)}}]
    feed = make_feed(make_config(data_stages=stages))
    plain = make_feed(make_config(data_stages=[stage(str(nanoset))]))
    for n in (1, 2, 3):
        validations = [[batch.tokens.tolist() for part in feed.validation(n) for batch in part] for _ in range(2)]
        assert validations[0] == validations[1]
        assert torch.equal(feed.step(n).microbatches[0].tokens, plain.step(n).microbatches[0].tokens)
    assert list(plain.validation(1)) == []
    feed.close()
    plain.close()
