"""What a save does when disks misbehave, and that training never waits for them."""

from __future__ import annotations

import errno
import os
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from nanotron.checkpoint.format import StateShard
from nanotron.checkpoint.read import load
from nanotron.checkpoint.resume import agree_resume, newest_complete
from nanotron.checkpoint.storage import LocalFolder
from nanotron.checkpoint.write import Saver
from nanotron.ops.host_memory import host_memory
from nanotron.parallel import agreement
from nanotron.parallel.params import Box
from nanotron.parallel.store import LostPeers


class FaultyFolder(LocalFolder):
    """A real folder whose disk misbehaves as the class attributes say; every operation is recorded."""

    operations: list[str]
    largest_write: int
    room: int  # bytes until the disk is full
    gate: threading.Event  # what a slow disk waits for
    lost: str  # a file whose directory entry does not survive

    @classmethod
    def behave(cls) -> None:
        cls.operations, cls.largest_write, cls.room, cls.lost = [], 1 << 40, 1 << 40, "-"
        cls.gate = threading.Event()
        cls.gate.set()

    def _record(self, what: str, path: str) -> None:
        type(self).operations.append(f"{what} {os.path.basename(path)}")

    def _open(self, path: str) -> int:
        self._record("open", path)
        return super()._open(path)

    def _write(self, file: int, view: memoryview) -> int:
        self.gate.wait()
        size = min(len(view), self.largest_write, self.room)
        if size == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        type(self).room -= size
        return super()._write(file, view[:size])

    def _sync(self, file: int) -> None:
        path = os.readlink(f"/proc/self/fd/{file}")
        self._record("sync folder" if stat.S_ISDIR(os.fstat(file).st_mode) else "sync", path)
        super()._sync(file)

    def _rename(self, source: str, target: str) -> None:
        self._record("rename", source)
        super()._rename(source, target)
        if os.path.basename(target) == self.lost:
            os.unlink(target)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> type[FaultyFolder]:
    FaultyFolder.behave()
    monkeypatch.setattr("nanotron.checkpoint.write.open_folder", FaultyFolder)
    return FaultyFolder


def pieces(value: float, rows: int = 64) -> list[StateShard]:
    shape = (rows, 3)
    weight, moment = torch.full(shape, value, dtype=torch.bfloat16), torch.full(shape, value)
    box = Box((0, 0), shape)
    return [StateShard("weight", "w", shape, box, weight), StateShard("exp_avg", "w", shape, box, moment)]


def holds(checkpoint: str | None, value: float) -> bool:
    assert checkpoint is not None
    loaded = pieces(-1.0)
    load(checkpoint, loaded)
    return all(bool((piece.tensor == value).all()) for piece in loaded)


def test_files_are_durable_before_they_are_named_and_the_index_comes_last(tmp_path: Path, faulty) -> None:
    saver = Saver(str(tmp_path / "run"))
    saver.save(3, pieces(1.0), {"step": 3}, {"config.yaml": "a: 1\n"})
    assert saver.wait(), saver.poll()
    expected = ["sync folder run", f"sync folder {tmp_path.name}"]  # both new folders are entries of their parents
    for file, folder in [
        ("shard-00000-of-00001.safetensors", "3"),
        ("state.json", "3"),
        ("config.yaml", "3"),
        ("index.json", "3"),
        ("latest.txt", "run"),
    ]:
        expected += [f"open {file}.tmp", f"sync {file}.tmp", f"rename {file}.tmp", f"sync folder {folder}"]
    assert faulty.operations == expected


def test_short_writes_are_continued(tmp_path: Path, faulty) -> None:
    faulty.largest_write = 7
    saver = Saver(str(tmp_path))
    saver.save(1, pieces(5.0), {})
    assert saver.wait(), saver.poll()
    found = agree_resume(str(tmp_path), None)
    assert found is not None
    assert holds(found.checkpoint, 5.0)


FILES = ("shard-00000-of-00001.safetensors", "state.json", "index.json")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("spare", [0, 1, -1])
def test_a_full_disk_is_reported_leaves_the_last_checkpoint_and_the_next_save_succeeds(
    tmp_path: Path, faulty, file: str, spare: int
) -> None:
    saver = Saver(str(tmp_path))
    saver.save(1, pieces(1.0), {"step": 1})
    assert saver.wait()
    sizes = [(tmp_path / "1" / name).stat().st_size for name in FILES]
    faulty.room = sum(sizes[: FILES.index(file)]) + (sizes[FILES.index(file)] - 1 if spare < 0 else spare)
    saver.save(2, pieces(2.0), {"step": 2})
    assert not saver.wait()
    (line,) = saver.poll()
    assert line.startswith("checkpoint of step 2 failed, the last is 1: ")
    assert f"No space left on device: {tmp_path}/2/{file}" in line
    assert saver.poll() == []
    assert newest_complete(str(tmp_path)) == f"{tmp_path}/1"
    assert holds(f"{tmp_path}/1", 1.0)
    assert not any(path.suffix in {".safetensors", ".tmp"} for path in (tmp_path / "2").iterdir())
    faulty.room = 1 << 40
    saver.save(2, pieces(2.0), {"step": 2})
    assert saver.wait(), saver.poll()
    assert saver.last_complete == 2
    assert holds(newest_complete(str(tmp_path)), 2.0)


