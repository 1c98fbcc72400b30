"""Questions about a run's data that `nanotron check` asks before anything starts; none of them imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import NamedTuple

from nanotron.config import (
    Config,
    CustomDatasetArgs,
    EmbeddedCorpusArgs,
    NanosetDatasetsArgs,
    PretrainDatasetsArgs,
    SFTDatasetsArgs,
)
from nanotron.config.data import AnyDataset
from nanotron.data.order.blend import round_weights
from nanotron.data.order.windows import TokenFile, TokenWindows
from nanotron.data.sources.custom import reference_problem
from nanotron.data.sources.empty_documents import IS_EMPTY, first_empty_document
from nanotron.data.sources.hub_names import hub_datasets
from nanotron.data.sources.nanoset import NanosetFile, find_nanoset_files, read_metadata
from nanotron.data.sources.remote import local_folder
from nanotron.data.sources.token_files import find_token_files, open_token_files
from nanotron.data.tokenize.corpus import VOCAB_SIZE
from nanotron.data.tokenize.tokenizer import load_tokenizer, open_tokenizer, tokenizer_file, vocab_size
from nanotron.errors import ConfigError

MOST_LINES, MOST_NAMES = 5, 5  # of folders with one mistake
FILES_OF_ONE = 2  # tokens and index


class DataProblem(NamedTuple):
    """One thing wrong with the data: the key of the config that leads to it, and what is wrong."""

    path: tuple[str | int, ...]
    text: str

    def __str__(self) -> str:
        dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path)
        return f"{dotted.removeprefix('.')}: {self.text}"


class FoundDataset(NamedTuple):
    """A data set of the config: its key, what it is, and the tokens per sample that are read of it."""

    path: tuple[str | int, ...]
    dataset: AnyDataset | None
    sequence_length: int


def datasets_of(config: Config) -> Iterator[FoundDataset]:
    """Every data set of the config, to train or to validate on."""
    for number, stage in enumerate(config.data_stages):
        length = stage.sequence_length or config.tokens.sequence_length
        yield FoundDataset(("data_stages", number, "data", "dataset"), stage.data.dataset, length)
        yield FoundDataset(("data_stages", number, "validation"), stage.validation, length)


def dataset_problems(found: FoundDataset) -> Iterator[DataProblem]:
    """Everything wrong with one data set, as far as metadata and file sizes tell."""
    path, dataset, sequence_length = found
    if isinstance(dataset, PretrainDatasetsArgs) and dataset.streaming:
        yield from _stream_problems(dataset, path)
    for name, text in _dataset_problems(dataset, sequence_length):
        yield DataProblem((*path, *name), text)


def vocabulary_problems(config: Config) -> Iterator[DataProblem]:
    """A tokenizer that is missing or cannot be read, and a vocabulary that is unknown or too small for the data."""
    vocab_key, tokenizer_key = ("model", "model_config", "vocab_size"), ("tokenizer", "tokenizer_name_or_path")
    kinds = [type(found.dataset) for found in datasets_of(config)]
    if tokenizer_name(config) is None and {PretrainDatasetsArgs, SFTDatasetsArgs} & set(kinds):
        yield DataProblem(tokenizer_key, "missing; the texts of data_stages have to be tokenized")
        return
    try:
        size, data_size = model_vocab_size(config), tokenizer_vocab_size(config)
    except ConfigError as error:
        if config.tokenizer.tokenizer_name_or_path is not None:
            yield DataProblem(tokenizer_key, str(error))
        elif not any(True for found in datasets_of(config) for _ in dataset_problems(found)):
            yield DataProblem(vocab_key, str(error))  # data that is not there cannot tell its vocabulary either
        return
    if data_size is not None and data_size > size:
        text = f"{size} is smaller than the tokenizer's vocabulary of {data_size}; set at least {data_size}"
        yield DataProblem(vocab_key, text)


def empty_documents(config: Config) -> list[DataProblem]:
    """Nothing wrong, but worth a line: the first document without tokens of each folder, as far as it is looked at."""
    problems = []
    for found in datasets_of(config):
        if not isinstance(found.dataset, NanosetDatasetsArgs):
            continue
        for place in range(len(found.dataset.dataset_folder)):
            if document := first_empty_document(_opened(local_folder(found.dataset, place), found.dataset)):
                problems.append(DataProblem((*found.path, "dataset_folder", place), f"{document} {IS_EMPTY}"))
    return problems


def too_many_files(config: Config, most: float) -> list[DataProblem]:
    """Nothing wrong on this machine yet, but worth a line: more files than a rank may have open by and by."""
    found = [one for one in datasets_of(config) if isinstance(one.dataset, NanosetDatasetsArgs)]
    counts = [len(find_token_files(folder)) for one in found for folder in _local_folders(one.dataset)]
    opened = FILES_OF_ONE * sum(counts)
    if opened <= most:
        return []
    text = (
        f"{sum(counts)} files of tokens, with their indices {opened} that a rank may have open at once, of {most:g}"
        " that this machine allows; raise that (ulimit -Hn), or write fewer and larger files"
    )
    return [DataProblem((*found[0].path, "dataset_folder"), text)]


def _local_folders(dataset: AnyDataset | None) -> Iterator[str]:
    assert isinstance(dataset, NanosetDatasetsArgs)
    yield from (local_folder(dataset, place) for place in range(len(dataset.dataset_folder)))


def unended_texts(config: Config) -> list[DataProblem]:
    """Nothing wrong, but worth a line: texts are to be tokenized, and no file of the tokenizer names what ends one."""
    name = tokenizer_name(config)
    kinds = {type(found.dataset) for found in datasets_of(config)}
    if name is None or not {PretrainDatasetsArgs, SFTDatasetsArgs} & kinds:
        return []
    try:
        end = open_tokenizer(name).end
    except ConfigError:
        return []  # what is wrong with it is said where it is needed
    text = (
        f"{name} names no token that ends a text, so documents are joined without one and completions never end; put "
        "eos_token into its tokenizer_config.json"
    )
    return [] if end is not None else [DataProblem(("tokenizer", "tokenizer_name_or_path"), text)]


def _opened(folder: str, dataset: AnyDataset | None) -> Iterator[TokenFile]:
    """The folder's token files, each opened when it is asked for."""
    assert isinstance(dataset, NanosetDatasetsArgs)
    for name in find_token_files(folder):
        yield from open_token_files(name, token_bytes=dataset.token_size_in_bytes)


