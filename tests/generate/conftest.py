"""Checkpoints as runs leave them, for the tests of generation."""

from pathlib import Path

import pytest

from tests.generate.tiny import write_run


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of shared key/value heads, trained with tp 2, and a vocabulary that no number of ranks divides."""
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="session")
def tied_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 whose embedding is its head, too."""
    return write_run(tmp_path_factory.mktemp("tied"), is_qwen2_config=True, tie_word_embeddings=True)
