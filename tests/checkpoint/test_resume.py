"""Which checkpoint a run continues from, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nanotron.checkpoint.compare import changed_keys
from nanotron.checkpoint.documents import read_state
from nanotron.checkpoint.format import StateShard
from nanotron.checkpoint.resume import (
    agree_resume,
    check_shared,
    find_resume,
    newest_complete,
)
from nanotron.checkpoint.retention import read_index
from nanotron.checkpoint.storage import LocalFolder, open_folder
from nanotron.checkpoint.verify import damaged_files
from nanotron.checkpoint.write import Saver
from nanotron.errors import ConfigError
from nanotron.parallel.params import Box


def save_steps(path: Path, *steps: int, **options: int) -> Saver:
    saver = Saver(str(path), **options)
    for step in steps:
        weight = torch.full((4, 2), float(step))
        saver.save(step, [StateShard("weight", "w", (4, 2), Box((0, 0), (4, 2)), weight)], {"step": step})
        assert saver.wait(), saver.poll()
    return saver


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def shard(path: Path, step: int) -> Path:
    return path / str(step) / "shard-00000-of-00001.safetensors"


@pytest.mark.parametrize("value", [None, "auto", "null", "AUTO"])
def test_omitted_null_and_auto_take_the_newest_complete_step(tmp_path: Path, value: str | None) -> None:
    assert find_resume(str(tmp_path), value) is None
    save_steps(tmp_path, 9, 10, 2)
    found = find_resume(str(tmp_path), value)
    assert found is not None
    assert (found.checkpoint, found.step, found.notices) == (f"{tmp_path}/10", 10, ())


def test_a_folder_that_does_not_exist_is_a_fresh_start(tmp_path: Path) -> None:
    assert find_resume(str(tmp_path / "absent"), None) is None


def test_never_is_a_fresh_start_and_refused_where_steps_are(tmp_path: Path) -> None:
    assert find_resume(str(tmp_path), "never") is None
    save_steps(tmp_path, 1, 2)
    with pytest.raises(
        ConfigError, match=r"resume_checkpoint_path=never, but .* holds checkpoints \(steps … 1, 2\); use"
    ):
        find_resume(str(tmp_path), "never")


def test_a_path_names_a_step_or_a_folder_of_steps(tmp_path: Path) -> None:
    save_steps(tmp_path / "old", 1, 2, 3)
    for path, step in [(tmp_path / "old", 3), (tmp_path / "old" / "2", 2)]:
        found = find_resume(str(tmp_path / "new"), str(path))
        assert found is not None
        assert found.step == step


@pytest.mark.parametrize("place", ["run", "copy"])
def test_a_step_of_the_runs_own_comes_before_any_path(tmp_path: Path, place: str) -> None:
    run, copy, old = (str(tmp_path / name) for name in ("run", "copy", "old"))
    save_steps(tmp_path / "old", 7)
    half = tmp_path / place / "9" / "shard-00000-of-00001.safetensors.tmp"
    half.parent.mkdir(parents=True)
    half.touch()
    found = find_resume(run, old, copy=copy)
    assert found is not None
    assert (found.step, found.own) == (7, False)
    assert any(f"ignoring {tmp_path}/{place}/9" in line for line in found.notices)
    save_steps(tmp_path / place, 2)
    for wish in (old, f"{old}/7", "gone", f"{run}/2", None):
        found = find_resume(run, wish, copy=copy)
        assert found is not None
        assert (found.checkpoint, found.own) == (f"{tmp_path}/{place}/2", True)
    with pytest.raises(ConfigError, match=f"never, but {tmp_path}/{place} holds checkpoints"):
        find_resume(run, "never", copy=copy)


def test_the_path_of_the_runs_own_folder_is_auto_unless_a_model_lies_there(tmp_path: Path) -> None:
    assert find_resume(str(tmp_path), f"{tmp_path}/") is None
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="a Hugging Face model"):
        find_resume(str(tmp_path), f"{tmp_path}/")
    save_steps(tmp_path, 1)
    found = find_resume(str(tmp_path), f"{tmp_path}/")
    assert found is not None
    assert found.step == 1


def test_damaged_steps_of_the_runs_own_lead_to_older_ones_and_to_the_copies_but_not_to_the_path(tmp_path: Path) -> None:
    run, copy, old = (tmp_path / name for name in ("run", "copy", "old"))
    save_steps(old, 7)
    save_steps(run, 1, 2)
    save_steps(copy, 2)
    for folder, step, left in ((run, 2, f"{run}/1"), (run, 1, f"{copy}/2"), (copy, 2, None)):
        flip(shard(folder, step), -1)
        if left is not None:
            found = agree_resume(str(run), str(old), copy=str(copy))
            assert found is not None
            assert found.checkpoint == left
            assert f"step {step} is damaged: looking for the one before it" in found.notices
    with pytest.raises(ConfigError) as caught:
        agree_resume(str(run), str(old), copy=str(copy))
    assert sum("its checksum differs" in line or "the checksum of" in line for line in caught.value.problems) == 3
    assert caught.value.problems[-1] == f"no complete, undamaged checkpoint is left in {run} or {copy}"


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (None, "there is no such folder, or it is empty"),
        ("checkpoint_metadata.json", "a checkpoint of Hugging Face's Nanotron.*model.init_method.path"),
        ("config.json", "a Hugging Face model.*model.init_method.path"),
        ("something.txt", "neither an index.json nor steps"),
        ("7/shard-00000-of-00001.safetensors", "none of its steps has an index.json"),
    ],
)
def test_a_path_that_is_no_checkpoint_is_refused_with_what_it_is(
    tmp_path: Path, file: str | None, message: str
) -> None:
    if file:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    path = tmp_path if file else tmp_path / "absent"
    with pytest.raises(ConfigError, match=f"checkpoints.resume_checkpoint_path={path}: .*{message}"):
        find_resume(str(tmp_path / "run"), str(path))


def test_a_half_written_step_is_ignored_with_a_line_that_says_so(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    (tmp_path / "2" / "index.json").unlink()
    (tmp_path / "3" / "index.json").write_text('{"format": "nanotron-chec')
    found = find_resume(str(tmp_path), None)
    assert found is not None
    assert found.step == 1
    assert "ignoring" in found.notices[0]
    assert f"{tmp_path}/3: index.json does not parse" in found.notices[0]
    assert found.notices[1] == f"ignoring {tmp_path}/2: it has no index.json, so its save was never completed"
    with pytest.raises(ConfigError, match=f"never completed; the newest complete one is {tmp_path}/1"):
        find_resume(str(tmp_path / "new"), str(tmp_path / "2"))


def test_latest_txt_is_only_advice(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    assert (tmp_path / "latest.txt").read_text() == "2\n"
    (tmp_path / "latest.txt").write_text("1\n")
    assert newest_complete(str(tmp_path)) == f"{tmp_path}/2"


def damage_each_way(path: Path) -> dict[str, Path]:
    """Ways to damage step 3 of copies of one folder, and the file that each must name."""
    ways = {}
    for way in ("data", "header", "truncated", "longer", "missing", "state"):
        folder = path / way
        save_steps(folder, 1, 2, 3)
        target = folder / "3" / "state.json" if way == "state" else shard(folder, 3)
        if way == "truncated":
            target.write_bytes(target.read_bytes()[:-1])
        elif way == "longer":
            target.write_bytes(target.read_bytes() + b"x")
        elif way == "missing":
            target.unlink()
        else:
            flip(target, {"data": -3, "header": 12, "state": 5}[way])
        ways[way] = target
    return ways


def test_damage_is_named_and_auto_takes_the_step_before_it(tmp_path: Path) -> None:
    for file in damage_each_way(tmp_path).values():
        folder = file.parents[1]
        found = agree_resume(str(folder), "auto")
        assert found is not None
        assert found.step == 2
        assert any(str(file) in line for line in found.notices), (file, found.notices)
        assert "step 3 is damaged: looking for the one before it" in found.notices


def test_a_damaged_path_is_refused_with_the_step_before_it_as_offer(tmp_path: Path) -> None:
    for file in damage_each_way(tmp_path).values():
        with pytest.raises(ConfigError) as caught:
            agree_resume("unused", str(file.parent))
        assert str(file) in caught.value.problems[0]
        offer = f"the checkpoint is damaged; the complete checkpoint before it is {file.parents[1]}/2"
        assert caught.value.problems[-1].endswith(offer)


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "nanotron.checkpoint.storage.CHUNK_BYTES", 7
    )  # boxes end and begin inside chunks, and span them
    saver = Saver(str(tmp_path))
    sizes = (1, 3, 16)
    pieces = [StateShard("weight", f"w{n}", (n,), Box((0,), (n,)), torch.randn(n)) for n in sizes]
    saver.save(1, [*pieces, pieces[0]._replace(kind="exp_avg", tensor=torch.ones(1).bfloat16())], {"step": 1})
    assert saver.wait(), saver.poll()
    checkpoint = open_folder(str(tmp_path / "1"))
    index = read_index(checkpoint)
    assert damaged_files(checkpoint, index) == []
    for name in ("state.json", "shard-00000-of-00001.safetensors"):
        file = tmp_path / "1" / name
        for position in range(file.stat().st_size):
            flip(file, position)
            damage = damaged_files(open_folder(str(tmp_path / "1")), index)
            assert len(damage) == 1, (name, position)
            assert str(file) in damage[0]
            flip(file, position)


@pytest.mark.parametrize(
    ("before", "after"),
    [('"offset": [2, 0]', '"offset": [1, 0]'), ('"weight/w"', '"weight/v"'), ('"shape": [4, 2]', '"shape": [5, 2]')],
)
def test_an_index_that_contradicts_itself_is_damage(tmp_path: Path, before: str, after: str) -> None:
    saver = Saver(str(tmp_path))
    halves = [StateShard("weight", "w", (4, 2), Box((row, 0), (2, 2)), torch.ones(2, 2)) for row in (0, 2)]
    saver.save(1, halves, {})
    assert saver.wait(), saver.poll()
    file = tmp_path / "1" / "index.json"
    assert file.read_text().count(before) == 1
    file.write_text(file.read_text().replace(before, after))
    checkpoint = open_folder(str(tmp_path / "1"))
    (line,) = damaged_files(checkpoint, read_index(checkpoint))
    assert line.startswith(f"{file} is damaged: the boxes of weight/")


@pytest.mark.parametrize("index", [b"\xa5\xff", b"{", b"null", b'{"format": 1}', b""])
def test_an_index_of_garbage_is_damage_and_never_a_fresh_start(tmp_path: Path, index: bytes) -> None:
    save_steps(tmp_path, 1, 2)
    (tmp_path / "2" / "index.json").write_bytes(index)
    found = agree_resume(str(tmp_path), None)
    assert found is not None
    assert found.step == 1
    assert f"ignoring {tmp_path}/2" in found.notices[0]
    (tmp_path / "1" / "index.json").write_bytes(index)
    with pytest.raises(ConfigError, match="no complete, undamaged checkpoint is left"):
        agree_resume(str(tmp_path), None)


@pytest.mark.parametrize("content", [b'{"step": 1', b"\xa5\xff", None])
def test_damage_of_the_text_files_is_told_in_a_line_when_it_was_not_looked_for(
    tmp_path: Path, content: bytes | None
) -> None:
    save_steps(tmp_path, 1)
    for name, read in {"state.json": read_state, "config.yaml": lambda path: changed_keys(path, {})}.items():
        file = tmp_path / "1" / name
        file.unlink(missing_ok=True)
        if content is not None:
            file.write_bytes(content)
        elif name == "config.yaml":
            continue  # may be missing
        with pytest.raises(ConfigError, match=f"{tmp_path}/1/{name} is (damaged|no text|missing)"):
            read(f"{tmp_path}/1")


def test_verification_can_be_switched_off(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    flip(shard(tmp_path, 1), -1)
    found = agree_resume(str(tmp_path), None, verify=False)
    assert found is not None
    assert found.step == 1


def test_who_takes_weights_alone_reads_no_byte_of_the_moments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saver = Saver(str(tmp_path))
    kinds = {"weight": torch.ones(8).bfloat16(), "exp_avg": torch.ones(8), "master": torch.ones(8)}
    saver.save(1, [StateShard(kind, "w", (8,), Box((0,), (8,)), values) for kind, values in kinds.items()], {})
    assert saver.wait(), saver.poll()
    read: list[bytes] = []
    stream = LocalFolder.stream

    def recorded(folder: LocalFolder, name: str, start: int = 0, stop: int | None = None) -> Iterator[bytes]:
        for chunk in stream(folder, name, start, stop):
            read.append(chunk if name.startswith("shard") else b"")
            yield chunk

    monkeypatch.setattr(LocalFolder, "stream", recorded)
    checkpoint = open_folder(str(tmp_path / "1"))
    assert damaged_files(checkpoint, read_index(checkpoint), kinds={"weight"}) == []
    assert sum(map(len, read)) == 16
    flip(shard(tmp_path, 1), -17)  # the end of what lies before the weight
    assert damaged_files(checkpoint, read_index(checkpoint), kinds={"weight"}) == []
    assert len(damaged_files(checkpoint, read_index(checkpoint))) == 1


def test_only_damaged_checkpoints_are_an_error_and_never_a_fresh_start(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    flip(shard(tmp_path, 1), -1)
    with pytest.raises(ConfigError, match="no complete, undamaged checkpoint is left"):
        agree_resume(str(tmp_path), None)


def agree(rank: int, world: int, folder: str, resume: str | None) -> tuple[int, tuple[str, ...]] | list[str]:
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    try:
        found = agree_resume(folder, resume, rank, world, store)
    except ConfigError as error:
        return error.problems
    assert found is not None
    return found.step, found.notices


def test_all_ranks_hear_of_the_damage_that_one_found(pool, tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    flip(tmp_path / "2" / "state.json", 3)  # the last file by name, so rank 1's to check
    answers = pool.run(2, agree, str(tmp_path), None)
    assert answers[0] == answers[1]
    assert answers[0][0] == 1
    refusals = pool.run(2, agree, str(tmp_path / "new"), str(tmp_path / "2"))
    assert refusals[0] == refusals[1]
    assert "state.json is damaged" in refusals[0][0]


def look_for_shared(rank: int, world: int, folders: list[str]) -> list[str]:
    import torch.distributed as dist

    try:
        check_shared(folders[rank], rank, world, dist.distributed_c10d._get_default_store())
    except ConfigError as error:
        return error.problems
    return []


def test_a_folder_that_not_every_rank_sees_is_refused_on_all(pool, tmp_path: Path) -> None:
    shared, local = str(tmp_path / "a"), str(tmp_path / "b")
    assert pool.run(2, look_for_shared, [shared, shared]) == [[], []]
    first, second = pool.run(2, look_for_shared, [shared, local])
    assert "rank 1 does not see what rank 0 writes" in first[0]
    assert "rank 1" in second[0]
    assert list(Path(shared).iterdir()) == []


@pytest.mark.parametrize(
    ("last", "every", "left"),
    [
        (None, None, [1, 2, 3, 4, 5, 6]),
        (2, None, [5, 6]),
        (1, 2, [2, 4, 6]),
        (2, 3, [3, 5, 6]),
        (None, 2, [1, 2, 3, 4, 5, 6]),
    ],
)
def test_the_last_n_and_every_kth_step_are_kept(
    tmp_path: Path, last: int | None, every: int | None, left: list[int]
) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, 5, 6, keep_last_n=last, keep_every=every)
    assert sorted(int(path.name) for path in tmp_path.iterdir() if path.is_dir()) == left


def test_retention_deletes_nothing_but_checkpoints(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 8)
    (tmp_path / "1" / "notes.txt").write_text("mine")
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "checkpoint_metadata.json").write_text("{}")
    (tmp_path / "2" / "config.yaml").write_text("{}")
    (tmp_path / "3").mkdir()
    (tmp_path / "3" / "shard-00000-of-00004.safetensors.tmp").write_text("cut short")
    (tmp_path / "3" / "state.json").write_text("{}")
    save_steps(tmp_path, 4, 5, keep_last_n=1)
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    ours = {f"{step}/{name}" for step in (5, 8) for name in ("index.json", "state.json", shard(tmp_path, step).name)}
    assert left == ours | {"1/notes.txt", "2/checkpoint_metadata.json", "2/config.yaml", "latest.txt"}


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_steps(tmp_path, 5)
    index = json.loads((tmp_path / "5" / "index.json").read_text())
    save_steps(tmp_path, 5)
    assert json.loads((tmp_path / "5" / "index.json").read_text()) == index
    assert agree_resume(str(tmp_path), None) is not None


def test_state_is_read_back_and_looking_for_a_checkpoint_imports_no_torch(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    assert read_state(f"{tmp_path}/1") == {"step": 1}
    script = (
        "import sys\n"
        "from nanotron.checkpoint.documents import read_state\n"
        "from nanotron.checkpoint.resume import agree_resume\n"
        "found = agree_resume(sys.argv[1], None)\n"
        "assert read_state(found.checkpoint)['step'] == 1\n"
        "assert 'torch' not in sys.modules and 'fsspec' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