def _stream_problems(dataset: PretrainDatasetsArgs, path: tuple[str | int, ...]) -> Iterator[DataProblem]:
    """Keys that a stream cannot honour."""
    if path[-1] == "validation":
        yield DataProblem((*path, "streaming"), "true, but validation needs a data set with a length; set false")
    if isinstance(dataset.hf_dataset_or_datasets, dict):
        text = (
            "fractions of a stream are unknown; name the data sets in a list (dataset_weights says how much of each "
            "to draw), or set streaming to false"
        )
        yield DataProblem((*path, "hf_dataset_or_datasets"), text)


def _dataset_problems(dataset: AnyDataset | None, sequence_length: int) -> Iterator[tuple[tuple[str | int, ...], str]]:
    if isinstance(dataset, NanosetDatasetsArgs):
        count, what = len(dataset.dataset_folder), "the folders of dataset_folder are"
        yield from _list_problems(dataset, "dataset_weights", count, what)
        yield from _list_problems(dataset, "dataset_max_tokens", count, what)
        yield from _list_problems(dataset, "dataset_read_path", count, what)
        yield from _folder_problems(dataset, sequence_length)
    if isinstance(dataset, PretrainDatasetsArgs | SFTDatasetsArgs):
        count = sum(1 for _ in hub_datasets(dataset))
        if count == 0:
            yield ("hf_dataset_or_datasets",), "names no data set; name at least one, and a split of it"
        names = dataset.hf_dataset_or_datasets
        if isinstance(names, list) and len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            text = f"{twice} is named twice; name it once, and say its share with dataset_weights"
            yield ("hf_dataset_or_datasets",), text
        if find_spec("datasets") is None:
            yield ("hf_dataset_or_datasets",), "reading Hugging Face data sets needs a package: pip install datasets"
        yield from _list_problems(dataset, "dataset_weights", count, "the data sets (names × splits) are")
    if isinstance(dataset, CustomDatasetArgs):
        count, what = len(dataset.python), "the functions of python are"
        yield from _list_problems(dataset, "arguments", count, what)
        yield from _list_problems(dataset, "dataset_weights", count, what)
        for number, reference in enumerate(dataset.python):
            if problem := reference_problem(reference):
                yield ("python", number) if count > 1 else ("python",), problem


