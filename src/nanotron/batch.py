"""What a model is fed: one microbatch of token rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

IGNORED_LABEL = -100
"""The label of a position that is not a target: it adds nothing to the loss nor to the count of valid tokens."""


class Batch(NamedTuple):
    """One microbatch; every pipeline stage of a replica gets the whole of it. b rows of s tokens, all int64."""

    tokens: Tensor
    """[b, s] input token ids."""
    labels: Tensor
    """[b, s] the next token of each position, or IGNORED_LABEL."""
    positions: Tensor
    """[b, s] position of each token, restarting per document where the document boundaries are known."""
    doc_starts: Tensor | None = None
    """[b, s] index in the row where each token's document starts; None: attention is plainly causal over the row."""
