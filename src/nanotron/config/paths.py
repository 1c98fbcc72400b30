"""Paths as people write them: `~` and `$HOME` are expanded wherever one is taken, as a shell would."""

from __future__ import annotations

import os
import re

from nanotron.errors import ConfigError

VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def expanded(path: str) -> str:
    """The path with `~`, `$NAME` and `${NAME}` expanded; a URL is left as it is.

    Raises ConfigError for a variable that is not set, which would become a folder of that name.
    """
    if "://" in path and not path.startswith("file://"):
        return path
    for name in (braced or plain for braced, plain in VARIABLE.findall(path)):
        if name not in os.environ:
            raise ConfigError(f"{path}: the environment variable {name} is not set; set it, or write the path itself")
    return os.path.expandvars(os.path.expanduser(path))
