"""What every test may ask for, and how many examples a property is tried on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.pool import Pool

torch.set_num_threads(1)  # operations as small as these only wait for each other's threads

# Machines that run the tests are busy: a slow example is no failure. `make nightly` looks at ten times as many.
for name, examples in (("every change", 30), ("nightly", 300)):
    settings.register_profile(name, deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=examples)
settings.load_profile("every change")


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for tests that need several ranks: `pool.run(world, function, *args)`."""
    pool = Pool()
    yield pool
    pool.close()
