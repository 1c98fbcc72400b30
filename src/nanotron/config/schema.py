"""The config's JSON Schema, for editors: they complete keys, show their descriptions and mark mistakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import TypeAdapter

from nanotron.config.compat.retired import retired_of
from nanotron.config.config import Config
from nanotron.config.keys import Status, in_any_case, sections_in

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NUMBER = {"pattern": r"^[-+.0-9_eE\s]+$"}
_AS_TEXT = {
    "integer": {"type": ["integer", "string"], **_NUMBER},
    "number": {"type": ["number", "string"], **_NUMBER},
    "boolean": {
        "type": ["boolean", "string", "integer"],
        "pattern": in_any_case(["true", "t", "yes", "y", "on", "1", "false", "f", "no", "n", "off", "0"])["pattern"],
        "minimum": 0,
        "maximum": 1,
    },
}
"""What else is read as a number or as true and false: quoted numbers, and the words for yes and no."""


def json_schema(schedules: Sequence[str]) -> dict[str, Any]:
    """Return the JSON Schema of a config file; `schedules` are the built-in values of `parallelism.pp_engine`."""
    schema: dict[str, Any] = _for_editors(TypeAdapter(Config).json_schema())
    schema["$defs"]["ParallelismArgs"]["properties"]["pp_engine"]["anyOf"] = [
        {"enum": list(schedules)},
        in_any_case(schedules),
        {"type": "string", "pattern": r"\.csv$|\.py:\w+$"},
    ]
    for cls in sections_in(Config):
        properties = (schema if cls is Config else schema["$defs"][cls.__name__])["properties"]
        properties |= {name: retired.json_schema for name, retired in retired_of(cls).items()}
    adam = schema["$defs"]["AdamWOptimizerArgs"]["properties"]
    schema["$defs"]["OptimizerArgs"]["properties"] |= {name: {**key, "deprecated": True} for name, key in adam.items()}
    return {"$schema": DIALECT, "title": "nanotron config", **{k: v for k, v in schema.items() if k != "title"}}


def _for_editors(node: Any) -> Any:
    """Turn our status of a key into words that editors know, and say all that is read as what belongs there."""
    if isinstance(node, list):
        return [_for_editors(item) for item in node]
    if not isinstance(node, dict):
        return node
    status = node.get("status")
    plain = {
        "anyOf" if name == "oneOf" else name: _for_editors(value)
        for name, value in node.items()
        if name not in ("status", "title", "discriminator")
    }
    if isinstance(plain.get("type"), str):
        plain |= _AS_TEXT.get(plain["type"], {})
    if "anyOf" in plain:
        plain["anyOf"] = [
            leaf for part in plain["anyOf"] for leaf in (part["anyOf"] if [*part] == ["anyOf"] else [part])
        ]
    if status is not None and Status(**status).derived:
        plain["description"] += f" Left out: {Status(**status).derived}."
    return plain
