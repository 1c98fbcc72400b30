"""What every rank finds out is said once, by rank 0."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tests.checkpoint.runs import run, values_of
from tests.pool import Pool

ONE_TOKEN_DOCUMENTS = """
def f():
    while True:
        yield [1]
"""


def warnings_of(rank: int, world: int, values: dict[str, Any]) -> list[str]:
    """What this rank of a run would print at its default log level."""
    logger, lines = logging.getLogger("nanotron"), list[str]()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        run(rank, world, values)
    finally:
        logger.removeHandler(handler)
    return lines


def small_run(folder: Path, **changes: Any) -> dict[str, Any]:
    values = values_of(folder, (2, 1, 1), checkpoints__save_final_state=False, **changes)
    values["tokens"] |= {"train_steps": 4, "batch_accumulation_per_replica": 1}
    values["model"]["model_config"]["num_hidden_layers"] = 1
    return values


def test_steps_without_any_target_are_told_once(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(ONE_TOKEN_DOCUMENTS)
    values = small_run(tmp_path)
    values["data_stages"][0]["data"]["dataset"] = {"python": f"{tmp_path}/data.py:f"}
    model = values["model"]["model_config"]
    del model["is_llama_config"]
    model |= {"is_qwen2_config": True, "_use_doc_masking": True}  # a document's first token is no target
    first, other = pool.run(2, warnings_of, values)
    assert [line.split(",")[0] for line in first] == ["step 1: no token of its batch is a target"]
    assert other == []


def test_a_step_that_is_not_finite_is_told_by_one_rank(pool: Pool, tmp_path: Path) -> None:
    values = small_run(tmp_path, optimizer__on_nan="skip")
    values["optimizer"]["learning_rate_scheduler"] = {"learning_rate": 1e30}
    first, other = pool.run(2, warnings_of, values)
    assert first
    assert all("is not finite; its update was left out" in line for line in first)
    assert len({line.split(":")[0] for line in first}) == len(first)
    assert other == []
