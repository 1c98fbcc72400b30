"""A file of Hugging Face's Nanotron becomes one of ours, before anything in it is validated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from nanotron.config.compat.retired import Retired, retired_of
from nanotron.config.compat.shapes import modernise
from nanotron.config.config import Config
from nanotron.config.document import Document, Problem
from nanotron.config.keys import KeyPath, fields_of, section_classes


def translate(document: Document) -> list[Problem]:
    """Rewrite old shapes and take out what does nothing here; refusals are reported in the document.

    Returns a line for every key that was taken out without effect.
    """
    modernise(document)
    notices = []
    for path, holder, key in list(_retired_keys(document.values, [Config])):
        value = holder.pop(path[-1])
        if problem := key.problem(value):
            document.report(path, problem)
        elif notice := key.notice(value):
            notices.append(Problem(path, notice, document.place_of(path)))
    return notices


def _retired_keys(
    values: Any, sections: Sequence[type[Any]], path: KeyPath = ()
) -> Iterator[tuple[KeyPath, dict[Any, Any], Retired]]:
    """Yield (path, mapping that holds it, declaration) of every retired key in the values of one of these sections."""
    if isinstance(values, list):
        for index, item in enumerate(values):
            yield from _retired_keys(item, sections, (*path, index))
    if not isinstance(values, dict):
        return
    for name, value in values.items():
        retired = [retired_of(cls)[name] for cls in sections if name in retired_of(cls)]
        fields = [fields_of(cls)[name] for cls in sections if name in fields_of(cls)]
        if retired and not fields:
            yield (*path, name), values, retired[0]
        inside = [cls for info in fields for cls in section_classes(info.annotation)]
        yield from _retired_keys(value, inside, (*path, name))
