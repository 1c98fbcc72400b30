"""Hugging Face models in, and out again: the same weights, the same logits, the same words."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanotron.check import examine
from nanotron.checkpoint.format import StateShard
from nanotron.checkpoint.read import load
from nanotron.checkpoint.resume import agree_resume
from nanotron.checkpoint.write import Saver
from nanotron.convert.exporting import export_hf
from nanotron.convert.folders import parse_model_config, read_model_config
from nanotron.convert.importing import import_weights, starter_config
from nanotron.convert.sources import load_weights, open_weights
from nanotron.errors import ConfigError
from nanotron.generate.source import open_source
from nanotron.models.hf_config import hf_config, model_config_from_hf
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import Box
from tests.convert.models import MODELS, SHAPE, hugging_face_model, logits_of, save_hugging_face, weight_pieces

WEIGHTS_INDEX = "model.safetensors.index.json"
TOKENS = torch.randint(0, 67, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", MODELS)
def test_an_imported_model_has_the_logits_of_the_original(tmp_path: Path, name: str) -> None:
    original = save_hugging_face(name, tmp_path / "hf")
    checkpoint = import_weights(str(tmp_path / "hf"), str(tmp_path / "ours"))
    config = read_model_config(checkpoint)
    pieces = weight_pieces(config)
    load(checkpoint, pieces)
    with torch.no_grad():
        expected = original(TOKENS).logits
    torch.testing.assert_close(logits_of(config, pieces, TOKENS), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_a_round_trip_is_bit_equal(tmp_path: Path, name: str, dtype: torch.dtype, interleaved: bool) -> None:
    save_hugging_face(name, tmp_path / "hf", dtype)
    if interleaved:  # ours then holds the channels of each head in another order
        config = json.loads((tmp_path / "hf" / "config.json").read_text())
        model_config = parse_model_config({**model_config_from_hf(config), "rope_interleaved": True}, "test")
        checkpoint = save_whole(tmp_path, model_config, tmp_path / "hf", dtype)
    else:
        checkpoint = import_weights(str(tmp_path / "hf"), str(tmp_path / "ours"))
    export_hf(checkpoint, str(tmp_path / "back"))
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("hf", "back"))
    assert before.keys() == after.keys()
    assert [key for key in before if not torch.equal(before[key], after[key])] == []
    assert {tensor.dtype for tensor in after.values()} == {dtype}


def save_whole(folder: Path, config, source: Path, dtype: torch.dtype) -> str:
    pieces = weight_pieces(config, dtype)
    load_weights(str(source), pieces, config)
    saver = Saver(str(folder / "ours"))
    saver.save(1, pieces, {}, starter_config(config, "test", "F32").to_texts())
    assert saver.wait(), saver.poll()
    return str(folder / "ours" / "1")


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama-biases"])
def test_interleaved_rotary_gives_the_logits_of_the_half_split_original(tmp_path: Path, name: str) -> None:
    original = save_hugging_face(name, tmp_path)
    values = model_config_from_hf(json.loads((tmp_path / "config.json").read_text()))
    config = parse_model_config({**values, "rope_interleaved": True}, "test")
    pieces = weight_pieces(config)
    load_weights(str(tmp_path), pieces, config)
    with torch.no_grad():
        expected = original(TOKENS).logits
    torch.testing.assert_close(logits_of(config, pieces, TOKENS), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_transformers_opens_an_export_and_continues_a_text_as_we_do(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    original = save_hugging_face(name, tmp_path / "hf")
    export_hf(import_weights(str(tmp_path / "hf"), str(tmp_path / "ours")), str(tmp_path / "back"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.equal(exported(TOKENS).logits, original(TOKENS).logits)
    prompt = TOKENS[:1, :5]
    theirs = exported.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=[], pad_token_id=0)
    config = read_model_config(str(tmp_path / "ours"))
    pieces = weight_pieces(config)
    load(str(tmp_path / "ours" / "0"), pieces)
    ours = prompt
    for _ in range(12):
        ours = torch.cat([ours, logits_of(config, pieces, ours)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(ours, theirs)


LAYERS = SHAPE["num_hidden_layers"]
SOME = ["full_attention"] * (LAYERS - 1) + ["sliding_attention"]


QWEN = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 50}


@pytest.mark.parametrize(
    ("theirs", "window", "layers"),
    [
        ({"model_type": "mistral"}, 4096, None),
        ({"model_type": "mistral", "sliding_window": None}, None, None),
        ({"model_type": "mistral", "sliding_window": 50}, 50, None),
        ({"model_type": "qwen2", "sliding_window": 50}, None, None),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": None, "max_window_layers": 0},
            None,
            None,
        ),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 50}, None, None),
        ({**QWEN, "max_window_layers": 0}, 50, None),
        ({**QWEN, "max_window_layers": 1}, 50, [1, 2]),
        ({**QWEN, "max_window_layers": 1, "layer_types": SOME}, 50, [2]),
        ({**QWEN, "layer_types": SOME[::-1]}, 50, [0]),
        ({**QWEN, "layer_types": ["full_attention"] * LAYERS}, None, None),
        ({"model_type": "llama", "sliding_window": 50}, None, None),
    ],
    ids=str,
)
def test_a_sliding_window_and_its_layers_come_in_and_go_out(theirs, window, layers) -> None:
    ours = model_config_from_hf({**SHAPE, **theirs})
    assert (ours["sliding_window_size"], ours.get("sliding_window_layers")) == (window, layers)
    again = hf_config(parse_model_config(ours, "test"), "float32")
    back = model_config_from_hf(again)
    assert (back["sliding_window_size"], back.get("sliding_window_layers")) == (window, layers)


@pytest.mark.parametrize(
    ("theirs", "problem"),
    [
        (
            {"model_type": "qwen2", "layer_types": SOME},
            f"a sliding window (None) in 1 of {LAYERS} layers, by layer_types,",
        ),
        (
            {"model_type": "mistral", "sliding_window": 50, "layer_types": SOME},
            "a sliding window (50) in 1 of 3 layers",
        ),
        ({"model_type": "llama", "layer_types": SOME}, "a sliding window (None) in 1 of 3 layers"),
        (
            {**QWEN, "layer_types": SOME[1:]},
            "layer_types with 2 kinds, of full_attention, sliding_attention, in 3 layers",
        ),
        (
            {**QWEN, "layer_types": ["chunked_attention"] * LAYERS},
            "layer_types with 3 kinds, of chunked_attention, in 3",
        ),
    ],
    ids=str,
)
def test_windows_that_a_family_does_not_have_are_refused(theirs, problem) -> None:
    with pytest.raises(ConfigError, match=f"{re.escape(problem)}.* is not available"):
        model_config_from_hf({**SHAPE, **theirs})


WINDOWS = {
    "mistral": {"sliding_window": 6},
    "qwen2": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    "qwen3": {"use_sliding_window": True, "sliding_window": 6, "layer_types": SOME[::-1]},
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_model_with_windows_has_the_logits_of_the_original_here_and_exported(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    original = hugging_face_model(name, **WINDOWS[name])
    original.save_pretrained(tmp_path / "hf")
    checkpoint = import_weights(str(tmp_path / "hf"), str(tmp_path / "ours"))
    config = read_model_config(checkpoint)
    pieces = weight_pieces(config)
    load(checkpoint, pieces)
    export_hf(checkpoint, str(tmp_path / "back"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    with torch.no_grad():
        expected = original(TOKENS).logits
        assert torch.equal(exported(TOKENS).logits, expected)
    torch.testing.assert_close(logits_of(config, pieces, TOKENS), expected, rtol=1e-5, atol=1e-5 * expected.abs().max())
    assert examine(f"{checkpoint}/config.yaml", files=False).config.tokens.sequence_length == 128


def test_null_is_not_the_default_of_an_absent_key() -> None:
    heads = {**SHAPE, "model_type": "mistral", "num_key_value_heads": None, "head_dim": None, "rope_theta": None}
    config = parse_model_config(model_config_from_hf(heads), "test")
    assert (config.num_key_value_heads, config.head_dim, config.rope_theta) == (4, 8, 10000.0)


def test_tensors_that_nothing_is_computed_with_are_named_and_others_refused(tmp_path: Path, caplog) -> None:
    save_hugging_face("qwen2-tied", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    spare = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].clone(),
        "score.weight": torch.ones(2, 32),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    save_file({**tensors, **spare}, file, {"format": "pt"})
    config, told = read_model_config(str(tmp_path)), []
    import_weights(str(tmp_path), str(tmp_path / "ours"), tell=told.append)
    assert told[0] == f"{tmp_path}: not used: {', '.join(sorted(spare))}"
    assert told[1].startswith(f"{tmp_path}: has no tokenizer; generate and export-hf will ask for one: put ")
    with caplog.at_level("INFO", "nanotron"):
        load_weights(str(tmp_path), weight_pieces(config), config)
    assert caplog.messages == told[:1]
    save_file({**tensors, "model.layers.1.self_attn.o_proj.bias": torch.ones(32)}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"model.layers.1.self_attn.o_proj.bias is no tensor of the model that the"):
        load_weights(str(tmp_path), weight_pieces(config), config)


def test_weights_of_our_own_checkpoint_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    save_hugging_face("qwen3", tmp_path / "hf")
    import_weights(str(tmp_path / "hf"), str(tmp_path / "ours"))
    values = model_config_from_hf(json.loads((tmp_path / "hf" / "config.json").read_text()))
    del values["is_qwen3_config"]
    config = parse_model_config({**values, "is_llama_config": True}, "test")
    with pytest.raises(ConfigError, match=r"layers.0.attn.k_norm.weight is no tensor of the model") as caught:
        load_weights(str(tmp_path / "ours"), weight_pieces(config), config)
    assert len(caught.value.problems) == 2 * LAYERS


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": {"tp_kv": 2, "tp_rep": 2}}, {"tp": 3}], ids=str)
def test_each_rank_s_shard_comes_straight_from_the_hugging_face_folder(tmp_path: Path, axes) -> None:
    save_hugging_face("qwen2", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    config = read_model_config(str(tmp_path))
    whole = weight_pieces(config)
    load_weights(str(tmp_path), whole, config)
    tensors = {piece.name: piece.tensor for piece in whole}
    if axes == {"tp": 3}:
        axes = {"tp": {"tp_kv": 1, "tp_rep": 3}}
    for rank in range(Mesh(axes).world):
        pieces = weight_pieces(config, torch.bfloat16, Mesh(axes, rank))
        load_weights(str(tmp_path), pieces, config)
        for piece in pieces:
            assert torch.equal(piece.tensor, tensors[piece.name][piece.box.slices()].bfloat16()), piece.name


def test_a_run_starts_from_a_checkpoint_an_import_or_the_folder_itself_alike(tmp_path: Path) -> None:
    save_hugging_face("llama", tmp_path / "hf")
    import_weights(str(tmp_path / "hf"), str(tmp_path / "ours"))
    config = read_model_config(str(tmp_path / "hf"))
    results = []
    for path in ("hf", "ours", "ours/0"):
        pieces = weight_pieces(config)
        master = pieces[0]._replace(kind="master", tensor=torch.zeros_like(pieces[0].tensor))
        load_weights(str(tmp_path / path), [*pieces, master], config)
        assert torch.equal(master.tensor, pieces[0].tensor)
        results.append([piece.tensor for piece in pieces])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_an_import_is_a_checkpoint_whose_checksums_hold_in_files_of_bounded_size(tmp_path: Path) -> None:
    save_hugging_face("llama", tmp_path / "hf")
    import_weights(str(tmp_path / "hf"), str(tmp_path / "ours"), max_shard_bytes=20_000)
    assert len(list((tmp_path / "ours" / "0").glob("*.safetensors"))) > 2
    found = agree_resume(str(tmp_path / "ours"), None)
    assert found is not None
    assert found.step == 0


def test_an_export_in_several_files_is_opened_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    original = save_hugging_face("llama", tmp_path / "hf")
    import_weights(str(tmp_path / "hf"), str(tmp_path / "ours"))
    export_hf(str(tmp_path / "ours"), str(tmp_path / "back"), max_shard_bytes=20_000)
    assert not (tmp_path / "back" / "model.safetensors").exists()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    theirs = dict(exported.named_parameters())
    assert all(torch.equal(theirs[name], parameter) for name, parameter in original.named_parameters())


def test_a_wider_export_takes_the_masters(tmp_path: Path) -> None:
    save_hugging_face("llama", tmp_path / "hf")
    config = read_model_config(str(tmp_path / "hf"))
    masters = [piece._replace(kind="master") for piece in weight_pieces(config)]
    load_weights(str(tmp_path / "hf"), masters, config)
    weights = [piece._replace(kind="weight", tensor=piece.tensor.bfloat16()) for piece in masters]
    saver = Saver(str(tmp_path / "ours"))
    model_config = json.dumps({**model_config_from_hf(json.loads((tmp_path / "hf" / "config.json").read_text()))})
    saver.save(1, [*weights, *masters], {}, {"model_config.json": model_config})
    assert saver.wait(), saver.poll()
    for dtype, exact in (("float32", True), (None, False)):
        export_hf(str(tmp_path / "ours"), str(tmp_path / f"{dtype}"), dtype=dtype)
        exported = load_file(tmp_path / f"{dtype}" / "model.safetensors")
        original = load_file(tmp_path / "hf" / "model.safetensors")
        assert all(torch.equal(exported[key], original[key] if exact else original[key].bfloat16()) for key in original)


def test_tokenizer_files_travel_and_open_in_transformers(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoTokenizer

    save_hugging_face("llama", tmp_path / "hf")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "hf" / "tokenizer.json"))
    assert export_hf(import_weights(str(tmp_path / "hf"), str(tmp_path / "ours")), str(tmp_path / "back")) == []
    assert AutoTokenizer.from_pretrained(tmp_path / "back").encode("b a c") == [1, 0, 2]


def test_the_tokens_that_begin_and_end_a_text_are_the_tokenizers_where_it_names_them(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    save_hugging_face("llama", tmp_path / "hf")
    Tokenizer(models.WordLevel({"</s>": 0, "b": 1, "c": 2, "<s>": 3})).save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "hf" / "generation_config.json").unlink()  # it says the same as config.json
    found = []
    for name, named in [("end", {"eos_token": "</s>"}), ("both", {"bos_token": {"content": "<s>"}, "eos_token": "b"})]:
        (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(named))
        export_hf(import_weights(str(tmp_path / "hf"), str(tmp_path / f"{name}-ours")), str(tmp_path / name))
        config = json.loads((tmp_path / name / "config.json").read_text())
        found.append((config["bos_token_id"], config["eos_token_id"]))
    assert found == [(1, 0), (3, 1)], "the model's own are 1 and 2"


@pytest.mark.parametrize("of_model", [[2, 5], [2], 2, None])
@pytest.mark.parametrize("drawing", [{"eos_token_id": [5, 3], "top_k": 7}, None])
def test_every_token_that_ends_a_text_goes_in_and_out_with_or_without_a_tokenizer(
    tmp_path: Path, of_model, drawing
) -> None:
    from tokenizers import Tokenizer, models

    save_hugging_face("llama", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "eos_token_id": of_model}))
    (tmp_path / "hf" / "generation_config.json").unlink()
    if drawing:
        (tmp_path / "hf" / "generation_config.json").write_text(json.dumps(drawing))
    import_weights(str(tmp_path / "hf"), str(tmp_path / "ours"))
    assert read_model_config(str(tmp_path / "ours")).eos_token_id == of_model
    export_hf(str(tmp_path / "ours"), str(tmp_path / "bare"))
    assert json.loads((tmp_path / "bare" / "config.json").read_text())["eos_token_id"] == of_model
    words = {word: number for number, word in enumerate("abcdefgh")}
    Tokenizer(models.WordLevel(words)).save(str(tmp_path / "ours" / "tokenizer.json"))
    Tokenizer(models.WordLevel(words)).save(str(tmp_path / "ours" / "0" / "tokenizer.json"))
    export_hf(str(tmp_path / "ours"), str(tmp_path / "back"))
    listed = of_model if isinstance(of_model, list) else [] if of_model is None else [of_model]
    ends = ([5, 3, 2] if 5 in listed else [5, 3]) if drawing else listed
    written = json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"]
    assert (written if isinstance(written, list) else [] if written is None else [written]) == ends
    assert list(open_source(str(tmp_path / "ours")).ends) == ends
    if drawing:
        theirs = json.loads((tmp_path / "back" / "generation_config.json").read_text())
        assert theirs == {"eos_token_id": ends, "top_k": 7}


def test_a_missing_tokenizer_is_said(tmp_path: Path) -> None:
    save_hugging_face("llama", tmp_path / "hf")
    (notice,) = export_hf(import_weights(str(tmp_path / "hf"), str(tmp_path / "ours")), str(tmp_path / "back"))
    assert notice.startswith("no tokenizer was found in")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type='gpt2' is no family that can be imported; those are llama, mistral"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not available here"),
        ({"mlp_bias": True}, "mlp_bias=true is not available here"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, "rope_type='longrope' is not available here"),
        ({"num_hidden_layers": 4}, "it has no model.layers.3.input_layernorm.weight"),
        ({"num_hidden_layers": 2}, r"model.layers.2.input_layernorm.weight is no tensor of the model that the config"),
        ({"vocab_size": None}, "config.json: vocab_size: missing"),
        (
            {"num_hidden_layers": 10_000},
            "num_hidden_layers=10000 of its config is another model's",
        ),
        ({"rope_scaling": "abc"}, r'config.json: rope_scaling is "abc": Input should be a valid dictionary'),
        ({"eos_token_id": []}, r"config.json: eos_token_id is \[\]: List should have at least 1 item"),
        ({"vocab_size": 68}, r"model.embed_tokens.weight has shape \[67, 32\], the model's config needs \[68, 32\]"),
    ],
)
def test_what_cannot_be_imported_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    save_hugging_face("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ConfigError, match=message) as caught:
        import_weights(str(tmp_path), str(tmp_path / "ours"))
    assert all(line.startswith(str(tmp_path)) for line in caught.value.problems)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("config.json", "[1]", "config.json: it is [1]: Input should be a valid dictionary"),
        ("config.json", "{", "config.json: EOF while parsing"),
        ("config.json", "[" * 50_000, "config.json: recursion limit exceeded"),
        (WEIGHTS_INDEX, "{", f"{WEIGHTS_INDEX}: EOF while parsing"),
        (
            WEIGHTS_INDEX,
            '{"weight_map": [1]}',
            "weight_map is [1]: Input should be a valid dictionary",
        ),
        (
            WEIGHTS_INDEX,
            '{"weight_map": {"a": "../b"}}',
            'weight_map.a is "../b": String should match',
        ),
        (WEIGHTS_INDEX, '{"weight_map": {"a": "b.safetensors"}}', "b.safetensors is missing"),
    ],
)
def test_a_file_that_is_none_is_named_in_a_line(tmp_path: Path, file: str, text: str, message: str) -> None:
    save_hugging_face("llama", tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        import_weights(str(tmp_path), str(tmp_path / "ours"))


@pytest.mark.parametrize("name", ["qwen2", "qwen2-moe"])
def test_no_value_of_a_config_is_more_than_a_mistake(tmp_path: Path, name: str) -> None:
    save_hugging_face(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 64, "rope_scaling": None, "layer_types": None}
    hostile = ("abc", [], {}, -1, 1.5, float("nan"), 10**30, True, None, [[]], {"a": [1]}, ["x"])
    for key, value in product([*config, "rope_theta", "max_window_layers", "attention_bias"], hostile):
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        with suppress(ConfigError):
            open_weights(str(tmp_path), read_model_config(str(tmp_path)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"is_qwen2_config": True, "attention_bias": False},
            "attention_bias=false cannot be exported: Hugging Face's qwen2",
        ),
        (
            {"is_llama_config": True, "sliding_window_size": 64},
            "sliding_window_size=64 in 3 of 3 layers cannot be exported: Hugging Face's llama has no window",
        ),
        (
            {"is_mistral_config": True, "sliding_window_size": 64, "sliding_window_layers": [0, 2]},
            "sliding_window_size=64 in 2 of 3 layers cannot be exported: Hugging Face's mistral has the window in all",
        ),
    ],
)
def test_what_the_family_cannot_express_is_refused_before_anything_is_written(tmp_path: Path, values, message) -> None:
    shape = {key: value for key, value in SHAPE.items() if key != "initializer_range"}
    config = parse_model_config({**shape, **values}, "test")
    pieces = weight_pieces(config)
    saver = Saver(str(tmp_path / "ours"))
    saver.save(1, pieces, {}, {"model_config.json": json.dumps({**shape, **values})})
    assert saver.wait()
    with pytest.raises(ConfigError, match=message):
        export_hf(str(tmp_path / "ours"), str(tmp_path / "back"))
    assert not (tmp_path / "back").exists()


def test_a_damaged_checkpoint_is_not_exported(tmp_path: Path) -> None:
    pieces = [StateShard("weight", "w", (4,), Box((0,), (4,)), torch.ones(4))]
    saver = Saver(str(tmp_path))
    saver.save(1, pieces, {})
    saver.wait()
    shard = tmp_path / "1" / "shard-00000-of-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(ConfigError, match=r"shard-00000-of-00001.safetensors is damaged"):
        export_hf(str(tmp_path), str(tmp_path / "back"))


def test_no_transformers_is_imported_on_the_way_in_or_out(tmp_path: Path) -> None:
    save_hugging_face("llama", tmp_path / "hf")
    script = (
        "import sys\n"
        "from nanotron.convert.importing import import_weights, starter_config\n"
        "from nanotron.convert.exporting import export_hf\n"
        "export_hf(import_weights('hf', 'ours'), 'back')\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_models_of_the_test_differ_in_every_parameter() -> None:
    parameters = list(hugging_face_model("qwen3").parameters())
    assert all(parameter.std() > 0 for parameter in parameters)
