"""What the files of a checkpoint may say, whoever wrote them: the kind and range of every value that is read.

What breaks a rule raises ValueError (``untrusted.checked``); readers turn it into ``Damaged``, which names the file.
Keys that nobody reads may hold anything.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from typing_extensions import Required, TypedDict

from nanotron.untrusted import Count, Number

Format = Literal["nanotron-checkpoint"]
Version = Literal[1, 2]

Shape = Annotated[tuple[Count, ...], Field(max_length=8)]
FileName = Annotated[str, Field(pattern=r"^[^/\\]+$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


if TYPE_CHECKING:
    StoredType = str
else:
    StoredType = Literal["F64", "F32", "BF16", "F16", "I64", "I32"]


class Written(TypedDict):
    """What says of index.json that this version reads it; the rest is ``format.Index``."""

    format: Format
    version: Version


class Rollback(TypedDict):
    """That the run went back from a step to a checkpoint, and what each stage leaves out since."""

    step: Count
    bad_step: Count
    left_out: dict[str, tuple[Count, Count]]


class State(TypedDict, total=False):
    """state.json: an imported model's has no position, so only the step is always there."""

    step: Required[Count]
    consumed: dict[str, Count]
    consumed_tokens: Count
    consumed_per_source: dict[str, dict[str, Count]]
    streams: dict[str, dict[str, Any]]
    data: dict[str, list[dict[str, Any]]]
    optimizer_updates: Annotated[Number, Field(ge=0)]
    lr: Number | None
    rollbacks: list[Rollback]


class SavedData(TypedDict, total=False):
    """The data of a stage in config.yaml."""

    seed: Required[Any]
    dataset: dict[str, Any] | None
    skip_samples: list[tuple[Count, Count]]


class SavedStage(TypedDict, total=False):
    """A stage in config.yaml."""

    name: Required[str]
    data: Required[SavedData]


class SavedTokens(TypedDict, total=False):
    """The section ``tokens`` in config.yaml."""

    sequence_length: Count


class SavedConfig(TypedDict, total=False):
    """config.yaml, as far as it is compared with the run's; it may be another version's, or leave defaults out."""

    data_stages: list[SavedStage]
    tokens: SavedTokens


class HeaderEntry(TypedDict):
    """A tensor in the header of a safetensors file."""

    dtype: str
    shape: Shape
    data_offsets: tuple[Count, Count]


FORMAT = TypeAdapter(Written)
STATE = TypeAdapter(State)
SAVED_CONFIG = TypeAdapter(SavedConfig)
HEADER = TypeAdapter(dict[str, HeaderEntry])
HEADER_METADATA = TypeAdapter(dict[str, str])
