"""What every data test may ask for."""

import pytest

from tests.data.fixtures import random_documents, write_nanoset


@pytest.fixture
def nanoset(tmp_path):
    """A folder with two files of 30 documents."""
    folder = tmp_path / "corpus"
    for number in range(2):
        write_nanoset(folder, random_documents(30, seed=number), number=number)
    return folder
