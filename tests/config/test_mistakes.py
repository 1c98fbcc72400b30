"""What is said about wrong configs, word by word; the table is wrong.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from nanotron.check import check, examine
from nanotron.errors import ConfigError

TABLE = yaml.safe_load((Path(__file__).parent / "wrong.yaml").read_text(encoding="utf-8"))
RIGHT: str = TABLE["right"]
RATES = "learning_rate: 3e-4, min_decay_lr: 1e-5"
QUIET = RIGHT.replace("64", "64\n    intermediate_size: 128").replace("3e-4", "3e-4\n    min_decay_lr: 1e-5")
"""The right config without the defaults that are remarked on."""


def text_of(case: dict[str, Any]) -> str:
    """The wrong config of a case."""
    text: str = case.get("text", RIGHT)
    for old, new in case.get("change", {}).items():
        assert old in text, f"{old!r} is not in the right config"
        text = text.replace(old, new, 1)
    appended: str = case.get("append", "")
    return text + appended


def problems(folder: Path, text: str, overrides: list[str] | None = None, nproc: int | None = None) -> list[str]:
    """The lines said about a config, without the file's name."""
    file = folder / "x.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        check(file, overrides or [], nproc)
    return [line.removeprefix(f"{file}:") for line in caught.value.problems]


@pytest.fixture(autouse=True)
def empty_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative paths of the table lead nowhere."""
    monkeypatch.chdir(tmp_path)


def test_the_config_that_the_table_changes_is_right(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(RIGHT)
    assert check(tmp_path / "x.yaml", nproc=8).parallelism.world_size == 8


def test_the_table_has_forty_cases_of_distinct_names() -> None:
    names = [case["name"] for case in TABLE["cases"]]
    assert len(names) == len(set(names)) >= 40


@pytest.mark.parametrize("case", TABLE["cases"], ids=lambda case: case["name"])
def test_a_mistake_is_named_exactly(case: dict[str, Any], tmp_path: Path) -> None:
    assert problems(tmp_path, text_of(case), case.get("overrides"), case.get("nproc")) == case["says"]


@pytest.mark.parametrize(
    ("marker", "said"),
    [
        ("is_gemma_config", "the family gemma is not available; use is_llama_config, "),
        ("is_starcoder2_config", "true is refused: the Starcoder2 family is not available; "),
        ("is_lama_config", "the family lama is not available; did you mean is_llama_config?"),
    ],
)
def test_a_family_that_is_not_there_is_one_line_whatever_keys_come_with_it(
    tmp_path: Path, marker: str, said: str
) -> None:
    own = f"\n    {marker}: true\n    multi_query: true\n    attn_pdrop: 0.1\n    num_key_value_head: 3"
    (line,) = problems(tmp_path, RIGHT.replace("hidden_size: 64", f"hidden_size: 64{own}"))
    assert line.startswith(f"8: model.model_config.{marker}: {said}")


def test_a_mistake_in_an_override_names_the_override(tmp_path: Path) -> None:
    wrong = ["tokens.train_steps=ten", "parallelism.tp=3", "nonsense", "tokens.x=1", "token.train_steps=2"]
    said = problems(tmp_path, RIGHT, wrong)
    assert said == [
        "--override nonsense: not of the form section.key=value",
        "--override parallelism.tp=3: parallelism.tp: 3 does not divide model.model_config.num_attention_heads=4;"
        " use 1, 2 or 4",
        "--override token.train_steps=2: token: unknown section; did you mean tokens?",
        "--override tokens.train_steps=ten: tokens.train_steps: ten is not a whole number",
        "--override tokens.x=1: tokens.x: unknown key of TokensArgs; docs/config.md lists every key",
    ]


def test_an_override_mends_a_mistake_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(RIGHT.replace("dp: 2", "dp: two").replace("tp: 2", "tp: 2\n  tp: 1"))
    assert check(file, ["parallelism.dp=1", "parallelism.tp=4"]).parallelism.world_size == 8


def test_an_override_of_a_list_item_counts_from_zero(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(RIGHT + "data_stages:\n- {name: a, start_training_step: 1}\n")
    assert check(file, ["data_stages[0].data.seed=7"]).data_stages[0].data.seed == 7
    assert problems(tmp_path, file.read_text(), ["data_stages[1].data.seed=7"]) == [
        "--override data_stages[1].data.seed=7: data_stages[1].data.seed: data_stages is a list of 1;"
        " name an item by number from 0"
    ]


def test_problems_are_sorted_by_line_and_overrides_come_last(tmp_path: Path) -> None:
    text = RIGHT.replace("train_steps: 10", "train_steps: 0").replace("dp: 2", "dp: 0").replace("64", "sixty")
    lines = problems(tmp_path, text, ["logging.log_level=loud"])
    assert [line.split(":")[0] for line in lines] == ["2", "7", "17", "--override logging.log_level=loud"]


def test_compiling_needs_the_compiler_that_it_would_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = RIGHT.replace("  model_config:", "  compile: true\n  model_config:")
    monkeypatch.setenv("CXX", "absent-c++")
    assert problems(tmp_path, text) == [
        "6: model.compile: true, but the C++ compiler absent-c++ is not installed; install it, name another in the"
        " environment variable CXX, or set it to false"
    ]
    monkeypatch.setenv("CXX", "sh")
    assert check(tmp_path / "x.yaml").model.compile


def test_a_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.yaml: no such file or directory; give the path of a YAML config"):
        check(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"model: \xff\xfe")
    with pytest.raises(ConfigError, match=r"binary.yaml: not a text file \(byte 7 is not UTF-8\)"):
        check(tmp_path / "binary.yaml")


def test_what_is_legal_and_surprising_gets_a_notice(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(
        RIGHT.replace("hidden_size: 64", "is_qwen2_config: true\n    hidden_size: 64\n    max_position_embeddings: 16")
        + "data_stages:\n- {name: a, start_training_step: 1}\n- {name: b, start_training_step: 11}\n"
        + "general: {ignore_sanity_checks: false}\n"
    )
    notices = [line.removeprefix(f"{file}:") for line in examine(file).notices]
    assert notices == [
        "6: model.model_config.intermediate_size: left out, so 192 (8/3 of hidden_size, rounded up to a multiple of"
        " 64); Hugging Face's Nanotron takes 11008",
        "6: model.model_config.attention_bias: left out, so Qwen2 has its biases on q, k and v; Hugging Face's Nanotron"
        " leaves them away",
        "13: optimizer.learning_rate_scheduler.min_decay_lr: left out, so the learning rate stays at 0.0003 after"
        " warm-up; set it, e.g. to a tenth, for a decay",
        "16: tokens.sequence_length: 32 is longer than model.model_config.max_position_embeddings=16",
        "22: data_stages[1].start_training_step: 11 is never reached: tokens.train_steps=10",
        "23: general.ignore_sanity_checks: no effect: replicas are equal by construction and tested to be; there are no"
        " checks at run time to switch",
    ]


def test_a_schedule_has_one_length(tmp_path: Path) -> None:
    rate, scheduler = "learning_rate: 3e-4\n", "optimizer.learning_rate_scheduler"
    long = RIGHT.replace(rate, f"{rate}    lr_warmup_steps: 2\n    lr_schedule_steps: 40\n")
    (tmp_path / "x.yaml").write_text(long)
    for steps in (5, 80):
        resolved = check(tmp_path / "x.yaml", [f"tokens.train_steps={steps}"]).optimizer.learning_rate_scheduler
        assert (resolved.lr_decay_starting_step, resolved.lr_decay_steps) == (2, 38)
    assert problems(tmp_path, long.replace("lr_warmup_steps: 2", "lr_decay_steps: 3")) == [
        f"14: {scheduler}.lr_schedule_steps: 40 is not where the decay ends: lr_decay_starting_step=0 +"
        " lr_decay_steps=3 = 3; make them agree, or leave one out"
    ]


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        (
            "lr_warmup_steps: 11",
            "lr_warmup_steps: 11 is longer than the run, tokens.train_steps=10, which ends while the learning rate"
            " still rises",
        ),
        (
            "lr_decay_starting_step: 10, lr_decay_steps: 31",
            "lr_decay_starting_step: 10 is not before the end of the run, tokens.train_steps=10: the learning rate does"
            " not fall",
        ),
        (
            "lr_decay_starting_step: 8, lr_decay_steps: 3",
            "lr_decay_steps: 3 steps from step 8 end at 11, after the run, tokens.train_steps=10, which ends before the"
            " learning rate has fallen to min_decay_lr=1e-05",
        ),
        (
            "lr_warmup_steps: 2, lr_schedule_steps: 40",
            "lr_schedule_steps: 40 is after the run, tokens.train_steps=10, which ends before the learning rate has"
            " fallen to min_decay_lr=1e-05",
        ),
        ("lr_decay_starting_step: 8, lr_decay_steps: 2", ""),
        ("lr_decay_starting_step: 2, lr_decay_steps: 3", ""),
    ],
)
def test_a_schedule_that_is_longer_than_the_run_is_legal_and_it_is_said_what_happens(
    scheduler: str, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(QUIET.replace("learning_rate: 3e-4\n    min_decay_lr: 1e-5", f"{{{RATES}, {scheduler}}}"))
    lines = [line.split("learning_rate_scheduler.")[1] for line in examine(file).notices]
    assert lines == ([said] if said else [])


def test_validation_that_never_takes_place_is_legal_and_said(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(QUIET + "  val_check_interval: 5\n")
    assert [line.removeprefix(f"{file}:") for line in examine(file).notices] == [
        "20: tokens.val_check_interval: 5, but no data stage has a validation data set: none takes place"
    ]
    stage = "data_stages: [{name: a, start_training_step: 1, validation: {corpus: stdlib}}]\n"
    file.write_text(QUIET + stage)
    assert [line.removeprefix(f"{file}:") for line in examine(file).notices] == [
        "20: data_stages[0].validation: is never read with tokens.val_check_interval=-1; set the steps from one"
        " validation to the next"
    ]
    file.write_text(QUIET + "  val_check_interval: 5\n" + stage)
    assert examine(file).notices == []


def test_a_ramp_that_is_the_whole_run_or_starves_a_pipeline_is_legal_and_said(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    ramp = "global_batch_size: 16\n  batch_ramp: [{global_batch_size: 4, steps: 3}, {global_batch_size: 8, steps: 7}]"
    file.write_text(QUIET.replace("batch_accumulation_per_replica: 4", ramp))
    assert [line.removeprefix(f"{file}:") for line in examine(file).notices] == [
        "19: tokens.batch_ramp: its 10 steps are all of the run, tokens.train_steps=10: none has global_batch_size=16",
        "19: tokens.batch_ramp[0].global_batch_size: 4 gives each replica 1 micro-batches, fewer than parallelism.pp=2:"
        " ranks of the pipeline wait in these 3 steps",
    ]


def test_tokens_of_another_width_are_a_mistake_where_there_are_files_too(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(4000))
    dataset = f"{{dataset_folder: {tmp_path}/a.bin, token_size_in_bytes: -2}}"
    stage = f"data_stages: [{{name: a, start_training_step: 1, data: {{dataset: {dataset}}}}}]\n"
    said = problems(tmp_path, RIGHT + "tokenizer: {tokenizer_name_or_path: null}\n" + stage)
    assert any(line.endswith("data_stages[0].data.dataset.token_size_in_bytes: -2 is not 2 or 4") for line in said)


def test_no_mistake_hides_another(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    stages = (
        "data_stages:\n- name: a\n  start_training_step: 1\n  data:\n    seed: x\n"
        "    dataset: {dataset_folder: absent}\n  validation: {dataset_folder: gone, token_size_in_bytes: 3}\n"
        "- {name: a, start_training_step: 1}\n"
    )
    said = problems(tmp_path, RIGHT + "tokenizer: {tokenizer_name_or_path: tokenizer}\n" + stages)
    assert [line.split(": ")[1] for line in said] == [
        "tokenizer.tokenizer_name_or_path",
        "data_stages[0].data.seed",
        "data_stages[0].data.dataset.dataset_folder[0]",
        "data_stages[0].validation.dataset_folder[0]",
        "data_stages[0].validation.token_size_in_bytes",
        "data_stages[1].name",
        "data_stages[1].start_training_step",
    ]


def test_what_sharding_costs_or_does_not_save_gets_a_notice(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"

    def notices(dp: int | str, stage: int) -> list[str]:
        text = RIGHT.replace("dp: 2", f"dp: {dp}").replace("optimizer:\n", f"optimizer:\n  zero_stage: {stage}\n")
        file.write_text(text)
        return [line.split("optimizer.zero_stage: ")[1] for line in examine(file).notices if "zero_stage" in line]

    gathered = "gradients are sent and weights are gathered twice for each of 4 micro-batches"
    assert notices(2, 1) == []
    assert notices(1, 3) == ["3 shards nothing: there is one replica (parallelism.dp=1)"]
    assert notices(2, 3) == [
        f"3 with parallelism.pp=2: {gathered}, where optimizer.zero_stage=1 sends both once; `nanotron plan` prices it"
    ]
    assert "weights" not in notices(2, 2)[0]
    assert notices("2\n  dp_shard: 1", 3) == ["3 shards nothing: none shares with another (parallelism.dp_shard=1)"]
