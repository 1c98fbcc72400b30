"""What has to be on disk before training reads it: the embedded corpus, and tokenized Hugging Face data sets.

Every process may ask for it; under a file lock one does the work and the others find it done. Call it before process
groups exist, so that no collective's timeout runs meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

from nanotron.config import Config, CustomDatasetArgs, EmbeddedCorpusArgs, PretrainDatasetsArgs, SFTDatasetsArgs
from nanotron.config.data import AnyDataset
from nanotron.config.keys import dotted
from nanotron.data.probe import datasets_of, tokenizer_name
from nanotron.data.sources.documents import HubDataset, open_hub_dataset
from nanotron.data.sources.hub_names import hub_datasets
from nanotron.data.tokenize.corpus import file_lock, prepare_corpus
from nanotron.data.tokenize.tokenizer import TextTokenizer, open_tokenizer, read_files
from nanotron.errors import ConfigError, at_key
from nanotron.logging import get_logger

logger = get_logger(__name__)

CACHE_FOLDER = "data/hf"


def prepare_data(config: Config) -> None:
    """Prepare every data set of the config that is not in token files yet."""
    for found in datasets_of(config):
        with at_key(dotted(found.path)):
            _prepare(config, found.dataset, found.sequence_length)


def _prepare(config: Config, dataset: AnyDataset | None, sequence_length: int) -> None:
    if isinstance(dataset, EmbeddedCorpusArgs):
        prepare_corpus(dataset.folder)
    if isinstance(dataset, PretrainDatasetsArgs) and not dataset.streaming:
        for name, hub in hub_datasets(dataset):
            prepare_hub_dataset(config, dataset, name, hub)
    if isinstance(dataset, SFTDatasetsArgs):
        for name, hub in hub_datasets(dataset):
            prepare_sft_dataset(config, dataset, name, hub, sequence_length)


def may_stream(config: Config) -> bool:
    """Whether some stage's rows are read by one rank of each replica and sent to the others."""
    datasets = [stage.data.dataset for stage in config.data_stages]
    return any(
        isinstance(dataset, CustomDatasetArgs) or (isinstance(dataset, PretrainDatasetsArgs) and dataset.streaming)
        for dataset in datasets
    )


def data_tokenizer(config: Config) -> str:
    """The tokenizer for texts that are tokenized here."""
    name = tokenizer_name(config)
    if name is None:
        raise ConfigError("tokenizer.tokenizer_name_or_path: missing; texts of data_stages have to be tokenized")
    return name


def text_tokenizer(config: Config) -> TextTokenizer:
    """The same, opened as the run reads texts."""
    return open_tokenizer(data_tokenizer(config), read_special_tokens=config.tokenizer.read_special_tokens)


def prepare_hub_dataset(config: Config, dataset: PretrainDatasetsArgs, name: str, hub: HubDataset) -> str:
    """Tokenize the data set into its cache folder unless that was done before, and return the folder."""
    folder = cache_folder(config, name, hub, dataset.text_column_name)
    if not _is_complete(folder):
        with file_lock(f"{folder}.lock"):
            if not _is_complete(folder):
                _tokenize(config, dataset, name, hub, folder)
    return folder


def _tokenize(config: Config, dataset: PretrainDatasetsArgs, name: str, hub: HubDataset, folder: str) -> None:
    from nanotron.data.tokenize.workers import Job, tokenize

    job = Job(
        inputs=[name],
        output=folder,
        tokenizer=data_tokenizer(config),
        append_eos=text_tokenizer(config).end is not None,
        read_special_tokens=config.tokenizer.read_special_tokens,
        column=dataset.text_column_name,
        hub=hub,
        workers=dataset.dataset_processing_num_proc_per_process,
    )
    if left_out := tokenize(job).left_out:
        logger.warning(f"{folder}: {left_out}")


def prepare_sft_dataset(
    config: Config, dataset: SFTDatasetsArgs, name: str, hub: HubDataset, sequence_length: int
) -> str:
    """Tokenize the examples and lay out rows of this length unless that was done before; returns the `.ds` file."""
    from nanotron.data.sources.nanoset import open_nanoset_file
    from nanotron.data.sources.sft import pack, pack_path, write_examples

    folder = cache_folder(config, name, hub, f"sft {dataset.debug_max_samples}")
    path = os.path.join(folder, "00000_unshuffled.ds")
    rows_path = pack_path(path, sequence_length)
    if not os.path.exists(rows_path):
        with file_lock(f"{folder}.lock"):
            os.makedirs(folder, exist_ok=True)
            if not os.path.exists(path):
                rows = open_hub_dataset(name, hub)
                count = int(len(rows) * hub.fraction)
                rows = rows.select(range(min(count, dataset.debug_max_samples or count)))
                tokenizer, reads = data_tokenizer(config), config.tokenizer.read_special_tokens
                if left_out := write_examples(name, rows, path, tokenizer, read_special_tokens=reads):
                    number, total = len(left_out), len(rows)
                    logger.warning(
                        f"{name}: left out {number} of {total} examples, which have no text to learn; "
                        f"the first: row {left_out[0]}"
                    )
            if not os.path.exists(path):
                raise ConfigError(f"{name!r} holds no example with a text to learn")
            if not os.path.exists(rows_path):
                ends = open_nanoset_file(path).document_ends
                assert ends is not None
                pack(rows_path, ends, sequence_length)
    return path


def _is_complete(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, ".tokenize", "summary.json"))


def cache_folder(config: Config, name: str, hub: HubDataset, column: str) -> str:
    """Where a data set's tokens are kept: a readable name, and a hash of everything that they depend on."""
    tokenizer = sorted(read_files(data_tokenizer(config)).items())  # its settings, too: they say how a text ends
    content = hashlib.blake2b(repr(tokenizer).encode()).hexdigest()
    facts = [name, list(hub), column, config.tokenizer.read_special_tokens, content, _files_of(name)]
    digest = hashlib.blake2b(json.dumps(facts).encode(), digest_size=6).hexdigest()
    readable = re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[-60:]
    return os.path.join(CACHE_FOLDER, f"{readable}-{hub.split}-{digest}")


def _files_of(name: str) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a local data set's files, so that an edited one is tokenized again."""
    found = [Path(name)] if os.path.isfile(name) else sorted(Path(name).rglob("*")) if os.path.isdir(name) else []
    stats = [(str(path), path.stat()) for path in found if path.is_file()]
    return [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
