"""Reading Nanosets: windows over files, document starts, and what is refused."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanotron.data.order.windows import TokenWindows
from nanotron.data.sources.nanoset import NanosetFile, open_nanoset_file
from nanotron.data.sources.token_files import open_token_files
from nanotron.errors import ConfigError
from tests.data.fixtures import random_documents, write_nanoset


class ArrayFile:
    """A token file in memory."""

    path = "array"
    knows_documents = True

    def __init__(self, documents):
        self._tokens = np.concatenate([np.array(document, dtype=np.int64) for document in documents])
        self._starts = np.cumsum([0, *map(len, documents)])
        self.num_tokens = len(self._tokens)

    def read(self, start, stop):
        return self._tokens[start:stop]

    def starts(self, start, stop):
        return self._starts[(self._starts > start) & (self._starts < stop)]

    def targets(self, start, stop):
        return None

    def byte_offset(self, token):
        return token


documents_lists = st.lists(
    st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=9), min_size=1, max_size=9), min_size=1, max_size=4
)


@given(files=documents_lists, sequence_length=st.integers(1, 12))
def test_every_token_but_the_first_is_a_target_once(files, sequence_length):
    stream = [token for documents in files for document in documents for token in document]
    starts = set(np.cumsum([len(document) for documents in files for document in documents]).tolist())
    if len(stream) < sequence_length + 1:
        with pytest.raises(ConfigError, match="fewer than one window"):
            TokenWindows("x", [ArrayFile(documents) for documents in files], sequence_length)
        return
    windows = TokenWindows("x", [ArrayFile(documents) for documents in files], sequence_length)
    targets = []
    for index in range(len(windows)):
        window = windows.window(index)
        assert len(window.tokens) == sequence_length + 1
        targets += window.tokens[1:].tolist()
        first = index * sequence_length
        expected = [start - first for start in sorted(starts) if first < start <= first + sequence_length]
        assert window.starts.tolist() == expected
    assert targets == stream[1 : 1 + len(targets)]
    assert len(stream) - 1 - len(targets) < sequence_length


def test_a_nanoset_file_equals_its_documents(tmp_path):
    documents = random_documents(50)
    path = write_nanoset(tmp_path / "a", documents, token_bytes=4)
    file = open_nanoset_file(str(path))
    reference = ArrayFile(documents)
    assert file.num_tokens == reference.num_tokens
    for start in range(0, file.num_tokens - 20, 7):
        assert file.read(start, start + 20).tolist() == reference.read(start, start + 20).tolist()
        assert file.starts(start, start + 20).tolist() == reference.starts(start, start + 20).tolist()


def test_empty_documents_hold_no_tokens_and_change_nothing(tmp_path):
    path = write_nanoset(tmp_path / "a", [[1, 2], [], [], [3], [], [4, 5]])
    assert open_nanoset_file(str(path)).starts(0, 5).tolist() == [2, 3]


def test_max_tokens_cuts_the_stream(nanoset):
    files = open_token_files(str(nanoset))
    assert len(TokenWindows("x", files, 8, max_tokens=81)) == 10
    assert len(TokenWindows("x", files, 8, max_tokens=80)) == 9


def test_without_an_index_the_end_of_document_token_tells_the_documents(tmp_path):
    path = write_nanoset(tmp_path / "a", [[1, 2, 0], [3, 0], [4, 5, 6, 0]])
    os.remove(f"{path}.index")
    files = open_token_files(str(tmp_path / "a"))
    assert TokenWindows("x", files, 8).window(0).starts is None
    assert TokenWindows("x", files, 8, eos_id=0).window(0).starts.tolist() == [3, 5]


def corrupt(path, how):
    if how == "odd":
        path.write_bytes(path.read_bytes()[:-1])
    elif how == "short":
        path.write_bytes(path.read_bytes()[:-2])
    elif how == "long":
        path.write_bytes(path.read_bytes() + b"ab")
    elif how == "index":
        index = path.with_name(path.name + ".index")
        index.write_bytes(index.read_bytes()[:-8])
    elif how == "index bytes":
        index = path.with_name(path.name + ".index")
        index.write_bytes(index.read_bytes()[:-3])
    elif how == "metadata":
        path.with_name(path.name + ".metadata").write_text("nonsense")
    elif how == "empty":
        path.write_bytes(b"")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("odd", r"00000_unshuffled.ds: 11 bytes .* truncated after token 5"),
        ("short", r"holds 5 tokens but .*metadata says 6; the file is truncated at byte 10"),
        ("long", r"holds 7 tokens but .*metadata says 6; the file should end at byte 12"),
        ("index", r"index: the last document ends at token 4 \(byte 8\) but .* holds 6"),
        ("index bytes", r"index: 21 bytes are not .* truncated at document 2"),
        ("metadata", r"00000_unshuffled.ds.metadata must start with two lines"),
        ("empty", r"holds 0 tokens but .*metadata says 6"),
    ],
)
def test_a_corrupt_file_is_named_with_the_offset(tmp_path, how, message):
    path = write_nanoset(tmp_path / "a", [[1, 2], [3, 4], [5, 6]])
    corrupt(path, how)
    with pytest.raises(ConfigError, match=message):
        open_nanoset_file(str(path)).starts(0, 5)


def test_a_token_beyond_the_vocabulary_is_named_with_its_byte(tmp_path):
    write_nanoset(tmp_path / "a", [[1, 2, 3], [4, 500, 6]])
    windows = TokenWindows("x", open_token_files(str(tmp_path / "a")), 5, vocab_size=100)
    with pytest.raises(ConfigError, match=r"00000_unshuffled.ds: token id 500 at byte 8 is not below vocab_size=100"):
        windows.window(0)


def test_documents_out_of_order_are_named(tmp_path):
    path = write_nanoset(tmp_path / "a", [[1] * 4, [2] * 4, [3] * 4, [4] * 4])
    index = path.with_name(path.name + ".index")
    np.array([6, 4, 8, 16], dtype="<u8").tofile(index)
    with pytest.raises(ConfigError, match=r"index: document 1 \(byte 8\) ends before it begins"):
        open_nanoset_file(str(path)).starts(0, 16)


def test_a_folder_without_token_files_says_what_was_looked_for_and_found(tmp_path):
    (tmp_path / "books.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=r"looked for .ds .* found books.jsonl; convert text with `nanotron tokenize"):
        open_token_files(str(tmp_path))
    with pytest.raises(ConfigError, match=r"does not exist"):
        open_token_files(str(tmp_path / "absent"))


SPARSE = """
import resource, sys, time
import numpy as np
from nanotron.data.sources.token_files import open_token_files
from nanotron.data.order.windows import TokenWindows
from nanotron.data.order.stage import Stage
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = resident()
source = TokenWindows("sparse", open_token_files(sys.argv[1]), 2048, vocab_size=257)
stage = Stage("s", [source], seed=1)
for first in range(0, 8192, 8):  # 64 MiB of pages
    stage.rows(first, 8)
