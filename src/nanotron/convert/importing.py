"""``nanotron import-hf``: a model of Hugging Face's or of Hugging Face's Nanotron's becomes a checkpoint of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nanotron.checkpoint.commit import report_of, write_index
from nanotron.checkpoint.format import STATE, key_of, shard_name
from nanotron.checkpoint.read import Tensors
from nanotron.checkpoint.safetensors import DTYPE_NAMES, DTYPES, Planned, split_by_size, write_file
from nanotron.checkpoint.storage import open_folder
from nanotron.config import Config, GeneralArgs, LRSchedulerArgs, ModelArgs, OptimizerArgs, TokensArgs
from nanotron.convert.folders import OURS, kind_of, new_folder, read_model_config
from nanotron.convert.sources import open_weights
from nanotron.convert.tokenizer import copy_tokenizer
from nanotron.data.tokenize.tokenizer import TOKENIZER
from nanotron.errors import ConfigError
from nanotron.logging import get_logger
from nanotron.models.families import family_of
from nanotron.parallel.params import Box, ParamSpec

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig

logger = get_logger(__name__)


def import_weights(
    source: str,
    target: str,
    *,
    max_shard_bytes: int = 5 << 30,
    tell: Callable[[str], None] = logger.info,
) -> str:
    """Write the weights of ``source`` as step 0 of the checkpoints folder ``target``; returns the checkpoint.

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
    folder = new_folder(target).join("0")
    folder.make()
    planned = [_plan(spec, tensors) for spec in family_of(config).specs(config).values()]
    groups = split_by_size(planned, max_shard_bytes)
    reports = []
    for rank, group in enumerate(groups):
        file = shard_name(rank, len(groups))
        written = write_file(folder, file, group)
        boxes = ((tensor.key.partition("@")[0], tensor.shape, tensor.dtype, _whole(tensor.shape)) for tensor in group)
        reports.append(report_of(file, written.size, boxes, written.digests))
    if TOKENIZER not in copy_tokenizer(open_folder(found.path), folder):
        tell(
            f"{found.path}: has no tokenizer; generate and export-hf will ask for one: put its tokenizer.json into"
            f" {folder.path}, or name it as tokenizer.tokenizer_name_or_path when you train on"
        )
    state = {"step": 0, "imported_from": {"format": found.kind, "path": found.path}}
    documents = starter_config(config, Path(target).name, planned[0].dtype).to_texts()
    documents[STATE] = json.dumps(state, indent=1) + "\n"
    write_index(0, folder, documents, reports)
    return folder.path


def _plan(spec: ParamSpec, tensors: Tensors) -> Planned:
    whole = _whole(spec.shape)
    dtype = tensors.dtype("weight", spec.name)

    def make() -> torch.Tensor:
        target = torch.empty(spec.shape, dtype=dtype)
        tensors.read_into(target, "weight", spec.name, whole)
        return target

    return Planned(key_of(f"weight/{spec.name}", whole), DTYPE_NAMES[dtype], spec.shape, make)


def _whole(shape: tuple[int, ...]) -> Box:
    return Box((0,) * len(shape), shape)


def starter_config(model: ModelConfig, name: str, dtype: str) -> Config:
    """A config that trains the imported model on, all else at its defaults."""
    length = min(2048, model.max_position_embeddings or 2048)
    return Config(
        general=GeneralArgs(project=name or "imported"),
        model=ModelArgs(model_config=model, dtype=str(DTYPES[dtype]).removeprefix("torch.")),  # type: ignore[arg-type]
        tokens=TokensArgs(sequence_length=length, micro_batch_size=1, batch_accumulation_per_replica=1),
        optimizer=OptimizerArgs(learning_rate_scheduler=LRSchedulerArgs(learning_rate=1e-5)),
    )
