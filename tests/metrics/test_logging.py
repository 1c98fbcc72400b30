"""Log lines know their rank and keep to its level."""

import logging
from collections.abc import Iterator

import pytest

from nanotron.logging import get_logger, set_up_logging
from nanotron.parallel.mesh import Mesh


@pytest.fixture(autouse=True)
def _restored_logger() -> Iterator[None]:
    logger = logging.getLogger("nanotron")
    before = (logger.level, logger.handlers, logger.propagate)
    yield
    logger.level, logger.handlers, logger.propagate = before


def said(capsys: pytest.CaptureFixture[str], mesh: Mesh, *, level: str = "info", replica: str = "warning") -> list[str]:
    set_up_logging(level, replica, mesh)
    get_logger("nanotron.training.trainer").info("an info")
    get_logger("nanotron.training.trainer").warning("a warning")
    return [line.partition(" [")[2] for line in capsys.readouterr().out.splitlines()]


def test_rank_zero_speaks_at_its_level_and_the_others_at_theirs(capsys: pytest.CaptureFixture[str]) -> None:
    axes = {"pp": 2, "dp": 1, "tp": 2}
    assert said(capsys, Mesh(axes, 0)) == ["INFO|PP=0|TP=0] an info", "WARNING|PP=0|TP=0] a warning"]
    assert said(capsys, Mesh(axes, 3)) == ["WARNING|PP=1|TP=1] a warning"]
    assert len(said(capsys, Mesh(axes, 3), replica="info")) == 2
    assert said(capsys, Mesh(axes, 0), level="error") == []


def test_one_process_has_no_coordinates_in_its_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, Mesh()) == ["INFO] an info", "WARNING] a warning"]
