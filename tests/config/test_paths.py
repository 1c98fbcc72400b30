"""Paths are expanded wherever one is taken: in every key of a config, on every command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import typer

from nanotron.cli import _expanded, app
from nanotron.config import Config
from nanotron.config.document import parse
from nanotron.config.keys import PathOrUrl, fields_of, sections_in
from nanotron.config.load import get_config_from_dict, get_config_from_file
from nanotron.config.paths import expanded
from nanotron.errors import ConfigError
from nanotron.launch.run import run_train
from tests.config.test_mistakes import RIGHT, problems

TEXTS_THAT_ARE_NO_PATHS = {
    "GeneralArgs.project", "GeneralArgs.run", "DatasetStageArgs.name",
    "OptimizerArgs.weight_decay_exclude_named_params", "ParameterGroupArgs.params",
    "PretrainDatasetsArgs.hf_dataset_splits", "PretrainDatasetsArgs.hf_dataset_config_name",
    "PretrainDatasetsArgs.text_column_name", "SFTDatasetsArgs.hf_dataset_splits",
    "SFTDatasetsArgs.hf_dataset_config_name", "CustomDatasetArgs.arguments",
}  # fmt: skip


def parts(annotation: Any) -> list[Any]:
    return [annotation, *(inside for part in get_args(annotation) for inside in parts(part))]


def test_every_key_that_takes_a_text_says_whether_it_is_a_path() -> None:
    expands = get_args(PathOrUrl)[1]
    plain = {
        f"{cls.__name__}.{name}"
        for cls in sections_in(Config)
        for name, info in fields_of(cls).items()
        if str in (found := [*parts(info.annotation), *info.metadata]) and expands not in found
    }
    assert plain == TEXTS_THAT_ARE_NO_PATHS


def test_home_is_expanded_in_configs_and_urls_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    model = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    folders = {"~/a": 1, "$HOME/b": 2, "${HOME}/c": 3, "s3://bucket/$NOBODY/d": 4}
    config = get_config_from_dict(
        {
            "model": {"model_config": model, "init_method": {"path": "~/base"}},
            "tokens": {"sequence_length": 8, "micro_batch_size": 1, "batch_accumulation_per_replica": 1},
            "optimizer": {"learning_rate_scheduler": {"learning_rate": 1e-3}},
            "parallelism": {"pp_engine": "~/mine.py:order"},
            "data_stages": [
                {"name": "a", "start_training_step": 1, "data": {"dataset": {"dataset_folder": folders}}},
                {"name": "b", "start_training_step": 2, "data": {"dataset": {"python": "~/mine.py:rows"}}},
            ],
        }
    )
    assert config.model.init_method.path == "/home/me/base"  # type: ignore[union-attr]
    assert config.parallelism.pp_engine == "/home/me/mine.py:order"
    first, second = (stage.data.dataset for stage in config.data_stages)
    assert first.dataset_folder == ["/home/me/a", "/home/me/b", "/home/me/c", "s3://bucket/$NOBODY/d"]  # type: ignore[union-attr]
    assert second.python == ["/home/me/mine.py:rows"]  # type: ignore[union-attr]


def test_a_variable_that_is_not_set_is_named_with_its_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOBODY", raising=False)
    (line,) = problems(tmp_path, RIGHT, ["general.run_dir=$NOBODY/x"])
    assert line.endswith(
        "general.run_dir: $NOBODY/x: the environment variable NOBODY is not set; set it, or write the path itself"
    )


@pytest.mark.parametrize("value", ['"$NOBODY/x"', '["$NOBODY/x"]', '{"$NOBODY/x": 1.0}', "5"])
def test_a_wrong_name_of_a_data_set_is_its_only_mistake(tmp_path: Path, value: str) -> None:
    stage = "data_stages:\n- {name: a, start_training_step: 1, data: {dataset: {hf_dataset_or_datasets: VALUE}}}\n"
    (line,) = problems(tmp_path, RIGHT + stage.replace("VALUE", value))
    assert "data_stages[0].data.dataset.hf_dataset_or_datasets" in line


PATHS = {
    "check": {"config_file"}, "doctor": {"config_file"}, "export-hf": {"checkpoint", "target"},
    "import-hf": {"source", "target"},
    "init": {"output"}, "inspect": {"path"}, "plan": {"config_file", "output"}, "report": {"runs", "output"},
    "timeline": {"config_file", "run", "output"}, "tokenize": {"inputs", "output", "tokenizer"},
    "generate": {"checkpoint", "batch_file"}, "train": {"config_file"}, "watch": {"run"}, "schema": set(),
    "slurm": {"config_file"}, "explain": {"config_file", "output"},
}  # fmt: skip


def test_every_path_of_the_command_line_is_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    found = {
        name: {parameter.name for parameter in command.params if parameter.callback is not None}
        for name, command in commands.items()
    }
    assert found == PATHS
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _expanded(Path("~/x")) == tmp_path / "x"
    assert _expanded(["~/x", "$HOME/y"]) == [f"{tmp_path}/x", f"{tmp_path}/y"]
    assert expanded("~/x:y") == f"{tmp_path}/x:y"
    with pytest.raises(ConfigError, match="NOBODY is not set"):
        expanded("${NOBODY}")
    assert run_train(["--config-file", "~/x.yaml"]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}/x.yaml: no such file")


def test_a_project_whose_name_looks_like_a_variable_loads_again(tmp_path: Path) -> None:
    config = get_config_from_dict({**parse(RIGHT).values, "general": {"project": "$0"}})
    config.save_as_yaml(tmp_path / "x.yaml", resolved=True)
    assert get_config_from_file(tmp_path / "x.yaml") == config
