"""docs/config.md and the table of docs/compatibility.md, written from the declarations of the keys."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from nanotron.config.compat.retired import Retired, retired_of
from nanotron.config.config import Config
from nanotron.config.document import show
from nanotron.config.keys import fields_of, is_section, section_classes, status_of
from nanotron.config.model import FAMILIES, ModelConfig

REFERENCE_INTRODUCTION = """\
# Config reference

Every key of a config file, from the one definition in `src/nanotron/config/`; this page is written by
`python tools/write_reference.py`. `nanotron check X.yaml` names every mistake in a file at once, and prints it with
all keys filled in. Keys without a default have to be written. Keys of Hugging Face's Nanotron that are not here have no
effect, as `nanotron check` says, or are refused; [compatibility.md](compatibility.md) lists them all.

Any key can be changed on the command line: `--override tokens.train_steps=20`, `--override data_stages[0].data.seed=7`.
Numbers are written as people write them: `3e-4` is a number, `10.0` is an integer where one belongs. Names of choices
are accepted in any case. In paths, here and on the command line, `~`, `$NAME` and `${NAME}` are expanded; URLs are left
as they are.
"""


TOP = "(top level)"


def reference() -> str:
    """Return docs/config.md."""
    parts = [REFERENCE_INTRODUCTION]
    for title, cls in _sections():
        parts.append(f"## {title}\n\n{cls.__doc__}\n\n| key | type | default | meaning |\n|---|---|---|---|")
        parts[-1] += "".join(f"\n{_row(name, info)}" for name, info in _own_fields(cls).items()) + "\n"
    return "\n".join(parts)


def status_table() -> str:
    """Return the table of docs/compatibility.md: what happens to every key."""
    live: dict[str, list[str]] = {}
    retired: dict[str, list[str]] = {}
    for title, cls in _sections():
        prefix = "" if title == TOP else f"{title.split(' (')[0]}."
        names = [
            name for name, info in _own_fields(cls).items() if title != TOP or not section_classes(info.annotation)
        ]
        live.setdefault(prefix, []).extend(f"| `{prefix}{name}` | honoured |  |" for name in names)
        retired.setdefault(prefix, []).extend(
            f"| `{prefix}{name}` | {key.verdict} | {_cell(key.reason)} |" for name, key in _own_retired(cls).items()
        )
    rows = [row for prefix in live for row in (*live[prefix], *retired[prefix])]
    return "\n".join(["| key | here | why, or instead |", "|---|---|---|", *dict.fromkeys(rows)]) + "\n"


def _sections() -> Iterator[tuple[str, type[Any]]]:
    """Yield (title, class) of every section in order of reading; the families share one."""
    yield TOP, Config
    yield from _inside(Config, "")


def _inside(cls: type[Any], prefix: str) -> Iterator[tuple[str, type[Any]]]:
    for name, info in fields_of(cls).items():
        classes = section_classes(info.annotation)
        path = f"{prefix}{name}" + ("[]" if get_origin(_bare(info.annotation)) is list else "")
        if ModelConfig in {base for found in classes for base in found.__mro__}:
            yield path, ModelConfig
            yield from _inside(ModelConfig, f"{path}.")
        for found in classes:
            many = f" ({found.__name__})" if len(classes) > 1 else ""
            yield f"{path}{many}", found
            if not issubclass(found, ModelConfig):
                yield from _inside(found, f"{path}.")


def _own_fields(cls: type[Any]) -> dict[str, FieldInfo]:
    """Return the keys of a class, those of a family without what all families have."""
    shared = fields_of(ModelConfig) if cls in FAMILIES.values() else {}
    return {name: info for name, info in fields_of(cls).items() if name not in shared}


def _own_retired(cls: type[Any]) -> Mapping[str, Retired]:
    """Return the keys that a class takes without effect; those of all families are the shared class's."""
    return {} if cls in FAMILIES.values() else retired_of(cls)


def _row(name: str, info: FieldInfo) -> str:
    return f"| `{name}` | {_cell(type_name(info))} | {_cell(_default(info))} | {_cell(info.description or '')} |"


def _default(info: FieldInfo) -> str:
    status = status_of(info)
    if status.derived:
        return status.derived
    if info.is_required():
        return "**required**"
    if info.default_factory is not None:
        value = info.default_factory()  # type: ignore[call-arg]
        if value == {}:
            return "`{}`"
        return "all defaults" if is_section(value) else f"`{show(value)}`"
    return f"`{show(info.default)}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def type_name(info: FieldInfo) -> str:
    """Name the type of a key's value, with its limits."""
    text = _name(info.annotation)
    bounds = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    marks = [
        f"{sign} {getattr(item, name):g}"
        for item in info.metadata
        for name, sign in bounds.items()
        if getattr(item, name, None) is not None
    ]
    return f"{text} {', '.join(marks)}" if marks else text


def _bare(annotation: Any) -> Any:
    """Take off `Annotated` and `| None`."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        kinds = [part for part in get_args(annotation) if part is not type(None)]
        return _bare(kinds[0]) if len(kinds) == 1 else annotation
    return annotation


def _name(annotation: Any) -> str:
    bare = _bare(annotation)
    if classes := section_classes(bare):
        kind = "list of sections" if get_origin(bare) is list else "section"
        return kind if len(classes) == 1 else f"one of {len(classes)} {kind}s"
    if get_origin(bare) is Literal:
        return " | ".join(f"`{show(choice)}`" for choice in get_args(bare))
    if get_origin(bare) is list:
        return f"list of {_name(get_args(bare)[0])}"
    if get_origin(bare) in (Union, types.UnionType):
        return " or ".join(_name(part) for part in get_args(bare) if part is not type(None))
    if get_origin(bare) is dict or bare is dict:
        return "mapping"
    return {int: "integer", float: "number", str: "text", bool: "true / false"}[bare]
