"""A family of models is one file and its line in the table: nothing else in the house has to know of it."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

from nanotron.models.families import FAMILIES

ROOT = Path(__file__).parents[2]

TRAINED = """
from nanotron.models.specs import StageModules
from nanotron.plan.measure import Measurements, measure_chunk
from tests.parity.__main__ import compare
from tests.parity.cases import FIRST_STEPS, Case
from tests.parity.run import config_of
from tests.pool import Pool

if __name__ == "__main__":
    config = config_of(Case(family="plain_mlp", layers=7))
    whole, measured = StageModules.whole(config.model.model_config), Measurements("cpu")
    assert measured.chunk(config, whole) == measure_chunk(config, whole, "cpu")
    assert measured.state(config, 0, [whole]).total == measured.state(config, 0, [whole], every_layer=True).total

    pool, references = Pool(), {}
    options = {"tp_mode": "REDUCE_SCATTER", "schedule": "zb_h1", "zero_stage": 1, "dtype": "float64"}
    case = Case(dp=2, tp=2, pp=2, family="plain_mlp", layers=5, steps=FIRST_STEPS, **options)
    problems = compare(pool, references, case)
    pool.close()
    assert not problems, problems
"""


def test_a_family_in_one_file_trains_on_every_axis_as_on_one_device(tmp_path: Path) -> None:
    """With layers of two kinds: parameters, pipeline split, FLOPs and the planner's lines go by them."""
    runpy.run_path(str(ROOT / "examples" / "extend" / "run.py"))["add_family"](tmp_path)
    (tmp_path / "trained.py").write_text(TRAINED)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, str(tmp_path / "trained.py")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok ") == 1, done.stdout
    assert "plain_mlp" not in FAMILIES
