"""`nanotron tokenize`: any text to Nanosets that datatrove reads, resumable and atomic."""

import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nanotron.data.sources.documents import HubDataset, InputPart, find_pieces, read_texts
from nanotron.data.sources.nanoset import read_metadata
from nanotron.data.sources.token_files import open_token_files
from nanotron.data.tokenize import progress as tokenize_progress
from nanotron.data.tokenize.nanoset_writer import metadata_text
from nanotron.data.tokenize.progress import TokenizeProgress
from nanotron.data.tokenize.tokenizer import END_OF_TEXT, load_tokenizer, save_tokenizer, train_bpe
from nanotron.data.tokenize.workers import Job, tokenize
from nanotron.errors import ConfigError
from tests.commands import nanotron

TEXTS = [f"Document {number}: " + "the quick brown fox, naïve café 你好 " * (number % 7 + 1) for number in range(300)]

PROGRESS = re.compile(
    r"\S+: ((?P<share>\d+)%, )?(?P<shards>\d+) of \d+ shards, \S+ documents, \S+ tokens, \S+ tokens/s(, \S+ left)?"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """The folder of a small byte-level BPE."""
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_bpe(TEXTS, 400), str(folder), eos=END_OF_TEXT)
    return str(folder)


def write_input(folder, kind, texts=TEXTS):
    """Write the texts in the given format and return what to pass to tokenize."""
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts)).encode()
    path = folder / f"texts.{kind}"
    if kind == "jsonl":
        path.write_bytes(lines)
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines))
    elif kind == "jsonl.zst":
        import zstandard

        path.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(lines))
    elif kind == "parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=50)
    elif kind == "txt":
        for number, text in enumerate(texts):
            (folder / f"{number:05d}.txt").write_text(text)
        return str(folder)
    elif kind in ("hf", "hf-streaming"):
        from datasets import Dataset

        Dataset.from_dict({"text": texts}).save_to_disk(str(folder / "saved"))
        return str(folder / "saved")
    return str(path)


def decoded(folder):
    """The documents of a Nanoset folder as text, without their end token."""
    tokenizer = load_tokenizer(folder)
    texts = []
    for file in open_token_files(folder):
        edges = [0, *file.document_ends.tolist()]
        for start, stop in itertools.pairwise(edges):
            tokens = file.read(start, stop).tolist()
            assert tokens[-1] == tokenizer.token_to_id(END_OF_TEXT)
            texts.append(tokenizer.decode(tokens[:-1]))
    return texts


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.zst", "parquet", "txt", "hf", "hf-streaming"])
def test_every_format_gives_the_documents_in_order(tmp_path, tokenizer, kind):
    source = write_input(tmp_path / "in", kind)
    hub = HubDataset(streaming=kind == "hf-streaming")
    summary = tokenize(Job([source], str(tmp_path / "out"), tokenizer=tokenizer, hub=hub, shard_bytes=6000))
    assert summary.documents == len(TEXTS)
    assert decoded(str(tmp_path / "out")) == TEXTS
    assert summary.shards > 1 or kind in ("jsonl.gz", "jsonl.zst", "hf", "hf-streaming")


def test_pieces_of_a_file_read_each_line_once_wherever_they_are_cut(tmp_path):
    path = write_input(tmp_path, "jsonl", TEXTS[:4])
    size = os.path.getsize(path)
    for cut in range(1, size):
        pieces = [InputPart("lines", path, 0, cut, cut), InputPart("lines", path, cut, size, size - cut)]
        assert [text for piece in pieces for text, *_ in read_texts(piece, "text", HubDataset())] == TEXTS[:4]
    for piece_size in range(20, 400, 7):
        pieces = find_pieces([path], HubDataset(), piece_size=piece_size)
        assert sum(piece.size for piece in pieces) == size
        assert [text for piece in pieces for text, *_ in read_texts(piece, "text", HubDataset())] == TEXTS[:4]


def test_several_workers_write_the_same_bytes_as_one(tmp_path, tokenizer):
    source = write_input(tmp_path / "in", "jsonl")
    for workers in (1, 2):
        output = str(tmp_path / f"out{workers}")
        tokenize(Job([source], output, tokenizer=tokenizer, workers=workers, shard_bytes=15000))
    one, two = ({path.name: path.read_bytes() for path in (tmp_path / name).glob("*.ds*")} for name in ("out1", "out2"))
    assert one == two
    assert len(one) > 6


