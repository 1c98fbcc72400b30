"""From the config's data_stages to stages with open sources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from nanotron.config import (
    Config,
    CustomDatasetArgs,
    DatasetStageArgs,
    EmbeddedCorpusArgs,
    NanosetDatasetsArgs,
    PretrainDatasetsArgs,
    SFTDatasetsArgs,
)
from nanotron.data.document_ends import end_token, end_token_of_files
from nanotron.data.order.skips import Skips
from nanotron.data.order.stage import Stage, StreamStage
from nanotron.data.order.windows import IndexedSource, TokenWindows
from nanotron.data.probe import model_vocab_size
from nanotron.data.sources.custom import (
    CustomRows,
    blamed,
    call_function,
    custom_functions,
    gives_rows,
    load_function,
)
from nanotron.data.sources.documents import HubDataset, encodable, open_hub_dataset, text_of
from nanotron.data.sources.dummy import DummySource
from nanotron.data.sources.hub_names import hub_datasets
from nanotron.data.sources.nanoset import open_nanoset_file
from nanotron.data.sources.remote import local_folder
from nanotron.data.sources.sft import PackedWindows
from nanotron.data.sources.shuffled_stream import ShuffledStream
from nanotron.data.sources.stream import DocumentStream, StreamSource
from nanotron.data.sources.token_files import open_token_files
from nanotron.data.tokenize.corpus import prepare_corpus
from nanotron.data.tokenize.prepare import prepare_hub_dataset, prepare_sft_dataset, text_tokenizer
from nanotron.data.tokenize.tokenizer import TextTokenizer
from nanotron.errors import ConfigError, at_key
from nanotron.logging import get_logger

if TYPE_CHECKING:
    from nanotron.config.data import AnyDataset

logger = get_logger(__name__)


@dataclass(frozen=True)
class ScheduledStage:
    """A stage and the facts of the config that the feed needs."""

    name: str
    start: int
    sequence_length: int
    stage: Stage | StreamStage
    validation: Stage | None
    key: str
    """Of the config: `data_stages[0]`."""


def build_stages(config: Config) -> list[ScheduledStage]:
    """Open every stage's sources, in order of start."""
    vocab_size = model_vocab_size(config)
    ordered = sorted(enumerate(config.data_stages), key=lambda numbered: numbered[1].start_training_step)
    return [_build_stage(config, stage, f"data_stages[{number}]", vocab_size) for number, stage in ordered]


def _build_stage(config: Config, args: DatasetStageArgs, key: str, vocab_size: int) -> ScheduledStage:
    sequence_length = args.sequence_length or config.tokens.sequence_length
    skips = Skips(args.data.skip_samples)
    with at_key(f"{key}.data.dataset"):
        stage = _open(
            config, args, args.data.dataset, sequence_length, vocab_size, name=args.name, repeat=args.data.repeat,
            skips=skips,
        )  # fmt: skip
    validation = None
    if args.validation is not None:
        name = f"{args.name}, validation"
        with at_key(f"{key}.validation"):
            opened = _open(
                config, args, args.validation, sequence_length, vocab_size, name=name, repeat=False, skips=Skips()
            )
        if isinstance(opened, StreamStage):
            raise ConfigError(f"{key}.validation: a data set with a length is needed, not a stream")
        validation = opened
    return ScheduledStage(args.name, args.start_training_step, sequence_length, stage, validation, key)


def _open(
    config: Config,
    args: DatasetStageArgs,
    dataset: AnyDataset | None,
    sequence_length: int,
    vocab_size: int,
    *,
    name: str,
    repeat: bool,
    skips: Skips,
) -> Stage | StreamStage:
    """A data set's sources, blended, in the order that the stage's keys ask for."""
    sources = _open_sources(config, args, dataset, sequence_length, vocab_size)
    weights = None if dataset is None or isinstance(dataset, EmbeddedCorpusArgs) else dataset.dataset_weights
    if any(isinstance(source, DocumentStream) for source in sources):
        return StreamStage(name, _shuffled(args, name, _all_streams(sources)), weights, skips=skips)
    indexed = [source for source in sources if not isinstance(source, DocumentStream)]
    seed, shuffle_block = args.data.seed, args.data.shuffle_block
    return Stage(name, indexed, weights, seed=seed, shuffle_block=shuffle_block, repeat=repeat, skips=skips)


def _all_streams(sources: Sequence[IndexedSource | DocumentStream]) -> list[DocumentStream]:
    """The sources, which must all be streams, because their rows are found in different ways."""
    for source in sources:
        if not isinstance(source, DocumentStream):
            raise ConfigError(
                f"python: {source.name} gives rows by number and others of its data set are streams; blend one kind, "
                "or give them stages of their own"
            )
    return [source for source in sources if isinstance(source, DocumentStream)]


