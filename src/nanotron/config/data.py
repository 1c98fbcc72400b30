"""The data: stages of the run, each with its data set."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from nanotron.config.compat.retired import DATASET, retires
from nanotron.config.keys import Count, Float, Int, PathOrUrl, Reads, Section, Width, key, required, section

DEFAULT_STAGE_NAME = "Training"


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str | int) else value


def _names_kind(value: Any) -> str:
    return (
        "<list of names>"
        if isinstance(value, list)
        else "<names to fractions>"
        if isinstance(value, dict)
        else "<name>"
    )


Sample = Annotated[Int, Field(ge=0)]
HuggingFaceNames = Annotated[
    Annotated[PathOrUrl, Tag("<name>")]
    | Annotated[list[PathOrUrl], Tag("<list of names>")]
    | Annotated[dict[PathOrUrl, Float], Tag("<names to fractions>")],
    Discriminator(_names_kind),
]
Numbers = Annotated[
    Annotated[Int, Tag("<number>")] | Annotated[list[Int], Tag("<list of numbers>")],
    Discriminator(lambda value: "<list of numbers>" if isinstance(value, list) else "<number>"),
]
Arguments = Annotated[
    Annotated[dict[str, Any], Tag("<mapping>")] | Annotated[list[dict[str, Any]], Tag("<list of mappings>")],
    Discriminator(lambda value: "<list of mappings>" if isinstance(value, list) else "<mapping>"),
]
_WEIGHTS = {"type": "object", "additionalProperties": {"type": "number"}}  # split into two keys before it is checked
StringList = Annotated[list[str], Reads(_as_list, lambda legal: legal["items"])]
Paths = Annotated[list[PathOrUrl], Reads(_as_list, lambda legal: legal["items"])]
Folders = Annotated[Paths, Reads(lambda value: value, lambda _: _WEIGHTS)]


@section
@retires(DATASET)
class EmbeddedCorpusArgs:
    """Text that every machine has: the Python standard library's sources, with a byte-level BPE trained on them."""

    corpus: Literal["stdlib"] = required("Name of the embedded corpus.", example="stdlib")
    folder: PathOrUrl = key(
        "data/python-bpe4096",
        "Folder that it is prepared in, once; relative to the working directory.",
        min_length=1,
    )


@section
@retires(DATASET)
class NanosetDatasetsArgs:
    """Folders of tokenized documents (datatrove's .ds files)."""

    dataset_folder: Folders = required(
        "A folder, a list of folders, or a mapping of folders to weights.", example="data/my_corpus", min_length=1
    )
    dataset_weights: list[Float] | None = key(
        None, "Share of samples from each folder; any positive numbers.", derived="each folder's share of the tokens"
    )
    dataset_read_path: Paths | None = key(
        None,
        "Folder of this machine that keeps what is read of each folder behind a URL, or holds a copy of it.",
        derived="data/remote/ and the URL",
    )
    tokenizer_name: PathOrUrl | None = key(
        None, "Tokenizer of the folders.", derived="what the folders' .metadata files say"
    )
    vocab_size: Int | None = key(None, "Size of the tokenizer's vocabulary.", derived="from the tokenizer", gt=0)
    token_size_in_bytes: Int | None = key(
        None, "Bytes per token in the files: 2 or 4.", derived="what the folders' .metadata files say"
    )
    dataset_max_tokens: Numbers | None = key(
        None, "Tokens to use of each folder: a number for all, or a list of one for each; null is all."
    )


@section
class HubDatasetsArgs:
    """What data sets of Hugging Face have in common, whatever is made of them."""

    hf_dataset_or_datasets: HuggingFaceNames = required(
        "A name or folder, a list of them, or a mapping to the fraction of each to use.",
        example="stas/openwebtext-10k",
    )
    hf_dataset_splits: StringList = key(None, "Splits of the data set.", factory=lambda: ["train"])
    hf_dataset_config_name: str | None = key(None, "Configuration of the data set.")
    dataset_processing_num_proc_per_process: Count = key(1, "Processes that tokenize.", gt=0)


@section
@retires(DATASET)
class PretrainDatasetsArgs(HubDatasetsArgs):
    """Texts of Hugging Face data sets, tokenized when the run starts."""

    text_column_name: str = key("text", "Column that holds the text.")
    dataset_weights: list[Float] | None = key(
        None,
        "Share of samples from each data set, or from each split of each; any positive numbers.",
        derived="each one's share of the tokens; of streams, equal shares",
    )
    streaming: bool = key(False, "Tokenize while training, without a copy on disk; the position is saved.")


