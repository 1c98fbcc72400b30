"""What a run may not change, and what it changed, since the checkpoint it continues from. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanotron.checkpoint.documents import saved_document
from nanotron.checkpoint.format import CONFIG, MODEL_CONFIG
from nanotron.checkpoint.retention import read_index
from nanotron.checkpoint.storage import open_folder
from nanotron.errors import ConfigError, brief, shorten

FIXED = ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rope_interleaved")
"""Keys of model_config that decide what a weight means and leave no trace in its shape."""


def check_model(checkpoint: str, shapes: Mapping[str, tuple[int, ...]], model_config: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another model: one whose weights have other shapes than ``shapes``, the run's.

    There is a line per key of model_config that changed; per weight only if that does not explain it. Weights of equal
    shape can still be of another model: the keys in FIXED must be those that the checkpoint was trained with. Others,
    such as rope_theta, may change.
    """
    tensors, weight = read_index(open_folder(checkpoint)).tensors, "weight/"
    lines = differences(
        {key.removeprefix(weight): list(held.shape) for key, held in tensors.items() if key.startswith(weight)},
        {name: list(shape) for name, shape in shapes.items()},
    )
    saved = saved_document(open_folder(checkpoint), MODEL_CONFIG)
    if saved is not None:
        told = {key for key in {*saved, *model_config} if saved.get(key) or model_config.get(key)} if lines else FIXED
        before, now = ({key: values.get(key) for key in sorted(told)} for values in (saved, model_config))
        lines = differences(before, now, "model.model_config") or lines
    if lines:
        shown = shorten(lines, 12)
        shown[-1] += "; put model.model_config back, or give this model its own checkpoints.checkpoints_path"
        raise ConfigError([f"checkpoint {checkpoint} is of another model: {line}" for line in shown])


def changed_keys(checkpoint: str, config: Mapping[str, Any]) -> list[str]:
    """One line per key of the run's config that is not what it was in the checkpoint's; all of them may change.

    The run's name is left out: by default it has the time of the start in it.
    """
    saved = saved_config(checkpoint)
    lines = [] if saved is None else differences(saved, config)
    return [line for line in lines if not line.startswith("general.run was ")]


def saved_config(checkpoint: str) -> dict[str, Any] | None:
    """The resolved config that a checkpoint was made with, None when it carries none."""
    return saved_document(open_folder(checkpoint), CONFIG)


def check_data(changes: list[str], *, allow_change: bool = False) -> list[str]:
    """Refuse data, or an order of it, that changed since the checkpoint; allowed, return the lines, to be printed."""
    if changes and not allow_change:
        fix = "put it back, or continue with --allow-data-change"
        raise ConfigError([f"the data changed since the checkpoint: {line}; {fix}" for line in changes])
    return changes


def differences(saved: Any, now: Any, where: str = "") -> list[str]:
    """One line per value that differs between two nested dicts and lists, by dotted path."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        lines = []
        for key in [*saved, *(key for key in now if key not in saved)]:
            path = f"{where}.{key}" if where else str(key)
            if key not in now:
                lines.append(f"{path} is {brief(saved[key])} in the checkpoint and absent now")
            elif key not in saved:
                lines.append(f"{path} is {brief(now[key])} now and absent in the checkpoint")
            else:
                lines += differences(saved[key], now[key], path)
        return lines
    if isinstance(saved, (list, tuple)) and isinstance(now, (list, tuple)):
        if list(saved) == list(now):
            return []
        if len(saved) == len(now) and any(isinstance(item, (Mapping, list, tuple)) for item in saved):
            return [
                line
                for i, (a, b) in enumerate(zip(saved, now, strict=True))
                for line in differences(a, b, f"{where}[{i}]")
            ]
    return [] if saved == now else [f"{where} was {brief(saved)} in the checkpoint and is {brief(now)} now"]
