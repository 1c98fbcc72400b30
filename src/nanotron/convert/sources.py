"""Reading weights that another program stored as if they were ours: by global name and box."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from nanotron.checkpoint.format import Damaged, Entry, StateShard
from nanotron.checkpoint.read import CheckpointTensors, Tensors, fill, read_box, source_kind
from nanotron.checkpoint.safetensors import DTYPES
from nanotron.checkpoint.storage import Folder, open_folder, read_header
from nanotron.checkpoint.verify import refuse_damage
from nanotron.convert.folders import HF_NANOTRON, OURS, kind_of
from nanotron.convert.schema import WEIGHT_MAP, read_json
from nanotron.errors import ConfigError, shorten
from nanotron.logging import get_logger
from nanotron.models.families import family_of
from nanotron.models.hf_tensors import FUSED, Part, hf_nanotron_parts, hugging_face_parts
from nanotron.models.specs import FINAL_NORM
from nanotron.parallel.agreement import Agreement, alone
from nanotron.parallel.params import Box, intersect

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig

logger = get_logger(__name__)


def load_weights(
    path: str,
    pieces: Iterable[StateShard],
    config: ModelConfig,
    agreement: Agreement | None = None,
    *,
    verify: bool = True,
) -> None:
    """Fill weight and master pieces from any folder of weights; the same call on every rank of ``agreement``.

    Pieces of kind "ema" are of the weights' average, which the folder has to have. What is read of a checkpoint of ours
    is compared with its checksums first (unless not ``verify``), shared out over the ranks. Raises ConfigError for a
    model that does not fit.
    """
    pieces = list(pieces)
    tensors = open_weights(path, config)
    for line in tensors.ignored:
        logger.info(line)
    if any(piece.kind == "ema" for piece in pieces):
        refuse_without_average(tensors, path)
    if isinstance(tensors, CheckpointTensors) and verify:
        kinds = {source_kind(tensors, piece) for piece in pieces}
        refuse_damage(tensors.folder.path, agreement or alone(), kinds)
    fill(tensors, pieces)


def refuse_without_average(tensors: Tensors, path: str) -> None:
    """Raise ConfigError for a folder without an average of its weights."""
    if tensors.shape("ema", FINAL_NORM) is None:
        raise ConfigError(f"--ema: {path} has no average of its weights, which optimizer.ema_decay makes; leave it out")


def open_weights(path: str, config: ModelConfig) -> CheckpointWeights | ForeignTensors:
    """The weights of a folder, by our names, for a model of this shape; raises ConfigError for another model's."""
    found = kind_of(path)
    folder = open_folder(found.path)
    if found.kind == OURS:
        return CheckpointWeights(folder, config)
    if found.kind == HF_NANOTRON:
        return _open_hf_nanotron(folder, config)
    files = hugging_face_files(folder)
    fused = any(name.endswith(FUSED) for name in files)
    _check_depth(found.path, config, len(files), fused=fused)
    parts = hugging_face_parts(config, family_of(config).specs(config), fused=fused)
    return ForeignTensors(folder, files, parts, config)


def _open_hf_nanotron(folder: Folder, config: ModelConfig) -> ForeignTensors:
    if config.moe_config is not None:
        raise ConfigError(
            f"{folder.path}: experts of a checkpoint of {HF_NANOTRON} cannot be read; convert it to a Hugging Face"
            " model with that program, and name its folder"
        )
    files = hf_nanotron_files(folder)
    _check_depth(folder.path, config, len(files))
    return ForeignTensors(folder, files, hf_nanotron_parts(config, family_of(config).specs(config)), config)


def _check_depth(path: str, config: ModelConfig, num_tensors: int, *, fused: bool = True) -> None:
    """Refuse a number of layers, or of experts that have tensors of their own, before something is made for each."""
    layers, moe = config.num_hidden_layers, config.moe_config
    said = f"num_hidden_layers={layers}" if layers > num_tensors else ""
    if not said and moe is not None and not fused and len(config.sparse_layers) * moe.num_experts > num_tensors:
        said = f"num_experts={moe.num_experts} in {len(config.sparse_layers)} layers"
    if said:
        raise ConfigError(f"{path}: {said} of its config is another model's: its files hold {num_tensors} tensors")


@dataclass(frozen=True)
class ForeignBox:
    """A box of a foreign tensor, and where it begins in the file that stores it."""

    box: Box
    file: str
    entry: Entry
    local: tuple[int, ...]


Files = dict[str, list[ForeignBox]]


class CheckpointWeights(CheckpointTensors):
    """One of our checkpoints as a source of weights; raises ConfigError when it holds some that the model has not."""

    def __init__(self, folder: Folder, config: ModelConfig) -> None:
        super().__init__(folder)
        self.ignored: list[str] = []
        _check_depth(folder.path, config, len(self.index.tensors))
        held = {name.removeprefix("weight/") for name in self.index.tensors if name.startswith("weight/")}
        refuse_unknown(folder, held - family_of(config).specs(config).keys())


