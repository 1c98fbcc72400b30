"""What every test may ask for, and how many examples a property is tried on."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.pool import Pool

gc.set_threshold(50_000)  # a tenth of the processor's time went into looking through what imports leave behind

# Machines that run the tests are busy: a slow example is no failure. `make nightly` looks at ten times as many.
for name, examples in (("every change", 30), ("nightly", 300)):
    settings.register_profile(name, deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=examples)
settings.load_profile("every change")


def pytest_collection_modifyitems() -> None:
    """Once all tests are imported, where any are: the process that only deals them out to workers imports no torch."""
    import torch

    torch.set_num_threads(1)  # operations as small as these only wait for each other's threads
    gc.freeze()  # a million objects of torch and transformers, which never are garbage


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Worker processes for tests that need several ranks: `pool.run(world, function, *args)`."""
    from tests.pool import Pool

    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The address of an S3 server in another process."""
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"], stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    address = next(found[0] for line in process.stderr if (found := re.search(r"http://127.0.0.1:\d+", line)))
    yield address
    process.kill()
    process.wait()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A fresh bucket's URL; the environment says where and who, as a user's does."""
    import s3fs

    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    name = "b" + re.sub(r"[^a-z0-9]", "", request.node.name.lower())[:50]
    s3fs.S3FileSystem().mkdir(name)
    return f"s3://{name}"
