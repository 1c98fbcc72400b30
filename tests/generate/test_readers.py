"""Whoever reads a checkpoint, for whatever purpose, finds the same damage and says it in the same line."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanotron.checkpoint.format import StateShard
from nanotron.checkpoint.inspect import inspect_checkpoint
from nanotron.checkpoint.resume import agree_resume
from nanotron.config.model import LlamaConfig
from nanotron.convert.exporting import export_hf
from nanotron.convert.sources import load_weights
from nanotron.errors import ConfigError
from nanotron.generate.source import laid_out, open_source
from nanotron.models.specs import decoder_specs
from nanotron.parallel.mesh import Mesh
from nanotron.training.topology import mesh_axes
from tests.generate.tiny import decoder_of

SHARD = "shard-00000-of-00001.safetensors"


def flipped(run: Path, folder: Path, name: str, position: int) -> str:
    """A copy of a run's step with one bit of a file turned around."""
    shutil.copytree(run, folder)
    data = bytearray((folder / "7" / name).read_bytes())
    data[position] ^= 1
    (folder / "7" / name).write_bytes(data)
    return f"{folder}/7"


def refusal(read: Callable[[], object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read()
    return caught.value.problems


def load_all(step: str, config: LlamaConfig) -> None:
    """Fill every weight of the model, as a run does that starts from it."""
    pieces = [
        StateShard("weight", name, spec.shape, spec.local_box(Mesh()), torch.empty(spec.shape))
        for name, spec in decoder_specs(config).items()
    ]
    load_weights(step, pieces, config)


@pytest.mark.parametrize(
    ("name", "position", "line"),
    [
        (SHARD, -1, "is damaged: the checksum of weight/"),
        ("config.yaml", -2, "is damaged: its checksum differs"),
        ("state.json", 12, "is damaged: its checksum differs"),
    ],
)
def test_every_reader_finds_a_flipped_bit(run: Path, tmp_path: Path, name: str, position: int, line: str) -> None:
    step = flipped(run, tmp_path / "run", name, position)
    found = {
        "generate": refusal(lambda: decoder_of(open_source(step))),
        "init_method.path": refusal(lambda: load_all(step, open_source(str(run)).config.model.model_config)),
        "inspect": refusal(lambda: list(inspect_checkpoint(step))),
        "export-hf": refusal(lambda: export_hf(step, str(tmp_path / "hf"))),
        "resume": refusal(lambda: agree_resume("unused", step))[:1],
    }
    assert f"{step}/{name} {line}" in found["resume"][0]
    assert found == dict.fromkeys(found, found["resume"])


def refused(rank: int, world: int, step: str) -> list[str]:
    source = open_source(step)
    mesh = Mesh(mesh_axes(laid_out(source.config, tp=world, pp=1)), rank)
    mesh.create_groups()
    return refusal(lambda: decoder_of(source, mesh))


def test_all_ranks_that_generate_hear_of_the_damage_that_one_found(pool, run: Path, tmp_path: Path) -> None:
    step = flipped(run, tmp_path / "run", SHARD, -1)
    first, second = pool.run(2, refused, step)
    assert first == second
    assert "is damaged: the checksum of weight/" in first[0]
