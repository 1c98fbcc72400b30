"""What is opened: steps, folders of steps, models from elsewhere; their tokenizers, and layouts that fit."""

import shutil
from pathlib import Path

import pytest

from nanotron.convert.exporting import export_hf
from nanotron.errors import ConfigError
from nanotron.generate.sampling import Sampling
from nanotron.generate.source import laid_out, open_source
from tests.generate.tiny import decoder_of, made


def test_a_folder_of_steps_is_its_newest_step(run: Path) -> None:
    assert open_source(str(run)).path == open_source(f"{run}/7/").path == str(run / "7")


def test_an_exported_model_says_what_the_checkpoint_says(run: Path, tmp_path: Path) -> None:
    export_hf(str(run), str(tmp_path / "hf"))
    ours, theirs = open_source(str(run)), open_source(str(tmp_path / "hf"))
    assert theirs.ends == ours.ends == (ours.tokenizer.token_to_id("<|endoftext|>"),)
    ids = [theirs.encode("import os")]
    assert made(decoder_of(theirs), ids, 8, Sampling()) == made(decoder_of(ours), ids, 8, Sampling())


def test_a_checkpoint_may_be_a_url(run: Path) -> None:
    memory = pytest.importorskip("fsspec").filesystem("memory")
    memory.put(f"{run}/", "/run-of-generate/", recursive=True)
    ours, theirs = open_source(str(run)), open_source("memory://run-of-generate")
    assert theirs.ends == ours.ends
    ids = [ours.encode("import os")]
    assert made(decoder_of(theirs), ids, 4, Sampling()) == made(decoder_of(ours), ids, 4, Sampling())


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{tmp_path}/nothing holds no weights that can be read"):
        open_source(f"{tmp_path}/nothing")


def test_a_tokenizer_is_looked_for_beside_the_weights_and_in_the_run_directory_first(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the one that the config names is not there
    shutil.copytree(run / "7", tmp_path / "steps" / "7")
    with pytest.raises(ConfigError, match=r"tokenizer 'data/.*' is neither a file"):
        open_source(str(tmp_path / "steps"))
    shutil.copy(run / "tokenizer.json", tmp_path / "steps")
    source = open_source(str(tmp_path / "steps"))
    assert source.ends == (source.config.model.model_config.eos_token_id,), "without tokenizer_config.json, the model's"
    (tmp_path / "steps" / "7" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"steps/7: its tokenizer.json is not a tokenizer"):
        open_source(str(tmp_path / "steps"))


def test_prompts_that_the_model_cannot_go_on_from_are_refused(run: Path) -> None:
    source = open_source(str(run))
    with pytest.raises(ConfigError, match="the prompt is empty"):
        source.encode("")
    source.config.model.model_config.vocab_size = 5
    with pytest.raises(ConfigError, match="the model only 5; is it another model's"):
        source.encode("import")


@pytest.mark.parametrize(
    ("layout", "complaint"),
    [
        ({"tp": 3, "pp": 1}, "tp=3 does not divide model.model_config.num_attention_heads=4"),
        ({"tp": 1, "pp": 4}, "pp=4"),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_refused(run: Path, layout: dict[str, int], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        laid_out(open_source(str(run)).config, **layout)


def test_generation_cuts_no_sequences_whatever_the_run_did(run: Path) -> None:
    config = open_source(str(run)).config
    config.parallelism.context_parallel_size = 2
    assert laid_out(config, tp=2, pp=1).parallelism.world_size == 2
