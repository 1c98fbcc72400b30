"""Folders of weights: which program wrote one, and which model it holds. No torch: mistakes are told at once.

index.json, or steps                a checkpoint of ours
checkpoint_metadata.json            a checkpoint of Hugging Face's Nanotron: one file per tensor and shard
config.json + *.safetensors         a Hugging Face model
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import TypeAdapter, ValidationError

from nanotron.checkpoint.format import INDEX
from nanotron.checkpoint.resume import newest_complete
from nanotron.checkpoint.storage import Folder, open_folder
from nanotron.config.keys import dotted
from nanotron.config.model import AnyModelConfig
from nanotron.convert.schema import CONFIG, read_json
from nanotron.errors import ConfigError
from nanotron.models.hf_config import model_config_from_hf
from nanotron.untrusted import MAPPING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from nanotron.config.model import ModelConfig

OURS, HF_NANOTRON, HUGGING_FACE = "checkpoint", "Hugging Face Nanotron", "Hugging Face"


class Found(NamedTuple):
    """What a folder is, and the folder of the very step where it holds several."""

    kind: str
    path: str


def kind_of(path: str) -> Found:
    """Tell what a folder of weights is; raises ConfigError when it is none that can be read."""
    names = open_folder(path).names()
    if INDEX in names:
        return Found(OURS, path)
    if "checkpoint_metadata.json" in names and "model" in names:
        return Found(HF_NANOTRON, path)
    if "config.json" in names:
        return Found(HUGGING_FACE, path)
    newest = newest_complete(path)
    if newest:
        return Found(OURS, newest)
    steps = [int(name) for name in names if name.isdigit()]
    if steps and "checkpoint_metadata.json" in open_folder(f"{path}/{max(steps)}").names():
        return Found(HF_NANOTRON, f"{path}/{max(steps)}")
    raise ConfigError(
        f"{path} holds no weights that can be read: looked for a checkpoint (index.json, or steps with one), one of "
        "Hugging Face's Nanotron (checkpoint_metadata.json, model/) and a Hugging Face model (config.json)"
    )


def new_folder(target: str) -> Folder:
    """Make the folder that a model is written into; raises ConfigError when something lies there."""
    folder = open_folder(target)
    if os.path.isfile(target) or folder.names():
        raise ConfigError(f"{target}: exists already and is not empty; name another folder, or delete it")
    folder.make()
    return folder


def read_model_config(path: str) -> ModelConfig:
    """The model section of a folder of weights, whoever wrote it; raises ConfigError naming what does not fit."""
    kind, path = kind_of(path)
    folder = open_folder(path)
    file = "config.json" if kind == HUGGING_FACE else "model_config.json"
    values = read_json(folder, file, CONFIG if kind == HUGGING_FACE else MAPPING)
    if kind == HUGGING_FACE:
        try:
            values = model_config_from_hf(values)
        except ConfigError as error:
            raise ConfigError([f"{path}/{line}" for line in error.problems]) from None
    elif kind == HF_NANOTRON:
        values = _known_keys(values)
    config = parse_model_config(values, f"{path}/{file}")
    if config.vocab_size is None:  # only a run's data could tell it
        raise ConfigError(f"{path}/{file}: vocab_size: missing")
    return config


def parse_model_config(values: dict[str, Any], where: str) -> ModelConfig:
    """The family's config for plain values; raises ConfigError for what is wrong or not available here."""
    try:
        config: ModelConfig = TypeAdapter(AnyModelConfig).validate_python(values)
    except ValidationError as error:
        raise ConfigError([f"{where}: {_words(item)}" for item in error.errors()]) from error
    return config


def _words(error: ErrorDetails) -> str:
    """One of pydantic's errors: the key, and what is wrong with it."""
    context = error.get("ctx", {})
    path = (*error["loc"][1:], *([context["key"]] if "key" in context else []))
    return f"{dotted(path)}: {context.get('text', error['msg'])}"


def _known_keys(values: dict[str, Any]) -> dict[str, Any]:
    """A Hugging Face Nanotron's model_config.json without what was switched off or only chose kernels there."""
    kernels = {"_attn_implementation", "ring_attn_heads_k_stride"}
    return {name: value for name, value in values.items() if value is not None and name not in kernels}
