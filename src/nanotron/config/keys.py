"""What a key of the config is: a type, a default, a description, and what happens to it here.

A section is a pydantic dataclass and every key is declared once, with `key` or `required`. Validation, the JSON Schema,
`docs/config.md` and `docs/compatibility.md` are all read off these declarations.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.fields import FieldInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, PydanticKnownError, core_schema
from typing_extensions import dataclass_transform

from nanotron.config.paths import expanded
from nanotron.errors import ConfigError

T = TypeVar("T")


@dataclass_transform()
def section(cls: type[T]) -> type[T]:
    """Make a class a section: a pydantic dataclass that refuses unknown keys, infinities and NaN."""
    return cast(type[T], pydantic_dataclass(config=ConfigDict(extra="forbid", allow_inf_nan=False))(cls))


@dataclass(frozen=True)
class Status:
    """What there is to know of a key beside its type.

    `derived` says in words how it is filled in when it was left out. A `marker` tells what a section is, so that it is
    written even at its default.
    """

    derived: str = ""
    marker: bool = False


def key(
    default: Any,
    description: str,
    *,
    derived: str = "",
    marker: bool = False,
    factory: Callable[[], Any] | None = None,
    **constraints: Any,
) -> Any:
    """Declare a key with a default. `constraints` are pydantic's (`gt`, `ge`, `le`, …)."""
    extra: dict[str, Any] = {"status": Status(derived, marker)}
    if factory is not None:
        return Field(default_factory=factory, description=description, json_schema_extra=extra, **constraints)
    return Field(default=default, description=description, json_schema_extra=extra, **constraints)


def required(description: str, *, example: Any, **constraints: Any) -> Any:
    """Declare a key that has to be written. `example` is shown when it is missing."""
    return Field(
        default=...,
        description=description,
        examples=[example],
        json_schema_extra=cast(Any, {"status": Status()}),
        **constraints,
    )


def derived(description: str, rule: str, **constraints: Any) -> Any:
    """Declare a key that is worked out when it is left out or null; `rule` says how."""
    return key(None, description, derived=rule, **constraints)


def fill(section: Any, name: str, value: Any) -> None:
    """Set a derived key that was left out, or was filled before, and remember that nobody wrote it."""
    if getattr(section, name) is None or was_filled(section, name):
        setattr(section, name, value)
        vars(section).setdefault("_filled", {})[name] = copy.deepcopy(value)


def was_filled(section: Any, name: str) -> bool:
    """Tell whether a key has its value from `fill`."""
    filled = vars(section).get("_filled", {})
    return name in filled and filled[name] == getattr(section, name)


def status_of(info: FieldInfo) -> Status:
    """Return what there is to know of a key."""
    extra = info.json_schema_extra
    return extra["status"] if isinstance(extra, dict) else Status()  # type: ignore[return-value]


def fields_of(cls: type[Any]) -> dict[str, FieldInfo]:
    """Return the keys of a section class in order of declaration."""
    fields: dict[str, FieldInfo] = cls.__pydantic_fields__
    return fields


def is_section(value: Any) -> bool:
    """Tell whether a value (or a class) is a section."""
    return hasattr(value, "__pydantic_fields__")


def section_classes(annotation: Any) -> list[type[Any]]:
    """Return the section classes inside a type: `list[A]`, `A | None`, `Annotated[A | B, …]`."""
    if is_section(annotation):
        return [annotation]
    return [cls for part in get_args(annotation) for cls in section_classes(part)]


def sections_in(cls: type[Any]) -> Iterator[type[Any]]:
    """Yield a section and all sections inside it; one that is in two places twice."""
    yield cls
    for info in fields_of(cls).values():
        for inside in section_classes(info.annotation):
            yield from sections_in(inside)


KeyPath = tuple[str | int, ...]


def walk(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Any, FieldInfo]]:
    """Yield (path, value, declaration) of every key under a section, parents before children."""
    if is_section(value):
        for name, info in fields_of(type(value)).items():
            child = getattr(value, name)
            yield (*path, name), child, info
            yield from walk(child, (*path, name))
    elif isinstance(value, list):
        for index, child in enumerate(value):
            yield from walk(child, (*path, index))


