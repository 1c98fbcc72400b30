"""Old shapes of config files, rewritten in place to the shape that the sections have."""

from __future__ import annotations

from typing import Any

from nanotron.config.document import Document
from nanotron.config.keys import KeyPath, fields_of
from nanotron.config.training import AdamWOptimizerArgs


def modernise(document: Document) -> None:
    """Rewrite old shapes; every key keeps the place where it was written."""
    optimizer = document.values.get("optimizer")
    if isinstance(optimizer, dict):
        _gather_adam_keys(document, optimizer)
    stages = document.values.get("data_stages")
    for index, stage in enumerate(stages if isinstance(stages, list) else []):
        for keys in (("data", "dataset"), ("validation",)):
            dataset = stage
            for key in keys:
                dataset = dataset.get(key) if isinstance(dataset, dict) else None
            if isinstance(dataset, dict):
                _split_weights(document, dataset, ("data_stages", index, *keys))


def _gather_adam_keys(document: Document, optimizer: dict[Any, Any]) -> None:
    """Move Adam's keys from beside `optimizer_factory` into it."""
    factory = optimizer.get("optimizer_factory") or {}
    if not isinstance(factory, dict):
        return
    for name in fields_of(AdamWOptimizerArgs):
        if name in optimizer and name not in factory:
            factory[name] = optimizer.pop(name)
            optimizer["optimizer_factory"] = factory
            _move(document, ("optimizer", name), ("optimizer", "optimizer_factory", name))


def _split_weights(document: Document, dataset: dict[Any, Any], path: KeyPath) -> None:
    """Turn `dataset_folder: {folder: weight}` into a list of folders and a list of weights."""
    weights = dataset.get("dataset_folder")
    if not isinstance(weights, dict) or dataset.get("dataset_weights") is not None:
        return
    dataset["dataset_folder"] = list(weights)
    dataset["dataset_weights"] = list(weights.values())
    for index, folder in enumerate(weights):
        place = document.place_of((*path, "dataset_folder", folder))
        document.places[(*path, "dataset_weights", index)] = place
        _move(document, (*path, "dataset_folder", folder), (*path, "dataset_folder", index))


def _move(document: Document, old: KeyPath, new: KeyPath) -> None:
    if old in document.places:
        document.places[new] = document.places.pop(old)
