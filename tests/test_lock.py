"""What is said to be supported is what tests run with."""

from __future__ import annotations

import re
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def test_the_lowest_torch_that_is_allowed_is_the_one_that_is_tested() -> None:
    """An older one would be nobody's: each release moves names and arguments (recompile_limit, all_gather_single)."""
    lowest = re.search(r'"torch>=(\d+\.\d+)"', (ROOT / "pyproject.toml").read_text())
    locked = re.search(r"^torch==(\d+\.\d+)\.", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)
    assert lowest is not None
    assert locked is not None
    assert lowest[1] == locked[1] == ".".join(torch.__version__.split(".")[:2])
