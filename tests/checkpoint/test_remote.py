"""Checkpoints behind URLs: an S3 server in another process, and fsspec's own file systems."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nanotron.checkpoint.documents import read_state
from nanotron.checkpoint.format import StateShard
from nanotron.checkpoint.read import load
from nanotron.checkpoint.resume import agree_resume, find_resume, newest_complete
from nanotron.checkpoint.storage import RemoteFolder, open_folder
from nanotron.checkpoint.write import Saver
from nanotron.errors import ConfigError
from nanotron.parallel.mesh import Mesh
from tests.checkpoint.layouts import globals_of, pieces_of, spec, wrong_pieces

SPECS = [spec("a", (65, 8), (("tp", 0),)), spec("b", (2, 6, 8), (("tp", 1),)), spec("c", (5,))]
KINDS = ("weight", "exp_avg")


@pytest.fixture(params=["s3", "memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('bucket')}/runs/one"
    return f"memory://{tmp_path.name}/one" if request.param == "memory" else f"file://{tmp_path}/one"


def pieces(mesh: Mesh, *, filled: bool) -> list[StateShard]:
    return pieces_of(SPECS, mesh, globals_of(SPECS, KINDS) if filled else None, zero=True, kinds=KINDS)


def save(url: str, *steps: int, **options: int) -> Saver:
    saver = Saver(url, **options)
    for step in steps:
        saver.save(step, pieces(Mesh(), filled=True), {"step": step})
        assert saver.wait(), saver.poll()
    return saver


def test_a_remote_checkpoint_is_found_verified_and_read_by_another_layout(url: str) -> None:
    assert find_resume(url, None) is None
    save(url, 1, 2)
    found = agree_resume(url, None)
    assert found is not None
    assert found.step == 2
    assert read_state(found.checkpoint) == {"step": 2}
    for rank in range(6):
        loaded = pieces(Mesh({"dp": 2, "tp": 3}, rank), filled=False)
        load(found.checkpoint, loaded)
        assert wrong_pieces(loaded, globals_of(SPECS, KINDS)) == []


def test_a_remote_upload_that_was_cut_short_is_no_checkpoint(url: str) -> None:
    save(url, 1, 2)
    open_folder(f"{url}/2").remove("index.json")
    assert newest_complete(url) == open_folder(f"{url}/1").path


def test_remote_damage_is_named_and_the_step_before_it_taken(url: str) -> None:
    save(url, 1, 2)
    folder = open_folder(f"{url}/2")
    shard = "shard-00000-of-00001.safetensors"
    data = bytearray(b"".join(folder.stream(shard)))
    data[-2] ^= 1
    folder.write(shard, [bytes(data)])
    found = agree_resume(url, None)
    assert found is not None
    assert found.step == 1
    assert f"2/{shard} is damaged" in found.notices[0]


def test_old_remote_steps_are_deleted(url: str) -> None:
    save(url, 1, 2, 3, 4, keep_last_n=2)
    assert [step for step in range(5) if "index.json" in open_folder(f"{url}/{step}").names()] == [3, 4]


def test_a_save_interrupted_in_the_middle_of_an_upload_leaves_no_file(bucket: str) -> None:
    folder = open_folder(f"{bucket}/run/1")

    def chunks() -> Iterator[bytes]:
        yield b"x" * (6 << 20)  # more than one part of a multipart upload
        raise OSError("the source failed")

    with pytest.raises(OSError, match="the source failed"):
        folder.write("shard", chunks())
    assert folder.names() == []


def test_an_upload_of_many_parts_is_the_same_bytes(bucket: str) -> None:
    folder = open_folder(f"{bucket}/run")
    data = torch.randint(0, 256, (13 << 20,), dtype=torch.uint8).numpy().tobytes()
    folder.write("big", [data[i : i + (4 << 20)] for i in range(0, len(data), 4 << 20)])
    assert folder.size("big") == len(data)
    assert bytes(folder.read("big", 5 << 20, 7 << 20)) == data[5 << 20 : 7 << 20]
    assert b"".join(folder.stream("big")) == data


def test_a_bucket_that_is_not_there_is_an_error_of_the_save_and_of_the_resume(bucket: str) -> None:
    missing = bucket.replace("s3://", "s3://no-") + "/run"
    saver = Saver(missing)
    saver.save(1, pieces(Mesh(), filled=True), {})
    assert not saver.wait()
    assert "step 1 failed" in saver.poll()[0]
    with pytest.raises(ConfigError, match="no such folder"):
        find_resume(f"{missing}-new", missing)


def test_only_what_a_rank_needs_is_fetched(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not isinstance(open_folder(url), RemoteFolder):
        pytest.skip("local files are memory-mapped")
    save(url, 1)
    shard = "shard-00000-of-00001.safetensors"
    header = int.from_bytes(open_folder(f"{url}/1").read(shard, 0, 8), "little")
    file_system = open_folder(url)._files  # fsspec gives every folder the same one
    fetched, plain = [], file_system.cat_file

    def counted(path: str, **options: object) -> bytes:
        data: bytes = plain(path, **options)
        fetched.append(len(data) if path.endswith(shard) else 0)
        return data

    monkeypatch.setattr(file_system, "cat_file", counted)
    box = pieces(Mesh({"tp": 8}, 3), filled=False)[:1]  # 8 of the 65 rows of one tensor
    load(f"{url}/1", box)
    assert sum(fetched) == 8 + header + box[0].tensor.nbytes


def test_a_local_checkpoint_is_copied_to_a_bucket_behind_training(bucket: str, tmp_path: Path) -> None:
    save(str(tmp_path), 1, 2, 3, copy_to=f"{bucket}/run", keep_last_n=2)
    for place in (str(tmp_path), f"{bucket}/run"):
        found = agree_resume(place, None)
        assert found is not None
        assert found.step == 3
        loaded = pieces(Mesh(), filled=False)
        load(found.checkpoint, loaded)
        assert wrong_pieces(loaded, globals_of(SPECS, KINDS)) == []
        assert "index.json" not in open_folder(f"{place}/1").names()


def test_a_copy_that_fails_is_reported_and_the_local_checkpoint_counts(bucket: str, tmp_path: Path) -> None:
    missing = bucket.replace("s3://", "s3://no-")
    saver = Saver(str(tmp_path), copy_to=missing)
    saver.save(1, pieces(Mesh(), filled=True), {})
    assert saver.wait()
    (line,) = saver.poll()
    assert line.startswith(f"copy of step 1 to {missing} failed: rank 0: ")
    assert newest_complete(str(tmp_path)) == f"{tmp_path}/1"


def test_an_unknown_scheme_is_a_users_mistake() -> None:
    with pytest.raises(ConfigError, match="nothing://bucket: cannot be opened"):
        open_folder("nothing://bucket")
