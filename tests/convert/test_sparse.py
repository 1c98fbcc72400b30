"""Models with experts, in from Hugging Face and out again: one tensor per expert or all of them fused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from nanotron.batch import Batch
from nanotron.checkpoint.read import load
from nanotron.checkpoint.write import Saver
from nanotron.convert.exporting import export_hf
from nanotron.convert.folders import parse_model_config, read_model_config
from nanotron.convert.importing import import_weights, starter_config
from nanotron.convert.sources import load_weights
from nanotron.errors import ConfigError
from nanotron.generate.decode import Decoder
from nanotron.generate.model import load_model
from nanotron.generate.sampling import Sampling
from nanotron.generate.source import laid_out
from nanotron.models.decoder import ChunkOptions
from nanotron.models.families import family_of
from nanotron.models.hf_config import hf_config, model_config_from_hf
from nanotron.models.hf_tensors import hugging_face_parts
from nanotron.models.specs import StageModules
from nanotron.parallel.mesh import Mesh
from nanotron.training.topology import mesh_axes
from tests.convert.models import SHAPE, SPARSE, hugging_face_model, weight_pieces
from tests.generate.tiny import made
from tests.pool import Pool

TOKENS = torch.randint(0, 67, (2, 40), generator=torch.Generator().manual_seed(1))
PROMPTS = [TOKENS[0, :5].tolist(), TOKENS[1, :9].tolist()]


@pytest.mark.parametrize("name", SPARSE)
def test_fused_experts_are_those_of_files_with_a_tensor_for_each(tmp_path: Path, name: str) -> None:
    model = hugging_face_model(name)
    model.save_pretrained(tmp_path / "each")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    config = read_model_config(str(tmp_path / "each"))
    assert any(key.endswith(".mlp.experts.gate_up_proj") for key in load_file(tmp_path / "fused" / "model.safetensors"))
    whole, cut = weight_pieces(config), [weight_pieces(config, mesh=Mesh({"tp": 2}, rank)) for rank in range(2)]
    load_weights(str(tmp_path / "each"), whole, config)
    import_weights(str(tmp_path / "fused"), str(tmp_path / "ours"))
    imported = weight_pieces(config)
    load(str(tmp_path / "ours" / "0"), imported)
    expected = {piece.name: piece.tensor for piece in whole}
    for pieces in cut:
        load_weights(str(tmp_path / "fused"), pieces, config)
    for piece in [*imported, *cut[0], *cut[1]]:
        assert torch.equal(piece.tensor, expected[piece.name][piece.box.slices()]), piece.name
    export_hf(str(tmp_path / "ours"), str(tmp_path / "back"))
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("each", "back"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("name", SPARSE)
def test_logits_and_greedy_tokens_are_transformers_on_one_process_and_two(
    tmp_path: Path, pool: Pool, name: str
) -> None:
    original = hugging_face_model(name)
    original.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = original(TOKENS).logits
    asked = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": [], "pad_token_id": 0}
    texts = [original.generate(torch.tensor([ids]), **asked)[0, len(ids) :].tolist() for ids in PROMPTS]
    alone = said(0, 1, str(tmp_path))
    (left, tokens), (right, also) = pool.run(2, said, str(tmp_path))
    for logits in (alone[0], torch.cat([left, right], -1)):
        torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5 * expected.abs().max())
    assert alone[1] == tokens == also == texts


def said(rank: int, world: int, folder: str) -> tuple[Tensor, list[list[int]]]:
    """What a rank of tp = world has of the logits of TOKENS, and the tokens that go on from PROMPTS, with a cache."""
    config = laid_out(starter_config(read_model_config(folder), "test", "F32"), tp=world, pp=1)
    mesh = Mesh(mesh_axes(config), rank)
    store = None
    if world > 1:
        mesh.create_groups()
        store = dist.distributed_c10d._get_default_store()
    cpu = torch.device("cpu")
    model = load_model(folder, config, mesh, cpu, store)
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    with torch.no_grad():
        logits, _, _ = model(None, Batch(TOKENS, torch.zeros_like(TOKENS), positions))
    return logits, made(Decoder(model, mesh, cpu, ends=()), PROMPTS, 12, Sampling())


MIXTRAL = {"model_type": "mixtral", "num_hidden_layers": 32, "intermediate_size": 14336, "router_aux_loss_coef": 0.02}
QWEN2_MOE = {"model_type": "qwen2_moe", "num_hidden_layers": 24, "router_aux_loss_coef": 0.001}
QWEN3_MOE = {"model_type": "qwen3_moe", "num_hidden_layers": 4, "norm_topk_prob": True, "num_experts": 128}
OLMOE = {"model_type": "olmoe", "num_hidden_layers": 16, "intermediate_size": 1024, "clip_qkv": None}
SIZES = {"hidden_size": 2048, "num_attention_heads": 16, "vocab_size": 67}


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (
            MIXTRAL,
            {
                "num_experts": 8,
                "top_k": 2,
                "moe_intermediate_size": 14336,
                "normalize_top_k": True,
                "router_aux_loss_coef": 0.02,
            },
        ),
        (
            QWEN2_MOE,
            {
                "num_experts": 60,
                "top_k": 4,
                "moe_intermediate_size": 1408,
                "normalize_top_k": False,
                "router_aux_loss_coef": 0.001,
                "enable_shared_expert": True,
                "shared_expert_intermediate_size": 5632,
            },
        ),
        (OLMOE, {"num_experts": 64, "top_k": 8, "moe_intermediate_size": 1024, "normalize_top_k": False}),
        ({**QWEN3_MOE, "num_local_experts": 16}, {"num_experts": 16, "top_k": 8, "moe_intermediate_size": 768}),
        ({**QWEN3_MOE, "decoder_sparse_step": 2}, {"num_experts": 128, "layers": [1, 3]}),
        ({**QWEN3_MOE, "mlp_only_layers": [0, 9]}, {"normalize_top_k": True, "layers": [1, 2, 3]}),
        ({**QWEN3_MOE, "mlp_only_layers": [3], "decoder_sparse_step": 2}, {"layers": [1]}),
    ],
    ids=str,
)
def test_what_a_config_says_of_experts_comes_in_and_goes_out(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    values = model_config_from_hf({**SIZES, **theirs})
    assert values["moe_config"].items() >= ours.items()
    assert ("layers" in values["moe_config"]) == ("layers" in ours)
    back = hf_config(parse_model_config(values, "test"), "float32")
    assert back["model_type"] == theirs["model_type"]
    assert model_config_from_hf(back)["moe_config"] == values["moe_config"]


def test_what_a_config_leaves_out_is_what_transformers_takes() -> None:
    from transformers import AutoConfig

    for model_type in ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe"):
        theirs = AutoConfig.for_model(model_type, **SHAPE).to_dict()
        with_all = parse_model_config(model_config_from_hf(theirs), "test")
        little = {**SHAPE, "model_type": model_type, "pad_token_id": theirs["pad_token_id"]}
        assert parse_model_config(model_config_from_hf(little), "test") == with_all, model_type


@pytest.mark.parametrize(
    ("theirs", "window", "layers"),
    [
        ({"model_type": "mixtral", "sliding_window": 50}, 50, None),
        ({"model_type": "mixtral"}, None, None),
        ({"model_type": "qwen3_moe", "sliding_window": 50}, None, None),
        ({"model_type": "qwen3_moe", "use_sliding_window": True, "sliding_window": 50}, 50, None),
        ({"model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 50}, 50, [0, 2]),
        (
            {"model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 50, "max_window_layers": 1},
            50,
            [0],
        ),
    ],
    ids=str,
)
def test_windows_of_sparse_families_are_transformers_and_go_out_again(theirs, window, layers) -> None:
    from transformers import AutoConfig

    ours = model_config_from_hf({**SHAPE, **theirs})
    assert (ours["sliding_window_size"], ours.get("sliding_window_layers")) == (window, layers)
    back = hf_config(parse_model_config(ours, "test"), "float32")
    again = model_config_from_hf(back)
    assert (again["sliding_window_size"], again.get("sliding_window_layers")) == (window, layers)
    for values in (theirs, back):
        read = AutoConfig.for_model(**{**SHAPE, **values})
        assert (read.sliding_window or None) == window
        if layers:
            assert [layer for layer, kind in enumerate(read.layer_types) if kind == "sliding_attention"] == layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_only_layers": [0, 1, 2]}, "model_type='qwen3_moe' with experts in none of 3 layers is not available"),
        ({"num_hidden_layers": 10_000_000}, "experts in some of 10000000 layers is not available here"),
        ({"num_local_experts": 10_000}, "num_experts=10000 in 3 layers of its config is another model's"),
        ({"num_local_experts": 7}, "layers.0.mlp.gate.weight has shape [8, 32], the model's config needs [7, 32]"),
        ({"num_local_experts": 9}, "it has no model.layers.0.mlp.experts.8.gate_proj.weight"),
        ({"norm_topk_prob": "yes"}, 'norm_topk_prob is "yes": Input should be a valid boolean'),
        ({"moe_intermediate_size": None}, "moe_config.moe_intermediate_size: "),
    ],
    ids=str,
)
def test_a_config_that_is_not_that_of_the_experts_is_named(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    hugging_face_model("qwen3-moe").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=re.escape(message)):
        import_weights(str(tmp_path), str(tmp_path / "ours"))


def test_clipped_queries_heads_of_another_width_and_dense_olmoe_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"clip_qkv=8.0 is not available here"):
        model_config_from_hf({**SIZES, **OLMOE, "clip_qkv": 8.0})
    values = model_config_from_hf({**SIZES, **OLMOE})
    with pytest.raises(
        ConfigError, match=r"head_dim=64 cannot .* olmoe has heads of hidden_size / num_attention_heads"
    ):
        hf_config(parse_model_config({**values, "head_dim": 64}, "test"), "float32")
    with pytest.raises(ConfigError, match="is_olmoe_config cannot be exported: Hugging Face has no such family"):
        hf_config(parse_model_config({**values, "moe_config": None}, "test"), "float32")


@pytest.mark.parametrize("name", SPARSE)
def test_every_gradient_is_that_of_transformers(name: str) -> None:
    original = hugging_face_model(name, torch.float64)
    original.set_experts_implementation("eager")  # the others have no float64
    config = parse_model_config(model_config_from_hf(original.config.to_dict()), "test")
    family, labels = family_of(config), TOKENS.roll(-1, 1)
    specs = family.specs(config)
    whole = StageModules.whole(config)
    ours = family.chunk()(config, specs, Mesh(), whole, ChunkOptions(torch.float64))
    theirs = {**dict(original.named_parameters()), **dict(original.named_buffers())}  # a bias that balances is one
    places = [(spec, part) for spec, of_one in hugging_face_parts(config, specs, fused=True).items() for part in of_one]
    with torch.no_grad():
        for spec, part in places:
            target = ours.weights[spec][part.box.slices()]
            target.copy_(theirs[part.tensor][part.foreign(part.box).slices()].view(target.shape))
    positions = torch.arange(TOKENS.shape[1]).expand_as(TOKENS)
    _, losses, _ = ours(None, Batch(TOKENS, labels, positions))
    losses["lm"].backward()
    cross_entropy(original(TOKENS).logits.flatten(0, 1), labels.flatten(), reduction="sum").backward()
    for spec, part in (place for place in places if specs[place[0]].learns):
        expected = theirs[part.tensor].grad[part.foreign(part.box).slices()]
        found = ours.weights[spec].grad[part.box.slices()].view(expected.shape)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


SHARED = {"enable_shared_expert": True, "shared_expert_intermediate_size": 24}


@pytest.mark.parametrize(
    ("family", "experts", "message"),
    [
        ("qwen3", {"score_function": "sigmoid"}, 'score_function="sigmoid" cannot be exported: Hugging Face\'s qwen3_'),
        ("qwen3", {"routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5 cannot be exported"),
        ("qwen3", {"num_expert_groups": 2}, "num_expert_groups=2 cannot be exported: Hugging Face's qwen3_moe has 1"),
        (
            "qwen3",
            {"bias_update_rate": 0.0},
            "bias_update_rate=0.0 cannot be exported: Hugging Face's qwen3_moe has nu",
        ),
        ("qwen3", SHARED, "enable_shared_expert=true cannot be exported: Hugging Face's qwen3_moe has false"),
        ("qwen2", {}, "enable_shared_expert=false cannot be exported: Hugging Face's qwen2_moe has true"),
        ("qwen2", {**SHARED, "shared_expert_gate": False}, "shared_expert_gate=false cannot be exported"),
        ("mistral", {}, "normalize_top_k=false cannot be exported: Hugging Face's mixtral has true"),
        (
            "mistral",
            {"normalize_top_k": True, "layers": [0, 2]},
            "layers=[0, 2] cannot be exported: Hugging Face's mixtral has experts in every layer",
        ),
        (
            "llama",
            {},
            "a model with is_llama_config and moe_config cannot be exported: Hugging Face has no such family; it has"
            " experts with is_mistral_config, is_qwen2_config, is_qwen3_config, is_olmoe_config",
        ),
        ("olmoe", {"layers": [1]}, "layers=[1] cannot be exported: Hugging Face's olmoe has experts in every layer"),
        ("olmoe", SHARED, "enable_shared_expert=true cannot be exported: Hugging Face's olmoe has false"),
    ],
    ids=str,
)
def test_experts_that_no_family_there_has_are_refused_before_anything_is_written(
    tmp_path: Path, family: str, experts: dict[str, Any], message: str
) -> None:
    shape = {key: value for key, value in SHAPE.items() if key != "initializer_range"}
    moe = {"num_experts": 4, "moe_intermediate_size": 16, **experts}
    values = {**shape, f"is_{family}_config": True, "moe_config": moe}
    pieces = weight_pieces(parse_model_config(values, "test"))
    saver = Saver(str(tmp_path / "ours"))
    saver.save(1, pieces, {}, {"model_config.json": json.dumps(values)})
    assert saver.wait()
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        export_hf(str(tmp_path / "ours"), str(tmp_path / "back"))
    assert len(caught.value.problems) == 1
    assert not (tmp_path / "back").exists()


def test_layers_that_predict_further_tokens_are_named_and_left_out(tmp_path: Path) -> None:
    hugging_face_model("deepseek-v3").save_pretrained(tmp_path)
    file, config = tmp_path / "model.safetensors", read_model_config(str(tmp_path))
    tensors, further = load_file(file), {name: torch.ones(2) for name in ("eh_proj", "enorm", "self_attn.o_proj")}
    tensors |= {f"model.layers.3.{name}.weight": tensor for name, tensor in further.items()}
    save_file(tensors, file)
    told: list[str] = []
    import_weights(str(tmp_path), str(tmp_path / "ours"), tell=told.append)
    assert "model.layers.3.self_attn.o_proj.weight" in told[0]
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"model\.layers\.3\.enorm\.weight is no tensor of the model"):
        load_weights(str(tmp_path), weight_pieces(config), config)