def test_datatrove_reads_what_we_write(tmp_path, tokenizer):
    from datatrove.utils.dataset import DatatroveFolderDataset

    source = write_input(tmp_path / "in", "jsonl")
    output = str(tmp_path / "out")
    summary = tokenize(Job([source], output, tokenizer=tokenizer, shard_bytes=10**9))
    theirs = DatatroveFolderDataset(output, seq_len=31, token_size=2, return_positions=True)
    (file,) = open_token_files(output)
    assert len(theirs) == summary.tokens // 32
    for number in range(len(theirs)):
        item = theirs[number]
        start = number * 32
        assert item["input_ids"].tolist() == file.read(start, start + 32).tolist()
        assert (
            np.flatnonzero(item["positions"].numpy() == 0)[1:].tolist()
            == (file.starts(start, start + 32) - start).tolist()
        )


def test_the_line_for_people_is_datatroves():
    import humanize

    for count in (0, 5, 57, 999, 1000, 10973, 123_456, 999_999, 1_234_567, 10**9, 2 * 10**12, 3 * 10**15):
        assert metadata_text("t", 2, count).splitlines()[2] == humanize.metric(count, unit="T")


@pytest.mark.parametrize("eos", [None, END_OF_TEXT])
def test_we_read_what_datatrove_writes_and_write_the_same_bytes(tmp_path, tokenizer, eos):
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer

    step = DocumentTokenizer(
        str(tmp_path / "theirs"), f"{tokenizer}/tokenizer.json", eos_token=eos, shuffle_documents=False
    )
    step.run(Document(text=text, id=str(number)) for number, text in enumerate(TEXTS))
    source = write_input(tmp_path / "in", "jsonl")
    tokenize(Job([source], str(tmp_path / "ours"), tokenizer=f"{tokenizer}/tokenizer.json", append_eos=eos is not None))
    theirs, ours = (tmp_path / name / "00000_unshuffled.ds" for name in ("theirs", "ours"))
    for suffix in ("", ".index", ".metadata"):
        assert Path(f"{ours}{suffix}").read_bytes() == Path(f"{theirs}{suffix}").read_bytes()
    (file,) = open_token_files(str(tmp_path / "theirs"))
    assert len(file.document_ends) == len(TEXTS)


