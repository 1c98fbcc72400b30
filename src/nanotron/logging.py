"""Log lines that know their rank, and numbers a person can read at a glance.

Global rank 0 speaks at ``logging.log_level``, every other rank at ``logging.log_level_replica``. A line starts with the
time, the level and the coordinates of the axes that have more than one rank: ``10:15:02 [INFO|PP=1|TP=0] …``.
"""

from __future__ import annotations

import logging
import math
import sys

from nanotron.errors import visible
from nanotron.parallel.mesh import Mesh

ROOT = "nanotron"
SUFFIXES = ("", "K", "M", "B", "T", "P", "E")


def get_logger(name: str = ROOT) -> logging.Logger:
    """The logger of one of our modules (``get_logger(__name__)``)."""
    return logging.getLogger(name if name.split(".")[0] == ROOT else f"{ROOT}.{name}")


def set_up_logging(level: str, level_replica: str, mesh: Mesh) -> None:
    """Send our log lines to standard output, at this rank's level and with this rank's prefix."""
    logger = logging.getLogger(ROOT)
    logger.setLevel((level if mesh.rank == 0 else level_replica).upper())
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(_Visible(_line_format(mesh), datefmt="%Y-%m-%d %H:%M:%S"))
    logger.handlers = [handler]
    logging.raiseExceptions = False  # a line that nobody takes (a closed pipe, a full disk) is no traceback
    logger.propagate = False


class _Visible(logging.Formatter):
    """Lines hold names and data of others', which are shown to the terminal, not obeyed by it."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _line_format(mesh: Mesh) -> str:
    coordinates = [f"{axis.upper()}={mesh.coord(axis)}" for axis in ("cp", "dp", "pp", "tp") if mesh.size(axis) > 1]
    return f"%(asctime)s [{'|'.join(['%(levelname)s', *coordinates])}] %(message)s"


def human_format(number: float) -> str:
    """Three significant digits and a suffix: 1024 -> "1.02K", 12.3456 -> "12.3", 3e-4 -> "0.0003"."""
    if not math.isfinite(number):
        return str(number)
    scaled, suffix = float(f"{number:.3g}"), 0
    while abs(scaled) >= 1000 and suffix < len(SUFFIXES) - 1:
        scaled, suffix = scaled / 1000, suffix + 1
    return f"{scaled:.3g}{SUFFIXES[suffix]}"


def human_duration(seconds: float) -> str:
    """Days, hours, minutes and seconds, the two largest that matter: 3725 -> "1h02m", 42 -> "42s"."""
    if not math.isfinite(seconds):
        return "unknown"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    if hours:
        return f"{hours}h{minutes:02d}m"
    return f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"
