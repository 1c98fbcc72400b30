"""What tests of metrics may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def wandb() -> Iterator[None]:
    """Weights & Biases as it begins: it would keep the settings of the process's first run for every later one."""
    package = pytest.importorskip("wandb", reason="the package wandb is not installed")
    package.teardown()
    yield
    package.teardown()
