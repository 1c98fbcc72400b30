"""Texts, files and functions that are not what they should be: each is a line that says where, and no traceback."""

import json
import logging
import time

import pytest
import torch

from nanotron.data.feed import Feed
from nanotron.data.sources import custom
from nanotron.data.sources.sft import write_examples
from nanotron.data.tokenize.tokenizer import END_OF_TEXT, load_tokenizer, save_tokenizer, train_bpe
from nanotron.data.tokenize.workers import Job, tokenize
from nanotron.errors import ConfigError
from nanotron.parallel.mesh import Mesh
from tests.data.fixtures import make_config


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    save_tokenizer(train_bpe(["a text"], 257), folder, eos=END_OF_TEXT)
    return folder


def refused(source, tokenizer, output):
    with pytest.raises(ConfigError) as error:
        tokenize(Job([str(source)], str(output), tokenizer=tokenizer))
    (line,) = error.value.problems
    return line


@pytest.mark.parametrize("train", [False, True])
def test_halves_of_characters_are_replaced_and_counted(tmp_path, tokenizer, train):
    (tmp_path / "x.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": "ab"}\n')
    how = {"train_bpe": 257} if train else {"tokenizer": tokenizer}
    summary = tokenize(Job([str(tmp_path / "x.jsonl")], str(tmp_path / "out"), **how))
    assert summary.mended == "documents with half a character's code (a lone surrogate), which is U+FFFD now: 1"
    expected = load_tokenizer(str(tmp_path / "out")).encode("a\ufffdb").ids
    assert summary.tokens == len(expected) + len("ab") + 2
    (tmp_path / "whole.jsonl").write_text(json.dumps({"text": "é日"}))
    assert tokenize(Job([str(tmp_path / "whole.jsonl")], str(tmp_path / "whole"), **how)).mended is None


def test_json_that_nests_without_end_is_named_with_its_line(tmp_path, tokenizer):
    source = tmp_path / "x.jsonl"
    source.write_text('{"text": "a"}\n{"text": "a", "more": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    assert refused(source, tokenizer, tmp_path / "out").startswith(f"{source}: line 2 (byte 14) is not JSON: ")


NEVER = """
import os, time

def never():
    while not os.path.exists(GO):
        time.sleep(0.01)
    while True:
        yield [1] * 9
"""


def test_a_function_that_does_not_return_is_named_while_it_is_waited_for(monkeypatch, caplog):
    monkeypatch.setattr(custom, "SAY_S", 0.05)

    def slow():
        while not caplog.records:
            time.sleep(0.01)
        return [[1]]

    assert custom.call_function("x.py:slow", slow, {}) == [[1]]
    assert caplog.messages[0] == "python: x.py:slow has not returned for 0 s"


def test_data_that_does_not_come_is_named_while_it_is_waited_for(tmp_path, caplog):
    file = tmp_path / "code.py"
    go = tmp_path / "go"
    file.write_text(NEVER.replace("GO", repr(str(go))))
    data = {"dataset": {"python": f"{file}:never"}, "num_loading_workers": 0}
    feed = Feed(
        make_config(data_stages=[{"name": "a", "start_training_step": 1, "data": data}]),
        Mesh(),
        device=torch.device("cpu"),
    )
    feed.say_after_s = 0.1

    class Go(logging.Handler):
        def emit(self, record):
            go.touch()

    logger, handler = logging.getLogger("nanotron"), Go()
    logger.addHandler(handler)
    try:
        feed.step(1)
    finally:
        logger.removeHandler(handler)
    feed.close()
    said = [record.getMessage() for record in caplog.records]
    assert f"step 1 has waited for its data for 0 s: data_stages[0].data.dataset ({file}:never)" in said


def test_a_damaged_page_is_named_with_its_row(tmp_path, tokenizer):
    pyarrow = pytest.importorskip("pyarrow", reason="the package pyarrow is not installed")
    from pyarrow import parquet

    source = tmp_path / "x.parquet"
    texts = [f"{number} " * 50 for number in range(2000)]
    parquet.write_table(pyarrow.table({"text": texts}), source, use_dictionary=False, compression="snappy")
    damaged = bytearray(source.read_bytes())
    damaged[2000:2100] = bytes(byte ^ 0xFF for byte in damaged[2000:2100])
    source.write_bytes(damaged)
    assert refused(source, tokenizer, tmp_path / "out").startswith(f"{source}: row 0 or one soon after is damaged: ")


@pytest.mark.parametrize("messages", ["hello", ["hello"]])
def test_messages_that_are_no_turns_are_named_with_their_row(tmp_path, tokenizer, messages):
    with pytest.raises(ConfigError, match=r"^data: row 0: 'messages' is not a list of mappings"):
        write_examples("data", [{"messages": messages}], str(tmp_path / "x.ds"), tokenizer, read_special_tokens=False)


CODE = """
def stream():
    yield [1] * 9
    raise KeyError("oops")

def called():
    raise KeyError("oops")

class Rows:
    def __len__(self):
        return 9
    def __getitem__(self, row):
        if row:
            raise KeyError("oops")
        return [1] * 9
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "stream",
            ": document 1",
        ),
        ("called", ""),
        ("Rows", ": row "),
        ("nowhere", ""),
    ],
)
def test_code_that_raises_is_told_with_what_was_asked_of_it_and_its_line(tmp_path, name, said):
    file = tmp_path / "code.py"
    file.write_text(CODE if name != "nowhere" else "import json\njson.loads('')\n")
    data = {"dataset": {"python": f"{file}:{name}"}, "num_loading_workers": 0}
    config = make_config(data_stages=[{"name": "a", "start_training_step": 1, "data": data}])
    with pytest.raises(ConfigError) as error:
        Feed(config, Mesh(), device=torch.device("cpu")).step(1)
    (line,) = error.value.problems
    raised = "JSONDecodeError" if name == "nowhere" else "KeyError: 'oops'"
    assert line.startswith(f"data_stages[0].data.dataset.python: {file}:{name}{said}")
    assert f" raises {raised}" in line
    assert name == "nowhere" or f"({file}, line " in line