@section
@retires(DATASET)
class SFTDatasetsArgs(HubDatasetsArgs):
    """Prompts and completions of a Hugging Face data set; the loss is on completions only."""

    sft_dataloader: bool = key(True, "Marks the kind of data set.", marker=True)
    debug_max_samples: Int | None = key(None, "Use only this many samples.", gt=0)
    dataset_weights: list[Float] | None = key(
        None,
        "Share of samples from each data set, or from each split of each; any positive numbers.",
        derived="each one's share of the rows",
    )


@section
@retires(DATASET)
class CustomDatasetArgs:
    """Data that Python functions of yours return (examples/custom_data.py shows both kinds)."""

    python: Paths = required(
        "`file.py:function` or `module:function`, or a list of them; a function returns an iterable of documents "
        "(texts or lists of token ids; also a list of texts), or an object with `__len__` and `__getitem__` that gives "
        "rows of sequence_length + 1 token ids.",
        example="examples/custom_data.py:counting",
        min_length=1,
    )
    arguments: Arguments = key(
        None, "Keyword arguments: a mapping for every function, or a list of one for each.", factory=dict
    )
    dataset_weights: list[Float] | None = key(
        None,
        "Share of samples from each function's data; any positive numbers.",
        derived="each one's share of the rows; of streams, equal shares",
    )


def _dataset_kind(value: Any) -> str:
    if not isinstance(value, dict):
        return type(value).__name__
    if "corpus" in value:
        return "EmbeddedCorpusArgs"
    if "python" in value:
        return "CustomDatasetArgs"
    if "sft_dataloader" in value or "debug_max_samples" in value:
        return "SFTDatasetsArgs"
    return "PretrainDatasetsArgs" if "hf_dataset_or_datasets" in value else "NanosetDatasetsArgs"


AnyDataset = Annotated[
    Annotated[EmbeddedCorpusArgs, Tag("EmbeddedCorpusArgs")]
    | Annotated[NanosetDatasetsArgs, Tag("NanosetDatasetsArgs")]
    | Annotated[PretrainDatasetsArgs, Tag("PretrainDatasetsArgs")]
    | Annotated[SFTDatasetsArgs, Tag("SFTDatasetsArgs")]
    | Annotated[CustomDatasetArgs, Tag("CustomDatasetArgs")],
    Discriminator(_dataset_kind),
]


def default_dataset() -> EmbeddedCorpusArgs:
    """Return the data set of a config that names none."""
    return EmbeddedCorpusArgs(corpus="stdlib")


@section
class DataArgs:
    """A data set and the order it is read in."""

    dataset: AnyDataset | None = key(
        None, "The data set; null is random tokens.", factory=default_dataset, derived="the embedded corpus"
    )
    seed: Int = key(42, "Seed of the order of samples.", ge=0)
    num_loading_workers: Count = key(1, "Threads that load data ahead of the steps.", ge=0)
    shuffle_block: Int | None = key(
        None,
        "Shuffle within blocks of this many neighbouring samples, and the blocks; kind to network file systems. "
        "Null shuffles every sample over the whole data set. Of a stream, blocks come one after another, each source's "
        "in memory while it is shuffled; null keeps its order.",
        gt=0,
    )
    skip_samples: list[list[Sample]] = key(
        None,
        "Ranges of the stage's samples to leave out, such as those of a loss spike: [[first, end], …], counted from 0;"
        " first is left out, end is not. metrics.jsonl says the first sample of every step. The others keep their"
        " order.",
        factory=list,
    )
    repeat: bool = key(
        True, "Read a data set again, in another order, when it is used up; false ends the run there, after a save."
    )


@section
class DatasetStageArgs:
    """A part of the run with its own data."""

    name: str = required("Name of the stage; unique.", example="Stable phase", min_length=1)
    start_training_step: Int = required("First step of the stage, counted from 1.", example=1, gt=0)
    data: Section[DataArgs] = key(None, "The data of the stage.", factory=DataArgs)
    sequence_length: Width | None = key(
        None, "Tokens per sample in this stage.", derived="tokens.sequence_length", gt=0
    )
    validation: AnyDataset | None = key(
        None,
        "The data set to validate on in this stage; null is none.",
    )


def default_stages() -> list[DatasetStageArgs]:
    """Return the stages of a config that names none: the embedded corpus from the first step to the last."""
    return [DatasetStageArgs(name=DEFAULT_STAGE_NAME, start_training_step=1)]
