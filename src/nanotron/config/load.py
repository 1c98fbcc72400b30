"""From a YAML file to a Config, with every mistake named at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

from pydantic import TypeAdapter, ValidationError

from nanotron.config.config import Config
from nanotron.config.document import parse
from nanotron.errors import ConfigError

_ADAPTER = TypeAdapter(Config)


def get_config_from_file(config_path: str | FilePath, overrides: Sequence[str] = ()) -> Config:
    """Read a config file, with overrides `a.b.c=value`. Raises ConfigError with every mistake."""
    document = parse(FilePath(config_path).read_text(encoding="utf-8"))
    for name in ("model", "tokens", "optimizer"):
        document.values.setdefault(name, {})
    return get_config_from_dict(document.values)


def get_config_from_dict(values: dict[str, Any]) -> Config:
    """Build a config from plain values. Raises ConfigError with every mistake."""
    try:
        return _ADAPTER.validate_python(values)
    except ValidationError as error:
        raise ConfigError(str(error)) from None
