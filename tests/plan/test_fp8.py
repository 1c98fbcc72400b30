"""What a plan says of matmuls in fp8: which they are, what they take, and where they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from nanotron.cli import app
from nanotron.config import Config
from nanotron.errors import ConfigError
from nanotron.models.specs import StageModules, is_hidden
from nanotron.plan.hardware import find_cluster
from nanotron.plan.layouts import changed
from nanotron.plan.measure import measure_chunk
from nanotron.plan.predict import Planner
from nanotron.plan.text import plan_text
from nanotron.training.topology import parameter_specs
from tests.plan.configs import VOCABULARY, small

IN_FP8 = {"model.fp8": "block128", "model.model_config.intermediate_size": 768}
PLAIN = IN_FP8 | {"model.fp8": None}


def sized(**layout: object) -> Config:
    return small(dtype="bfloat16", **layout)  # type: ignore[arg-type]


def test_layers_multiply_in_fp8_and_the_head_and_weight_gradients_do_not() -> None:
    plain, config = (changed(sized(micro_batch=1), change) for change in (PLAIN, IN_FP8))
    whole = StageModules.whole(config.model.model_config)
    before, counts = (measure_chunk(each, whole, "accelerator") for each in (plain, config))
    matrices = sum(spec.numel for spec in parameter_specs(config).values() if is_hidden(spec))
    tokens, width = 256, config.model.model_config.hidden_size
    head = 2 * tokens * VOCABULARY * width
    for work in (counts.forward, counts.backward):
        assert work["fp8"] == 2 * tokens * matrices
        assert work["matmul"] == head
    assert counts.weights == before.weights
    assert before.forward["fp8"] == 0
    assert before.forward["matmul"] == head + 2 * tokens * matrices
    assert counts.forward["moved"] > before.forward["moved"], "rounding is work too"
    assert counts.kept == before.kept, "what is rounded is dropped at once"


def test_it_pays_in_a_large_layer_where_rounding_is_one_pass_over_memory() -> None:
    large = {"model.model_config.intermediate_size": 14_336}
    bf16, fp8, as_written = (
        changed(sized(hidden=4096, sequence=4096, layers=2), change | large)
        for change in (PLAIN, IN_FP8, IN_FP8 | {"model.compile": False})
    )
    h100 = Planner(find_cluster("h100", 8))
    before, after, slow = (h100.plan(config).tokens_per_second for config in (bf16, fp8, as_written))
    assert after > 1.1 * max(before, slow)
    assert "in bfloat16, layers multiply in fp8 (block128), on" in plan_text(h100.plan(fp8))


@pytest.mark.parametrize("gpu", ["a100", "b200"])
def test_it_is_refused_in_one_line_where_torch_has_no_kernel(tmp_path: Path, gpu: str) -> None:
    path = tmp_path / "run.yaml"
    changed(sized(), IN_FP8).save_as_yaml(path)
    result = CliRunner().invoke(app, ["plan", str(path), "--gpu", gpu])
    assert isinstance(result.exception, ConfigError)  # of which main makes a line and exit code 2
    said = f"model.fp8=block128: torch has no kernel for it on {gpu}; plan for h100, h100-pcie, h100-nvl, h200"
    assert str(result.exception) == said
