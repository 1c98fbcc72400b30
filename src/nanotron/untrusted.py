"""What files say, before it is believed: text parsed to a bounded depth, values held to a schema.

What breaks a rule raises ValueError with the place, the value and the rule; whoever reads the file adds its name.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import pydantic_core
import yaml
from pydantic import Field, TypeAdapter, ValidationError

T = TypeVar("T")

MOST = 2**60  # elements and bytes: what is larger overflows somewhere below, and exists nowhere
Count = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
MAPPING = TypeAdapter(dict[str, Any])


def parse_json(text: str) -> Any:
    """What a JSON text says; raises ValueError, also for one that nests without end."""
    return pydantic_core.from_json(text)


def parse_yaml(text: str) -> Any:
    """What a YAML text says; raises ValueError, also for one that nests without end."""
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(" ".join(str(error).split())) from None


def checked(schema: TypeAdapter[T], value: object) -> T:
    """A value that keeps to the schema, without the keys that it does not name; raises ValueError."""
    try:
        return schema.validate_python(value)
    except ValidationError as error:
        raise ValueError(complaint(error)) from None


def complaint(error: ValidationError) -> str:
    """The first thing that is wrong: where, what is there, and what should be."""
    first = error.errors(include_url=False)[0]
    rule, where = first["msg"], ".".join(str(part) for part in first["loc"])
    if first["type"] == "missing":
        return f"{where}: {rule}"
    found = json.dumps(first["input"], default=str)
    return f"{where or 'it'} is {found if len(found) <= 60 else found[:57] + '…'}: {rule}"
