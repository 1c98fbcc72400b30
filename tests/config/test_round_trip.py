"""Load → save → load is the identity; an odd input is answered by a list of mistakes, or taken by editors too."""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from nanotron.check import check
from nanotron.config import Config, get_config_from_dict, get_config_from_file
from nanotron.config.document import dump, parse
from nanotron.config.messages import all_keys
from nanotron.config.model import FAMILIES
from nanotron.errors import ConfigError
from tests.config.test_mistakes import RIGHT
from tests.config.test_schema import EDITOR

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc")), min_size=1, max_size=12)
PATH = st.text(st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="$"), min_size=1, max_size=12)
SMALL = st.integers(1, 64)
RATE = st.floats(1e-8, 1.0, exclude_min=True)


def optional(**keys: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Mappings with any of these keys."""
    return st.fixed_dictionaries({}, optional=keys)


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    heads = draw(st.sampled_from([1, 2, 4, 8]))
    shape = {"hidden_size": heads * 16, "num_attention_heads": heads, "num_hidden_layers": draw(SMALL)}
    marker = draw(st.sampled_from(["is_llama_config", "is_mistral_config", "is_qwen2_config", "is_qwen3_config", ""]))
    more = draw(
        optional(
            num_key_value_heads=st.just(1),
            vocab_size=st.integers(16, 10**6),
            rope_theta=st.floats(1.0, 1e6),
            tie_word_embeddings=st.booleans(),
            _use_doc_masking=st.booleans(),
            use_cache=st.booleans(),
            eos_token_id=st.none() | st.integers(0, 15),
            rope_scaling=st.none() | st.just({"rope_type": "llama3", "factor": 8}),
        )
    )
    return {**shape, **more, **({marker: True} if marker else {})}


DATASETS = (
    st.none()
    | st.just({"corpus": "stdlib"})
    | st.builds(lambda names: {"dataset_folder": names}, st.lists(PATH, min_size=1, max_size=3) | PATH)
    | st.builds(lambda name: {"hf_dataset_or_datasets": name, "sft_dataloader": True}, PATH | st.lists(PATH))
    | st.builds(lambda names: {"hf_dataset_or_datasets": names}, st.dictionaries(PATH, RATE))
)

CONFIGS = st.fixed_dictionaries(
    {
        "model": st.fixed_dictionaries(
            {"model_config": models()},
            optional={
                "dtype": st.sampled_from(["bfloat16", "float32"]),
                "init_method": st.builds(lambda std: {"std": std}, RATE) | st.builds(lambda path: {"path": path}, PATH),
            },
        ),
        "tokens": st.fixed_dictionaries(
            {"sequence_length": SMALL, "micro_batch_size": SMALL, "batch_accumulation_per_replica": SMALL},
            optional={"train_steps": SMALL},
        )
        | st.fixed_dictionaries({"sequence_length": SMALL, "micro_batch_size": SMALL, "global_batch_size": SMALL}),
        "optimizer": st.fixed_dictionaries(
            {
                "learning_rate_scheduler": st.fixed_dictionaries(
                    {"learning_rate": RATE}, optional={"lr_warmup_steps": SMALL, "min_decay_lr": RATE}
                )
            },
            optional={
                "clip_grad": st.none() | RATE,
                "optimizer_factory": st.sampled_from([{"name": "sgd"}, {"adam_beta1": 0.8}, {"adam_eps": 1e-5}]),
                "weight_decay_exclude_named_params": st.lists(TEXT, max_size=2),
                "groups": st.lists(
                    st.fixed_dictionaries(
                        {"params": st.lists(TEXT, min_size=1, max_size=2)},
                        optional={"learning_rate": RATE, "optimizer": st.sampled_from(["sgd", "ADAMW"])},
                    ),
                    max_size=2,
                ),
            },
        ),
    },
    optional={
        "general": optional(project=TEXT, run=TEXT, seed=st.integers(0, 2**60), threads_per_rank=SMALL),
        "parallelism": optional(
            dp=SMALL | st.just("auto"), pp_layers=st.lists(SMALL), pp_engine=st.sampled_from(["afab", "zbv"])
        ),
        "checkpoints": optional(checkpoints_path=PATH, keep_last_n=SMALL, resume_checkpoint_path=PATH),
        "profiler": st.builds(lambda path: {"profiler_export_path": path, "active": 2}, PATH),
        "data_stages": st.lists(
            st.fixed_dictionaries(
                {"name": TEXT, "start_training_step": SMALL},
                optional={"data": optional(dataset=DATASETS, seed=SMALL), "sequence_length": SMALL},
            ),
            min_size=1,
            max_size=3,
        ),
    },
)


@given(CONFIGS)
def test_load_save_load_is_the_identity(values: dict[str, Any]) -> None:
    config = get_config_from_dict(values)
    assert EDITOR.is_valid(values)
    with tempfile.TemporaryDirectory() as folder:
        for resolved in (True, False):
            file = Path(folder) / "x.yaml"
            config.save_as_yaml(file, resolved=resolved, header="a comment\nof two lines")
            again = get_config_from_file(file)
            assert again == config
            assert again.to_dict() == config.to_dict()


def test_what_was_derived_is_written_only_when_resolved() -> None:
    config = get_config_from_dict(parse(RIGHT).values)
    assert config.to_dict(resolved=False) == {
        "parallelism": {"dp": 2, "pp": 2, "tp": 2},
        "model": {
            "model_config": {
                "hidden_size": 64,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "is_llama_config": True,
            }
        },
        "tokens": {
            "sequence_length": 32,
            "micro_batch_size": 2,
            "batch_accumulation_per_replica": 4,
            "train_steps": 10,
        },
        "optimizer": {"learning_rate_scheduler": {"learning_rate": 3e-4}},
    }
    assert config.to_dict()["optimizer"]["learning_rate_scheduler"]["lr_decay_steps"] == 10


def test_a_derived_key_that_is_changed_afterwards_is_written() -> None:
    config = get_config_from_dict(parse(RIGHT).values)
    config.optimizer.learning_rate_scheduler.lr_decay_steps = 3
    config.data_stages[0].data.seed = 7
    chosen = config.to_dict(resolved=False)
    assert chosen["optimizer"]["learning_rate_scheduler"]["lr_decay_steps"] == 3
    assert chosen["data_stages"][0]["data"] == {"seed": 7}


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
PATHS = st.sampled_from(sorted({path for path in all_keys() if "data_stages" not in path}))


def place(values: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Put a value at a path, making mappings on the way."""
    *above, last = path
    for part in above:
        if not isinstance(values.get(str(part)), dict):
            values[str(part)] = {}
        values = values[str(part)]
    values[str(last)] = value


@given(st.lists(st.tuples(PATHS, ODD), min_size=1, max_size=3), st.booleans())
def test_any_value_anywhere_is_accepted_or_named(changes: list[tuple[Any, Any]], listed: bool) -> None:
    values = copy.deepcopy(parse(RIGHT).values)
    for path, value in changes:
        place(values, path, value)
    if listed:
        values["data_stages"] = [values.pop("tokens", None), changes[0][1]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.yaml"
        file.write_text(dump(values), encoding="utf-8")
        try:
            assert isinstance(check(file), Config)
            EDITOR.validate(parse(file.read_text(encoding="utf-8")).values)
        except ConfigError as error:
            assert all(line.startswith(f"{file}:") and "\n" not in line for line in error.problems)  # noqa: PT017


WRITTEN = [None, True, 0, 1, 2.0, 0.5, -1, "yes", "Off", "7", "1e-3", "LINEAR", "Cosine", "num_Layers", "1F1B", "fp32"]
WRITTEN += ["All_Reduce", "SGD", "x", [], ["x"], [1], {}, {"x": 1}]
ELSEWHERE = [*FAMILIES, "pp_engine"]  # where true is also 1, and whose names `check` knows
KEYS = st.sampled_from(sorted(path for path in all_keys() if path[-1] not in ELSEWHERE))
DATASET_KINDS = st.sampled_from(
    [
        {"corpus": "stdlib"},
        {"dataset_folder": "x"},
        {"hf_dataset_or_datasets": "x"},
        {"hf_dataset_or_datasets": "x", "sft_dataloader": True},
        {"python": "x.py:f"},
    ]
)


@given(st.lists(st.tuples(KEYS, st.sampled_from(WRITTEN)), min_size=1, max_size=4), DATASET_KINDS)
def test_an_editor_takes_what_the_loader_takes(changes: list[tuple[Any, Any]], kind: dict[str, Any]) -> None:
    values = copy.deepcopy(parse(RIGHT).values)
    values["data_stages"] = {"data": {"dataset": dict(kind)}, "validation": dict(kind)}
    for path, value in changes:
        place(values, path, value)
    if isinstance(values["data_stages"], dict):
        values["data_stages"] = [{"name": "a", "start_training_step": 1, **values["data_stages"]}]
    try:
        get_config_from_dict(values)
    except ConfigError:
        return
    EDITOR.validate(values)