def _shuffled(args: DatasetStageArgs, name: str, streams: Sequence[DocumentStream]) -> Sequence[StreamSource]:
    """The streams, each shuffled in blocks if the stage asks for it."""
    block, seed = args.data.shuffle_block, args.data.seed
    if block is None:
        return streams
    return [ShuffledStream(stream, block, seed, name, number) for number, stream in enumerate(streams)]


def _open_sources(
    config: Config, args: DatasetStageArgs, dataset: AnyDataset | None, sequence_length: int, vocab_size: int
) -> Sequence[IndexedSource | DocumentStream]:
    """The sources of one data set, cut into windows of sequence_length + 1 tokens."""
    if dataset is None:
        return [DummySource(args.data.seed, args.name, sequence_length, vocab_size)]
    if isinstance(dataset, EmbeddedCorpusArgs):
        files = open_token_files(prepare_corpus(dataset.folder))
        return [TokenWindows(dataset.corpus, files, sequence_length, vocab_size=vocab_size)]
    if isinstance(dataset, NanosetDatasetsArgs):
        return _open_folders(config, dataset, sequence_length, vocab_size)
    if isinstance(dataset, CustomDatasetArgs):
        return [_open_custom(config, args, reference, arguments, sequence_length, vocab_size)
                for reference, arguments in custom_functions(dataset)]  # fmt: skip
    if isinstance(dataset, SFTDatasetsArgs):
        paths = [(name, prepare_sft_dataset(config, dataset, name, hub, sequence_length))
                 for name, hub in hub_datasets(dataset)]  # fmt: skip
        return [
            PackedWindows(name, open_nanoset_file(path), sequence_length, vocab_size=vocab_size) for name, path in paths
        ]
    if dataset.streaming:
        return [_open_hub_stream(config, args, dataset, name, hub, sequence_length, vocab_size)
                for name, hub in hub_datasets(dataset)]  # fmt: skip
    folders = [(name, prepare_hub_dataset(config, dataset, name, hub)) for name, hub in hub_datasets(dataset)]
    return [
        TokenWindows(name, open_token_files(folder), sequence_length, vocab_size=vocab_size) for name, folder in folders
    ]


def _open_custom(
    config: Config,
    args: DatasetStageArgs,
    reference: str,
    arguments: Mapping[str, Any],
    sequence_length: int,
    vocab_size: int,
) -> IndexedSource | DocumentStream:
    function = load_function(reference)
    data = call_function(reference, function, arguments)
    with blamed(reference):
        rows = gives_rows(data)
    if rows:
        masks = config.model.model_config._use_doc_masking
        eos_id = end_token(config, reference, config.tokenizer.tokenizer_name_or_path) if masks else None
        _tell_end(reference, eos_id)
        return CustomRows(reference, data, sequence_length, vocab_size=vocab_size, eos_id=eos_id)
    encode_text = TextEncoder(config)
    return DocumentStream(
        reference,
        partial(function, **arguments),
        lambda document: encode_text(document) if isinstance(document, str) else document,
        sequence_length,
        vocab_size=vocab_size,
        repeat=args.data.repeat,
        guard=blamed,
    )


def _open_hub_stream(
    config: Config,
    args: DatasetStageArgs,
    dataset: PretrainDatasetsArgs,
    name: str,
    hub: HubDataset,
    sequence_length: int,
    vocab_size: int,
) -> DocumentStream:
    encode_text, column = TextEncoder(config), dataset.text_column_name
    return DocumentStream(
        name,
        partial(open_hub_dataset, name, hub),
        lambda row: encode_text(text_of(row, column, name)),
        sequence_length,
        vocab_size=vocab_size,
        repeat=args.data.repeat,
    )


class TextEncoder:
    """From a text to a document's token ids, by the run's tokenizer, which is loaded at the first text."""

    def __init__(self, config: Config) -> None:
        self._config = config

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return text_tokenizer(self._config)

    def __call__(self, text: str) -> list[int]:
        """What `nanotron tokenize` writes for the text."""
        return self._tokenizer.documents([encodable(text)])[0]


def _open_folders(
    config: Config, dataset: NanosetDatasetsArgs, sequence_length: int, vocab_size: int
) -> list[IndexedSource]:
    limits = dataset.dataset_max_tokens
    max_tokens = limits if isinstance(limits, list) else [limits] * len(dataset.dataset_folder)
    sources: list[IndexedSource] = []
    for number, (folder, limit) in enumerate(zip(dataset.dataset_folder, max_tokens, strict=True)):
        read_at = local_folder(dataset, number)
        files = open_token_files(read_at, token_bytes=dataset.token_size_in_bytes)
        eos_id = end_token_of_files(config, dataset, read_at, files)
        _tell_end(folder, eos_id)
        sources.append(
            TokenWindows(folder, files, sequence_length, vocab_size=vocab_size, eos_id=eos_id, max_tokens=limit)
        )
    return sources


def _tell_end(name: str, eos_id: int | None) -> None:
    if eos_id is not None:
        logger.info(f"{name} has no index of its documents; they end with token {eos_id}")
