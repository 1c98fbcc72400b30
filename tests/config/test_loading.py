"""How files are read: numbers as people write them, old shapes, YAML's corners, scripts of Hugging Face's Nanotron."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nanotron.check import check, examine, summary
from nanotron.config import (
    Config,
    LlamaConfig,
    MistralConfig,
    ModelArgs,
    ModelConfig,
    ParallelismArgs,
    Qwen2Config,
    Qwen3Config,
    RandomInit,
    SGDOptimizerArgs,
    SpectralMupInit,
    get_config_from_dict,
    get_config_from_file,
)
from nanotron.config.document import dump, parse
from nanotron.errors import ConfigError
from tests.commands import nanotron
from tests.config.test_mistakes import RIGHT


def load(folder: Path, text: str) -> Config:
    """Read a config from text."""
    (folder / "x.yaml").write_text(text, encoding="utf-8")
    return get_config_from_file(folder / "x.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1E5", 1e5),
        ("1_000", 1000),
        ("010", 10),
        ("0x10", 16),
        ("1:30", "1:30"),
        ("no", "no"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        (".5", 0.5),
        ("-.inf", float("-inf")),
        ("~", None),
        ("", None),
        ("'3e-4'", "3e-4"),
    ],
)
def test_a_scalar_means_what_people_mean(text: str, value: Any) -> None:
    read = parse(f"key: {text}\n").values["key"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("text", ["3e-4", "no", "on", "2024-01-01", "010", "1:30", "null", "0o7", "a: b", "# x", " x "])
def test_text_that_looks_like_something_else_is_quoted_when_written(text: str) -> None:
    assert parse(dump({"key": text})).values == {"key": text}


def test_integral_floats_are_integers_and_quoted_numbers_are_numbers(tmp_path: Path) -> None:
    text = RIGHT.replace("train_steps: 10", "train_steps: 1e3").replace("dp: 2", "dp: 2.0").replace("3e-4", '"3e-4"')
    config = load(tmp_path, text)
    assert (config.tokens.train_steps, config.parallelism.dp) == (1000, 2)
    assert type(config.tokens.train_steps) is int
    assert config.optimizer.learning_rate_scheduler.learning_rate == 3e-4


def test_names_are_accepted_in_any_case(tmp_path: Path) -> None:
    text = RIGHT.replace("dp: 2", "dp: 2\n  pp_engine: 1F1B\n  tp_mode: reduce_scatter")
    text = text.replace("model:", "model:\n  dtype: Float32\n  init_method: {scaling_method: NUM_LAYERS}", 1)
    config = load(tmp_path, text.replace("optimizer:", "optimizer:\n  optimizer_factory: {name: SGD}", 1))
    assert (config.parallelism.pp_engine, config.parallelism.tp_mode) == ("1f1b", "REDUCE_SCATTER")
    assert (config.model.dtype, config.model.init_method) == ("float32", type(config.model.init_method)())
    assert isinstance(config.optimizer.optimizer_factory, SGDOptimizerArgs)


@pytest.mark.parametrize(
    ("marker", "family", "biases"),
    [
        ("", LlamaConfig, (False, False, False)),
        ("is_llama_config: true\n    attention_bias: true", LlamaConfig, (True, True, False)),
        ("is_mistral_config: true", MistralConfig, (False, False, False)),
        ("is_qwen2_config: true", Qwen2Config, (True, False, False)),
        ("is_qwen2_config: true\n    attention_bias: false", Qwen2Config, (False, False, False)),
        ("is_qwen3_config: true", Qwen3Config, (False, False, True)),
    ],
)
def test_the_marker_decides_the_family(
    marker: str, family: type[ModelConfig], biases: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    model = load(tmp_path, RIGHT.replace("hidden_size", f"{marker}\n    hidden_size")).model.model_config
    assert type(model) is family
    assert (model.qkv_bias, model.out_bias, model.qk_norm) == biases


def test_derived_keys_are_filled_in(tmp_path: Path) -> None:
    config = load(tmp_path, RIGHT.replace("3e-4", "3e-4\n    lr_warmup_steps: 2"))
    model, scheduler = config.model.model_config, config.optimizer.learning_rate_scheduler
    assert (model.num_key_value_heads, model.head_dim, model.intermediate_size) == (4, 16, 192)
    assert model.max_position_embeddings == 32
    assert (scheduler.lr_decay_starting_step, scheduler.lr_decay_steps, scheduler.min_decay_lr) == (2, 8, 3e-4)
    assert scheduler.lr_warmup_style == "linear"
    assert config.checkpoints.checkpoints_path == "runs/nanotron"
    assert config.global_batch_size == 16


def test_vocabulary_comes_from_the_embedded_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for size in ("", "    vocab_size: -1\n"):
        Path("x.yaml").write_text(RIGHT.replace("  model_config:\n", f"  model_config:\n{size}"))
        assert check("x.yaml").model.model_config.vocab_size == 4096


def test_old_shapes_load(tmp_path: Path) -> None:
    text = RIGHT.replace(
        "optimizer:", "optimizer:\n  adam_beta2: 0.99\n  adam_eps: 1e-6\n  torch_adam_is_fused: true", 1
    )
    text += "data_stages:\n- name: a\n  start_training_step: 1\n  data: {dataset: {dataset_folder: {x: 3, y: 1}}}\n"
    text += "  validation: {dataset_folder: {z: 2}}\n"
    config = load(tmp_path, text + "logging:\nmetrics_logging: null\n")
    factory, dataset = config.optimizer.optimizer_factory, config.data_stages[0].data.dataset
    assert (factory.adam_beta2, factory.adam_eps) == (0.99, 1e-6)  # type: ignore[union-attr]
    assert (dataset.dataset_folder, dataset.dataset_weights) == (["x", "y"], [3.0, 1.0])  # type: ignore[union-attr]
    assert config.data_stages[0].validation.dataset_weights == [2.0]  # type: ignore[union-attr]
    assert config.logging.log_level == "info"


def test_anchors_and_merge_keys_work_and_an_override_wins_over_them(tmp_path: Path) -> None:
    text = RIGHT + "general: &base {project: a, seed: 1}\n"
    text += "data_stages:\n- &s {name: a, start_training_step: 1}\n- {<<: *s, name: b, start_training_step: 5}\n"
    assert [stage.name for stage in load(tmp_path, text).data_stages] == ["a", "b"]
    with pytest.raises(ConfigError, match="this alias contains itself"):
        load(tmp_path, RIGHT + "lighteval: &a {b: *a}\n")


def test_an_explicit_null_dataset_is_random_tokens_and_an_absent_one_the_embedded_corpus(tmp_path: Path) -> None:
    stage = "data_stages:\n- {name: a, start_training_step: 1, data: {seed: 1%s}}\n"
    assert load(tmp_path, RIGHT + stage % ", dataset: null").data_stages[0].data.dataset is None
    assert load(tmp_path, RIGHT + stage % "").data_stages[0].data.dataset is not None


SCRIPT = """
from nanotron.config import (
    AdamWOptimizerArgs, CheckpointsArgs, Config, DataArgs, DatasetStageArgs, ExistingCheckpointInit, GeneralArgs,
    LlamaConfig, LoggingArgs, LRSchedulerArgs, MetricsLoggingArgs, ModelArgs, NanosetDatasetsArgs, OptimizerArgs,
    ParallelismArgs, PretrainDatasetsArgs, ProfilerArgs, Qwen2Config, RandomInit, S3UploadArgs, SFTDatasetsArgs,
    SGDOptimizerArgs, SpectralMupInit, TokenizerArgs, TokensArgs, get_config_from_file,
)
from nanotron.logging import human_format

