"""Checkpoints as runs leave them, for the tests of generation."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.generate.tiny import write_run


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Operations this small only wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of shared key/value heads, trained with tp 2, and a vocabulary that no number of ranks divides."""
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def tied_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 whose embedding is its head, too."""
    return write_run(tmp_path_factory.mktemp("tied"), is_qwen2_config=True, tie_word_embeddings=True)
