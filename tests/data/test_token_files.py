"""Megatron's .bin/.idx and flat arrays, read like Nanosets, and `nanotron inspect` of all of them."""

from contextlib import suppress

import numpy as np
import pytest

from nanotron.data.inspect import inspect_dataset, is_dataset
from nanotron.data.order.windows import TokenWindows
from nanotron.data.sources.token_files import open_token_files
from nanotron.data.tokenize.tokenizer import END_OF_TEXT, save_tokenizer, train_bpe, vocab_size
from nanotron.errors import ConfigError
from tests.commands import nanotron
from tests.data.fixtures import make_config, random_documents, write_megatron, write_nanoset
from tests.data.test_feed import make_feed, stage


def rows_and_starts(path, **options):
    source = TokenWindows("x", open_token_files(str(path), **options), 16)
    windows = [source.window(index) for index in range(len(source))]
    starts = [None if window.starts is None else window.starts.tolist() for window in windows]
    return [window.tokens.tolist() for window in windows], starts


@pytest.mark.parametrize(("dtype", "code"), [("<u2", 8), ("<i4", 4), ("<i8", 5)])
def test_megatron_files_read_as_the_nanoset_of_the_same_documents(tmp_path, dtype, code):
    documents = random_documents(60)
    write_nanoset(tmp_path / "nanoset", documents)
    (tmp_path / "megatron").mkdir()
    cut = [[document[:3], document[3:]] if len(document) > 5 else [document] for document in documents]
    write_megatron(tmp_path / "megatron" / "text_document", cut, dtype=dtype, code=code)
    expected = rows_and_starts(tmp_path / "nanoset")
    assert rows_and_starts(tmp_path / "megatron") == expected
    assert rows_and_starts(tmp_path / "megatron" / "text_document") == expected
    (file,) = open_token_files(str(tmp_path / "megatron"))
    assert file.ends(0, 60).tolist() == np.cumsum([len(document) for document in documents]).tolist()


def test_flat_arrays_hold_the_same_rows_and_know_no_documents(tmp_path):
    documents = random_documents(60)
    write_nanoset(tmp_path / "nanoset", documents)
    rows, _ = rows_and_starts(tmp_path / "nanoset")
    tokens = np.concatenate([np.array(document) for document in documents])
    (tmp_path / "flat").mkdir()
    for dtype in ("<u2", "<i4", "<i8", ">u2", ">i4", ">u8"):
        np.save(tmp_path / "flat" / "tokens.npy", tokens.astype(dtype))
        assert rows_and_starts(tmp_path / "flat") == (rows, [None] * len(rows))
        assert rows_and_starts(tmp_path / "flat" / "tokens.npy")[0] == rows
    for token_bytes in (2, 4):
        tokens.astype(f"<u{token_bytes}").tofile(tmp_path / "tokens.bin")
        assert rows_and_starts(tmp_path / "tokens.bin", token_bytes=token_bytes)[0] == rows


def test_training_reads_every_format_by_the_same_keys(tmp_path):
    documents = random_documents(60)
    write_nanoset(tmp_path / "a", documents)
    write_megatron(tmp_path / "text", [[document] for document in documents])
    np.concatenate([np.array(document) for document in documents]).astype("<u2").tofile(tmp_path / "tokens.bin")
    found = []
    for path, dataset in [("a", {}), ("text", {}), ("tokens.bin", {"token_size_in_bytes": 2})]:
        feed = make_feed(make_config(data_stages=[stage(str(tmp_path / path), dataset=dataset)]))
        found.append([batch.tokens.tolist() for n in (1, 2, 3) for batch in feed.step(n).microbatches])
        feed.close()
    assert found[0] == found[1] == found[2]


def damage(path, where, content):
    with open(path, "r+b") as file:
        file.seek(where)
        file.write(content)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda path: damage(path, 0, b"X"), "bytes 0 to 8 are not Megatron's 'MMIDIDX'"),
        (lambda path: damage(path, 9, b"\2"), r"version 2 \(byte 9\)"),
        (lambda path: damage(path, 17, b"\7"), r"dtype code 7 \(byte 17\) are not supported"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), r"need 142 bytes but the file ends at byte 134"),
        (lambda path: damage(path, 142 - 8, b"\3"), "last document ends at sequence 3 of 5"),
    ],
)
def test_a_corrupt_megatron_index_is_named_with_the_byte(tmp_path, how, message):
    write_megatron(tmp_path / "text", [[[1, 2, 3]], [[4]], [[5, 6]], [[7]], [[8]]])
    how(tmp_path / "text.idx")
    with pytest.raises(ConfigError, match=message):
        TokenWindows("x", open_token_files(str(tmp_path / "text")), 4).window(0)


def test_a_truncated_or_odd_array_is_named(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(100, dtype="<u2"))
    content = (tmp_path / "a.npy").read_bytes()
    (tmp_path / "a.npy").write_bytes(content[:-10])
    with pytest.raises(ConfigError, match=r"a.npy \(318 bytes\) is truncated or not a .npy"):
        open_token_files(str(tmp_path / "a.npy"))
    np.save(tmp_path / "a.npy", np.ones((3, 4), dtype="<f4"))
    with pytest.raises(ConfigError, match=r"holds float32 of shape \(3, 4\); one row of integers is needed"):
        open_token_files(str(tmp_path / "a.npy"))
    (tmp_path / "b.bin").write_bytes(b"123")
    with pytest.raises(ConfigError, match="3 bytes of tokens are not a multiple of 2"):
        open_token_files(str(tmp_path / "b.bin"), token_bytes=2)
    with pytest.raises(ConfigError, match=r"set dataset.token_size_in_bytes to 2 or 4"):
        open_token_files(str(tmp_path / "b.bin"))
    np.save(tmp_path / "a.npy", np.arange(0, dtype="<u2"))
    (tmp_path / "b.bin").write_bytes(b"")
    for name in ("a.npy", "b.bin"):
        with pytest.raises(ConfigError, match=f"{name} is empty; remove it or write it again"):
            open_token_files(str(tmp_path / name), token_bytes=2)


