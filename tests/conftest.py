"""What every test may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for tests that need several ranks: `pool.run(world, function, *args)`."""
    pool = Pool()
    yield pool
    pool.close()
