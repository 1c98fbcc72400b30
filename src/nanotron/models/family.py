"""What the rest of the house asks of a family of models. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanotron.models.flops import decoder_layer_flops
from nanotron.models.hf_facts import HuggingFace
from nanotron.models.specs import decoder_layers, decoder_specs
from nanotron.parallel.params import ParamSpec

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig
    from nanotron.models.decoder import DecoderChunk


def decoder_chunk() -> type[DecoderChunk]:
    """The chunk of a decoder whose layers are dense, or have experts."""
    from nanotron.models.decoder import DecoderChunk

    return DecoderChunk


@dataclass(frozen=True)
class Family:
    """One family. Wherever a model's shape is asked for, it is an instance of ``config``."""

    config: type[ModelConfig]
    """Its keys; a mapping with ``is_<name>_config: true`` is read as this class."""
    hugging_face: HuggingFace | None = None
    """None: it can be neither imported nor exported."""
    hugging_face_sparse: HuggingFace | None = None
    """The same of its models with experts, which are a family of their own there."""
    specs: Callable[..., dict[str, ParamSpec]] = decoder_specs
    """(config, *, std, scaling_method, sequence_parallel) -> every parameter by global name, in the model's order."""
    layer_kinds: Callable[[ModelConfig], Sequence[str]] = decoder_layers
    """The kind of each layer; layers of one kind, under one window, have equal parameters, memory and FLOPs."""
    layer_flops: Callable[[ModelConfig, str, int], int] = decoder_layer_flops
    """(config, kind, tokens) -> FLOPs of a layer's forward over one sequence, without a window."""
    chunk: Callable[[], type[DecoderChunk]] = decoder_chunk
    """The class of its pipeline chunks; a function, since torch is imported only where a model is built."""

    def hugging_face_of(self, config: ModelConfig) -> HuggingFace | None:
        """What a model of this family is in a Hugging Face folder."""
        return self.hugging_face if config.moe_config is None else self.hugging_face_sparse
