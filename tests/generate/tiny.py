"""A tiny run with a tokenizer, and what its model says, computed by the forward that training uses."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor

from nanotron.batch import IGNORED_LABEL, Batch
from nanotron.checkpoint.format import StateShard
from nanotron.checkpoint.write import Saver
from nanotron.config import get_config_from_dict
from nanotron.data.tokenize.tokenizer import END_OF_TEXT, save_tokenizer, train_bpe
from nanotron.generate.decode import Decoder
from nanotron.generate.model import load_model
from nanotron.generate.sampling import Sampling
from nanotron.generate.source import Source, laid_out, open_source
from nanotron.models.decoder import ChunkOptions, DecoderChunk
from nanotron.models.specs import StageModules, decoder_specs
from nanotron.parallel.mesh import Mesh
from nanotron.training.topology import mesh_axes

TEXT = "import os\nfor name in os.listdir('é€'):\n    print(name)\n" * 20
CPU = torch.device("cpu")
PROMPTS = ("import os", "for", "print(name)\n    import os.listdir")


def write_run(folder: Path, **facts: Any) -> Path:
    """A folder of steps as a run leaves it: config and tokenizer beside one checkpoint of drawn weights."""
    tokenizer = train_bpe([TEXT], 281)
    save_tokenizer(tokenizer, str(folder), eos=END_OF_TEXT)
    shape = {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "intermediate_size": 48,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 32,
    }
    config = get_config_from_dict(
        {
            "parallelism": {"dp": 1, "tp": 2, "pp": 1},
            "model": {"dtype": "float32", "model_config": {**shape, **facts}},
            "tokens": {"sequence_length": 16, "micro_batch_size": 1, "batch_accumulation_per_replica": 1},
            "optimizer": {"learning_rate_scheduler": {"learning_rate": 1e-3}},
        }
    )
    assert config.model.model_config.vocab_size % 2, "tp cuts the vocabulary unevenly"
    specs = decoder_specs(config.model.model_config, std=0.3)
    shape = config.model.model_config
    model = DecoderChunk(shape, specs, Mesh(), StageModules.whole(shape), ChunkOptions())
    model.initialize(seed=1)
    pieces = [
        StateShard("weight", name, specs[name].shape, specs[name].local_box(Mesh()), weight.data)
        for name, weight in model.weights.items()
    ]
    config.save_as_yaml(folder / "config.yaml")
    saver = Saver(str(folder), 0, 1, None)
    model_config = {"model_config.json": model_config_json(folder / "config.yaml")}
    saver.save(7, pieces, {"step": 7}, {"config.yaml": (folder / "config.yaml").read_text(), **model_config})
    assert saver.wait(), saver.poll()
    return folder


def model_config_json(config_file: Path) -> str:
    return json.dumps(yaml.safe_load(config_file.read_text())["model"]["model_config"])


def whole_model(source: Source) -> DecoderChunk:
    """The model on one device."""
    return load_model(source.path, laid_out(source.config, tp=1, pp=1), Mesh(), CPU)


def decoder_of(source: Source, mesh: Mesh | None = None) -> Decoder:
    """A decoder whose rows never end, on one device, or this rank's part of one on a mesh."""
    mesh = mesh or Mesh()
    config = laid_out(source.config, tp=mesh.size("tp"), pp=mesh.size("pp"))
    store = dist.distributed_c10d._get_default_store() if mesh.world > 1 else None
    return Decoder(load_model(source.path, config, mesh, CPU, store), mesh, CPU, ends=())


def rank_tokens(rank: int, world: int, path: str, tp: int, pp: int, sampling: Sampling) -> list[list[int]]:
    """What one rank of a layout sees of the continuations of PROMPTS."""
    source = open_source(path)
    mesh = Mesh(mesh_axes(laid_out(source.config, tp=tp, pp=pp)), rank)
    assert mesh.world == world
    mesh.create_groups()
    return made(decoder_of(source, mesh), [source.encode(prompt) for prompt in PROMPTS], 12, sampling)


def made(
    decoder: Decoder, prompts: Sequence[list[int]], count: int, sampling: Sampling, **options: Any
) -> list[list[int]]:
    """The tokens made for each prompt of one batch."""
    rows: list[list[int]] = [[] for _ in prompts]
    for tokens in decoder.tokens(prompts, count, sampling, **options):
        for row, token in zip(rows, tokens, strict=True):
            row += [] if token is None else [token]
    return rows


def training_logits(model: DecoderChunk, ids: list[int]) -> Tensor:
    """The logits [s, V] of one row, by the forward that training uses: no cache, no padding."""
    tokens = torch.tensor([ids])
    positions = torch.arange(len(ids))[None]
    with torch.no_grad():
        logits, _, _ = model(None, Batch(tokens, torch.full_like(tokens, IGNORED_LABEL), positions))
    assert isinstance(logits, Tensor)
    return logits[0]
