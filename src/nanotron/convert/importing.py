"""``nanotron import-hf``: a model of Hugging Face's or of Hugging Face's Nanotron's becomes a checkpoint of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanotron.checkpoint.commit import write_index
from nanotron.checkpoint.format import STATE, key_of, shard_name
from nanotron.checkpoint.read import Tensors
from nanotron.checkpoint.safetensors import DTYPE_NAMES, DTYPES, Planned, split_by_size, write_file
from nanotron.checkpoint.storage import open_folder
from nanotron.config import Config, GeneralArgs, LRSchedulerArgs, ModelArgs, OptimizerArgs, TokensArgs
from nanotron.config.document import dump
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


def starter_config(model: ModelConfig, name: str, dtype: str) -> Config:
    """A config that trains the imported model on, all else at its defaults."""
    length = min(2048, model.max_position_embeddings or 2048)
    return Config(
        general=GeneralArgs(project=name or "imported"),
        model=ModelArgs(model_config=model, dtype=str(DTYPES[dtype]).removeprefix("torch.")),  # type: ignore[arg-type]
        tokens=TokensArgs(sequence_length=length, micro_batch_size=1, batch_accumulation_per_replica=1),
        optimizer=OptimizerArgs(learning_rate_scheduler=LRSchedulerArgs(learning_rate=1e-5)),
    )