NOT_COMPUTED = re.compile(r"(?!model\.)|.*\.rotary_emb\.inv_freq$")
"""Other programs' tensors that change nothing: heads for other tasks (or a tied one's copy), and stored frequencies."""

FURTHER = "eh_proj.weight"
"""Ends the name of a tensor of a DeepSeek's further layers: they predict tokens after the next, which nobody asks."""


def refuse_unknown(folder: Folder, names: Iterable[str]) -> None:
    """Raise ConfigError for weights that a model of the config does not have: without them it would be another."""
    lines = shorten([f"{name} is no tensor of the model that the config describes" for name in sorted(names)])
    if lines:
        lines[-1] += "; describe the model that the folder holds, or take the tensor out"
        raise ConfigError([f"{folder.path}: {line}" for line in lines])


class ForeignTensors:
    """Another program's tensors under our names.

    ``files`` says where the boxes of each foreign tensor are stored, ``parts`` what each of our parameters is made of.
    ``ignored`` names the tensors that are not read. Raises ConfigError when the tensors are not those of a model of the
    config.
    """

    def __init__(self, folder: Folder, files: Files, parts: Mapping[str, list[Part]], config: ModelConfig) -> None:
        self._folder, self._files, self._parts = folder, files, parts
        self._shapes = {name: spec.shape for name, spec in family_of(config).specs(config).items()}
        self._head_dim = config.head_dim
        self._check()
        unused = files.keys() - {part.tensor for of_one in parts.values() for part in of_one}
        further = tuple(name.removesuffix(FURTHER) for name in unused if name.endswith(FURTHER))
        ignored = sorted(name for name in unused if NOT_COMPUTED.match(name) or name.startswith(further))
        refuse_unknown(folder, unused - set(ignored))
        self.ignored = [f"{folder.path}: not used: {', '.join(shorten(ignored))}"] if ignored else []

    def shape(self, kind: str, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name) if kind == "weight" else None

    def dtype(self, kind: str, name: str) -> torch.dtype:
        return DTYPES[self._files[self._parts[name][0].tensor][0].entry.dtype]

    def read_into(self, target: torch.Tensor, kind: str, name: str, box: Box) -> None:
        """Copy ``box`` of one of our parameters into ``target``, cast to its dtype."""
        for part in self._parts[name]:
            shared = intersect(box, part.box)
            if shared is not None:
                view = target[shared.slices(box)]
                view.copy_(self._read_part(part, shared).view(view.shape))

    def _read_part(self, part: Part, shared: Box) -> torch.Tensor:
        box = part.foreign(shared)
        if not part.rotary:
            return self._read(part.tensor, box)
        first = box.offset[0] // self._head_dim * self._head_dim  # whole heads, to be put in our order
        end = -(-(box.offset[0] + box.shape[0]) // self._head_dim) * self._head_dim
        heads = self._read(part.tensor, Box((first, *box.offset[1:]), (end - first, *box.shape[1:])))
        return interleaved(heads, self._head_dim)[box.offset[0] - first :][: box.shape[0]]

    def _read(self, name: str, box: Box) -> torch.Tensor:
        """A box of a foreign tensor: a view of the file that holds it all, or put together from several."""
        result, filled = torch.empty(0), 0
        for stored in self._files[name]:
            shared = intersect(box, stored.box)
            if shared is None:
                continue
            offset = (s - o + i for s, o, i in zip(shared.offset, stored.box.offset, stored.local, strict=True))
            data = read_box(self._folder, stored.file, stored.entry, Box(tuple(offset), shared.shape))
            if shared == box:
                return data
            if not filled:
                result = torch.empty(box.shape, dtype=data.dtype)
            result[shared.slices(box)].copy_(data)
            filled += shared.numel
        if filled != box.numel:
            raise Damaged(
                f"{self._folder.path}: the files of {name} hold {filled} of the {box.numel} elements that are needed"
            )
        return result

    def _check(self) -> None:
        ends: dict[str, tuple[int, ...]] = {}
        for part in (part for parts in self._parts.values() for part in parts):
            box = part.foreign(part.box)
            end = tuple(offset + size for offset, size in zip(box.offset, box.shape, strict=True))
            ends[part.tensor] = max(ends.get(part.tensor, end), end)
        problems = []
        for tensor, end in ends.items():
            if tensor not in self._files:
                problems.append(f"it has no {tensor}")
            elif (shape := extent(self._files[tensor])) != end:
                problems.append(f"{tensor} has shape {list(shape)}, the model's config needs {list(end)}")
            elif unread := {stored.entry.dtype for stored in self._files[tensor]} - DTYPES.keys():
                problems.append(f"{tensor} is {', '.join(unread)}; only {', '.join(DTYPES)} are read, convert it")
        if problems:
            raise ConfigError([f"{self._folder.path}: {line}" for line in shorten(problems)])


def extent(boxes: list[ForeignBox]) -> tuple[int, ...]:
    """The shape that boxes span from the origin."""
    ends = ([o + n for o, n in zip(stored.box.offset, stored.box.shape, strict=True)] for stored in boxes)
    return tuple(max(dims) for dims in zip(*ends, strict=True))


def interleaved(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Channels of each head (dim 0) from half-split order (i, i + e/2) to interleaved (2i, 2i + 1)."""
    pairs = heads.view(-1, 2, head_dim // 2, *heads.shape[1:])  # [h·e, …] -> [h, 2, e/2, …]
    return pairs.transpose(1, 2).reshape(heads.shape)


def half_split(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """The inverse of ``interleaved``."""
    pairs = heads.view(-1, head_dim // 2, 2, *heads.shape[1:])  # [h·e, …] -> [h, e/2, 2, …]
    return pairs.transpose(1, 2).reshape(heads.shape)


def hugging_face_files(folder: Folder) -> Files:
    """Where each tensor of a Hugging Face model folder is; raises ConfigError when it has no safetensors."""
    names = folder.names()
    if "model.safetensors.index.json" in names:
        listed = set(read_json(folder, "model.safetensors.index.json", WEIGHT_MAP)["weight_map"].values())
    else:
        listed = {name for name in names if name.endswith(".safetensors")}
    if not listed:
        raise ConfigError(
            f"{folder.path} holds no *.safetensors (pickled *.bin files are not read: convert them first)"
        )
    files: Files = {}
    for file in sorted(listed):
        for name, entry in read_header(folder, file)[0].items():
            origin = (0,) * len(entry.shape)
            files[name] = [ForeignBox(Box(origin, entry.shape), file, entry, origin)]
    return files


def hf_nanotron_files(folder: Folder) -> Files:
    """Where the boxes of each tensor of a Hugging Face Nanotron checkpoint are.

    model/<module path>/model_<parameter>[_pp-rank-P-of-N_tp-rank-T-of-M…].safetensors holds one tensor ``data``; a
    shard's metadata pair slices of it with slices of the whole tensor.
    """
    files: Files = {}
    for path in sorted(walk(folder.join("model"), "model")):
        entries, metadata = read_header(folder, path)
        module, _, file = path.removeprefix("model/").rpartition("/")
        parameter = re.match(r"(?:model_)*([a-z0-9_]+?)(?:_pp-rank-.*|\.safetensors.*)$", file)
        if parameter is None or "data" not in entries:
            raise Damaged(f"{folder.path}/{path} is no file of a Hugging Face Nanotron checkpoint")
        stored = files.setdefault(f"{module.replace('/', '.')}.{parameter[1]}", [])
        try:
            pairs = list(slice_pairs(metadata, entries["data"].shape))
        except (ValueError, IndexError) as error:
            raise Damaged(f"{folder.path}/{path} has slices in its metadata that mean nothing") from error
        stored += [ForeignBox(box, path, entries["data"], local) for box, local in pairs]
    return files


def walk(folder: Folder, path: str) -> Iterator[str]:
    """Every safetensors file below a folder, by its path."""
    for name in folder.names():
        if name.endswith(".safetensors"):
            yield f"{path}/{name}"
        elif "." not in name:
            yield from walk(folder.join(name), f"{path}/{name}")


def slice_pairs(metadata: Mapping[str, str], shape: tuple[int, ...]) -> Iterator[tuple[Box, tuple[int, ...]]]:
    """(box of the whole tensor, its offset in the file's tensor) of ``local#global;local#global;…``.

    Slices are ``start,stop,step``, or None for a whole dim, joined by ``|`` over dims; without metadata the file holds
    the whole tensor. Raises ValueError for slices that mean nothing.
    """
    if "local_global_slices_pairs" not in metadata:
        yield Box((0,) * len(shape), shape), (0,) * len(shape)
        return
    for pair in metadata["local_global_slices_pairs"].split(";"):
        local, whole = ([dim.split(",") for dim in side.split("|")] for side in pair.split("#"))
        offset = tuple(0 if start == "None" else int(start) for start, _, _ in local)
        ends = (size if stop == "None" else int(stop) for (_, stop, _), size in zip(local, shape, strict=True))
        sizes = tuple(end - start for end, start in zip(ends, offset, strict=True))
        origin = tuple(0 if start == "None" else int(start) for start, _, _ in whole)
        if any(not 0 <= o <= o + n <= size for o, n, size in zip(offset, sizes, shape, strict=True)):
            raise ValueError(f"{pair} is outside of {shape}")
        if len(origin) != len(shape):
            raise ValueError(f"{pair} is of {len(origin)} dims, not of {len(shape)}")
        yield Box(origin, sizes), offset
