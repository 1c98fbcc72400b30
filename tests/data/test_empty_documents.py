"""Documents without tokens are legal, change nothing, and are named once: at the check, or when a window meets one."""

import pytest

from nanotron.check import examine
from nanotron.data.order.windows import TokenWindows
from nanotron.data.sources import empty_documents
from nanotron.data.sources.empty_documents import first_empty_document
from nanotron.data.sources.token_files import open_token_files
from tests.data.fixtures import write_megatron, write_nanoset

LINE = "has no tokens; empty documents are skipped"


@pytest.fixture(params=["nanoset", "megatron"])
def write(request, tmp_path):
    """A function that writes documents in a format, and gives the name of the index and how a line names its entry."""

    def write_documents(documents):
        if request.param == "nanoset":
            index = f"{write_nanoset(tmp_path / 'a', documents)}.index"
            return lambda number: f"{index}: document {number} (byte {8 * number})"
        (tmp_path / "a").mkdir()
        sequences = [[document] if document else [] for document in documents]
        write_megatron(tmp_path / "a" / "text", sequences)
        first = 34 + 12 * sum(map(len, sequences))
        return lambda number: f"{tmp_path}/a/text.idx: document {number} (byte {first + 8 * number})"

    return write_documents


@pytest.mark.parametrize("empty", [[0], [3], [5, 7], [9]])
def test_the_first_empty_document_is_found_wherever_it_is(write, tmp_path, empty):
    place = write([[] if number in empty else [number] * 3 for number in range(10)])
    assert first_empty_document(open_token_files(str(tmp_path / "a"))) == place(empty[0])


def test_no_more_documents_are_looked_at_than_is_cheap_and_no_file_after_them_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(empty_documents, "MOST_DOCUMENTS", 5)
    for number, documents in enumerate(([[1]] * 3, [[1], [1], []])):
        write_nanoset(tmp_path / "a", documents, number=number)
    files = open_token_files(str(tmp_path / "a"))

    def opened():
        yield from files
        raise AssertionError("a file was asked for beyond the documents that are looked at")

    assert first_empty_document(opened()) is None
    monkeypatch.setattr(empty_documents, "MOST_DOCUMENTS", 6)
    assert first_empty_document(opened()).startswith(f"{files[1].path}.index: document 2 (byte 16)")


def read_all(folder, caplog):
    """Tokens and starts of every window of 4 tokens, and the lines that reading them logged."""
    windows = TokenWindows("x", open_token_files(str(folder)), 4)
    with caplog.at_level("INFO", logger="nanotron"):
        found = [
            (window.tokens.tolist(), window.starts.tolist()) for window in map(windows.window, range(len(windows)))
        ]
    lines = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found, lines


@pytest.mark.parametrize("empty", [0, 2, 5])
def test_one_beyond_what_was_looked_at_is_named_once_at_the_read_and_changes_nothing(
    write, tmp_path, monkeypatch, caplog, empty
):
    """Windows step by 4 and documents are of 2 and 4 tokens: an empty one lies inside a window, or at its edge."""
    documents = [[1, 2], [3, 4], [5, 6], [7, 8, 9, 10], [11, 12], [13, 14], [15, 16, 17]]
    write_nanoset(tmp_path / "same", documents)
    place = write([*documents[:empty], [], [], *documents[empty:]])
    read, lines = read_all(tmp_path / "a", caplog)
    assert lines == []  # the check has named it
    monkeypatch.setattr(empty_documents, "MOST_DOCUMENTS", 0)
    read, lines = read_all(tmp_path / "a", caplog)
    assert lines in ([f"{place(empty)} {LINE}"], [f"{place(empty + 1)} {LINE}"])
    assert read == read_all(tmp_path / "same", caplog)[0]


CONFIG = """
model: {model_config: {hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, vocab_size: 257}}
optimizer: {learning_rate_scheduler: {learning_rate: 1.0e-3}}
tokens: {sequence_length: 4, micro_batch_size: 1, batch_accumulation_per_replica: 1, train_steps: 2,
         val_check_interval: 1}
data_stages:
  - name: a
    start_training_step: 1
    data: {dataset: {dataset_folder: [whole, holes]}}
    validation: {dataset_folder: holes}
"""


def test_check_and_the_start_of_a_run_name_the_file_and_its_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_nanoset(tmp_path / "whole", [[1] * 30])
    write_nanoset(tmp_path / "holes", [[1] * 9, [], [2] * 9, []])
    (tmp_path / "run.yaml").write_text(CONFIG)
    line = f"holes/00000_unshuffled.ds.index: document 1 (byte 8) {LINE}"
    keys = ("data_stages[0].data.dataset.dataset_folder[1]", "data_stages[0].validation.dataset_folder[0]")
    notices = [notice for notice in examine("run.yaml").notices if "no tokens" in notice]
    assert len(notices) == 2
    for notice, key in zip(notices, keys, strict=True):
        assert notice.startswith("run.yaml:")
        assert key in notice
        assert notice.endswith(line)
    assert not any("no tokens" in notice for notice in examine("run.yaml", files=False).notices)