def test_the_width_of_tokens_follows_the_vocabulary(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{number}": number for number in range(70_000)} | {END_OF_TEXT: 70_000}
    wide = Tokenizer(models.WordLevel(words, unk_token="w0"))
    wide.pre_tokenizer = pre_tokenizers.Whitespace()
    save_tokenizer(wide, str(tmp_path / "wide"), eos=END_OF_TEXT)
    source = write_input(tmp_path / "in", "jsonl", ["w1 w69999 w2"])
    tokenize(Job([source], str(tmp_path / "out"), tokenizer=str(tmp_path / "wide")))
    (file,) = open_token_files(str(tmp_path / "out"))
    assert file.token_bytes == 4
    assert file.read(0, 4).tolist() == [1, 69999, 2, 70_000]


def test_a_trained_bpe_is_left_beside_the_tokens(tmp_path):
    source = write_input(tmp_path / "in", "jsonl")
    tokenize(Job([source], str(tmp_path / "out"), train_bpe=500))
    assert decoded(str(tmp_path / "out")) == TEXTS
    metadata = read_metadata(str(tmp_path / "out" / "00000_unshuffled.ds"))
    assert metadata.tokenizer == str(tmp_path / "out" / "tokenizer.json")


KILLED = """
import sys
from nanotron.data.tokenize.workers import Job, tokenize
if __name__ == "__main__":
    source, output, tokenizer = sys.argv[1:]
    tokenize(Job([source], output, tokenizer=tokenizer, shard_bytes=40_000))
"""


def test_a_killed_call_leaves_only_whole_shards_and_the_next_goes_on(tmp_path, tokenizer):
    source = write_input(tmp_path / "in", "jsonl", TEXTS * 100)
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    output = tmp_path / "out"
    process = subprocess.Popen([sys.executable, str(script), source, str(output), tokenizer])
    while len(list(output.glob("*.ds"))) < 3:
        assert process.poll() is None, "it ended before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    whole = {path: path.stat().st_mtime_ns for path in output.glob("*.ds")}
    for file in open_token_files(str(output)):
        assert int(file.document_ends[-1]) == file.num_tokens
    summary = tokenize(Job([source], str(output), tokenizer=tokenizer, shard_bytes=40_000))
    assert summary.resumed_shards in (len(whole), len(whole) - 1)  # killed between a shard and its report, or not
    assert summary.documents == len(TEXTS) * 100
    assert decoded(str(output)) == TEXTS * 100
    assert sum(path.stat().st_mtime_ns == when for path, when in whole.items()) == summary.resumed_shards
    assert not list(output.glob("*.partial"))


def test_another_input_or_tokenizer_in_the_same_folder_is_refused(tmp_path, tokenizer):
    source = write_input(tmp_path / "in", "jsonl")
    output = str(tmp_path / "out")
    tokenize(Job([source], output, tokenizer=tokenizer))
    other = write_input(tmp_path / "other", "jsonl", TEXTS[:10])
    with pytest.raises(ConfigError, match="begun with another tokenizer and eos and input"):
        tokenize(Job([other], output, tokenizer=f"{tokenizer}/tokenizer.json", append_eos=False))
    assert tokenize(Job([source], output, tokenizer=tokenizer)).resumed_shards == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "a"}\nnot json\n', r"bad.jsonl: line 2 \(byte 14\) is not JSON"),
        (b'{"body": "a"}\n', r"bad.jsonl: line 1 \(byte 0\) has no column 'text', only 'body'; choose with --column"),
        (b'{"text": 3}\n', r"line 1 \(byte 0\): column 'text' holds int, not text"),
        (b'{"text": "a"}\n\n["b"]\n', r"bad.jsonl: line 3 \(byte 15\) is not a JSON object"),
        (b'{"text": ""}\n', r"hold no text in column 'text'"),
    ],
)
def test_bad_input_is_named_with_its_byte_and_leaves_no_shard(tmp_path, tokenizer, content, message):
    (tmp_path / "bad.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        tokenize(Job([str(tmp_path / "bad.jsonl")], str(tmp_path / "out"), tokenizer=tokenizer))
    assert not [name for name in os.listdir(tmp_path / "out") if ".ds" in name]


@pytest.mark.parametrize("kind", ["gz", "zst"])
@pytest.mark.parametrize("how", ["a byte short", "half", "damaged", "not compressed"])
def test_a_compressed_file_that_is_cut_or_damaged_is_named_and_never_read_in_part(tmp_path, tokenizer, kind, how):
    path = Path(write_input(tmp_path, f"jsonl.{kind}", ["\n" * 10] * 500 + TEXTS))
    whole = path.read_bytes()
    middle = len(whole) // 2
    path.write_bytes(
        {
            "a byte short": whole[:-1],
            "half": whole[:middle],
            "damaged": whole[:middle] + bytes(40) + whole[middle + 40 :],
            "not compressed": b'{"text": "a"}\n',
        }[how]
    )
    named = rf"texts.jsonl.{kind} \(\d+ bytes\) is truncated or not (gzip|zstandard)"
    if how == "damaged":  # a line may show it before the checksum does
        named += rf"|texts.jsonl.{kind}: line \d+ \(byte \d+\) is not JSON"
    with pytest.raises(ConfigError, match=named):
        tokenize(Job([str(path)], str(tmp_path / "out"), tokenizer=tokenizer))


@pytest.mark.parametrize("kind", ["gz", "zst"])
def test_every_part_of_a_file_compressed_in_parts_is_read(tmp_path, tokenizer, kind):
    parts = [Path(write_input(tmp_path / name, f"jsonl.{kind}", texts)) for name, texts in
             (("a", TEXTS[:100]), ("b", TEXTS[100:]))]  # fmt: skip
    (tmp_path / f"both.jsonl.{kind}").write_bytes(parts[0].read_bytes() + parts[1].read_bytes())
    tokenize(Job([str(tmp_path / f"both.jsonl.{kind}")], str(tmp_path / "out"), tokenizer=tokenizer))
    assert decoded(str(tmp_path / "out")) == TEXTS


def test_a_tokenizer_without_an_end_token_needs_a_decision(tmp_path, tokenizer):
    source = write_input(tmp_path / "in", "jsonl")
    bare = tmp_path / "bare.json"
    bare.write_bytes(Path(tokenizer, "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="does not say which token ends a document; use --eos or --no-eos"):
        tokenize(Job([source], str(tmp_path / "out"), tokenizer=str(bare)))
    with pytest.raises(ConfigError, match="--eos '<end>' is not a token"):
        tokenize(Job([source], str(tmp_path / "out2"), tokenizer=str(bare), eos="<end>"))


def test_the_command_tokenizes_in_parallel_and_says_the_totals(tmp_path):
    source = write_input(tmp_path / "in", "jsonl")
    command = ["tokenize", source, "--output", "out", "--train-bpe", 400, "--workers", 2]
    done = nanotron(tmp_path, *command)
    training, *progress = done.stderr.splitlines()
    assert training == "out: training a BPE of 400 tokens on the input"
    assert all(PROGRESS.fullmatch(line) for line in progress)  # none unless it takes a second
    assert done.stdout.startswith("out: 300 documents, ")
    assert len(done.stdout.splitlines()) == 1
    assert decoded(str(tmp_path / "out")) == TEXTS
    assert "1 of them from before" in nanotron(tmp_path, *command).stdout


def test_progress_is_told_in_lines_where_there_is_no_terminal(tmp_path, tokenizer, monkeypatch, capsys):
    monkeypatch.setattr(tokenize_progress, "REFRESH_S", 0.001)
    monkeypatch.setattr(tokenize_progress, "LINE_S", 0.0)
    monkeypatch.setattr(tokenize_progress, "SHARD_LINE_S", 0.0)
    monkeypatch.setattr("nanotron.data.tokenize.workers.BATCH_CHARACTERS", 10_000)
    source = write_input(tmp_path / "in", "jsonl", TEXTS * 10)
    tokenize(Job([source], str(tmp_path / "out"), tokenizer=tokenizer, shard_bytes=10**9))
    lines = capsys.readouterr().err.splitlines()
    matches = [PROGRESS.fullmatch(line) for line in lines]
    assert all(matches), lines
    assert any(match["shards"] == "0" and match["share"] != "0" for match in matches)  # within the shard
    assert (matches[-1]["shards"], matches[-1]["share"]) == ("1", "100")
    tokenize(Job([source], str(tmp_path / "quiet"), tokenizer=tokenizer), show_progress=False)
    assert capsys.readouterr().err == ""


def test_progress_lines_are_as_far_apart_as_they_should_be(monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr(tokenize_progress.time, "monotonic", lambda: clock[0])
    progress = TokenizeProgress("out", 1000, 3)
    for seconds, size, shards in [(0, 100, 0), (9, 300, 0), (1, 400, 0), (0.9, 500, 1), (0.2, 500, 1), (9, 600, 1)]:
        clock[0] += seconds
        progress.counters[:] = [size, 2, 5 * size, shards]
        progress._refresh()
    first, second = capsys.readouterr().err.splitlines()
    assert first == "out: 40%, 0 of 3 shards, 2 documents, 2K tokens, 200 tokens/s, 15s left"
    assert second == "out: 50%, 1 of 3 shards, 2 documents, 2.5K tokens, 225 tokens/s, 11s left"


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "txt", "hf"])
@pytest.mark.parametrize("append_eos", [True, False])
def test_empty_documents_are_left_out_counted_and_the_first_is_named(tmp_path, tokenizer, kind, append_eos):
    texts = [*TEXTS[:60], "", *TEXTS[60:90], "", "", *TEXTS[90:]]
    source = write_input(tmp_path / "in", kind, texts)
    output = str(tmp_path / "out")
    summary = tokenize(Job([source], output, tokenizer=tokenizer, append_eos=append_eos, shard_bytes=3000))
    assert (summary.documents, summary.empty_documents) == (300, 3)
    assert summary.first_empty == {
        "txt": f"{source}/00060.txt",
        "parquet": f"{source}: row 60",
        "hf": f"{source}: row 60",
    }.get(kind, f"{source}: line 61 (byte {byte_of_line(texts, 60)})")
    assert summary.left_out == f"left out 3 empty documents, the first: {summary.first_empty}"
    for file in open_token_files(output):
        assert (np.diff(file.document_ends, prepend=np.uint64(0)) > 0).all()
    assert append_eos is False or decoded(output) == TEXTS


def byte_of_line(texts, number):
    return sum(len(json.dumps({"id": n, "text": text})) + 1 for n, text in enumerate(texts[:number]))


def test_files_without_anything_and_texts_without_a_token_are_named_too(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = Tokenizer(models.WordLevel({"a": 0, END_OF_TEXT: 1}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    save_tokenizer(words, str(tmp_path / "words"), eos=END_OF_TEXT)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "b.jsonl").write_text('{"text": "a a"}\n{"text": "  "}\n')
    job = Job([str(tmp_path / "in")], str(tmp_path / "out"), tokenizer=str(tmp_path / "words"), append_eos=False)
    assert tokenize(job).left_out == f"left out 1 empty document, the first: {tmp_path}/in/b.jsonl: line 2 (byte 16)"
    (tmp_path / "in" / "a.jsonl").write_text("")
    summary = tokenize(replace(job, output=str(tmp_path / "out2")))
    assert (summary.documents, summary.empty_documents) == (1, 2)
    assert summary.first_empty == f"{tmp_path}/in/a.jsonl"


def test_the_command_says_what_it_left_out(tmp_path):
    source = write_input(tmp_path / "in", "jsonl", [*TEXTS, ""])
    done = nanotron(tmp_path, "tokenize", source, "-o", "out", "--train-bpe", 400)
    assert done.stdout.splitlines()[1].startswith(f"out: left out 1 empty document, the first: {source}: line 301 (by")


def test_the_command_says_when_the_trained_bpe_is_smaller_than_asked_for(tmp_path):
    (tmp_path / "short.txt").write_text("too little text")
    done = nanotron(tmp_path, "tokenize", "short.txt", "--output", "out", "--train-bpe", 512)
    size = load_tokenizer(str(tmp_path / "out")).get_vocab_size()
    assert size < 512
    assert done.stdout.endswith(f"; the texts are too few for a BPE of 512 tokens, it has {size}\n"), done.stderr


def test_the_command_answers_mistakes_with_one_line(tmp_path):
    for arguments, line in [
        ([], "name at least one input and --output FOLDER, or use --stdlib for the embedded corpus\n"),
        (["x", "--output", "o"], "give one of --tokenizer NAME and --train-bpe SIZE, not both and not neither\n"),
        (["absent.txt", "--output", "o", "--train-bpe", 400], "'absent.txt': no such file or folder\n"),
        (["absent/", "--output", "o", "--train-bpe", 400], "'absent/': no such file or folder\n"),
        (["*.jsonl", "--output", "o", "--train-bpe", 400], "no file matches '*.jsonl'\n"),
    ]:
        done = nanotron(tmp_path, "tokenize", *arguments)
        assert (done.returncode, done.stderr) == (2, line)


def test_the_known_script_and_its_flags_still_work(tmp_path, tokenizer):
    write_input(tmp_path / "in", "jsonl")
    saved = write_input(tmp_path / "hf", "hf")
    script = Path(__file__).parents[2] / "tools" / "preprocess_data.py"
    common = ["--tokenizer-name-or-path", tokenizer, "--eos-token", END_OF_TEXT, "--n-tasks", 2, "--output-folder"]
    done = nanotron(tmp_path, script, *common, "a", "jsonl", "--dataset", "in", "--glob-pattern", "*.jsonl")
    assert done.returncode == 0, done.stderr
    done = nanotron(tmp_path, script, *common, "b", "hf", "--dataset", saved, "--column", "text", "--split", "train")
    assert done.returncode == 0, done.stderr
    assert decoded(str(tmp_path / "a")) == decoded(str(tmp_path / "b")) == TEXTS
