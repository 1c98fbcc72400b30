"""What other programs' files may say, as far as it is looked into here: the rest is held to our own keys' rules."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter
from typing_extensions import TypedDict

from nanotron.checkpoint.schema import FileName
from nanotron.checkpoint.storage import Folder, read_text
from nanotron.errors import ConfigError
from nanotron.untrusted import Count, Number, checked, parse_json

Tokens = Annotated[
    list[Count], Field(min_length=1), BeforeValidator(lambda ids: [ids] if isinstance(ids, int) else ids)
]
Flag = Annotated[bool, Field(strict=True)]


class WeightMap(TypedDict):
    """model.safetensors.index.json: the file of each tensor."""

    weight_map: dict[str, FileName]


class Rope(TypedDict, total=False):
    """How positions are scaled; both names are in use."""

    rope_type: str
    type: str
    rope_theta: Number | None


class HuggingFaceConfig(TypedDict, total=False):
    """config.json of a model."""

    model_type: str
    num_hidden_layers: Annotated[Count, Field(gt=0)] | None
    hidden_act: str | None
    mlp_bias: Flag | None
    attention_bias: Flag | None
    sliding_window: Count | None
    use_sliding_window: Flag | None
    max_window_layers: Count | None
    layer_types: list[str] | None
    rope_theta: Number | None
    rope_scaling: Rope | None
    rope_parameters: Rope | None
    eos_token_id: Tokens | None
    qkv_bias: Flag | None
    clip_qkv: Number | None
    num_local_experts: Count | None
    decoder_sparse_step: Count | None
    mlp_only_layers: list[Count] | None
    norm_topk_prob: Flag | None


WEIGHT_MAP = TypeAdapter(WeightMap)
CONFIG = TypeAdapter(HuggingFaceConfig)


def read_json(folder: Folder, name: str, schema: TypeAdapter[Any]) -> dict[str, Any]:
    """What a JSON file says; raises ConfigError, with its name, when it is missing or breaks the schema."""
    try:
        text = read_text(folder, name)
    except FileNotFoundError as error:
        raise ConfigError(f"{folder.path}/{name} is missing") from error
    try:
        said: dict[str, Any] = parse_json(text)
        checked(schema, said)
    except ValueError as error:
        raise ConfigError(f"{folder.path}/{name}: {error}") from error
    return said
