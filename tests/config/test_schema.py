"""The JSON Schema that editors read: it takes what the loader takes, and marks what is wrong."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from nanotron.config import get_config_from_dict
from nanotron.config.config import Config
from nanotron.config.document import parse
from nanotron.config.keys import fields_of
from nanotron.config.presets import PRESETS, starter
from nanotron.config.schema import json_schema
from nanotron.pipeline.schedules import SCHEDULE_NAMES
from tests.config.test_mistakes import RIGHT

ROOT = Path(__file__).parents[2]
EXAMPLES = [file for file in sorted((ROOT / "examples").rglob("*.yaml")) if file.parent.name != "lm_eval"]
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
SCHEMA = json_schema(SCHEDULE_NAMES)
EDITOR = Draft202012Validator(SCHEMA)


def complete(key: str, value: Any) -> dict[str, Any]:
    """The right config with one section, or a part of a data stage, as a page shows it."""
    if key not in fields_of(Config):
        data = {"dataset": value} if key == "dataset" else value
        key, value = "data_stages", [{"name": "a", "start_training_step": 1, "data": data}]
    config = copy.deepcopy(parse(RIGHT).values)
    merge(config, {key: value})
    return config


def merge(into: dict[str, Any], values: dict[str, Any]) -> None:
    """Put values into nested mappings; an ellipsis of a page says nothing."""
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            merge(into[name], value)
        elif name != "…":
            into[name] = value


def documented() -> Iterator[Any]:
    """Every top-level entry of every fenced YAML block, by page and line."""
    for page in PAGES:
        text = page.read_text()
        for block in re.finditer(r"^```yaml\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE):
            line = text.count("\n", 0, block.start()) + 2
            for entry in re.finditer(r"^\w.*\n(?:[ \n#].*\n?)*", block[1], flags=re.MULTILINE):
                values = parse(entry[0]).values
                first = line + block[1].count("\n", 0, entry.start())
                yield from (pytest.param(name, value, id=f"{page.name}:{first}") for name, value in values.items())


DOCUMENTED = list(documented())


def test_pages_show_configs() -> None:
    assert len(DOCUMENTED) > 15


@pytest.mark.parametrize(("key", "value"), DOCUMENTED)
def test_a_documented_config_is_taken_by_loader_and_editor(key: str, value: Any) -> None:
    config = complete(key, value)
    assert get_config_from_dict(config)
    EDITOR.validate(config)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_an_example_is_taken_by_editors_and_shows_them_the_schema(file: Path) -> None:
    schema = os.path.relpath(ROOT / "examples" / "config.schema.json", file.parent)
    assert file.read_text().startswith(f"# yaml-language-server: $schema={schema}\n")
    values = parse(file.read_text()).values
    values["model"]["model_config"].pop("is_plain_mlp_config", None)  # a family that examples/extend adds
    EDITOR.validate(values)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_starter_config_is_taken_by_editors(preset: str) -> None:
    EDITOR.validate(parse(starter(preset, 512)).values)


@pytest.mark.parametrize(
    "text",
    [
        "dataset: {dataset_folder: train}",
        "dataset: {dataset_folder: [a, b], dataset_weights: [1, 2]}",
        "dataset: {dataset_folder: {a: 3, b: 0.5}}",
        "dataset: {python: file.py:f, arguments: {seed: 1}}",
        "dataset: {hf_dataset_or_datasets: {a: 0.5}, hf_dataset_splits: train}",
        "dataset: null",
        "model: {init_method: {std: 0.02, scaling_method: NUM_LAYERS}, dtype: BF16}",
        "model: {model_config: {vocab_size: -1, hidden_act: SiLU, use_cache: true, _attn_implementation: sdpa}}",
        "optimizer: {adam_beta1: 0.9, adam_beta2: 0.95, adam_eps: 1e-8, torch_adam_is_fused: true}",
        "optimizer: {optimizer_factory: {name: SGD}, on_nan: Skip}",
        "optimizer: {learning_rate_scheduler: {learning_rate: '3e-4', lr_decay_style: Cosine, lr_warmup_style: null}}",
        "tokens: {sequence_length: 10.0, train_steps: '1_000', micro_batch_size: 1e3}",
        "parallelism: {pp_engine: 1F1B, tp_mode: reduce_scatter, recompute_layer: yes, tp_recompute_allgather: 0}",
        "parallelism: {recompute_layer: Selective}",
        "parallelism: {expert_parallel_size: 1, context_parallel_size: 1, moe_layer_recompute: false}",
        "general: {ignore_sanity_checks: true, step: null}",
        "logging: null",
        "lighteval: null",
        "profiler: null",
    ],
)
def test_an_editor_takes_every_form_that_the_loader_takes(text: str) -> None:
    ((key, value),) = parse(text).values.items()
    config = complete(key, value)
    assert get_config_from_dict(config)
    EDITOR.validate(config)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dp: 2", "dpp: 2"),
        ("dp: 2", "dp: two"),
        ("dp: 2", "dp: 0"),
        ("hidden_size: 64", "hiden_size: 64"),
        ("dp: 2", "pp_engine: 1f2b"),
        ("dp: 2", "recompute_layer: maybe"),
        ("model:", "model:\n  init_method: {scaling_method: NUM_LAYER}"),
        ("model:", "data_stages: [{name: a, start_training_step: 1, data: {dataset: {dataset_folder: 3}}}]\nmodel:"),
    ],
)
def test_an_editor_marks_a_mistake(old: str, new: str) -> None:
    assert EDITOR.is_valid(parse(RIGHT).values)
    assert not EDITOR.is_valid(parse(RIGHT.replace(old, new, 1)).values)


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)
