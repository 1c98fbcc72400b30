"""Checkpoints whose files contradict each other, or say what cannot be, with checksums that hold all the same."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from nanotron.checkpoint.format import Damaged, Index, StateShard, StoredFile, header_bytes, parse_header, tiles
from nanotron.checkpoint.resume import agree_resume
from nanotron.checkpoint.storage import open_folder, read_header
from nanotron.checkpoint.verify import refuse_damage
from nanotron.checkpoint.write import Saver
from nanotron.parallel.agreement import alone
from nanotron.parallel.params import Box, flat_range_boxes

SHARD = "shard-00000-of-00001.safetensors"
STATE = {"consumed": {"a": 8}, "streams": {}, "data": {"a": [{"name": "x"}]}, "optimizer_updates": 2.0, "lr": 1e-3}
CONFIG = "data_stages: []\ntokens: {sequence_length: 8}\n"


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Steps 1 and 2; the second is to be lied about."""
    saver = Saver(str(tmp_path))
    rows = [StateShard("weight", "w", (4, 2), Box((row, 0), (2, 2)), torch.full((2, 2), 1.0 + row)) for row in (0, 2)]
    for step in (1, 2):
        saver.save(step, rows, STATE, {"config.yaml": CONFIG, "model_config.json": "{}"})
        assert saver.wait(), saver.poll()
    return tmp_path


def rewrite(step: Path, name: str, text: str) -> None:
    """Change a text file and let the index vouch for it."""
    (step / name).write_text(text)
    index = Index.from_json((step / "index.json").read_text())
    files = {**index.files, name: StoredFile(len(text.encode()), xxhash.xxh3_64_hexdigest(text.encode()))}
    (step / "index.json").write_text(Index(index.step, files, index.tensors).to_json())


def state(**changes: Any) -> Callable[[Path], None]:
    return lambda step: rewrite(step, "state.json", json.dumps({"step": 2, **STATE, **changes}))


def text(name: str, content: str) -> Callable[[Path], None]:
    return lambda step: rewrite(step, name, content)


def index(before: str, after: str) -> Callable[[Path], None]:
    """Change a part of the index that is there once."""

    def change(step: Path) -> None:
        said = (step / "index.json").read_text()
        assert said.count(before) == 1, said
        (step / "index.json").write_text(said.replace(before, after))

    return change


def header(before: str, after: str) -> Callable[[Path], None]:
    """Change a part of the shard's header, as long as what is put in its place."""

    before, after = (part.replace("SECOND", '"data_offsets":[16') for part in (before, after))

    def change(step: Path) -> None:
        data = (step / SHARD).read_bytes()
        assert data.count(before.encode()) == 1
        assert len(before) == len(after)
        (step / SHARD).write_bytes(data.replace(before.encode(), after.encode()))

    return change


def fifo(step: Path) -> None:
    (step / "index.json").unlink()
    os.mkfifo(step / "index.json")


def folder_for_file(step: Path) -> None:
    (step / "index.json").unlink()
    (step / "index.json").mkdir()


