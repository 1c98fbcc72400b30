"""From a command line to text: one process or many, as torchrun's users know it, and as transformers would say it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from nanotron.convert.exporting import export_hf
from nanotron.errors import ConfigError
from nanotron.generate import command
from nanotron.generate.command import DEFAULT_PROMPTS, Request, generate, run_generate, run_request
from nanotron.generate.source import open_source
from tests.commands import nanotron
from tests.generate.tiny import PROMPTS, write_run

REPOSITORY = Path(__file__).parents[2]


def json_lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_run_generate_without_prompts_takes_its_own(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_generate(["--ckpt-path", str(run), "--max-new-tokens", "4", "--use-cache", "--dp", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(DEFAULT_PROMPTS[0])
    assert DEFAULT_PROMPTS[1] in out


def test_batches_of_any_size_give_the_same_texts(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "more.txt").write_text("\n".join(PROMPTS[1:2]))
    outputs = []
    for batch_size in (1, 2, 16):
        request = Request(
            str(run), PROMPTS[:1], str(tmp_path / "more.txt"), 6, temperature=0.9, batch_size=batch_size, json=True
        )
        assert generate(request) == 0
        outputs.append(json_lines(capsys.readouterr().out))
    assert outputs[0] == outputs[1] == outputs[2]
    assert [line["prompt"] for line in outputs[0]] == list(PROMPTS[:2])


def test_a_request_is_the_same_on_either_way_to_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("ckpt", ("-x", "b\nc"), "file", 3, 0.5, 4, 0.9, 7, 2, 3, 5, True, True, True)
    heard: list[Request] = []
    monkeypatch.setattr(command, "_run_rank", lambda ask: heard.append(ask()) or 0)
    options = "--batch-file file --max-new-tokens 3 --temperature 0.5 --top-k 4 --top-p 0.9 --seed 7 --tp 2 --pp 3"
    others = ["--batch-size=5", "--json", "--read-special-tokens", "--ema", "--prompt=-x", "--prompt=b\nc"]
    assert run_generate(["--ckpt-path", "ckpt", *options.split(), *others]) == 0
    assert run_request([json.dumps(asdict(request))]) == 0
    assert [replace(asked, prompts=tuple(asked.prompts)) for asked in heard] == [request, request]


def test_greedy_texts_are_those_of_transformers_on_the_exported_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run = write_run(tmp_path, rope_theta=500.0)
    source = open_source(str(run))
    generate(Request(str(run), PROMPTS[:2], max_new_tokens=12, json=True))
    free = [line["tokens"] for line in json_lines(capsys.readouterr().out)]
    end = free[0][8]
    other = next(token for token in free[1][3:] if token not in free[0] and end not in free[1][: free[1].index(token)])
    settings = json.loads((run / "tokenizer_config.json").read_text())
    settings["eos_token"] = source.tokenizer.id_to_token(end)  # now the texts end before they are full
    (run / "tokenizer_config.json").write_text(json.dumps(settings))
    (run / "generation_config.json").write_text(json.dumps({"eos_token_id": [other, end], "max_length": 77}))
    export_hf(str(run), str(tmp_path / "hf"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert generate(Request(str(run), PROMPTS, max_new_tokens=40, json=True)) == 0
    ours = json_lines(capsys.readouterr().out)
    for prompt, line in zip(PROMPTS, ours, strict=True):
        inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        with torch.no_grad():
            theirs = model.generate(**inputs, max_new_tokens=40, do_sample=False, pad_token_id=0)[0]
        theirs = theirs[inputs["input_ids"].shape[1] :].tolist()
        assert line["tokens"] == (theirs[:-1] if theirs[-1] in (end, other) else theirs)
    assert [len(line["tokens"]) for line in ours[:2]] == [free[0].index(end), free[1].index(other)]
    assert model.generation_config.max_length == 77, "the rest of generation_config.json travels too"


def test_nanotron_generate_starts_a_rank_for_each_part_and_prints_the_same(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompt", "import os", "--prompt=for", "--max-new-tokens", "6"]
    done = nanotron(run, "generate", str(run), *options, "--tp", "2", "--pp", "2")
    assert done.returncode == 0, done.stderr
    assert generate(Request(str(run), ("import os", "for"), max_new_tokens=6)) == 0
    assert done.stdout == capsys.readouterr().out


def test_torchrun_starts_the_layout_that_was_trained(run: Path) -> None:
    """The run was trained with tp 2."""
    options = ["--ckpt-path", str(run), "--prompt", "import os", "--max-new-tokens", "3", "--json"]
    done = nanotron(REPOSITORY, "torchrun", "--standalone", "--nproc_per_node=2", "run_generate.py", *options)
    assert done.returncode == 0, done.stderr
    assert [line["prompt"] for line in json_lines(done.stdout)] == ["import os"]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"prompts": ()}, "no prompt: give --prompt TEXT or --batch-file FILE"),
        ({"prompts": ("",)}, "the prompt is empty"),
        ({"tp": 3}, "tp=3 does not divide"),
        ({"pp": 4}, "pp=4"),
        ({"max_new_tokens": 0}, "--max-new-tokens 0"),
        ({"batch_size": 0}, "--batch-size 0"),
        ({"tp": -2, "pp": -1}, "--tp -2"),
        ({"top_p": 1.5}, "top_p=1.5"),
    ],
)
def test_a_mistake_is_named_before_any_rank_starts(
    run: Path, monkeypatch: pytest.MonkeyPatch, change: dict, complaint: str
) -> None:
    monkeypatch.setattr("nanotron.generate.command.start_workers", lambda *given, **more: pytest.fail("started"))
    monkeypatch.setattr("nanotron.generate.command.load_model", lambda *given: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=complaint):
        generate(Request(**{"path": str(run), "prompts": ("x",), **change}))


def test_run_generate_names_a_mistake_in_one_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_generate(["--ckpt-path", str(tmp_path / "nothing"), "--prompt", "x"]) == 2
    assert run_generate(["--ckpt-path", str(run), "--prompt", "x", "--tp", "2"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.startswith(f"{tmp_path / 'nothing'} holds no weights that can be read")
    assert second == "tp=2 · pp=1 makes 2 ranks, but 1 were started; start 2, or give other --tp and --pp"


def test_going_past_the_length_that_the_model_is_meant_for_is_noted(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(Request(str(run), ("import os",), max_new_tokens=40))
    assert "go past the 32 that the model is meant for" in capsys.readouterr().err
    generate(Request(str(run), ("import os",), max_new_tokens=5))
    assert not capsys.readouterr().err
