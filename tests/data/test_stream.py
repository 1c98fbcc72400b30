"""Streams: read in order, dealt by row, resumed from a small position."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotron.config import BatchRampArgs
from nanotron.data.feed import Feed
from nanotron.data.sources.documents import HubDataset, open_hub_dataset
from nanotron.data.sources.stream import DocumentStream, EndOfData
from nanotron.data.tokenize.tokenizer import END_OF_TEXT, load_tokenizer, save_tokenizer, train_bpe
from nanotron.errors import ConfigError
from nanotron.parallel.mesh import Mesh
from tests.data.fixtures import make_config

EXAMPLES = Path(__file__).parents[2] / "examples" / "custom_data.py"
documents_lists = st.lists(st.lists(st.integers(0, 99), max_size=30), min_size=1, max_size=12).filter(any)


def stream(documents, sequence_length, *, kind=iter, **options):
    return DocumentStream(
        "x", lambda: kind(documents), lambda document: document, sequence_length, vocab_size=100, **options
    )


@given(documents=documents_lists, sequence_length=st.integers(1, 20))
def test_windows_are_the_documents_end_to_end(documents, sequence_length):
    source = stream(documents, sequence_length)
    windows = [source.next() for _ in range(12)]
    endless = itertools.chain.from_iterable(itertools.cycle(documents))
    tokens = list(itertools.islice(endless, 12 * sequence_length + 1))
    edges = itertools.accumulate(map(len, itertools.cycle(filter(None, documents))))
    starts = set(itertools.takewhile(lambda edge: edge <= 12 * sequence_length, edges))
    for number, window in enumerate(windows):
        first = number * sequence_length
        assert window.tokens.tolist() == tokens[first : first + sequence_length + 1]
        assert (window.starts + first).tolist() == [
            edge for edge in sorted(starts) if first < edge <= first + sequence_length
        ]


class ToldLate:
    """Documents that go where they are told when the first is asked for, and know only then; their state is alive."""

    def __init__(self, documents):
        self.documents, self.start, self.state = documents, {"next": 0}, {"next": 0}

    def __iter__(self):
        self.state["next"] = self.start["next"]
        while self.state["next"] < len(self.documents):
            self.state["next"] += 1
            yield self.documents[self.state["next"] - 1]

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.start = state


@pytest.mark.parametrize("kind", [iter, ToldLate])
@given(
    documents=documents_lists,
    sequence_length=st.integers(1, 20),
    stops=st.lists(st.integers(0, 6), min_size=1, max_size=4),
)
def test_a_stream_resumes_from_its_position_again_and_again(kind, documents, sequence_length, stops):
    source, resumed = (stream(documents, sequence_length, kind=kind) for _ in range(2))
    for steps in [*stops, 8]:
        for _ in range(steps):
            expected, found = source.next(), resumed.next()
            assert expected.tokens.tolist() == found.tokens.tolist()
            assert expected.starts.tolist() == found.starts.tolist()
        position = json.loads(json.dumps(source.state_dict()))
        assert resumed.state_dict() == position
        resumed = stream(documents, sequence_length, kind=kind)
        resumed.load_state_dict(position)


def open_streamed(kind):
    """A data set of `datasets` that is streamed: its files or its generator in two shards, the last through a map."""
    from datasets import IterableDataset

    if kind == "files":
        return open_hub_dataset("./texts", HubDataset(streaming=True))
    shards = IterableDataset.from_generator(texts_of_shards, gen_kwargs={"shards": ["ab", "cd"]})
    return shards if kind == "generator" else shards.map(lambda rows: rows, batched=True, batch_size=4)


def texts_of_shards(shards):
    for name in shards:
        yield from ({"text": name * (number % 4 + 1)} for number in range(9))


@pytest.mark.parametrize("kind", ["files", "generator", "map"])
def test_a_streamed_data_set_resumed_at_every_window_again_and_again_reads_on(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    Path("texts").mkdir()
    for name in ("ab", "cd"):
        Path(f"texts/{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in texts_of_shards([name])))

    def opened():
        return DocumentStream(
            "x", lambda: open_streamed(kind), lambda row: [ord(letter) for letter in row["text"]], 8, vocab_size=256
        )

    whole, source = opened(), opened()
    for _ in range(14):  # an epoch has 84 tokens: windows 10 and on are of the next one
        for _ in range(2):  # the second resumes from what the first has read nothing of
            position = json.loads(json.dumps(source.state_dict()))
            source = opened()
            source.load_state_dict(position)
            assert source.state_dict() == position
        assert source.next().tokens.tolist() == whole.next().tokens.tolist()


def test_a_stream_that_may_not_repeat_ends_and_an_empty_one_is_refused():
    source = stream([[1, 2, 3], [4, 5, 6]], 2, repeat=False)
    assert [source.next().tokens.tolist() for _ in range(2)] == [[1, 2, 3], [3, 4, 5]]
    with pytest.raises(EndOfData, match="no documents left"):
        source.next()
    with pytest.raises(ConfigError, match="x gives no documents"):
        stream([[], []], 2).next()


def test_token_ids_beyond_the_vocabulary_are_named():
    with pytest.raises(
        ConfigError, match=r"token ids from 4 to 100; 0 to 99 \(vocab_size\) are legal. It begins \[4, 100"
    ):
        stream([[4, 100, 5]], 1).next()


def test_an_endless_stream_of_empty_documents_says_so_and_is_given_up(monkeypatch, caplog):
    monkeypatch.setattr("nanotron.data.sources.stream.EMPTY_IN_A_ROW", (10, 100))
    source = stream(itertools.chain([[1]] + [[]] * 99 + [[2]], itertools.repeat([])), 1)
    assert source.next().tokens.tolist() == [1, 2]
    caplog.clear()
    with pytest.raises(ConfigError, match=r"^x: 100 documents in a row have no tokens; look at what gives them$"):
        source.next()
    assert caplog.messages == ["x: 10 documents in a row have no tokens; still looking for one that has"]


def test_an_empty_document_of_a_stream_is_named_once_and_counted_from_the_start_of_the_epoch(caplog):
    documents = [[1, 2], [3, 4], [], [5], []]
    source = stream(documents, 1)
    with caplog.at_level("INFO", logger="nanotron"):
        for _ in range(3):
            source.next()
        position = source.state_dict()
        for _ in range(10):
            source.next()
    (record,) = caplog.records
    assert record.getMessage() == "x: document 2 has no tokens; empty documents are skipped"
    caplog.clear()
    resumed = stream(documents, 1)
    resumed.load_state_dict(position)
    with caplog.at_level("INFO", logger="nanotron"):
        resumed.next()
    assert [record.getMessage().split(" has")[0] for record in caplog.records] == ["x: document 2"]


def config_for(dataset, *, dp=1, tokenizer=None, **data):
    stages = [{"name": "a", "start_training_step": 1, "data": {"dataset": dataset, **data}}]
    return make_config(data_stages=stages, dp=dp, tokenizer={"tokenizer_name_or_path": tokenizer})


def global_tokens(config, steps, *, first=1, state=None):
    dp, device = config.parallelism.dp, torch.device("cpu")
    feeds = [Feed(config, Mesh({"dp": dp}, rank), device=device, state=state) for rank in range(dp)]
    rows = [
        row.tolist()
        for step in range(first, first + steps)
        for feed in feeds
        for batch in feed.step(step).microbatches
        for row in batch.tokens
    ]
    for feed in feeds:
        feed.close()
    return rows, json.loads(json.dumps(feeds[0].state_dict()))


@pytest.mark.parametrize("name", ["counting", "RandomWalks", "Squares"])
def test_the_documented_examples_stop_and_resume_on_another_dp(name):
    arguments = {"sequence_length": 8} if name == "Squares" else {}
    dataset = {"python": f"{EXAMPLES}:{name}", "arguments": arguments}
    reference, whole = global_tokens(config_for(dataset), 6)
    first, state = global_tokens(config_for(dataset), 2)
    rest, resumed = global_tokens(config_for(dataset, dp=2), 2, first=3, state=state)
    assert first + rest == reference
    assert resumed == whole
    assert ("a" in state["streams"]) == (name != "Squares")


def test_a_hub_data_set_is_streamed_and_resumed(tmp_path, monkeypatch):
    from datasets import Dataset

    monkeypatch.chdir(tmp_path)
    texts = [f"text {number} " + "words and more " * (number % 4) for number in range(50)]
    save_tokenizer(train_bpe(texts, 270), "tokenizer", eos=END_OF_TEXT)
    Dataset.from_dict({"text": texts}).save_to_disk("saved")
    dataset = {"hf_dataset_or_datasets": "saved", "streaming": True}
    model = {"vocab_size": 270}

    def config(dp):
        stages = [{"name": "a", "start_training_step": 1, "data": {"dataset": dataset}}]
        tokenizer = {"tokenizer_name_or_path": "tokenizer"}
        return make_config(data_stages=stages, dp=dp, tokenizer=tokenizer, model_config=model)

    reference, _ = global_tokens(config(1), 10)
    tokenizer = load_tokenizer("tokenizer")
    end = tokenizer.token_to_id(END_OF_TEXT)
    whole = [token for text in texts for token in [*tokenizer.encode(text).ids, end]]
    assert [token for row in reference for token in row] == whole[: len(reference) * 8]
    first, state = global_tokens(config(1), 4)
    rest, _ = global_tokens(config(2), 3, first=5, state=state)
    assert first + rest == reference


def test_a_checkpoint_without_the_position_is_refused():
    config = config_for({"python": f"{EXAMPLES}:counting"})
    with pytest.raises(ConfigError, match="no position at sample 8 of the streams of stage 'a'"):
        global_tokens(config, 1, state={"consumed": {"a": 8}})


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("nowhere", "is not of the form file.py:function"),
        ("absent.py:f", "names no file"),
        ("no.such.module:f", "cannot be imported"),
        (f"{EXAMPLES}:absent", "has no function 'absent'"),
    ],
)
def test_a_function_that_is_not_there_is_named(reference, message):
    with pytest.raises(ConfigError, match=message):
        global_tokens(config_for({"python": reference}), 1)


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        ("def f(): yield {'a': 1}", {}, r"own.py:f: document 0 is \"{'a': 1}\"; a text or a sequence of token ids"),
        ("def f(): yield [1, 2]; yield [1.5]", {}, r"own.py:f: document 1 is '\[1.5\]'; a text or a sequence of"),
        ("def f(): yield None", {}, r"own.py:f: document 0 is 'None'"),
        ("def f(): yield [[1], [2, 3]]", {}, r"own.py:f: document 0 is '\[\[1\], \[2, 3\]\]'"),
        (
            "def f(): return [[1, 2]] * 9",
            {},
            r"own.py:f: row \d has 2 token ids; sequence_length \+ 1 = 9 are needed. To",
        ),
        (
            "def f(): return [[1]*9, 'a']",
            {},
            r"row 1 is 'a'; a sequence of sequence_length \+ 1 = 9 token ids is needed",
        ),
        ("def f(): return 'a text'", {}, "own.py:f returns str; an iterable of documents, or an object with"),
        ("def f(): return {'text': ['a']}", {}, "own.py:f returns dict; an iterable of documents, or an object with"),
        ("def f(): return 5", {}, r"python: .*own.py:f returns int; an iterable of documents, or an object with"),
        ("def f(n): yield [n]", {"m": 1}, r"own.py:f missing a required argument: 'n'; dataset.arguments gives it {'m"),
    ],
)
def test_data_of_the_wrong_kind_is_the_users_mistake(tmp_path, code, arguments, message):
    (tmp_path / "own.py").write_text(code)
    with pytest.raises(ConfigError, match=message):
        global_tokens(config_for({"python": f"{tmp_path}/own.py:f", "arguments": arguments}), 1)


def test_a_list_of_texts_is_a_stream_of_documents_like_an_iterator_over_them(tmp_path):
    texts = [f"text {number} " + "and more " * (number % 4) for number in range(20)]
    save_tokenizer(train_bpe(texts, 257), str(tmp_path), eos=END_OF_TEXT)
    found = []
    for code in (f"return {texts}", f"yield from {texts}"):
        (tmp_path / "own.py").write_text(f"def f(): {code}")
        found.append(global_tokens(config_for({"python": f"{tmp_path}/own.py:f"}, tokenizer=str(tmp_path)), 4))
    assert found[0] == found[1]
    assert list(found[0][1]["streams"]) == ["a"]


def test_a_stream_that_may_not_repeat_and_fills_no_step_is_refused():
    config = config_for({"python": f"{EXAMPLES}:counting", "arguments": {"documents": 1}}, dp=2, repeat=False)
    with pytest.raises(ConfigError, match=r"the data of stage '.*' ends before its first step, and a step takes"):
        global_tokens(config, 1)


def read_in_replica(rank, world, axes, documents, first_step=8):
    """This rank's rows of two steps, how many documents it read, and whether the data's end came to it."""
    config = config_for({"python": f"{EXAMPLES}:counting", "arguments": {"documents": documents}}, dp=2, repeat=False)
    config.tokens.batch_ramp = [BatchRampArgs(global_batch_size=first_step, steps=1)]
    mesh = Mesh(axes, rank)
    mesh.create_groups(rows=True)
    feed = Feed(config, mesh, device=torch.device("cpu"))
    rows, ended = [], False
    for step in range(1, 4):
        try:
            rows += [row.tolist() for batch in feed.step(step).microbatches for row in batch.tokens]
        except EndOfData:
            ended = True
            break
    feed.close()
    return mesh.coord("dp"), rows, ended, bool(feed.state_dict()["streams"])


def test_one_rank_of_each_replica_reads_a_stream_and_all_get_its_rows_and_its_end(pool):
    axes = {"pp": 2, "dp": 2}
    results = pool.run(4, read_in_replica, axes, 4)  # 160 tokens: two steps of 8 rows of 8, and not a third
    reference, _ = global_tokens(config_for({"python": f"{EXAMPLES}:counting", "arguments": {"documents": 4}}, dp=2), 2)
    for dp, rows, ended, _ in results:
        assert ended
        assert rows == [row for number, row in enumerate(reference) if number % 8 // 4 == dp]
    assert [reads for *_, reads in results] == [True, True, False, False]
    for dp, rows, ended, _ in pool.run(4, read_in_replica, axes, 4, 4):  # a first step of 4 rows
        assert ended
        assert rows == reference[2 * dp : 2 * dp + 2] + reference[4 + 4 * dp : 8 + 4 * dp]
