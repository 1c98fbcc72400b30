"""Log lines know their rank and keep to its level."""

import logging
from collections.abc import Iterator

import pytest

from nanotron.errors import ConfigError
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


def test_what_a_terminal_would_obey_is_shown_in_errors_and_log_lines(capsys: pytest.CaptureFixture[str]) -> None:
    hostile, shown = "a\x1b]0;x\x07\x9b\r\u202eb\té", "a\\x1b]0;x\\x07\\x9b\\r\\u202eb\té"
    assert ConfigError(hostile).problems == [shown]
    assert str(ConfigError([hostile, shown])) == f"{shown}\n{shown}"
    set_up_logging("info", "info", Mesh())
    get_logger("x").info(hostile)
    assert capsys.readouterr().out.endswith(f"] {shown}\n")