def test_a_disk_that_fills_up_after_the_commit_costs_no_checkpoint(tmp_path: Path, faulty) -> None:
    saver = Saver(str(tmp_path))
    saver.save(1, pieces(1.0), {"step": 1})
    assert saver.wait()
    faulty.room = sum(path.stat().st_size for path in (tmp_path / "1").iterdir())
    saver.save(2, pieces(2.0), {"step": 2})
    assert saver.wait()
    assert saver.poll() == [f"checkpoint {tmp_path}/2 is complete, but: No space left on device: {tmp_path}/latest.txt"]
    assert holds(newest_complete(str(tmp_path)), 2.0)


def test_an_index_that_may_not_be_durable_is_taken_back_before_the_shards_go(
    tmp_path: Path, faulty, monkeypatch
) -> None:
    def sync(self: FaultyFolder, file: int) -> None:
        if "rename index.json.tmp" in self.operations[-1:]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(faulty, "_sync", sync)
    saver = Saver(str(tmp_path))
    saver.save(1, pieces(1.0), {})
    assert not saver.wait()
    assert newest_complete(str(tmp_path)) is None
    assert sorted(path.name for path in (tmp_path / "1").iterdir()) == ["state.json"]


def test_a_folder_without_permission_is_reported(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")  # a file where the folder should be: refused for root too
    saver = Saver(str(blocked))
    saver.save(1, pieces(1.0), {})
    assert not saver.wait()
    (line,) = saver.poll()
    assert line.startswith("checkpoint of step 1 failed, no checkpoint is complete yet: ")
    assert str(blocked) in line


@pytest.mark.parametrize("lost", ["shard-00000-of-00001.safetensors", "state.json", "index.json"])
def test_a_lost_directory_entry_costs_one_checkpoint_and_is_named(tmp_path: Path, faulty, lost: str) -> None:
    saver = Saver(str(tmp_path))
    saver.save(1, pieces(1.0), {})
    assert saver.wait()
    faulty.lost = lost
    saver.save(2, pieces(2.0), {})
    saver.wait()
    found = agree_resume(str(tmp_path), None)
    assert found is not None
    assert found.step == 1
    assert lost in " ".join(found.notices)
    assert holds(found.checkpoint, 1.0)


def test_training_goes_on_while_a_slow_disk_writes_what_the_weights_were(tmp_path: Path, faulty) -> None:
    saver = Saver(str(tmp_path))
    faulty.gate.clear()
    live = pieces(1.0)
    saver.save(1, live, {})
    for piece in live:  # the next steps
        piece.tensor.fill_(9.0)
    assert saver.poll() == []
    assert newest_complete(str(tmp_path)) is None
    faulty.gate.set()
    assert saver.wait()
    assert holds(f"{tmp_path}/1", 1.0)


def test_a_step_that_is_written_anew_is_no_checkpoint_meanwhile_and_keeps_nothing_old(tmp_path: Path, faulty) -> None:
    saver = Saver(str(tmp_path))
    saver.save(5, pieces(1.0), {})
    assert saver.wait()
    (tmp_path / "5" / "shard-00003-of-00004.safetensors").write_text("of another layout")
    faulty.gate.clear()
    faulty.operations.clear()
    saver.save(5, pieces(2.0), {})
    while not any(operation.startswith("open shard-00000-of-00001") for operation in faulty.operations):
        time.sleep(0.001)
    assert newest_complete(str(tmp_path)) is None
    faulty.gate.set()
    assert saver.wait()
    assert holds(f"{tmp_path}/5", 2.0)
    assert not (tmp_path / "5" / "shard-00003-of-00004.safetensors").exists()


def test_a_second_save_waits_for_the_first_and_both_are_complete(tmp_path: Path, faulty) -> None:
    saver = Saver(str(tmp_path))
    faulty.gate.clear()
    saver.save(1, pieces(1.0), {})
    threading.Timer(0.05, faulty.gate.set).start()
    saver.save(2, pieces(2.0), {})
    assert saver.wait()
    assert holds(f"{tmp_path}/1", 1.0)
    assert holds(f"{tmp_path}/2", 2.0)


def test_the_host_copy_is_one_buffer_that_later_saves_use_again(tmp_path: Path) -> None:
    saver = Saver(str(tmp_path))
    addresses = set()
    for step in (1, 2, 3):
        saver.save(step, pieces(float(step)), {})
        saver.wait()
        addresses.add(saver._snapshot._buffer.data_ptr())
    assert len(addresses) == 1


def test_pieces_that_a_rank_does_not_write_are_not_copied(tmp_path: Path) -> None:
    mine, theirs = pieces(1.0)
    saver = Saver(str(tmp_path))
    saver.save(1, [mine, theirs._replace(writes=False)], {})
    saver.wait()
    assert saver._snapshot._buffer.numel() == mine.tensor.numel() * 2


def test_views_and_mixed_dtypes_are_stored_as_safetensors_reads_them(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).view(4, 6)
    odd = torch.tensor([1.5], dtype=torch.bfloat16)
    box = Box((2, 0), (6, 4))
    saver = Saver(str(tmp_path))
    saver.save(
        1,
        [
            StateShard("weight", "odd", (1,), Box((0,), (1,)), odd),
            StateShard("weight", "t", (8, 4), box, base.t()),
            StateShard("weight", "t", (8, 4), Box((0, 0), (2, 4)), torch.zeros(2, 4)),
            StateShard("weight", "scalar", (), Box((), ()), torch.tensor(3.0)),
        ],
        {},
    )
    assert saver.wait(), saver.poll()
    stored = load_file(tmp_path / "1" / "shard-00000-of-00001.safetensors")
    assert torch.equal(stored["weight/t@2,0"], base.t())
    assert torch.equal(stored["weight/odd@0"], odd)
    assert torch.equal(stored["weight/scalar@"], torch.tensor(3.0))


def fail_on_rank_1(rank: int, world: int, folder: str) -> tuple[list[str], bool, int | None]:
    import torch.distributed as dist

    if rank == 1:
        import nanotron.checkpoint.write as write

        FaultyFolder.behave()
        FaultyFolder.room = 10
        write.open_folder = FaultyFolder  # this worker process only
    saver = Saver(folder, rank, world, dist.distributed_c10d._get_default_store(), timeout_s=20)
    box = Box((rank * 64, 0), (64, 3))
    part = [StateShard("weight", "w", (128, 3), box, torch.full((64, 3), float(rank)))]
    saver.save(1, part, {})
    first = saver.wait()
    FaultyFolder.room = 1 << 40
    saver.save(2, part, {})
    saver.wait()
    if rank == 1:
        write.open_folder = LocalFolder
    return saver.poll(), first, saver.last_complete


def test_one_rank_s_full_disk_fails_the_save_on_all_and_the_next_one_succeeds(pool, tmp_path: Path) -> None:
    answers = pool.run(2, fail_on_rank_1, str(tmp_path))
    assert answers[0] == answers[1]
    (line,), first, last = answers[0]
    assert line.startswith(
        "checkpoint of step 1 failed, no checkpoint is complete yet: rank 1: No space left on device"
    )
    assert (first, last) == (False, 2)
    assert list((tmp_path / "1").iterdir()) == []
    assert newest_complete(str(tmp_path)) == f"{tmp_path}/2"


def silent_rank_1(rank: int, world: int, folder: str) -> list[str]:
    import torch.distributed as dist

    saver = Saver(folder, rank, world, dist.distributed_c10d._get_default_store(), timeout_s=0.3)
    if rank == 1:
        return []
    saver.save(1, pieces(1.0), {})
    with pytest.raises(LostPeers) as lost:
        saver.wait()
    assert lost.value.ranks == [1]
    with pytest.raises(LostPeers):  # nor does another save go on without it
        saver.save(2, pieces(1.0), {})
    return saver.poll()


def test_a_rank_that_says_nothing_is_named_and_ends_the_saving(pool, tmp_path: Path) -> None:
    (line,) = pool.run(2, silent_rank_1, str(tmp_path))[0]
    assert line.startswith("checkpoint of step 1 failed")
    assert line.endswith("rank 1 did not answer within 0.3 s")


def test_a_disk_that_hangs_is_said_with_the_file_and_not_given_up(
    tmp_path: Path, faulty, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(agreement, "SAY_S", 0.05)
    saver = Saver(str(tmp_path), timeout_s=0.1)
    faulty.gate.clear()
    saver.save(1, pieces(1.0), {})
    deadline = time.monotonic() + 30
    while not caplog.messages and time.monotonic() < deadline:
        time.sleep(0.01)
    faulty.gate.set()
    assert caplog.messages[0].startswith(f"rank 0 has been writing {tmp_path}/1/shard-00000-of-00001.safetensors for")
    assert saver.wait()


def test_memory_that_cuda_copies_to_is_as_large_as_the_state_and_known_to_it_while_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pinned by torch's own allocator it would be the next power of two."""
    registered: dict[int, int] = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda start, size, flags: registered.update({start: size}),
        cudaHostUnregister=registered.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    size = (1 << 20) + 1
    memory = host_memory(size, {"cpu", "cuda"})
    assert memory.untyped_storage().nbytes() == size
    assert registered == {memory.data_ptr(): size}
    del memory
    assert registered == {}
    assert host_memory(size, {"cpu"}).numel() == size
    assert registered == {}
