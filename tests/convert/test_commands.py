"""`nanotron import-hf`, `export-hf` and `inspect`, as a user calls them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nanotron.config import get_config_from_file
from tests.commands import nanotron
from tests.convert.models import save_hugging_face


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds hf, a Hugging Face model, and ours, its import."""
    path = tmp_path_factory.mktemp("models")
    save_hugging_face("qwen2-tied", path / "hf")
    done = nanotron(path, "import-hf", "hf", "ours")
    assert (done.returncode, done.stdout) == (
        0,
        "ours/0: train on from it with model.init_method: {path: ours/0}\n",
    ), done.stderr
    return path


def test_an_import_carries_a_config_that_trains_it_on(folder: Path) -> None:
    config = get_config_from_file(folder / "ours" / "0" / "config.yaml")
    assert config.model.model_config.tie_word_embeddings
    assert config.model.model_config.vocab_size == 67
    assert config.model.dtype == "float32"
    assert config.tokens.sequence_length == 128


def test_an_export_says_what_it_is_and_that_it_has_no_tokenizer(folder: Path) -> None:
    done = nanotron(folder, "export-hf", "ours", "back", "--dtype", "bfloat16")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "back: a Hugging Face model, made from ours\n"
    assert done.stderr.startswith("no tokenizer was found in")
    names = ["config.json", "generation_config.json", "model.safetensors"]
    assert sorted(path.name for path in (folder / "back").iterdir()) == names


def test_inspect_shows_the_import_and_refuses_what_is_none(folder: Path) -> None:
    done = nanotron(folder, "inspect", "ours")
    assert done.returncode == 0, done.stderr
    assert "imported from format Hugging Face" in done.stdout
    assert done.stdout.splitlines()[-1] == "integrity    all 4 files are as they were written"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["import-hf", "ours", "again"], "ours is a checkpoint of ours already; nothing needs importing"),
        (["import-hf", "absent", "again"], "absent holds no weights that can be read: looked for"),
        (["export-hf", "hf", "again"], "hf is a folder of Hugging Face; only a checkpoint of ours can be exported"),
        (["export-hf", "ours", "again", "--dtype", "int8"], "--dtype int8 is not one of float64, float32, bfloat16"),
        (["import-hf", "hf", "ours"], "ours: exists already and is not empty; name another folder, or delete it"),
        (["export-hf", "ours", "hf"], "hf: exists already and is not empty; name another folder, or delete it"),
        (["export-hf", "ours", "hf/config.json"], "hf/config.json: exists already and is not empty; name another"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(folder: Path, arguments: list[str], line: str) -> None:
    done = nanotron(folder, *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
    assert not (folder / "again").exists()
