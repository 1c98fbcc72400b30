"""``nanotron import-hf``: a model of Hugging Face's or of Hugging Face's Nanotron's becomes a checkpoint of ours."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import TypeAdapter, ValidationError

from nanotron.checkpoint.commit import write_index
from nanotron.checkpoint.format import STATE, key_of, shard_name
from nanotron.checkpoint.read import Tensors
from nanotron.checkpoint.safetensors import DTYPE_NAMES, DTYPES, Planned, split_by_size, write_file
from nanotron.checkpoint.storage import Folder, open_folder
from nanotron.config import Config, GeneralArgs, LRSchedulerArgs, ModelArgs, OptimizerArgs, TokensArgs
from nanotron.config.document import dump
from nanotron.config.keys import dotted
from nanotron.config.model import AnyModelConfig
from nanotron.convert.schema import CONFIG, read_json
from nanotron.convert.sources import HF_NANOTRON, HUGGING_FACE, OURS, kind_of, open_weights
from nanotron.convert.tokenizer import copy_tokenizer
from nanotron.data.tokenize.tokenizer import TOKENIZER
from nanotron.errors import ConfigError
from nanotron.logging import get_logger
from nanotron.models.families import family_of
from nanotron.models.hf_config import model_config_from_hf
from nanotron.parallel.params import Box, ParamSpec
from nanotron.untrusted import MAPPING

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from nanotron.config.model import ModelConfig

logger = get_logger(__name__)


def import_weights(
    source: str,
    target: str,
    *,
    step: int = 0,
    max_shard_bytes: int = 5 << 30,
    tell: Callable[[str], None] = logger.info,
) -> str:
    """Write the weights of ``source`` as step ``step`` of the checkpoints folder ``target``; returns the checkpoint.

    Tensors keep their dtype, rounding nothing; ``tell`` is called with what the folder holds that is not imported.
    Training continues from the checkpoint with model.init_method.path.
    """
    found = kind_of(source)
    if found.kind == OURS:
        raise ConfigError(f"{source} is a checkpoint of ours already; nothing needs importing")
    config = read_model_config(found.path)
    tensors = open_weights(found.path, config)
    for line in tensors.ignored:
        tell(line)
    folder = new_folder(target).join(str(step))
    folder.make()
    planned = [_plan(spec, tensors) for spec in family_of(config).specs(config).values()]
    groups = split_by_size(planned, max_shard_bytes)
    reports = []
    for rank, group in enumerate(groups):
        file = shard_name(rank, len(groups))
        written = write_file(folder, file, group)
        boxes = [_entry(tensor, written.digests[tensor.key]) for tensor in group]
        reports.append({"file": file, "size": written.size, "boxes": boxes, "problems": []})
    if TOKENIZER not in copy_tokenizer(open_folder(found.path), folder):
        tell(
            f"{found.path}: has no tokenizer; generate and export-hf will ask for one: put its tokenizer.json into"
            f" {folder.path}, or name it as tokenizer.tokenizer_name_or_path when you train on"
        )
    run = starter_config(config, Path(target).name, planned[0].dtype).to_dict()
    documents = {
        "config.yaml": dump(run),
        "model_config.json": json.dumps(run["model"]["model_config"], indent=1) + "\n",
        STATE: json.dumps({"step": step, "imported_from": {"format": found.kind, "path": found.path}}, indent=1) + "\n",
    }
    write_index(step, folder, documents, reports)
    return folder.path


def new_folder(target: str) -> Folder:
    """Make the folder that a model is written into; raises ConfigError when something lies there."""
    folder = open_folder(target)
    if os.path.isfile(target) or folder.names():
        raise ConfigError(f"{target}: exists already and is not empty; name another folder, or delete it")
    folder.make()
    return folder


def _plan(spec: ParamSpec, tensors: Tensors) -> Planned:
    whole = Box((0,) * len(spec.shape), spec.shape)
    dtype = tensors.dtype("weight", spec.name)

    def make() -> torch.Tensor:
        target = torch.empty(spec.shape, dtype=dtype)
        tensors.read_into(target, "weight", spec.name, whole)
        return target

    return Planned(key_of(f"weight/{spec.name}", whole), DTYPE_NAMES[dtype], spec.shape, make)


def _entry(planned: Planned, digest: str) -> dict[str, Any]:
    origin = (0,) * len(planned.shape)
    return {
        "tensor": planned.key.partition("@")[0],
        "shape": planned.shape,
        "dtype": planned.dtype,
        "box": (origin, planned.shape),
        "key": planned.key,
        "xxh3": digest,
    }


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


def starter_config(model: ModelConfig, name: str, dtype: str) -> Config:
    """A config that trains the imported model on, all else at its defaults."""
    length = min(2048, model.max_position_embeddings or 2048)
    return Config(
        general=GeneralArgs(project=name or "imported"),
        model=ModelArgs(model_config=model, dtype=str(DTYPES[dtype]).removeprefix("torch.")),  # type: ignore[arg-type]
        tokens=TokensArgs(sequence_length=length, micro_batch_size=1, batch_accumulation_per_replica=1),
        optimizer=OptimizerArgs(learning_rate_scheduler=LRSchedulerArgs(learning_rate=1e-5)),
    )


def _known_keys(values: dict[str, Any]) -> dict[str, Any]:
    """A Hugging Face Nanotron's model_config.json without what was switched off or only chose kernels there."""
    kernels = {"_attn_implementation", "ring_attn_heads_k_stride"}
    return {name: value for name, value in values.items() if value is not None and name not in kernels}
