"""`nanotron check`, `schema` and `init` as a user meets them; what they write down is fresh; the examples are right."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from nanotron.check import check
from nanotron.config import Config, get_config_from_file
from nanotron.config.compat.retired import retired_of
from nanotron.config.keys import fields_of, section_classes, status_of
from nanotron.config.presets import PRESETS, starter
from nanotron.config.reference import reference, status_table
from nanotron.config.schema import json_schema
from nanotron.errors import ConfigError
from nanotron.pipeline.schedules import SCHEDULE_NAMES
from tests.commands import nanotron
from tests.config.test_mistakes import RIGHT

STALE = "run: python tools/write_reference.py"
ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
WORLD = {
    "config_135m.yaml": 8,
    "config_1b.yaml": 8,
    "config_3d.yaml": 8,
    "config_8b.yaml": 64,
    "config_long_context.yaml": 2,
    "config_moe.yaml": 8,
    "config_tiny_llama.yaml": 8,
    "config_tiny_moe.yaml": 8,
    "config_tiny_muon.yaml": 4,
    "config_tiny_sharded.yaml": 8,
}

# The file that every reader of the documentation knows; the example is this text below its comment for editors.
CONFIG_3D = """\
parallelism:
  dp: 2
  tp: 2
  pp: 2
  pp_engine: 1f1b # pipeline schedule
model:
  model_config:
    hidden_size: 2048
    num_hidden_layers: 24
    num_attention_heads: 16
optimizer:
  learning_rate_scheduler:
    learning_rate: 3.0e-4
  optimizer_factory:
    adam_beta1: 0.9
    adam_beta2: 0.95
tokens:
  sequence_length: 2048
  micro_batch_size: 4
  batch_accumulation_per_replica: 8
"""


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from nanotron.cli import main
for line in sys.stdin:
    sys.argv = ["nanotron", *line.split()]
    try:
        main()
    except SystemExit as end:
        assert end.code in (0, 2), line
"""


def test_no_command_about_configs_and_no_wrong_folder_imports_torch(tmp_path: Path) -> None:
    lines = f"check {EXAMPLES[0]}\ncheck absent.yaml\ncheck {EXAMPLES[0]} --resolved\ninit\nschema\ncheck --help\n"
    lines += f"inspect no\nimport-hf no x\nexport-hf no x\ntimeline {EXAMPLES[0]} --costs flops\n"
    ran = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input=lines, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, ran.stderr.count("absent.yaml: no such file")) == (0, 1), ran.stderr


def test_check_prints_the_config_with_what_was_defaulted_marked_and_five_lines(tmp_path: Path) -> None:
    ran = nanotron(tmp_path, "check", ROOT / "examples" / "config_3d.yaml", "--nproc", "8")
    assert ran.returncode == 0, ran.stderr
    assert "  dp: 2\n" in ran.stdout
    assert "  recompute_layer: false  # default\n" in ran.stdout
    assert "    head_dim: 128  # default: hidden_size / num_attention_heads\n" in ran.stdout
    assert ran.stdout.splitlines()[-5:] == [
        "parameters  1.23B, vocabulary 4096, bfloat16",
        "tokens      131M in 1000 steps of 64 samples of 2048",
        "layout      8 ranks: dp 2 · pp 2 (1f1b) · tp 2 (ALL_REDUCE), zero stage 1",
        "layers      pipeline rank 0: embedding, 0-11 | pipeline rank 1: 12-23, head",
        "data        Training, from step 1: corpus stdlib",
    ]
    assert [line.split(": ")[1] for line in ran.stderr.splitlines()] == [
        "model.model_config.intermediate_size",
        "optimizer.learning_rate_scheduler.min_decay_lr",
    ]


def test_check_resolved_prints_yaml_that_loads_to_the_same_config(tmp_path: Path) -> None:
    source = ROOT / "examples" / "config_3d.yaml"
    ran = nanotron(tmp_path, "check", source, "--resolved", "--override", "tokens.train_steps=20")
    (tmp_path / "resolved.yaml").write_text(ran.stdout)
    resolved = get_config_from_file(tmp_path / "resolved.yaml")
    assert resolved == check(source, ["tokens.train_steps=20"])
    assert resolved.tokens.train_steps == 20
    again = nanotron(tmp_path, "check", tmp_path / "resolved.yaml", "--resolved")
    assert (again.stdout, again.stderr) == (ran.stdout, "")  # nothing more to derive, nothing to remark


