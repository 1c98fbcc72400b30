"""Token folders behind URLs: written there, and read from there through files here that fill up with what was read."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from nanotron.check import examine
from nanotron.checkpoint.storage import RemoteFolder, open_folder
from nanotron.data.inspect import inspect_dataset, is_dataset
from nanotron.data.order.windows import TokenWindows
from nanotron.data.sources import partial_files, remote
from nanotron.data.sources.nanoset import NanosetFile
from nanotron.data.sources.remote import local_path
from nanotron.data.sources.token_files import open_token_files
from nanotron.data.tokenize.tokenizer import load_tokenizer, open_tokenizer
from nanotron.data.tokenize.workers import Job, tokenize
from nanotron.errors import ConfigError
from tests.commands import nanotron
from tests.data.fixtures import make_config, random_documents, write_megatron, write_nanoset
from tests.data.test_feed import global_rows, stage


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty folder of a file system that is not this machine's, while the working directory is a new one."""
    monkeypatch.chdir(tmp_path)
    remote._stand_in.cache_clear()
    return f"memory://{tmp_path.name}"


def upload(folder: Path, url: str) -> None:
    fsspec.filesystem("memory").put(f"{folder}/", f"{url.removeprefix('memory:/')}/", recursive=True)


def rows(path: str, **options: object) -> list[list[int]]:
    """Every window's tokens and document starts."""
    source = TokenWindows("x", open_token_files(path, **options), 16)
    windows = [source.window(index) for index in range(len(source))]
    return [window.tokens.tolist() + ([] if window.starts is None else window.starts.tolist()) for window in windows]


def ends(path: str, **options: object) -> list[list[int]]:
    """Where the documents of every file end, as the mapped index says."""
    files = [file for file in open_token_files(path, **options) if isinstance(file, NanosetFile)]
    return [file.document_ends.tolist() for file in files]


def fingerprint(path: str, **options: object) -> dict[str, object]:
    return TokenWindows("x", open_token_files(path, **options), 16).fingerprint()


