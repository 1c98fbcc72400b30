"""The text files of a checkpoint, read and checked: state.json, config.yaml, model_config.json. No torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from nanotron.checkpoint import schema
from nanotron.checkpoint.format import CONFIG, MODEL_CONFIG, STATE, Damaged
from nanotron.checkpoint.storage import Folder, open_folder, read_text
from nanotron.untrusted import MAPPING, checked, parse_json, parse_yaml

POSITION = ("consumed", "consumed_tokens", "consumed_per_source", "streams", "data", "optimizer_updates")
PARSERS: dict[str, tuple[Callable[[str], Any], TypeAdapter[Any]]] = {
    STATE: (parse_json, schema.STATE),
    CONFIG: (parse_yaml, schema.SAVED_CONFIG),
    MODEL_CONFIG: (parse_json, MAPPING),
}
"""How the text of each file is read, and what it has to keep to."""


def read_state(checkpoint: str, *, position: bool = False) -> dict[str, Any]:
    """state.json of a checkpoint; raises ``Damaged`` when it is missing or is none.

    With ``position`` also when it does not say where to go on, unless it is an imported model's, which has no position.
    """
    state = saved_document(open_folder(checkpoint), STATE)
    if state is None:
        raise Damaged(f"{checkpoint}/{STATE} is missing")
    lacking = [key for key in POSITION if key not in state]
    if position and lacking and "imported_from" not in state:
        raise Damaged(f"{checkpoint}/{STATE} is damaged: it has no {', '.join(lacking)}")
    return state


def saved_document(checkpoint: Folder, name: str) -> dict[str, Any] | None:
    """What one of the text files says, None when it is not there; raises ``Damaged`` when it breaks its schema."""
    try:
        text = read_text(checkpoint, name)
    except FileNotFoundError:
        return None
    parse, kept = PARSERS[name]
    try:
        document: dict[str, Any] = parse(text)
        checked(kept, document)
    except ValueError as error:
        raise Damaged(f"{checkpoint.path}/{name} is damaged ({error})") from error
    return document