print(len(source), resident() - before)
"""


@pytest.mark.parametrize("num_files", [1, 5])
def test_a_corpus_of_trillions_of_tokens_costs_no_memory(tmp_path, num_files):
    tokens, documents = 10**12, 10**9
    for number in range(num_files):
        path = write_nanoset(tmp_path / "a", [[1]], number=number)
        os.truncate(path, 2 * tokens)
        index = f"{path}.index"
        os.truncate(index, 8 * documents)
        with open(index, "r+b") as file:
            file.seek(8 * (documents - 1))
            file.write(np.uint64(tokens).tobytes())
        path.with_name(path.name + ".metadata").write_text(f"Unknown Tokenizer|2\n{tokens}\n1 TT")
    run = subprocess.run(
        [sys.executable, "-c", SPARSE, str(tmp_path / "a")], capture_output=True, text=True, check=True
    )
    windows, extra = map(int, run.stdout.split())
    assert windows == (num_files * tokens - 1) // 2048
    assert extra < 20 * 2**20


def test_reading_a_nanoset_opens_no_file_before_the_first_window(nanoset):
    files = open_token_files(str(nanoset))
    assert all(isinstance(file, NanosetFile) and "_mapped" not in vars(file) for file in files)


def test_the_loss_file_of_datatrove_says_which_tokens_are_targets(tmp_path):
    for number, documents in enumerate(([[1, 2, 3], [4, 5]], [[6, 7, 8]])):
        path = write_nanoset(tmp_path / "a", documents, number=number)
        if number == 0:
            Path(f"{path}.loss").write_bytes(bytes([0, 1, 1, 0, 1]))
    window = TokenWindows("x", open_token_files(str(tmp_path / "a")), 7).window(0)
    assert window.targets.tolist() == [False, True, True, False, True, True, True, True]
    assert window.starts.tolist() == [3, 5]
    Path(f"{tmp_path}/a/00000_unshuffled.ds.loss").write_bytes(b"\1\1")
    with pytest.raises(ConfigError, match=r"ds.loss: 2 bytes for the 5 tokens"):
        TokenWindows("x", open_token_files(str(tmp_path / "a")), 7).window(0)


FILES = """
import resource, sys
from nanotron.data.sources.token_files import open_token_files
resource.setrlimit(resource.RLIMIT_NOFILE, (100, int(sys.argv[2])))
files = open_token_files(sys.argv[1])
print(sum(int(file.read(0, 1)[0]) + len(file.starts(0, 1)) for file in files))
"""


def test_more_files_than_a_process_may_open_at_first_are_read_and_more_than_it_ever_may_are_refused(tmp_path):
    for number in range(60):
        write_nanoset(tmp_path, [[1]], number=number)
    run = [sys.executable, "-c", FILES, str(tmp_path)]
    done = subprocess.run([*run, "400"], capture_output=True, text=True, check=False)
    assert done.stdout == "60\n", done.stderr
    done = subprocess.run([*run, "100"], capture_output=True, text=True, check=False)
    assert "too many files: " in done.stderr
    assert "a process may open 100; raise that (ulimit -Hn)" in done.stderr
