"""lm-eval judges an exported checkpoint by the very likelihoods that our own forward computes."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from nanotron.convert.exporting import export_hf
from nanotron.generate.source import open_source
from tests.generate.tiny import training_logits, whole_model, write_run

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed; pip install -e '.[eval]' to run this")
REPOSITORY = Path(__file__).parents[2]


SPARSE = {"is_qwen3_config": True, "moe_config": {"num_experts": 8, "moe_intermediate_size": 24}}


@pytest.mark.parametrize("facts", [{}, SPARSE], ids=["dense", "sparse"])
def test_lm_eval_on_an_export_finds_the_likelihoods_of_our_own_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]
) -> None:
    from lm_eval.tasks import TaskManager

    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    logging.getLogger("lm_eval").setLevel(logging.WARNING)
    run = write_run(tmp_path, max_position_embeddings=128, **facts)  # lm-eval cuts what is longer
    export_hf(str(run), str(tmp_path / "hf"))
    outcome = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(tmp_path / "hf"), "dtype": "float32", "device": "cpu"},
        tasks=["python_next"],
        task_manager=TaskManager(include_path=str(REPOSITORY / "examples" / "lm_eval"), include_defaults=False),
        bootstrap_iters=0,
    )
    source = open_source(str(run))
    model = whole_model(source)

    def likelihood(code: str, choice: str) -> float:
        """log p(choice | code), summed over the choice's tokens."""
        start, ids = len(source.encode(code)), source.encode(code + choice)
        log_p = training_logits(model, ids).log_softmax(-1)
        return sum(float(log_p[index - 1, ids[index]]) for index in range(start, len(ids)))

    lines = (REPOSITORY / "examples" / "lm_eval" / "python_next.jsonl").read_text().splitlines()
    questions = [json.loads(line) for line in lines]
    expected = [[likelihood(question["code"], choice) for choice in question["choices"]] for question in questions]
    samples = sorted(outcome["samples"]["python_next"], key=lambda sample: sample["doc_id"])
    found = [[float(value) for value, _ in sample["filtered_resps"]] for sample in samples]
    assert found == [pytest.approx(row, rel=1e-4) for row in expected]
    right = [row.index(max(row)) == question["answer"] for row, question in zip(expected, questions, strict=True)]
    assert outcome["results"]["python_next"]["acc,none"] == pytest.approx(sum(right) / len(right))