def test_mistakes_end_with_code_2_one_line_each_and_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(RIGHT.replace("dp: 2", "dp: 0").replace("3e-4", "fast"))
    ran = nanotron(tmp_path, "check", "x.yaml")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.splitlines() == [
        "x.yaml:2: parallelism.dp: 0 is out of range; it must be > 0",
        "x.yaml:12: optimizer.learning_rate_scheduler.learning_rate: fast is not a number",
    ]


def test_code_of_others_is_not_run_when_asked_not_to(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("open('ran', 'w')\ndef order(rank, ranks, microbatches):\n    return []\n")
    (tmp_path / "x.yaml").write_text(RIGHT.replace("dp: 2", "dp: 2\n  pp_engine: code.py:order"))
    ran = nanotron(tmp_path, "check", "x.yaml", "--no-code")
    assert (ran.returncode, (tmp_path / "ran").exists()) == (0, False), ran.stderr
    assert "layers      unknown: the schedule's code is not run" in ran.stdout.splitlines()
    assert nanotron(tmp_path, "check", "x.yaml").returncode == 2
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("command", ["check", "init", "schema"])
def test_every_command_and_option_has_help(command: str, tmp_path: Path) -> None:
    ran = nanotron(tmp_path, command, "--help")
    assert ran.returncode == 0
    described = [line for line in ran.stdout.splitlines() if line.startswith("│") and "--" in line]
    assert described
    assert all(len(line.strip("│ ").split("  ")) > 1 for line in described)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_starter_config_is_right_as_it_stands(preset: str, tmp_path: Path) -> None:
    devices = {"30b-a3b": 16, "70b": 64, "405b": 512}.get(preset, 8)
    ran = nanotron(tmp_path, "init", "--preset", preset, "--gpus", str(devices), "-o", "new.yaml")
    assert ran.returncode == 0, ran.stderr
    assert check(tmp_path / "new.yaml", nproc=devices).parallelism.world_size == devices
    for short in ("tokens.train_steps=20", "tokens.stop_after=20"):  # a schedule may be longer than the run
        assert check(tmp_path / "new.yaml", [short]).tokens.last_step == 20
    again = nanotron(tmp_path, "init", "-o", "new.yaml")
    assert (again.returncode, again.stderr) == (
        2,
        "--output new.yaml: exists already; name another file, or delete it\n",
    )


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 6, 8, 24])
def test_a_tiny_starter_config_fits_any_number_of_devices(devices: int, tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text(starter("tiny", devices))
    assert check(tmp_path / "x.yaml", nproc=devices)


def test_a_model_too_large_for_the_devices_is_refused_with_a_number_that_fits(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="70b does not fit on them with 80 GiB each; use a multiple of 32") as caught:
        starter("70b", 8)
    assert "\n" not in str(caught.value)
    (tmp_path / "x.yaml").write_text(starter("70b", 32))
    assert check(tmp_path / "x.yaml", nproc=32)


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_an_example_is_right(file: Path, tmp_path: Path) -> None:
    assert check(file, nproc=WORLD[file.name])


def test_the_well_known_example_is_word_for_word() -> None:
    text = (ROOT / "examples" / "config_3d.yaml").read_text()
    assert "\n".join(text.splitlines()[1:]) + "\n" == CONFIG_3D


def test_the_example_script_writes_the_example(tmp_path: Path) -> None:
    script = ROOT / "examples" / "config_tiny_llama.py"
    (tmp_path / script.name).write_text(script.read_text())
    assert nanotron(tmp_path, script.name).returncode == 0
    assert (tmp_path / "config_tiny_llama.yaml").read_text() == script.with_suffix(".yaml").read_text()


def test_the_schema_in_examples_is_fresh(tmp_path: Path) -> None:
    printed = nanotron(tmp_path, "schema").stdout
    assert json.loads(printed) == json_schema(SCHEDULE_NAMES)
    assert (ROOT / "examples" / "config.schema.json").read_text() == printed, STALE


def test_the_reference_is_fresh_and_every_key_is_described() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == reference(), STALE
    for _, name, _ in declarations():
        assert f"| `{name}` |" in reference()


def declarations() -> Iterator[tuple[type[Any], str, FieldInfo]]:
    """Every key of every section class, once."""
    done: set[type[Any]] = set()
    todo: list[type[Any]] = [Config]
    while todo:
        section = todo.pop()
        if section not in done:
            done.add(section)
            for name, info in fields_of(section).items():
                yield section, name, info
                todo += section_classes(info.annotation)


def test_every_key_is_declared_with_a_description_that_is_a_sentence() -> None:
    for section, name, info in declarations():
        assert info.description, f"{section.__name__}.{name}"
        assert info.description.endswith("."), f"{section.__name__}.{name}: {info.description}"


# The keys of Hugging Face's Nanotron that people's files have.
HF_NANOTRON = """
general: project run seed step consumed_train_samples benchmark_csv_path ignore_sanity_checks
parallelism: dp pp tp pp_engine tp_mode tp_linear_async_communication recompute_layer tp_recompute_allgather
  expert_parallel_size context_parallel_size moe_layer_recompute
model: model_config init_method dtype make_vocab_size_divisible_by ddp_bucket_cap_mb
model.init_method: std scaling_method use_mup path
model.model_config: bos_token_id eos_token_id hidden_act hidden_size initializer_range intermediate_size is_llama_config
  is_qwen2_config is_starcoder2_config max_position_embeddings num_attention_heads num_hidden_layers
  num_key_value_heads attention_bias pad_token_id pretraining_tp rms_norm_eps rope_scaling rope_theta rope_interleaved
  tie_word_embeddings use_cache vocab_size _attn_implementation z_loss_enabled z_loss_coefficient
  rope_seq_len_interpolation_factor flex_attention_mask sliding_window_size no_rope_layer _fused_rotary_emb
  _fused_rms_norm _use_qkv_packed _use_doc_masking log_attn_probs ring_attn_heads_k_stride moe_config
tokenizer: tokenizer_name_or_path tokenizer_revision tokenizer_max_length
tokens: sequence_length train_steps micro_batch_size batch_accumulation_per_replica val_check_interval limit_val_batches
  limit_test_batches
optimizer: optimizer_factory zero_stage weight_decay weight_decay_exclude_named_params clip_grad accumulate_grad_in_fp32
  learning_rate_scheduler
optimizer.optimizer_factory: name adam_eps adam_beta1 adam_beta2 torch_adam_is_fused
optimizer.learning_rate_scheduler: learning_rate lr_warmup_steps lr_warmup_style lr_decay_style lr_decay_steps
  lr_decay_starting_step min_decay_lr
data_stages[]: name start_training_step sequence_length data
data_stages[].data: dataset seed num_loading_workers
data_stages[].data.dataset: hf_dataset_or_datasets hf_dataset_splits hf_dataset_config_name
  dataset_processing_num_proc_per_process dataset_overwrite_cache text_column_name sft_dataloader debug_max_samples
  dataset_folder dataset_weights dataset_read_path tokenizer_name vocab_size token_size_in_bytes return_positions
  skip_in_stream pad_samples_to_global_batch_size dataset_max_tokens shuffle_files use_old_brrr_dataloader
checkpoints: checkpoints_path checkpoint_interval save_initial_state save_final_state resume_checkpoint_path
  load_lr_scheduler load_optimizer checkpoints_path_is_shared_file_system
logging: log_level log_level_replica iteration_step_info_interval
metrics_logging: log_level log_detail_interval
profiler: profiler_export_path wait warmup active repeat skip_first record_shapes profile_memory with_stack
  export_chrome_trace
s3_upload: upload_s3_path remove_after_upload s5cmd_numworkers s5cmd_concurrency s5cmd_path
"""


def test_the_compatibility_table_is_fresh_and_has_every_key_of_hugging_faces_nanotron() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    table = re.search(r"<!-- keys:.*?-->\n\n(.*?)\n<!-- end of keys -->", page, flags=re.DOTALL)
    assert table is not None
    assert table[1] == status_table(), STALE
    for line in re.sub(r"\n  +", " ", HF_NANOTRON.strip()).splitlines():
        section, keys = line.split(": ")
        missing = [key for key in keys.split() if f"| `{section}.{key}` |" not in table[1]]
        assert not missing, section


def only_choice(info: FieldInfo) -> bool:
    """Tell whether a key has one legal value."""
    return get_origin(info.annotation) is Literal and len(get_args(info.annotation)) == 1


def test_every_key_of_a_section_is_read_by_some_part() -> None:
    parts = [file for file in (ROOT / "src" / "nanotron").rglob("*.py") if file.name not in ("rules.py", "check.py")]
    read: set[str] = set()
    for part in parts:
        for node in ast.walk(ast.parse(part.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "config" not in part.parts:
                read.add(node.value)
    for section, name, info in declarations():
        a_choice = not section_classes(info.annotation) and not only_choice(info)
        if a_choice and not status_of(info).marker:
            assert name in read, f"{section.__name__}.{name} is said to be honoured, but nothing reads it"
        assert name not in retired_of(section)