@pytest.fixture
def blocks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Small blocks, and what is asked for: (file, start, stop)."""
    monkeypatch.setattr(partial_files, "BLOCK_BYTES", 256)
    asked: list[tuple[str, int, int]] = []
    read = RemoteFolder.read

    def recorded(folder: RemoteFolder, name: str, start: int = 0, stop: int | None = None) -> bytearray:
        asked.append((name, start, stop or -1))
        return read(folder, name, start, stop)

    monkeypatch.setattr(RemoteFolder, "read", recorded)
    return asked


@pytest.mark.parametrize("kind", ["nanoset", "megatron", "prefix", "array", "flat"])
def test_a_folder_behind_a_url_reads_as_the_same_folder_here(tmp_path: Path, url: str, blocks: list, kind: str) -> None:
    documents = random_documents(80)
    (tmp_path / "here").mkdir()
    options, name = {}, ""
    if kind == "nanoset":
        write_nanoset(tmp_path / "here", documents[:50])
        write_nanoset(tmp_path / "here" / "below", documents[50:], number=1)
    elif kind in ("megatron", "prefix"):
        write_megatron(tmp_path / "here" / "text", [[document] for document in documents])
        name = "/text" if kind == "prefix" else ""
    elif kind == "array":
        np.save(tmp_path / "here" / "a.npy", np.concatenate(documents).astype("<u2"))
    else:
        np.concatenate(documents).astype("<u4").tofile(tmp_path / "here" / "a.bin")
        options, name = {"token_bytes": 4}, "/a.bin"
    upload(tmp_path / "here", f"{url}/there")
    for ask in (fingerprint, ends, rows):  # each of files that nobody has read yet
        assert ask(local_path(f"{url}/there{name}"), **options) == ask(f"{tmp_path}/here{name}", **options)
        remote._stand_in.cache_clear()
        shutil.rmtree("data")
    assert local_path(f"{url}/there{name}").startswith(f"data/remote/memory/{tmp_path.name}/there")
    assert local_path(f"file://{tmp_path}/here") == f"{tmp_path}/here"


def test_training_reads_it_by_the_same_keys_and_resumes_with_either(tmp_path: Path, url: str, blocks: list) -> None:
    write_nanoset(tmp_path / "here", random_documents(200))
    upload(tmp_path / "here", url)
    expected, local = global_rows([stage(str(tmp_path / "here"))], 3)
    found, there = global_rows([stage(url, dataset={"dataset_read_path": "kept"})], 3)
    assert found == expected
    (one,), (other,) = local.fingerprints()["stable"], there.fingerprints()["stable"]
    assert {**one, "name": ""} == {**other, "name": ""}
    assert Path("kept/00000_unshuffled.ds").exists()


def test_only_what_is_read_is_fetched_once_and_for_all_processes(tmp_path: Path, url: str, blocks: list) -> None:
    np.arange(2000, dtype="<u2").tofile(tmp_path / "a.bin")
    (tmp_path / "here").mkdir()
    shutil.move(tmp_path / "a.bin", tmp_path / "here")
    upload(tmp_path / "here", url)
    (file,) = open_token_files(local_path(url), token_bytes=2)
    assert blocks == []
    assert file.read(500, 600).tolist() == list(range(500, 600))  # bytes 1000 to 1200, of blocks 3 and 4
    assert blocks == [("a.bin", 768, 1280)]
    assert file.read(400, 700).tolist() == list(range(400, 700))
    assert blocks[1:] == [("a.bin", 1280, 1536)]
    (again,) = open_token_files(local_path(url), token_bytes=2)  # as another process does
    assert again.read(400, 700).tolist() == list(range(400, 700))
    assert again.read(1990, 2000).tolist() == list(range(1990, 2000))
    assert blocks[2:] == [("a.bin", 3840, 4000)]
    assert file.read(0, 2000).tolist() == list(range(2000))


def test_what_was_not_read_to_the_end_is_not_marked(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_nanoset(tmp_path / "here", random_documents(50))
    upload(tmp_path / "here", url)
    expected, path = rows(str(tmp_path / "here")), local_path(url)
    with monkeypatch.context() as short:
        short.setattr(RemoteFolder, "read", lambda *_: bytearray(3))
        with pytest.raises(OSError, match="gave 3 bytes"):
            rows(path)
    with monkeypatch.context() as full:
        full.setattr(os, "fdatasync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        with pytest.raises(ConfigError, match=r"cannot be kept \(No space left on device\); make room"):
            rows(path)
    assert rows(path) == expected


def test_what_changed_there_is_begun_anew_and_what_is_gone_goes(tmp_path: Path, url: str) -> None:
    write_nanoset(tmp_path / "here", random_documents(50))
    upload(tmp_path / "here", url)
    first = rows(local_path(url))
    write_nanoset(tmp_path / "other", random_documents(50, seed=1))
    upload(tmp_path / "other", url)
    assert rows(local_path(url)) == first, "in one process data stay as they were found"
    remote._stand_in.cache_clear()
    assert rows(local_path(url)) == rows(str(tmp_path / "other"))
    write_nanoset(tmp_path / "more", random_documents(50), number=1)
    upload(tmp_path / "more", url)
    open_folder(url).remove("00000_unshuffled.ds")
    remote._stand_in.cache_clear()
    assert rows(local_path(url)) == rows(str(tmp_path / "more"))
    mark = Path(f"{local_path(url)}/00001_unshuffled.ds{partial_files.MARK}")
    mark.write_bytes(mark.read_bytes()[:-1])  # as a disk that was full
    with pytest.raises(ConfigError, match="was cut short; remove both, and they are fetched again"):
        rows(local_path(url))
    remote._stand_in.cache_clear()
    assert rows(local_path(url)) == rows(str(tmp_path / "more")), "a new start mends it itself"


@pytest.mark.parametrize(
    ("dataset", "key", "text"),
    [
        (
            {"dataset_folder": "URL/nothing"},
            "dataset_folder[0]",
            "holds no token files: .* found nothing",
        ),
        ({"dataset_folder": "URL/text"}, "dataset_folder[0]", r"found a.txt; write some with `nanotron tokenize INPUT"),
        ({"dataset_folder": "nothing://x/y"}, "dataset_folder[0]", "nothing://x/y: cannot be opened"),
        (
            {"dataset_folder": "URL/data", "dataset_read_path": ["a", "b"]},
            "dataset_read_path",
            "has 2 in its list",
        ),
    ],
)
def test_check_says_what_is_wrong_with_a_url(tmp_path: Path, url: str, dataset: dict, key: str, text: str) -> None:
    write_nanoset(tmp_path / "here" / "data", random_documents(50))
    (tmp_path / "here" / "text").mkdir()
    (tmp_path / "here" / "text" / "a.txt").write_text("x")
    upload(tmp_path / "here", url)
    dataset = json.loads(json.dumps(dataset).replace("URL", url))
    make_config(data_stages=[stage(None) | {"data": {"dataset": dataset}}]).save_as_yaml("c.yaml")
    with pytest.raises(ConfigError, match=text) as caught:
        examine("c.yaml")
    assert any(f"data_stages[0].data.dataset.{key}: " in line for line in caught.value.problems)


def test_a_copy_that_somebody_made_is_read_as_it_is(tmp_path: Path, url: str) -> None:
    write_nanoset(tmp_path / "copy", random_documents(50))
    assert local_path(f"{url}/not/there", "copy") == "copy"


def test_a_place_for_local_files_is_a_notice(tmp_path: Path, url: str) -> None:
    write_nanoset(tmp_path / "here", random_documents(50))
    dataset = {"dataset_folder": str(tmp_path / "here"), "dataset_read_path": "kept"}
    make_config(data_stages=[stage(None) | {"data": {"dataset": dataset}}]).save_as_yaml("c.yaml")
    assert any("dataset_read_path: no effect for" in line for line in examine("c.yaml").notices)


def test_tokens_are_written_to_a_url_as_they_are_written_here(tmp_path: Path, url: str) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"text number {number} " * 50)
    inputs = [f"{number}.txt" for number in range(4)]
    job = {"inputs": inputs, "train_bpe": 270, "shard_bytes": 1000}
    here = tokenize(Job(output="here", **job), show_progress=False)
    assert here == tokenize(Job(output=url, **job), show_progress=False)
    assert not Path("memory:").exists()
    there, names = open_folder(url), {path.name for path in Path("here").iterdir()}
    assert set(there.names()) == names
    for name in names - {".tokenize"}:
        content = Path("here", name).read_bytes().replace(b"here/tokenizer.json", f"{url}/tokenizer.json".encode())
        assert bytes(there.read(name)) == content, name
    assert rows(local_path(url)) == rows("here")
    assert is_dataset(url)
    assert list(inspect_dataset(url))[1:3] == list(inspect_dataset("here"))[1:3]
    assert open_tokenizer(url).encode("text") == open_tokenizer("here").encode("text")
    assert load_tokenizer(f"{url}/tokenizer.json").to_str() == load_tokenizer("here").to_str()


def test_a_call_that_was_killed_goes_on_from_the_shards_that_are_there(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(f"text number {number} " * 50)
    job = {"inputs": [f"{number}.txt" for number in range(4)], "train_bpe": 270, "shard_bytes": 1000}
    tokenize(Job(output="here", **job), show_progress=False)
    write = RemoteFolder.write

    def fails_at_the_third(folder: RemoteFolder, name: str, chunks: object) -> None:
        if name.startswith("00002"):
            raise OSError("the link is down")
        write(folder, name, chunks)

    with monkeypatch.context() as broken:
        broken.setattr(RemoteFolder, "write", fails_at_the_third)
        with pytest.raises(OSError, match="the link is down"):
            tokenize(Job(output=url, **job), show_progress=False)
    summary = tokenize(Job(output=url, **job), show_progress=False)
    assert (summary.shards, summary.resumed_shards) == (4, 2)
    assert rows(local_path(url)) == rows("here")
    with pytest.raises(ConfigError, match=f"{url} was begun with another input"):
        tokenize(Job(output=url, **{**job, "inputs": ["0.txt"]}), show_progress=False)


def test_whatever_a_file_system_raises_is_a_line_with_the_url(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("Unable to locate credentials")  # as S3's client says it, which is no OSError there

    for name in ("find", "ls", "open", "cat_file"):
        monkeypatch.setattr(MemoryFileSystem, name, refused)
    with pytest.raises(ConfigError, match=rf"^{url}: cannot be read \({url}: Unable to locate credentials\)"):
        local_path(url)
    folder = open_folder(url)
    for ask, where in [
        (folder.names, url),
        (lambda: folder.read("a"), f"{url}/a"),
        (lambda: list(folder.stream("a")), f"{url}/a"),
        (lambda: folder.write("a", [b""]), f"{url}/a"),
    ]:
        with pytest.raises(OSError, match="Unable to locate credentials") as caught:
            ask()
        assert caught.value.filename == where


def test_ranks_train_from_an_object_store(tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections do not survive a fork, and the parent has had some when it starts its ranks."""
    monkeypatch.chdir(tmp_path)
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"text number {number} " * 200)
    url = f"{bucket}/corpora/three"
    job = Job([f"{number}.txt" for number in range(3)], url, train_bpe=270, shard_bytes=3000)
    assert tokenize(job, show_progress=False).shards == 3
    config = make_config(data_stages=[stage(url)], dp=2, train_steps=1, model_config={"vocab_size": 270})
    config.checkpoints.save_final_state = False
    config.save_as_yaml("c.yaml")
    done = nanotron(tmp_path, "train", "c.yaml")
    assert done.returncode == 0, done.stderr
    kept = f"data/remote/{url.replace('://', '/')}/00000_unshuffled.ds"
    assert Path(kept).stat().st_size == open_folder(url).size("00000_unshuffled.ds")
    assert any("tokenizer.json, vocabulary 270" in line for line in inspect_dataset(url))