def dotted(path: KeyPath) -> str:
    """Write a path as people do: `data_stages[0].data.seed`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


ANY = ""
"""Stands for every item of a list: `data_stages[].name`."""


def path_of(name: str) -> KeyPath:
    """Read what `dotted` writes; `data_stages.0.data` is `data_stages[0].data` too, `[]` is any item of a list."""
    parts = re.sub(r"\[(\d*)\]", r".\1", name).split(".")
    return tuple(int(part) if part.isdigit() else part for part in parts)


def overlap(one: KeyPath, other: KeyPath) -> bool:
    """Tell whether two keys are the same, or one is inside the other."""
    pairs = zip(one, other, strict=False)
    return all(a == b or (ANY in (a, b) and (isinstance(a, int) or isinstance(b, int))) for a, b in pairs)


class _Nullable:
    """Lets a key be null in a file although, once derived, it never is for those who read it."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.nullable_schema(handler(source))


@dataclass(frozen=True)
class Reads:
    """Rewrites what is written before it is checked; `also` says, in JSON Schema, what is legal because of that.

    It is given the schema of what is legal without.
    """

    rewrite: Callable[[Any], Any]
    also: Callable[[JsonSchemaValue], JsonSchemaValue]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.rewrite, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        legal = handler(schema)
        return {"anyOf": [legal, self.also(legal)]}


def true_false_or(name: str) -> Reads:
    """Read the words for true and false as any other key does, and ``name`` in any case."""

    def read(value: Any) -> Any:
        with suppress(ValidationError):
            return _TRUTH.validate_python(value)
        return value.lower() if isinstance(value, str) else value

    return Reads(read, lambda _: {"anyOf": [{"type": "boolean"}, in_any_case([name])]})


_TRUTH = TypeAdapter(bool)


def in_any_case(names: Iterable[str]) -> JsonSchemaValue:
    """Return the JSON Schema of some names in any case."""
    letters = ("".join(f"[{c.upper()}{c.lower()}]" if c.isalpha() else re.escape(c) for c in name) for name in names)
    return {"type": "string", "pattern": f"^(?:{'|'.join(letters)})$"}


def choices(legal: JsonSchemaValue) -> list[str]:
    """Return the choices that a JSON Schema leaves."""
    inside = [choice for part in legal.get("anyOf", ()) for choice in choices(part)]
    return [*legal.get("enum", ()), *([legal["const"]] if "const" in legal else ()), *inside]


def choices_in_any_case(legal: JsonSchemaValue) -> JsonSchemaValue:
    """Return the JSON Schema of a key's choices, in any case."""
    return in_any_case(choices(legal))


def _no_boolean(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("number", "true and false are no numbers")
    return value


def _whole(value: Any) -> Any:
    """Accept `1e20` as what it is, a whole number, so that it is refused for its size."""
    return int(value) if isinstance(value, float) and value.is_integer() else _no_boolean(value)


def _empty_section(value: Any) -> Any:
    return {} if value is None else value


def _lower(value: Any) -> Any:
    """Accept a name in any case, and the enum members that older scripts pass."""
    return getattr(value, "name", value).lower() if isinstance(getattr(value, "name", value), str) else value


def _upper(value: Any) -> Any:
    return getattr(value, "name", value).upper() if isinstance(getattr(value, "name", value), str) else value


def _auto(value: Any) -> Any:
    if value is None:
        raise PydanticKnownError("int_type")
    return None if isinstance(value, str) and value.lower() == "auto" else value


def _expand(value: str) -> str:
    try:
        return expanded(value)
    except ConfigError as error:
        raise PydanticCustomError("rule", "{text}", {"text": str(error)}) from None


@dataclass(frozen=True)
class AtMost:
    """Bounds a kind of whole numbers, so that none overflows, or is counted up to for hours, where it is used."""

    limit: int

    def _check(self, value: int) -> int:
        if abs(value) > self.limit:
            raise PydanticKnownError("less_than_equal", {"le": self.limit})
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {**handler(schema), "maximum": self.limit}


_Whole = Annotated[int, BeforeValidator(_whole)]
Int = Annotated[_Whole, AtMost(2**60)]
"""Any whole number: steps, tokens, seeds."""
Width = Annotated[_Whole, AtMost(2**31 - 1)]
"""Elements along a dim of a tensor."""
Count = Annotated[_Whole, AtMost(2**16)]
"""Things that exist one by one: ranks, layers, microbatches, threads."""
Float = Annotated[float, BeforeValidator(_no_boolean)]
Derived = Annotated[T, _Nullable()]
Section = Annotated[T, Reads(_empty_section, lambda _: {"type": "null"})]
Auto = Annotated[Derived[T], Reads(_auto, lambda _: in_any_case(["auto"]))]
"""`auto` is null: worked out from more than the file says."""
Lower = Annotated[T, Reads(_lower, choices_in_any_case)]
Upper = Annotated[T, Reads(_upper, choices_in_any_case)]
PathOrUrl = Annotated[str, AfterValidator(_expand)]
"""Every key that names a file or a folder, also one with more behind it, as `file.py:function`."""