DEEP = "[" * 1_000
LIES = {
    "step of the index": (index('"step": 2', '"step": 1'), "index.json is of step 1, not of the step that the folder"),
    "step of the state": (state(step=1), "state.json is of step 1, but index.json of step 2"),
    "negative count": (state(consumed={"a": -8}), "consumed.a is -8: Input should be greater than or equal to 0"),
    "count that is none": (state(consumed={"a": "8"}), 'consumed.a is "8": Input should be a valid integer'),
    "NaN": (state(optimizer_updates=float("nan")), "optimizer_updates is NaN: Input should be a finite number"),
    "endless number": (state(lr=float("inf")), "lr is Infinity"),
    "list for a mapping": (state(streams=[]), "streams is []"),
    "fingerprints of nothing": (state(data={"a": 3}), "data.a is 3"),
    "deep state": (text("state.json", DEEP), "recursion limit"),
    "deep config": (text("config.yaml", DEEP), "recursion depth"),
    "stage without data": (text("config.yaml", "data_stages: [{name: a}]"), "data_stages.0.data: Field required"),
    "list for the model": (text("model_config.json", "[1]"), "it is [1]"),
    "deep index": (lambda step: (step / "index.json").write_text(DEEP), "recursion limit"),
    "pipe": (fifo, "index.json is no regular file"),
    "folder": (folder_for_file, "index.json is no regular file"),
    "state not listed": (index('"state.json"', '"other.json"'), "does not list state.json"),
    "boxes at one offset": (
        lambda step: (index('"offset": [2, 0]', '"offset": [0, 0]')(step), index("w@2,0", "w@0,0")(step)),
        "the boxes of weight/w contradict it",
    ),
    "box outside": (index('"shape": [4, 2], "dtype"', '"shape": [4, 1], "dtype"'), "the boxes of weight/w contradict"),
    "huge shape": (index('"shape": [4, 2], "dtype"', f'"shape": [{2**62}, 2], "dtype"'), f"shape.0 is {2**62}"),
    "many dims": (index('"shape": [4, 2], "dtype"', f'"shape": {[1] * 60}, "dtype"'), "at most 8 items"),
    "unknown dtype": (index('"dtype": "F32"', '"dtype": "F33"'), 'dtype is "F33"'),
    "negative size": (index('"size": 176', '"size": -176'), "Input should be greater than or equal to 0"),
    "file elsewhere": (index('"files": {"', '"files": {"../'), "String should match pattern"),
    "longer than its bytes": (header("[2,2],SECOND", "[2,9],SECOND"), "damaged header"),
    "bytes that overlap": (header("[16,32]", "[15,31]"), "damaged header"),
    "wider than its bytes": (header('"F32","shape":[2,2],SECOND', '"F64","shape":[2,2],SECOND'), "damaged header"),
    "no header": (header('{"weight/w@0', "[[[[[[[[[[[["), "damaged header"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lie_is_damage_that_names_the_file_and_the_step_before_it_is_taken(saved: Path, lie: str) -> None:
    tell, line = LIES[lie]
    tell(saved / "2")
    for verify in (True, False):  # checksums hold: it is not they that tell
        found = agree_resume(str(saved), None, verify=verify)
        assert found is not None
        assert found.step == 1
        assert any(f"{saved}/2" in notice and line in notice for notice in found.notices), found.notices
    with pytest.raises(Damaged, match=f"{saved}/2"):
        refuse_damage(f"{saved}/2", alone())


def test_what_is_true_is_no_damage(saved: Path) -> None:
    state(consumed={"a": 9}, of_another_version={"deep": [{}]})(saved / "2")
    text("config.yaml", CONFIG + "of_another_version: 1\n")(saved / "2")
    refuse_damage(f"{saved}/2", alone())
    (saved / "copy").mkdir()
    for file in (saved / "2").iterdir():
        (saved / "copy" / file.name).write_bytes(file.read_bytes())
    refuse_damage(f"{saved}/copy", alone())  # a folder that names no step may hold any


@pytest.mark.parametrize("name", ["pipe", "folder"])
def test_only_regular_files_are_read(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    with pytest.raises(Damaged, match=f"{name} is no regular file"):
        open_folder(str(tmp_path)).read(name)
    with pytest.raises(Damaged, match=f"{name} is no regular file"):
        list(open_folder(str(tmp_path)).stream(name))


def test_a_header_must_account_for_every_byte_of_its_file(tmp_path: Path) -> None:
    content = header_bytes({"a": ("F32", (2,)), "b": ("BF16", (1,)), "none": ("F32", (0, 3))}) + bytes(10)
    (tmp_path / "f").write_bytes(content)
    assert set(read_header(open_folder(str(tmp_path)), "f")[0]) == {"a", "b", "none"}
    for data, line in [
        (content + b"x", "has 1 bytes too many"),
        (content[:-1], "was cut short"),
        (b"", "no safetensors"),
    ]:
        (tmp_path / "f").write_bytes(data)
        with pytest.raises(Damaged, match=line):
            read_header(open_folder(str(tmp_path)), "f")
    with pytest.raises(ValueError, match="dtype 'F4', which is none of"):
        parse_header(b'{"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}')
    with pytest.raises(ValueError, match="valid string"):
        parse_header(b'{"__metadata__": {"a": 1}}')


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_boxes_tile_a_tensor_if_and_only_if_every_element_is_in_one(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), max_size=3)))
    size = int(torch.tensor(shape).prod()) if shape else 1
    cuts = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=4))})
    boxes = [box for lo, hi in pairwise(cuts) for box in flat_range_boxes(shape, lo, hi)]
    assert tiles(shape, boxes)
    if boxes and shape:
        number = data.draw(st.integers(0, len(boxes) - 1))
        moved = [tuple(max(0, n + data.draw(st.integers(-1, 1))) for n in part) for part in boxes[number]]
        boxes[number] = Box(*moved)
    held = torch.zeros([n + 9 for n in shape])
    for box in boxes:
        held[box.slices()] += 1
    whole = torch.zeros_like(held)
    whole[tuple(slice(n) for n in shape)] = 1
    assert tiles(shape, boxes) == (torch.equal(held, whole) and all(0 not in box.shape for box in boxes))
