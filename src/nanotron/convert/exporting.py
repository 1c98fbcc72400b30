"""``nanotron export-hf``: a checkpoint of ours becomes a Hugging Face model folder.

The original layout does not matter, and neither transformers nor a GPU is needed: each tensor is read, put in Hugging
Face's order and written before the next.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import yaml

from nanotron.checkpoint.format import StateShard
from nanotron.checkpoint.read import CheckpointTensors, source_kind
from nanotron.checkpoint.safetensors import DTYPE_NAMES, DTYPES, Planned, split_by_size, write_file
from nanotron.checkpoint.storage import Folder, open_folder, read_text
from nanotron.checkpoint.verify import refuse_damage
from nanotron.convert.folders import OURS, kind_of, new_folder, read_model_config
from nanotron.convert.sources import half_split, refuse_without_average
from nanotron.convert.tokenizer import copy_tokenizer, read_tokenizer
from nanotron.data.tokenize.tokenizer import STOPS, kept_files, read_files
from nanotron.errors import ConfigError
from nanotron.models.families import family_of
from nanotron.models.hf_config import hf_config
from nanotron.models.hf_tensors import Part, hugging_face_parts
from nanotron.parallel.agreement import alone
from nanotron.parallel.params import ParamSpec

EXPORT_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values() if dtype.is_floating_point}


def export_hf(
    checkpoint: str, target: str, *, dtype: str | None = None, ema: bool = False, max_shard_bytes: int = 5 << 30
) -> list[str]:
    """Write a checkpoint (a step, or the newest of a folder of steps) as a Hugging Face model; returns notices.

    ``dtype``: one of EXPORT_DTYPES; None keeps the weights' own. A wider one than theirs is taken from the masters.
    ``ema``: the average of the weights in their place.
    Raises ConfigError for a target that is not empty, for a damaged checkpoint, and for what the Hugging Face family
    cannot express.
    """
    found = kind_of(checkpoint)
    if found.kind != OURS:
        raise ConfigError(f"{checkpoint} is a folder of {found.kind}; only a checkpoint of ours can be exported")
    refuse_damage(found.path, alone())
    tensors = CheckpointTensors(open_folder(found.path))
    if ema:
        refuse_without_average(tensors, found.path)
    config = read_model_config(found.path)
    specs = family_of(config).specs(config)
    for name, spec in specs.items():
        if tensors.shape("weight", name) != spec.shape:
            raise ConfigError(f"{found.path}: its weight {name} is not what its model_config.json describes")
    chosen = _dtype(dtype) if dtype else tensors.dtype("weight", next(iter(specs)))
    theirs = hf_config(config, str(chosen).removeprefix("torch."))
    out = new_folder(target)
    parts = hugging_face_parts(config, specs)
    planned = [
        _plan(tensors, "ema" if ema else "weight", specs[name], part, chosen, config.head_dim)
        for name in specs
        for part in parts[name]
    ]
    _write_weights(out, planned, max_shard_bytes)
    notices = _write_tokenizer(open_folder(found.path), out)
    out.write("config.json", [_json(theirs | _ends_of_texts(out, config.eos_token_id))])
    return [f"{notice}: {target} has none" for notice in notices]


def _ends_of_texts(out: Folder, of_model: int | list[int] | None) -> dict[str, Any]:
    """The tokens that begin and end a text, where the tokenizer in the folder names them: they outrank the model's.

    The ends also go to generation_config.json: transformers ends a text at each, as ``nanotron generate`` does.
    """
    found = read_tokenizer(out)
    if found is None:
        return {}
    ends = found.stops_with(of_model)
    named = {"bos_token_id": found.bos, "eos_token_id": list(ends) if len(ends) > 1 else next(iter(ends), None)}
    if found.stops:
        drawing = json.loads(read_text(out, STOPS)) if STOPS in out.names() else {}
        out.write(STOPS, [_json(drawing | {"eos_token_id": named["eos_token_id"]})])
    return {key: token for key, token in named.items() if token is not None}


def _json(values: dict[str, Any]) -> bytes:
    return (json.dumps(values, indent=2) + "\n").encode()


def _dtype(name: str) -> torch.dtype:
    if name not in EXPORT_DTYPES:
        raise ConfigError(f"--dtype {name} is not one of {', '.join(EXPORT_DTYPES)}")
    return EXPORT_DTYPES[name]


def _plan(
    tensors: CheckpointTensors, wanted: str, spec: ParamSpec, part: Part, dtype: torch.dtype, head_dim: int
) -> Planned:
    """One Hugging Face tensor: a box of ours, without the stacking dim, its channels in half-split order."""
    foreign_shape = part.foreign(part.box).shape

    def make() -> torch.Tensor:
        target = torch.empty(part.box.shape, dtype=dtype)
        kind = source_kind(tensors, StateShard(wanted, spec.name, spec.shape, part.box, target))
        tensors.read_into(target, kind, spec.name, part.box)
        target = target.view(foreign_shape)
        return half_split(target, head_dim) if part.rotary else target

    return Planned(part.tensor, DTYPE_NAMES[dtype], foreign_shape, make)


def _write_weights(out: Folder, planned: list[Planned], max_shard_bytes: int) -> None:
    """model.safetensors, or numbered files and the index that Hugging Face expects with them."""
    groups = split_by_size(planned, max_shard_bytes)
    metadata = {"format": "pt"}
    if len(groups) == 1:
        write_file(out, "model.safetensors", groups[0], metadata)
        return
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_file(out, file, group, metadata)
        weight_map |= {tensor.key: file for tensor in group}
    index = {"metadata": {"total_size": sum(tensor.size for tensor in planned)}, "weight_map": weight_map}
    out.write("model.safetensors.index.json", [_json(index)])


def _write_tokenizer(checkpoint: Folder, out: Folder) -> list[str]:
    """Copy the tokenizer from the checkpoint, the run that holds it, or where its config names it; says what fails."""
    run = open_folder(checkpoint.path.rpartition("/")[0] or ".")
    if copy_tokenizer(checkpoint, out) or copy_tokenizer(run, out):
        return []
    config = yaml.safe_load(read_text(checkpoint, "config.yaml")) if "config.yaml" in checkpoint.names() else None
    named = ((config or {}).get("tokenizer") or {}).get("tokenizer_name_or_path")
    if not named:
        return [f"no tokenizer was found in {checkpoint.path}, its parent, or its config.yaml"]
    try:
        kept = kept_files(read_files(named), named)
    except ConfigError as error:
        return [f"no tokenizer was found in {checkpoint.path} or its parent, and {error}"]
    for name, text in kept.items():
        out.write(name, [text.encode()])
    return []
