"""From the config's data_stages to stages with open sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from nanotron.config import (
    Config,
    CustomDatasetArgs,
    DatasetStageArgs,
    EmbeddedCorpusArgs,
    NanosetDatasetsArgs,
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


def build_stages(config: Config, left_out: Mapping[str, Sequence[Sequence[int]]]) -> list[ScheduledStage]:
    """Open every stage's sources, in order of start; ``left_out``: by stage, what is skipped beside what it says."""
    vocab_size = model_vocab_size(config)
    ordered = sorted(enumerate(config.data_stages), key=lambda numbered: numbered[1].start_training_step)
    return [
        _build_stage(config, stage, f"data_stages[{number}]", vocab_size, left_out.get(stage.name, ()))
        for number, stage in ordered
    ]


def _build_stage(
    config: Config, args: DatasetStageArgs, key: str, vocab_size: int, left_out: Sequence[Sequence[int]]
) -> ScheduledStage:
    opener = StageOpener(config, args, args.sequence_length or config.tokens.sequence_length, vocab_size)
    skips, validation = Skips([*args.data.skip_samples, *left_out]), None
    with at_key(f"{key}.data.dataset"):
        stage = opener.stage(args.data.dataset, args.name, repeat=args.data.repeat, skips=skips)
    if args.validation is not None:
        with at_key(f"{key}.validation"):
            validation = opener.stage(args.validation, f"{args.name}, validation", repeat=False, skips=Skips())
    if isinstance(validation, StreamStage):
        raise ConfigError(f"{key}.validation: a data set with a length is needed, not a stream")
    return ScheduledStage(args.name, args.start_training_step, opener.sequence_length, stage, validation, key)


@dataclass(frozen=True)
class StageOpener:
    """Opens the sources of a stage, cut into windows of sequence_length + 1 tokens."""

    config: Config
    args: DatasetStageArgs
    sequence_length: int
    vocab_size: int

    def stage(self, dataset: AnyDataset | None, name: str, *, repeat: bool, skips: Skips) -> Stage | StreamStage:
        """A data set's sources, blended, in the order that the stage's keys ask for."""
        sources, data = self._sources(dataset), self.args.data
        weights = None if dataset is None or isinstance(dataset, EmbeddedCorpusArgs) else dataset.dataset_weights
        streams = [source for source in sources if isinstance(source, DocumentStream)]
        indexed = [source for source in sources if not isinstance(source, DocumentStream)]
        if not streams:
            seed, block = data.seed, data.shuffle_block
            return Stage(name, indexed, weights, seed=seed, shuffle_block=block, repeat=repeat, skips=skips)
        if indexed:
            raise ConfigError(
                f"python: {indexed[0].name} gives rows by number and others of its data set are streams; blend one "
                "kind, or give them stages of their own"
            )
        return StreamStage(name, self._shuffled(streams, name), weights, skips=skips)

    def _shuffled(self, streams: Sequence[DocumentStream], name: str) -> Sequence[StreamSource]:
        """The streams, each shuffled in blocks if the stage asks for it."""
        block, seed = self.args.data.shuffle_block, self.args.data.seed
        if block is None:
            return streams
        return [ShuffledStream(stream, block, seed, name, number) for number, stream in enumerate(streams)]

    def _sources(self, dataset: AnyDataset | None) -> Sequence[IndexedSource | DocumentStream]:
        """The sources of one data set."""
        config, length, vocab_size = self.config, self.sequence_length, self.vocab_size
        if dataset is None:
            return [DummySource(self.args.data.seed, self.args.name, length, vocab_size)]
        if isinstance(dataset, EmbeddedCorpusArgs):
            return [self._windows(dataset.corpus, prepare_corpus(dataset.folder))]
        if isinstance(dataset, NanosetDatasetsArgs):
            return self._folders(dataset)
        if isinstance(dataset, CustomDatasetArgs):
            return [self._custom(reference, arguments) for reference, arguments in custom_functions(dataset)]
        names = list(hub_datasets(dataset))
        if isinstance(dataset, SFTDatasetsArgs):
            paths = [(name, prepare_sft_dataset(config, dataset, name, hub, length)) for name, hub in names]
            return [PackedWindows(name, open_nanoset_file(path), length, vocab_size=vocab_size) for name, path in paths]
        if dataset.streaming:
            return [self._hub_stream(name, hub, dataset.text_column_name) for name, hub in names]
        folders = [(name, prepare_hub_dataset(config, dataset, name, hub)) for name, hub in names]
        return [self._windows(name, folder) for name, folder in folders]

    def _windows(self, name: str, folder: str) -> TokenWindows:
        return TokenWindows(name, open_token_files(folder), self.sequence_length, vocab_size=self.vocab_size)

    def _folders(self, dataset: NanosetDatasetsArgs) -> list[IndexedSource]:
        limits, folders = dataset.dataset_max_tokens, dataset.dataset_folder
        max_tokens = limits if isinstance(limits, list) else [limits] * len(folders)
        sources: list[IndexedSource] = []
        for number, (folder, limit) in enumerate(zip(folders, max_tokens, strict=True)):
            read_at = local_folder(dataset, number)
            files = open_token_files(read_at, token_bytes=dataset.token_size_in_bytes)
            eos_id = end_token_of_files(self.config, dataset, read_at, files)
            _tell_end(folder, eos_id)
            options = {"vocab_size": self.vocab_size, "eos_id": eos_id, "max_tokens": limit}
            sources.append(TokenWindows(folder, files, self.sequence_length, **options))
        return sources

    def _custom(self, reference: str, arguments: Mapping[str, Any]) -> IndexedSource | DocumentStream:
        function = load_function(reference)
        data = call_function(reference, function, arguments)
        with blamed(reference):
            rows = gives_rows(data)
        if not rows:
            return self._stream(reference, partial(function, **arguments), self._encode_texts, guard=blamed)
        masks = self.config.model.model_config._use_doc_masking
        eos_id = end_token(self.config, reference, self.config.tokenizer.tokenizer_name_or_path) if masks else None
        _tell_end(reference, eos_id)
        return CustomRows(reference, data, self.sequence_length, vocab_size=self.vocab_size, eos_id=eos_id)

    def _hub_stream(self, name: str, hub: HubDataset, column: str) -> DocumentStream:
        return self._stream(
            name, partial(open_hub_dataset, name, hub), lambda row: self.encode(text_of(row, column, name))
        )

    def _stream(
        self,
        name: str,
        open_documents: Callable[[], Iterable[Any]],
        encode: Callable[[Any], Sequence[int]],
        **options: Any,
    ) -> DocumentStream:
        length, repeat = self.sequence_length, self.args.data.repeat
        return DocumentStream(
            name, open_documents, encode, length, vocab_size=self.vocab_size, repeat=repeat, **options
        )

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        return text_tokenizer(self.config)  # loaded at the first text

    def _encode_texts(self, document: Any) -> Any:
        """A document of the user's: a text, or token ids already."""
        return self.encode(document) if isinstance(document, str) else document

    def encode(self, text: str) -> list[int]:
        """A document's token ids: what `nanotron tokenize` writes for the text."""
        return self._tokenizer.documents([encodable(text)])[0]


def _tell_end(name: str, eos_id: int | None) -> None:
    if eos_id is not None:
        logger.info(f"{name} has no index of its documents; they end with token {eos_id}")
