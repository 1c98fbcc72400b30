"""How the next token is chosen from the logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from nanotron.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. ``temperature`` 0 takes the most likely one."""

    temperature: float = 0.0
    top_k: int | None = None
    """Choose among this many most likely tokens."""
    top_p: float | None = None
    """Choose among the fewest tokens whose probabilities add up to this (arXiv 1904.09751)."""
    seed: int = 42

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ConfigError(f"temperature={self.temperature} is negative; use 0 for greedy, or a positive number")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} leaves no token to choose; use at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} is no probability; use more than 0 and at most 1")

    def generator(self, number: int) -> torch.Generator:
        """The random numbers of prompt ``number``: the same whatever other prompts share its batch."""
        return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{self.seed}/{number}".encode()))


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token id from the logits [V] of the last position."""
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = logits.float().cpu() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < len(logits):
        kept = logits.topk(sampling.top_k)
        logits = torch.full_like(logits, -torch.inf).scatter(0, kept.indices, kept.values)
    probabilities = logits.softmax(0)
    if sampling.top_p is not None:
        ordered, order = probabilities.sort(descending=True)
        before = ordered.cumsum(0) - ordered  # probability of all that is likelier
        probabilities[order[before >= sampling.top_p]] = 0
    return int(torch.multinomial(probabilities, 1, generator=generator))