def _list_problems(
    dataset: AnyDataset, name: str, count: int, what: str
) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """A list that has not one value for each source, or weights that are none."""
    values = getattr(dataset, name)
    if not isinstance(values, list):
        return
    if len(values) != count:
        yield (name,), f"has {len(values)} in its list, but {what} {count}; give one for each"
    elif name == "dataset_weights":
        try:
            round_weights(values)
        except ConfigError as error:
            yield (name,), str(error)


def _folder_problems(dataset: NanosetDatasetsArgs, sequence_length: int) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """What is wrong with the files of each folder; many with one mistake, say all that are missing, are one line."""
    found: dict[str, list[tuple[int, str]]] = {}  # a mistake without the folder's name -> (folder's number, mistake)
    for number, folder in enumerate(dataset.dataset_folder):
        try:
            files = open_token_files(local_folder(dataset, number), token_bytes=dataset.token_size_in_bytes)
            TokenWindows(folder, files, sequence_length)
            for file in files:
                if isinstance(file, NanosetFile) and file.num_tokens:
                    file.check_index()
        except (ConfigError, OSError) as error:
            found.setdefault(str(error).replace(folder, ""), []).append((number, str(error)))
    for alike in found.values():
        others = [dataset.dataset_folder[number] for number, _ in alike[1:]]
        is_many = len(alike) > MOST_LINES
        more = f"; and the same of {len(others)} more: {', '.join(others[:MOST_NAMES])}, …" if is_many else ""
        for number, text in alike[:1] if is_many else alike:
            yield ("dataset_folder", number), text + more


def tokenizer_name(config: Config) -> str | None:
    """The tokenizer of the run's data: the config's, else what the first data set with one says."""
    if config.tokenizer.tokenizer_name_or_path:
        return config.tokenizer.tokenizer_name_or_path
    for stage in config.data_stages:
        dataset = stage.data.dataset
        if isinstance(dataset, EmbeddedCorpusArgs):
            return os.path.join(dataset.folder, "tokenizer.json")
        if isinstance(dataset, NanosetDatasetsArgs):
            name = dataset.tokenizer_name or _folder_tokenizer(dataset)
            if name:
                return name
    return None


def _folder_tokenizer(dataset: NanosetDatasetsArgs) -> str | None:
    """A tokenizer.json that lies in the first folder, else the name in its first file's metadata."""
    try:
        folder = local_folder(dataset, 0)
    except ConfigError:
        return None  # reported with the folder's other problems
    inside = tokenizer_file(folder) if os.path.isdir(folder) else None
    if inside or not os.path.isdir(folder):
        return inside
    for path in find_nanoset_files(folder)[:1]:
        try:
            metadata = read_metadata(path)
        except ConfigError:
            return None  # reported with the folder's other problems
        if metadata and metadata.tokenizer and metadata.tokenizer != "Unknown Tokenizer":
            return metadata.tokenizer
    return None


def tokenizer_vocab_size(config: Config) -> int | None:
    """The vocabulary of the data's tokenizer when it can be told without the network, else None."""
    name, own = tokenizer_name(config), config.tokenizer.tokenizer_name_or_path
    if name is not None and (tokenizer_file(name) or (own and os.path.isdir(own))):  # loading refuses an unfit folder
        return vocab_size(load_tokenizer(name))
    for stage in config.data_stages:
        dataset = stage.data.dataset
        if isinstance(dataset, EmbeddedCorpusArgs):
            return VOCAB_SIZE
        if isinstance(dataset, NanosetDatasetsArgs) and dataset.vocab_size:
            return dataset.vocab_size
    return None


def model_vocab_size(config: Config) -> int:
    """The model's vocab_size: the config's, else the tokenizer's."""
    if config.model.model_config.vocab_size is not None:
        return config.model.model_config.vocab_size
    size = tokenizer_vocab_size(config)
    if size is not None:
        return size
    name = tokenizer_name(config)
    if name is None:
        raise ConfigError("no tokenizer tells the vocabulary of this data; set vocab_size or tokenizer_name_or_path")
    return vocab_size(load_tokenizer(name))
