"""The documented format: docs/checkpoint-format.md holds for what is written, and a script without torch reads it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import xxhash

from nanotron.checkpoint.format import Index, StateShard, header_bytes, parse_header
from nanotron.checkpoint.write import Saver
from nanotron.parallel.params import Box
from tests.checkpoint.read_checkpoint import read_tensor

DOCUMENT = Path(__file__).parents[2] / "docs" / "checkpoint-format.md"
SCRIPT = Path(__file__).with_name("read_checkpoint.py")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    weight, moment = torch.randn(6, 4).bfloat16(), torch.randn(6, 4)
    pieces = [
        StateShard("weight", "w", (6, 4), Box((0, 0), (6, 4)), weight),
        StateShard("exp_avg", "w", (6, 4), Box((0, 0), (2, 4)), moment[:2]),
        StateShard("exp_avg", "w", (6, 4), Box((2, 0), (1, 3)), moment[2:3, :3]),
        StateShard("exp_avg", "w", (6, 4), Box((2, 3), (1, 1)), moment[2:3, 3:]),
        StateShard("exp_avg", "w", (6, 4), Box((3, 0), (3, 4)), moment[3:]),
        StateShard("weight", "norm", (), Box((), ()), torch.tensor(2.5, dtype=torch.float64)),
    ]
    torch.save({"weight": weight.float(), "moment": moment}, tmp_path / "expected.pt")
    saver = Saver(str(tmp_path))
    saver.save(3, pieces, {"step": 3}, {"config.yaml": "general: {}\n"})
    assert saver.wait(), saver.poll()
    return tmp_path / "3"


def test_the_script_without_torch_reads_every_element(saved: Path) -> None:
    expected = torch.load(saved.parent / "expected.pt")
    tensors = json.loads((saved / "index.json").read_text())["tensors"]
    assert torch.equal(torch.from_numpy(read_tensor(saved, tensors["weight/w"])), expected["weight"])
    assert torch.equal(torch.from_numpy(read_tensor(saved, tensors["exp_avg/w"])), expected["moment"])
    script = (
        f"import runpy, sys; sys.argv = ['read_checkpoint.py', {str(saved)!r}]\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "assert 'torch' not in sys.modules and 'nanotron' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "weight/norm () sum 2.500000" in done.stdout


def test_the_script_in_the_document_is_the_script() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert code == SCRIPT.read_text()
    assert len(code.splitlines()) <= 30


def test_every_key_of_the_index_is_documented_and_every_documented_key_is_there(saved: Path) -> None:
    def keys(value: object, path: str = "") -> set[str]:
        if isinstance(value, dict):
            parts = {"files": "<file>", "tensors": "<kind>/<name>"}
            inner = parts.get(path.rsplit(".", 1)[-1])
            return {k for name, item in value.items() for k in keys(item, f"{path}.{inner or name}".strip("."))} | {
                path
            }
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return {k for item in value for k in keys(item, f"{path}[]")}
        return {path}

    written = keys(json.loads((saved / "index.json").read_text())) - {"", "tensors.<kind>/<name>.boxes[]"}
    section = DOCUMENT.read_text().partition("## index.json")[2].partition("\n## ")[0]
    documented = set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))
    assert written == documented


def test_checksums_and_sizes_are_of_the_bytes_that_the_document_says(saved: Path) -> None:
    index = json.loads((saved / "index.json").read_text())
    for name, file in index["files"].items():
        data = (saved / name).read_bytes()
        assert len(data) == file["size"]
        assert "xxh3" not in file or xxhash.xxh3_64_hexdigest(data) == file["xxh3"]
    for key, tensor in index["tensors"].items():
        for box in tensor["boxes"]:
            assert box["key"] == f"{key}@{','.join(map(str, box['offset']))}"
            data = (saved / box["file"]).read_bytes()
            length = int.from_bytes(data[:8], "little")
            start, stop = json.loads(data[8 : 8 + length])[box["key"]]["data_offsets"]
            assert (8 + length) % 8 == 0
            assert xxhash.xxh3_64_hexdigest(data[8 + length + start : 8 + length + stop]) == box["xxh3"]


def test_an_index_survives_a_round_trip_and_another_version_is_refused(saved: Path) -> None:
    text = (saved / "index.json").read_text()
    assert Index.from_json(text).to_json() == text
    with pytest.raises(ValueError, match="version is 3: Input should be 1 or 2"):
        Index.from_json(text.replace('"version": 1', '"version": 3'))


@pytest.mark.parametrize(("kind", "version"), [("exp_avg", 1), ("momentum", 2), ("ema", 2)])
def test_kinds_of_the_second_version_say_so_and_readers_open_both(saved: Path, kind: str, version: int) -> None:
    index = Index.from_json((saved / "index.json").read_text())
    index.tensors[f"{kind}/extra"] = next(iter(index.tensors.values()))
    text = index.to_json()
    assert json.loads(text)["version"] == version
    assert Index.from_json(text) == index


def test_headers_are_read_in_file_order() -> None:
    header = header_bytes({"b": ("F32", (2, 3)), "a": ("BF16", (5,))}, {"format": "pt"})
    entries, metadata = parse_header(header[8:])
    assert list(entries) == ["b", "a"]
    assert (entries["b"].start, entries["b"].stop, entries["a"].stop) == (
        len(header),
        len(header) + 24,
        len(header) + 34,
    )
    assert metadata == {"format": "pt"}
