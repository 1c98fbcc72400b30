"""Any layout opens what any layout saved."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanotron.checkpoint.format import StateShard
from nanotron.checkpoint.read import load
from nanotron.checkpoint.write import Saver
from nanotron.errors import ConfigError
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import Box
from tests.checkpoint.layouts import MOMENTS, globals_of, pieces_of, spec, wrong_pieces

KINDS = ("weight", *MOMENTS)


class Case(NamedTuple):
    """A tensor, the mesh that saves it and the mesh that loads it: (dp, tp, zero)."""

    shape: tuple[int, ...]
    dim: int | None
    saved: tuple[int, int, int]
    loaded: tuple[int, int, int]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    layout = st.tuples(st.integers(1, 5), st.integers(1, 5), st.sampled_from([0, 1, 3]))
    dim = draw(st.none() | st.integers(0, len(shape) - 1))
    return Case(shape, dim, draw(layout), draw(layout))


def all_pieces(
    case: Case, name: str, layout: tuple[int, int, int], tensors: dict[str, torch.Tensor] | None
) -> list[StateShard]:
    dp, tp, zero = layout
    parameter = spec(name, case.shape, () if case.dim is None else (("tp", case.dim),))
    meshes = (Mesh({"dp": dp, "tp": tp}, rank) for rank in range(dp * tp))
    return [piece for mesh in meshes for piece in pieces_of([parameter], mesh, tensors, zero=zero, kinds=KINDS)]


@given(st.lists(cases(), min_size=20, max_size=30))
def test_every_box_of_every_layout_is_filled_from_the_boxes_of_any_other(tensors_in: list[Case]) -> None:
    tensors, saved, loaded = {}, [], []
    for i, case in enumerate(tensors_in):
        tensors |= globals_of([spec(f"p{i}", case.shape)], KINDS)
        saved += all_pieces(case, f"p{i}", case.saved, tensors)
        loaded += all_pieces(case, f"p{i}", case.loaded, None)
    with tempfile.TemporaryDirectory() as folder:
        saver = Saver(folder)
        saver.save(1, saved, {})
        assert saver.wait(), saver.poll()
        load(f"{folder}/1", loaded)
    assert wrong_pieces(loaded, tensors) == []


SPECS = [
    spec("embed.weight", (257, 16), (("tp", 0),)),
    spec("layers.0.attn.kv.weight", (2, 8, 16), (("tp_kv", 1),)),
    spec("layers.0.mlp.down.weight", (16, 24), (("tp", 1),)),
    spec("layers.0.attn_norm.weight", (16,)),
    spec("layers.1.mlp.gate_up.weight", (2, 24, 16), (("tp", 1),)),
    spec("norm.weight", (16,)),
]
LAYOUTS = [
    ({"pp": 2, "dp": 2, "tp": 1}, True),
    ({"pp": 1, "dp": 1, "tp": 1}, False),
    ({"pp": 1, "dp": 2, "tp": 2}, True),
    ({"pp": 1, "dp": 3, "tp": 1}, True),
    ({"pp": 1, "dp": 1, "tp": {"tp_kv": 2, "tp_rep": 2}}, True),
    ({"pp": 4, "dp": 1, "tp": 1}, False),
]


def stage_specs(mesh: Mesh) -> list[object]:
    stage, stages = mesh.coord("pp"), mesh.size("pp")
    return [parameter for i, parameter in enumerate(SPECS) if i * stages // len(SPECS) == stage]


def save_as(rank: int, world: int, folder: str, axes: dict[str, object], zero: bool) -> list[str]:
    import torch.distributed as dist

    mesh = Mesh(axes, rank)
    store = dist.distributed_c10d._get_default_store() if world > 1 else None
    saver = Saver(folder, rank, world, store, timeout_s=30)
    pieces = pieces_of(stage_specs(mesh), mesh, globals_of(SPECS, KINDS), zero=zero, kinds=KINDS)
    for step in (1, 2):
        saver.save(step, pieces, {"step": step})
    saver.wait()
    return saver.poll()


@pytest.mark.parametrize(("axes", "zero"), LAYOUTS, ids=lambda value: str(value).replace(" ", ""))
def test_ranks_save_together_and_every_other_layout_reads_it(pool, tmp_path: Path, axes, zero) -> None:
    world = Mesh(axes).world
    assert pool.run(world, save_as, str(tmp_path), axes, zero) == [[]] * world
    shards = sorted(path.name for path in (tmp_path / "2").glob("shard-*"))
    assert (
        len(shards) == len({(m.coord("pp"), m.coord("dp") if zero else 0, m.coord("tp")) for m in meshes(axes)}) or zero
    )
    for other, other_zero in LAYOUTS:
        for mesh in meshes(other):
            pieces = pieces_of(stage_specs(mesh), mesh, None, zero=other_zero, kinds=KINDS)
            load(str(tmp_path / "2"), pieces)
            assert wrong_pieces(pieces, globals_of(SPECS, KINDS)) == []


def rank_pieces(axes: dict[str, object], zero: bool, rank: int) -> list[StateShard]:
    mesh = Mesh(axes, rank)
    return pieces_of(stage_specs(mesh), mesh, None, zero=zero, kinds=KINDS)


def meshes(axes: dict[str, object]) -> list[Mesh]:
    return [Mesh(axes, rank) for rank in range(Mesh(axes).world)]


def save_one(folder: Path, pieces: list[StateShard]) -> str:
    saver = Saver(str(folder))
    saver.save(1, pieces, {})
    assert saver.wait(), saver.poll()
    return str(folder / "1")


def whole(kind: str, tensor: torch.Tensor) -> StateShard:
    return StateShard(kind, "w", tuple(tensor.shape), Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor)


@pytest.mark.parametrize(("saved", "wanted"), list(product([torch.float32, torch.bfloat16, torch.float64], repeat=2)))
def test_a_weight_is_cast_to_the_dtype_of_the_run(tmp_path: Path, saved: torch.dtype, wanted: torch.dtype) -> None:
    values = torch.randn(5, 3, dtype=torch.float64).to(saved)
    target = torch.zeros(5, 3, dtype=wanted)
    load(save_one(tmp_path, [whole("weight", values)]), [whole("weight", target)])
    assert torch.equal(target, values.to(wanted))


def test_a_missing_master_comes_from_the_weight(tmp_path: Path) -> None:
    values = torch.randn(5, 3)
    weight, master = torch.zeros(5, 3, dtype=torch.bfloat16), torch.zeros(5, 3)
    load(save_one(tmp_path, [whole("weight", values)]), [whole("weight", weight), whole("master", master)])
    assert torch.equal(master, values)
    assert torch.equal(weight, values.bfloat16())


def test_an_fp32_run_takes_the_masters_of_a_bf16_checkpoint(tmp_path: Path) -> None:
    master = torch.randn(5, 3)
    checkpoint = save_one(tmp_path, [whole("weight", master.bfloat16()), whole("master", master)])
    wide, same = torch.zeros(5, 3), torch.zeros(5, 3, dtype=torch.bfloat16)
    load(checkpoint, [whole("weight", wide)])
    load(checkpoint, [whole("weight", same)])
    assert torch.equal(wide, master)
    assert torch.equal(same, master.bfloat16())


def test_all_that_a_checkpoint_lacks_is_named_at_once(tmp_path: Path) -> None:
    checkpoint = save_one(tmp_path, [whole("weight", torch.ones(5, 3))])
    wanted = [whole("exp_avg", torch.zeros(5, 3)), whole("weight", torch.zeros(4, 3))]
    with pytest.raises(ConfigError) as caught:
        load(checkpoint, wanted)
    assert caught.value.problems == [
        "the checkpoint does not fit this run: it has no exp_avg, being another optimizer's or imported; continue with"
        " that optimizer, or start with checkpoints.load_optimizer: false from there, in another"
        " checkpoints.checkpoints_path",
        "the checkpoint does not fit this run: w has shape [5, 3] there, and [4, 3] in this run",
    ]


def test_a_checkpoint_whose_index_lost_a_box_is_refused(tmp_path: Path) -> None:
    halves = [StateShard("weight", "w", (4, 2), Box((row, 0), (2, 2)), torch.ones(2, 2)) for row in (0, 2)]
    checkpoint = save_one(tmp_path, halves)
    index = json.loads((tmp_path / "1" / "index.json").read_text())
    index["tensors"]["weight/w"]["boxes"].pop()
    (tmp_path / "1" / "index.json").write_text(json.dumps(index))
    load(checkpoint, [halves[0]])
    with pytest.raises(ConfigError, match=r"hold 4 of the 8 elements of weight/w that are needed"):
        load(checkpoint, [whole("weight", torch.zeros(4, 2))])


def test_a_rank_s_memory_grows_by_what_it_loads_and_not_by_the_file(tmp_path: Path) -> None:
    rows, part = 4096, 64  # of 64 KiB each: 256 MiB and 4 MiB
    checkpoint = save_one(tmp_path, [whole("weight", torch.zeros(rows, 16 << 10))])
    script = (
        "import re, sys, torch\n"
        "from nanotron.checkpoint.format import StateShard\n"
        "from nanotron.checkpoint.read import load\n"
        "from nanotron.parallel.params import Box\n"
        "peak = lambda: int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1024\n"
        f"shape, box = ({rows}, 16 << 10), Box((100, 0), ({part}, 16 << 10))\n"
        "before = peak()\n"
        "load(sys.argv[1], [StateShard('weight', 'w', shape, box, torch.empty(box.shape))])\n"
        "print(peak() - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, checkpoint], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 * 4  # its shard, the pages mapped for it, and some slack, in MiB


def test_boxes_that_do_not_cover_their_tensor_are_never_committed(tmp_path: Path) -> None:
    saver = Saver(str(tmp_path))
    saver.save(1, [StateShard("weight", "w", (4, 2), Box((0, 0), (3, 2)), torch.ones(3, 2))], {})
    assert not saver.wait()
    assert "weight/w: the ranks' boxes miss 2 elements of (4, 2)" in saver.poll()[0]
    assert not (tmp_path / "1" / "index.json").exists()
