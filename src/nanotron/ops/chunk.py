"""What the pipeline, the buckets and whoever measures know of a model chunk, and what they do around its blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from nanotron.ops.weight_grads import WeightGrads
from nanotron.parallel.params import ParamSpec


def _nothing(block: str, *outputs: Tensor) -> None:
    """Weights that nobody moves are always there."""


class Use(NamedTuple):
    """A block of a chunk's forward: what it is called, and how its backward adds to its weights' gradients."""

    block: str
    names: tuple[str, ...]
    """Of the weights that it uses and that have a gradient."""
    contributions: int = 1
    """How often one microbatch's backward adds to each one's gradient."""
    rereads: bool = True
    """Whether its backward reads the weights once more."""


@dataclass(eq=False)
class Hooks:
    """What happens around a chunk's blocks; one object, made before the chunk and passed in."""

    weight_grads: WeightGrads = field(default_factory=WeightGrads)
    """Where weight gradients go."""
    before_block: Callable[[str], None] = _nothing
    """Called with a block's name before its forward: whoever moves weights waits here for them."""
    after_block: Callable[..., None] = _nothing
    """Called with a block's name and its forward's outputs: its backward begins when one of these has its gradient."""
    loss_scale: Callable[[], float | Tensor] = lambda: 1.0
    """What the losses' sum is multiplied by before backward; asked for where forward makes gradients already."""
    measures: bool = False
    """Whether forward's metrics tell how large activations are; ``measuring`` sets it."""

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Have the forwards inside measure their activations."""
        self.measures = True
        try:
            yield
        finally:
            self.measures = False


class Chunk(Protocol):
    """A piece of the model: (activations or None, microbatch) -> (activations, token-sum losses, metrics)."""

    @property
    def hooks(self) -> Hooks: ...

    @property
    def weights(self) -> Mapping[str, nn.Parameter]:
        """This rank's shards by global name, in model order."""
        ...

    @property
    def specs(self) -> Mapping[str, ParamSpec]: ...

    def uses(self, sequence_length: int) -> Sequence[Use]:
        """Its blocks in the order of its forward; a tied weight may be used by two."""
        ...

    def __call__(self, x: Tensor | None, batch: Any) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]: ...
