"""Which Hugging Face data sets the keys of a data set stand for."""

from __future__ import annotations

from collections.abc import Iterator

from nanotron.config import PretrainDatasetsArgs, SFTDatasetsArgs
from nanotron.data.sources.documents import HubDataset


def hub_datasets(dataset: PretrainDatasetsArgs | SFTDatasetsArgs) -> Iterator[tuple[str, HubDataset]]:
    """Every (name, how to open it) that a data set's keys stand for: names × splits, with their fractions."""
    named = dataset.hf_dataset_or_datasets
    fractions = named if isinstance(named, dict) else dict.fromkeys([named] if isinstance(named, str) else named, 1.0)
    splits = [dataset.hf_dataset_splits] if isinstance(dataset.hf_dataset_splits, str) else dataset.hf_dataset_splits
    streaming = isinstance(dataset, PretrainDatasetsArgs) and dataset.streaming
    for name, fraction in fractions.items():
        for split in splits:
            yield name, HubDataset(dataset.hf_dataset_config_name, split, streaming, fraction, only=True)
