"""Checkpoints of Hugging Face's Nanotron, written here from the description of its layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanotron.checkpoint.read import load
from nanotron.convert.folders import parse_model_config, read_model_config
from nanotron.convert.importing import import_weights
from nanotron.convert.sources import load_weights
from nanotron.errors import ConfigError
from nanotron.models.specs import decoder_specs
from nanotron.parallel.mesh import Mesh
from tests.convert.models import weight_pieces

LLAMA = {
    "is_llama_config": True,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rope_interleaved": True,
    "_attn_implementation": "flash_attention_2",
    "rope_scaling": None,
    "pretraining_tp": 1,
    "z_loss_enabled": False,
}
QWEN2 = {
    **{key: value for key, value in LLAMA.items() if key != "is_llama_config"},
    "is_qwen2_config": True,
    "tie_word_embeddings": True,
    "_attn_implementation": "llama3_ring_attention",
    "_use_qkv_packed": True,
    "moe_config": None,
    "flex_attention_mask": None,
}


def write_existing(folder: Path, values: dict[str, object], tp: int) -> dict[str, torch.Tensor]:
    """Write a checkpoint of random weights cut over ``tp`` ranks; returns them by our names."""
    config = parse_model_config({**values, "_attn_implementation": "sdpa"}, "test")
    torch.manual_seed(0)
    ours = {name: torch.randn(spec.shape) for name, spec in decoder_specs(config).items()}
    model = folder / "model"
    place(model, "model.token_position_embeddings.pp_block.token_embedding.weight", ours["embed.weight"], [32], 0, tp)
    place(model, "model.final_layer_norm.pp_block.weight", ours["norm.weight"], [], None, tp)
    if "head.weight" in ours:
        place(model, "model.lm_head.pp_block.weight", ours["head.weight"], [32], 0, tp)
    for layer in range(2):
        block, mine = f"model.decoder.{layer}.pp_block", f"layers.{layer}"
        for kind in ("weight", "bias"):
            if f"{mine}.attn.q.{kind}" in ours:
                qkv = torch.cat([ours[f"{mine}.attn.q.{kind}"], *ours[f"{mine}.attn.kv.{kind}"]])
                place(model, f"{block}.attn.qkv_proj.{kind}", qkv, [16, 8, 8], 0, tp)
        place(model, f"{block}.attn.o_proj.weight", ours[f"{mine}.attn.out.weight"], [16], 1, tp)
        gate_up = torch.cat(list(ours[f"{mine}.mlp.gate_up.weight"]))
        place(model, f"{block}.mlp.gate_up_proj.weight", gate_up, [24, 24], 0, tp)
        place(model, f"{block}.mlp.down_proj.weight", ours[f"{mine}.mlp.down.weight"], [24], 1, tp)
        place(model, f"{block}.input_layernorm.weight", ours[f"{mine}.attn_norm.weight"], [], None, tp)
        place(model, f"{block}.post_attention_layernorm.weight", ours[f"{mine}.mlp_norm.weight"], [], None, tp)
    (folder / "checkpoint_metadata.json").write_text(json.dumps({"version": "1.5", "tp": tp, "dp": 1}))
    (folder / "model_config.json").write_text(json.dumps(values))
    return ours


def place(model: Path, name: str, tensor: torch.Tensor, chunks: list[int], dim: int | None, tp: int) -> None:
    """One tensor: whole, or cut on ``dim`` so that each rank has its part of every chunk, with slices that say so."""
    *modules, parameter = name.split(".")
    folder = model.joinpath(*modules)
    folder.mkdir(parents=True, exist_ok=True)
    if dim is None:
        save_file({"data": tensor.contiguous()}, folder / f"model_{parameter}.safetensors")
        return
    for rank in range(tp):
        parts, pairs, local, start = [], [], 0, 0
        for chunk in chunks:
            size = chunk // tp
            parts.append(tensor.narrow(dim, start + rank * size, size))
            pairs.append(
                f"{slices(tensor.dim(), dim, local, size)}#{slices(tensor.dim(), dim, start + rank * size, size)}"
            )
            local, start = local + size, start + chunk
        metadata = {
            "version": "1.5",
            "local_global_slices_pairs": ";".join(pairs),
            "unsharded_shape": str(tuple(tensor.shape)),
        }
        file = folder / f"model_{parameter}_pp-rank-0-of-1_tp-rank-{rank}-of-{tp}.safetensors"
        save_file({"data": torch.cat(parts, dim).contiguous()}, file, metadata)


def slices(dims: int, dim: int, start: int, size: int) -> str:
    return "|".join(f"{start},{start + size},None" if i == dim else "None,None,None" for i in range(dims))


@pytest.mark.parametrize("values", [LLAMA, QWEN2], ids=["llama", "qwen2-tied"])
@pytest.mark.parametrize("tp", [1, 2])
def test_weights_are_imported_whatever_their_layout(tmp_path: Path, tp: int, values: dict[str, object]) -> None:
    ours = write_existing(tmp_path / "old" / "100", values, tp)
    for source, target in (("old", "first"), ("old/100", "second")):
        checkpoint = import_weights(str(tmp_path / source), str(tmp_path / target))
        pieces = weight_pieces(read_model_config(checkpoint))
        load(checkpoint, pieces)
        assert [piece.name for piece in pieces if not torch.equal(piece.tensor, ours[piece.name])] == []
        assert len(pieces) == len(ours)


@pytest.mark.parametrize("axes", [{"tp": 4}, {"tp": {"tp_kv": 2, "tp_rep": 2}}, {"tp": 2}], ids=str)
def test_a_rank_fills_its_shard_across_the_old_shards(tmp_path: Path, axes) -> None:
    ours = write_existing(tmp_path, QWEN2, 2)
    config = read_model_config(str(tmp_path))
    for rank in range(Mesh(axes).world):
        pieces = weight_pieces(config, mesh=Mesh(axes, rank))
        load_weights(str(tmp_path), pieces, config)
        assert all(torch.equal(piece.tensor, ours[piece.name][piece.box.slices()]) for piece in pieces)


def test_the_rotary_order_stays_as_it_was(tmp_path: Path) -> None:
    write_existing(tmp_path, LLAMA, 1)
    assert read_model_config(str(tmp_path)).rope_interleaved is True


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_existing(tmp_path, LLAMA, 2)
    (file,) = tmp_path.glob("model/model/decoder/1/pp_block/attn/qkv_proj/*tp-rank-0-of-2*")
    file.unlink()
    config = read_model_config(str(tmp_path))
    with pytest.raises(ConfigError, match=r"model.decoder.1.pp_block.attn.qkv_proj.weight hold .* elements"):
        load_weights(str(tmp_path), weight_pieces(config), config)


def test_experts_are_refused_in_a_line(tmp_path: Path) -> None:
    write_existing(tmp_path, LLAMA, 1)
    (tmp_path / "model_config.json").write_text(json.dumps({**QWEN2, "moe_config": {"num_experts": 8}}))
    with pytest.raises(ConfigError, match="experts of a checkpoint of Hugging Face Nanotron cannot be read; convert"):
        import_weights(str(tmp_path), str(tmp_path / "ours"))


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"index.json.*checkpoint_metadata.json.*config.json"):
        read_model_config(str(tmp_path))