model_config = LlamaConfig(
    bos_token_id=1, eos_token_id=2, hidden_act="silu", hidden_size=16, initializer_range=0.02, intermediate_size=64,
    max_position_embeddings=256, num_attention_heads=4, num_hidden_layers=2, num_key_value_heads=4, pretraining_tp=1,
    rms_norm_eps=1e-05, rope_scaling=None, tie_word_embeddings=True, use_cache=True, vocab_size=256,
)
print(human_format(model_config.vocab_size * model_config.hidden_size * 2).replace(".", "p"))
dataset = PretrainDatasetsArgs(hf_dataset_or_datasets="stas/openwebtext-10k", text_column_name="text")
config = Config(
    general=GeneralArgs(project="debug", run="tiny_llama_%date_%jobid", seed=42, ignore_sanity_checks=True),
    checkpoints=CheckpointsArgs(checkpoints_path="checkpoints", checkpoint_interval=10),
    parallelism=ParallelismArgs(
        dp=2, pp=2, tp=2, pp_engine="1f1b", tp_mode="REDUCE_SCATTER", tp_linear_async_communication=True
    ),
    model=ModelArgs(init_method=RandomInit(std=0.025), model_config=model_config),
    tokenizer=TokenizerArgs("robot-test/dummy-tokenizer-wordlevel"),
    optimizer=OptimizerArgs(
        zero_stage=0, weight_decay=0.01, clip_grad=1.0, accumulate_grad_in_fp32=True,
        learning_rate_scheduler=LRSchedulerArgs(
            learning_rate=3e-4, lr_warmup_steps=2, lr_warmup_style="linear", lr_decay_style="cosine", min_decay_lr=1e-5
        ),
        optimizer_factory=AdamWOptimizerArgs(
            adam_eps=1e-08, adam_beta1=0.9, adam_beta2=0.95, torch_adam_is_fused=True
        ),
    ),
    logging=LoggingArgs(),
    tokens=TokensArgs(sequence_length=256, train_steps=15, micro_batch_size=2, batch_accumulation_per_replica=1),
    data_stages=[
        DatasetStageArgs(name="Stable", start_training_step=1, data=DataArgs(dataset=dataset, seed=42)),
        DatasetStageArgs(name="Annealing", start_training_step=10, data=DataArgs(dataset=dataset, seed=42)),
    ],
    profiler=None,
)
config.save_as_yaml("out.yaml")
assert get_config_from_file("out.yaml") == config
"""


def test_a_config_script_of_hugging_faces_nanotron_writes_its_yaml(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    ran = nanotron(tmp_path, "script.py")
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", "8p19K\n")
    assert check(tmp_path / "out.yaml", nproc=8)


def test_classes_without_a_counterpart_say_why() -> None:
    with pytest.raises(ImportError, match="evaluations are not started from a training run"):
        from nanotron.config import LightEvalConfig  # noqa: F401


def test_a_full_file_of_hugging_faces_nanotron_is_accepted_with_a_notice_for_every_key_without_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = RIGHT.replace("hidden_size", "use_cache: true\n    pretraining_tp: 1\n    hidden_size")
    Path("x.yaml").write_text(text + "general: {ignore_sanity_checks: true, step: null, benchmark_csv_path: null}\n")
    said = [line for line in examine("x.yaml").notices if "no effect" in line]
    assert [line.split(": ")[1] for line in said] == [
        "model.model_config.use_cache",
        "model.model_config.pretraining_tp",
        "general.ignore_sanity_checks",
    ]


def test_a_key_without_effect_is_named_wherever_it_is_written_and_gone_from_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stage = "{name: a, start_training_step: 1, data: {dataset: {corpus: stdlib, shuffle_files: true}}}"
    Path("x.yaml").write_text(RIGHT + f"data_stages: [{stage}]\n")
    checked = examine("x.yaml", ["general={step: 7}"])
    said = [line for line in checked.notices if "no effect" in line]
    assert [line.split(": no effect")[0] for line in said] == [
        "x.yaml:18: data_stages[0].data.dataset.shuffle_files",
        "--override general={step: 7}: general.step",
    ]
    assert not {"step", "shuffle_files"} & set(dump(checked.config.to_dict()).replace(":", " ").split())


def test_a_script_may_pass_keys_without_effect_and_is_stopped_by_refused_ones() -> None:
    model = LlamaConfig(  # type: ignore[call-arg]
        hidden_size=16, num_hidden_layers=2, num_attention_heads=4, use_cache=False, no_rope_layer=None
    )
    assert not hasattr(model, "use_cache")
    assert ParallelismArgs(2, moe_layer_recompute=True).dp == 2  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="no_rope_layer: 4 is refused: every layer has rotary positions"):
        LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4, no_rope_layer=4)  # type: ignore[call-arg]
    assert SpectralMupInit(use_mup=True) == RandomInit(use_mup=True)
    with pytest.raises(ConfigError, match="config:1: lighteval: a mapping is refused: evaluations are not started"):
        get_config_from_dict({**parse(RIGHT).values, "lighteval": {"batch_size": 8}})


def test_a_config_from_plain_values_names_its_mistakes_too() -> None:
    with pytest.raises(ConfigError, match=r"parallelism\.dp: 0 is out of range"):
        get_config_from_dict({**parse(RIGHT).values, "parallelism": {"dp": 0}})


@pytest.mark.parametrize(("short", "full"), [("bf16", "bfloat16"), ("FP32", "float32"), ("fp64", "float64")])
def test_a_dtype_has_a_short_name(short: str, full: str) -> None:
    values = parse(RIGHT).values
    config = get_config_from_dict({**values, "model": {**values["model"], "dtype": short}})
    assert config.model.dtype == full


def test_scripts_may_pass_a_torch_dtype_and_enum_members() -> None:
    class dtype:
        __module__ = "torch"

        def __str__(self) -> str:
            return "torch.float64"

    class Mode:
        name = "REDUCE_SCATTER"

    model = LlamaConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
    assert ModelArgs(model_config=model, dtype=dtype()).dtype == "float64"  # type: ignore[arg-type]
    assert ParallelismArgs(tp_mode=Mode()).tp_mode == "REDUCE_SCATTER"  # type: ignore[arg-type]


def test_a_ramp_says_how_many_samples_each_step_has(tmp_path: Path) -> None:
    ramp = "global_batch_size: 16\n  batch_ramp: [{global_batch_size: 4, steps: 3}, {global_batch_size: 8, steps: 2}]"
    (tmp_path / "x.yaml").write_text(RIGHT.replace("batch_accumulation_per_replica: 4", ramp))
    config = check(tmp_path / "x.yaml")
    assert [config.samples_of(step) for step in range(1, 8)] == [4, 4, 4, 8, 8, 16, 16]
    assert [config.samples_by(step) for step in (0, 3, 4, 10)] == [0, 12, 20, 28 + 5 * 16]
    assert config.batches(4) == [(3, 4), (1, 8)]
    assert [config.steps_left(step) for step in (3, 5, 9, 10)] == [(2 * 8 + 5 * 16) / 4, 5 * 16 / 8, 1, 0]
    assert check(tmp_path / "x.yaml", ["tokens.stop_after=4"]).steps_left(3) == 2
    assert "tokens      3.46K in 10 steps of 4 (the first 3), 8 (the next 2), then 16 samples of 32" in summary(config)
    assert "tokens      640 in 4 steps of 4 (the first 3), then 8 samples of 32" in summary(
        check(tmp_path / "x.yaml", ["tokens.train_steps=4"])
    )


def test_replicas_that_are_counted_when_ranks_are_launched_keep_the_batch(tmp_path: Path) -> None:
    batch = "global_batch_size: 24\n  micro_batch_size: 2\n"
    text = RIGHT.replace("dp: 2", "dp: Auto").replace("pp: 2", "pp: 1")
    text = text.replace("micro_batch_size: 2\n  batch_accumulation_per_replica: 4\n", batch)
    (tmp_path / "x.yaml").write_text(text)
    fitted = [check(tmp_path / "x.yaml", [], ranks) for ranks in (None, 3, 9, 16, 64)]
    assert [config.parallelism.dp for config in fitted] == [1, 1, 4, 6, 12]
    assert [config.tokens.batch_accumulation_per_replica for config in fitted] == [12, 12, 3, 2, 1]
    assert {config.global_batch_size for config in fitted} == {24}
    assert fitted[-1].to_dict(resolved=False)["parallelism"] == {"dp": "auto", "tp": 2}
    assert "batch_accumulation_per_replica" not in fitted[-1].to_dict(resolved=False)["tokens"]
    in_rounds = check(tmp_path / "x.yaml", ["parallelism.pp=2", "parallelism.pp_engine=interleaved_1f1b"], 64)
    assert (in_rounds.parallelism.dp, in_rounds.tokens.batch_accumulation_per_replica) == (6, 2)
    ramp = "tokens.batch_ramp=[{global_batch_size: 8, steps: 5}, {global_batch_size: 12, steps: 5}]"
    growing = [check(tmp_path / "x.yaml", [ramp], ranks) for ranks in (None, 3, 9, 16, 64)]
    assert [config.parallelism.dp for config in growing] == [1, 1, 2, 2, 2]  # 8, 12 and 24 samples, two at once
    with pytest.raises(ConfigError, match=r"parallelism.dp: auto: 2 ranks are the fewest that hold this layout, but 1"):
        check(tmp_path / "x.yaml", [], 1)