@pytest.mark.parametrize(
    ("dtype", "stored", "message"),
    [
        ("<i2", -25536, r"token 27 \(byte 182\) is -25536 as int16; ids are 0 to 32767. Write .* with a wider type"),
        (">i4", -100, r"token 27 \(byte 236\) is -100 as int32; ids are 0 to 2147483647"),
        ("<u8", 2**63 + 5, r"token 27 \(byte 344\) is 9223372036854775813 as uint64; ids are 0 to 9223372036854775807"),
    ],
)
def test_a_negative_token_id_is_refused_where_its_window_is_read_and_not_before(tmp_path, dtype, stored, message):
    tokens = np.arange(40).astype(dtype)
    tokens[27] = stored
    np.save(tmp_path / "a.npy", tokens)
    source = TokenWindows("x", open_token_files(str(tmp_path)), 8, vocab_size=100)
    assert source.window(1).tokens.tolist() == list(range(8, 17))
    for read in (lambda: source.window(3), lambda: list(inspect_dataset(str(tmp_path)))):
        with pytest.raises(ConfigError, match=rf"a.npy: {message}"):
            read()


def test_ids_that_megatron_wrote_as_int16_are_refused_above_32767(tmp_path):
    write_megatron(tmp_path / "text", [[[7, 32767, 40000 - 2**16]]], dtype="<i2", code=3)
    with pytest.raises(ConfigError, match=r"text.bin: token 2 \(byte 4\) is -25536 as int16; ids are 0 to 32767"):
        TokenWindows("x", open_token_files(str(tmp_path / "text")), 2).window(0)


def test_no_byte_of_a_data_set_is_more_than_a_mistake(tmp_path):
    """Every file of every format, flipped, cut and overwritten: what is wrong is refused in a line, wherever it is."""
    documents = random_documents(12)
    (tmp_path / "megatron").mkdir()
    (tmp_path / "array").mkdir()
    write_nanoset(tmp_path / "nanoset", documents)
    write_megatron(tmp_path / "megatron" / "text", [[document] for document in documents])
    np.save(tmp_path / "array" / "a.npy", np.concatenate(documents).astype("<u2"))
    generator = np.random.default_rng(0)
    texts = [b"", b"\xff\xfe", b"t|2", b"t|2\n-1", b"t|-2\n9", b"t|3\n9", b"t|2\n" + b"9" * 5000]
    for file in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        content = file.read_bytes()
        damaged = [*texts, *(content[:size] for size in generator.integers(len(content), size=5))]
        for position, bit in generator.integers((len(content), 8), size=(60, 2)):
            damaged.append(content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :])
        for data in damaged:
            file.write_bytes(data)
            with suppress(ConfigError):
                list(inspect_dataset(str(file.parent)))
            with suppress(ConfigError):
                rows_and_starts(file.parent)
        file.write_bytes(content)


@pytest.mark.parametrize("size", [-2, 0, 3, 8])
def test_tokens_of_another_width_are_refused(tmp_path, size):
    (tmp_path / "a.bin").write_bytes(bytes(24))
    with pytest.raises(ConfigError, match=f"{size} bytes per token; use 2 or 4"):
        list(inspect_dataset(str(tmp_path), token_bytes=size))


def test_inspect_says_documents_tokens_tokenizer_and_draws_the_lengths(tmp_path):
    texts = ["hello there"] * 30 + ["a much longer text of many words " * 8] * 10
    tokenizer = train_bpe(texts, 300)
    folder = tmp_path / "a"
    documents = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    write_nanoset(folder, documents)
    save_tokenizer(tokenizer, str(folder), eos=END_OF_TEXT)
    lines = list(inspect_dataset(str(folder)))
    total = sum(map(len, documents))
    assert lines[0] == f"{folder}: Nanoset, 1 file"
    assert lines[1].startswith(f"tokens      {total:,} ")
    assert lines[2] == "documents   40"
    assert lines[3] == f"tokenizer   {folder}/tokenizer.json, vocabulary {vocab_size(tokenizer)}"
    assert lines[4] == f"token ids   {min(map(min, documents))} … {max(map(max, documents))}"
    bars = [line for line in lines if line.endswith("%")]
    assert bars[0].endswith(" 75.0%")
    assert bars[-1].endswith(" 25.0%")
    assert bars[0].count("█") == 40
    assert bars[-1].count("█") == 13
    assert lines[-3:] == [f"document {number} ({len(documents[0])} tokens): hello there" for number in range(3)]


def test_inspect_finds_empty_documents_and_corrupt_files(tmp_path):
    path = write_nanoset(tmp_path / "a", [[1, 2], [], [3], []])
    line = f"notice      2 of 4 documents have no tokens; {path}.index: document 1 (byte 8)"
    assert line in list(inspect_dataset(str(tmp_path / "a")))
    path.write_bytes(b"\0")
    with pytest.raises(ConfigError, match="not a multiple of 2"):
        list(inspect_dataset(str(tmp_path / "a")))


def test_the_command_tells_data_sets_from_other_folders(tmp_path):
    write_megatron(tmp_path / "text", [[document] for document in random_documents(20)])
    assert is_dataset(str(tmp_path))
    assert not is_dataset(str(tmp_path / "absent"))
    done = nanotron(tmp_path, "inspect", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "documents   20" in done.stdout
    done = nanotron(tmp_path, "inspect", tmp_path / "absent")
    assert done.returncode == 2
