"""The loop that makes tokens: a batch of prompts through the stages in turn, then one token of every row at a time.

    b rows   s tokens of a row in this forward   t tensor-parallel ranks   d hidden size   V vocabulary

Prompts of different lengths end together: shorter ones are padded on the left, and no token sees the padding.

    index      0   1   2   3   4   5  …          a row's text is a span; padding is one of its own
    row 0      a   b   c   d   e   f             positions: 0 at the text's first token
    row 1      ·   ·   ·   x   y   z             index n of the cache is the same token's in every layer and stage
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from nanotron.batch import IGNORED_LABEL, Batch, Span, Spans, document_spans
from nanotron.generate.sampling import Sampling, choose
from nanotron.models.cache import LayerCache, new_cache
from nanotron.models.decoder import DecoderChunk
from nanotron.parallel.comm import all_gather
from nanotron.parallel.mesh import Mesh

WITHOUT_PLANS = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.OVERRIDEABLE,
]
"""Attention kernels for lengths that change with every token: all but cuDNN's, which plans for each of them."""


class Decoder:
    """A model spread over a mesh of tp and pp, of which this rank holds ``model``.

    ``ends``: the tokens that each end a text. Every method is collective: all ranks call it with the same arguments.
    """

    def __init__(self, model: DecoderChunk, mesh: Mesh, device: torch.device, ends: Collection[int]) -> None:
        self._model, self._mesh, self._device, self._ends = model, mesh, device, frozenset(ends)
        self._dtype = next(model.parameters()).dtype
        self._first = mesh.coord("pp") == 0
        self._last = mesh.coord("pp") == mesh.size("pp") - 1

    @torch.inference_mode()
    def tokens(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, sampling: Sampling, first_number: int = 0
    ) -> Iterator[list[int | None]]:
        """Yield the next token of every row, the same on every rank, until all rows have ended.

        A row ends with an end token, which is not yielded: it and what follows is None.
        ``first_number``: the number of the first prompt, which with the seed decides what is drawn for it.
        """
        batch = left_padded(prompts, self._device)
        pads = [batch.tokens.shape[1] - len(ids) for ids in prompts]
        starts = torch.tensor(pads, device=self._device)[:, None]
        generators = [sampling.generator(first_number + row) for row in range(len(prompts))]
        longest = batch.tokens.shape[1]
        cache = new_cache(len(self._model.layers), longest + max_new_tokens)
        ended = [False] * len(prompts)
        for index in range(longest, longest + max_new_tokens):  # where in a row the token goes that is made now
            chosen = self._agree(self._forward(batch, cache), sampling, generators)  # [b]
            ids = chosen.tolist()
            ended = [was or token in self._ends for was, token in zip(ended, ids, strict=True)]
            yield [None if over else token for over, token in zip(ended, ids, strict=True)]
            if all(ended):
                return
            spans = tuple((Span(0, 1, pad, index + 1),) for pad in pads) if any(pads) else None
            batch = _batch(chosen[:, None], index - starts, spans)

    def _forward(self, batch: Batch, cache: list[LayerCache]) -> Tensor | None:
        """Run the stages in turn; the logits [b, 1, V/t] of the last token, on the last stage's ranks."""
        x = None if self._first else self._receive(batch)
        with sdpa_kernel(WITHOUT_PLANS):
            x, _, _ = self._model(x, batch, cache)
        assert isinstance(x, Tensor)
        if self._last:
            return x
        stage = self._mesh.coord("pp")
        dist.send(x, self._mesh.rank_at(pp=stage + 1), group=self._mesh.edge_group(stage, stage + 1))
        return None

    def _receive(self, batch: Batch) -> Tensor:
        shape = (*batch.tokens.shape, self._model.config.hidden_size)  # [b, s, d]
        x = torch.empty(shape, dtype=self._dtype, device=self._device)
        stage = self._mesh.coord("pp")
        dist.recv(x, self._mesh.rank_at(pp=stage - 1), group=self._mesh.edge_group(stage - 1, stage))
        return x

    def _agree(self, logits: Tensor | None, sampling: Sampling, generators: list[torch.Generator]) -> Tensor:
        """The next token of every row [b], chosen by one rank and told to all."""
        chosen = torch.empty(len(generators), dtype=torch.int64, device=self._device)
        if logits is not None:
            whole = gather_vocabulary(logits[:, 0], self._model.config.vocab_size, self._mesh)  # [b, V/t] -> [b, V]
            ids = [choose(row, sampling, generator) for row, generator in zip(whole, generators, strict=True)]
            chosen.copy_(torch.tensor(ids))
        everyone = self._mesh.world_group()
        if everyone is not None:
            dist.broadcast(chosen, self._mesh.rank_at(pp=self._mesh.size("pp") - 1, tp=0), group=everyone)
        return chosen


def left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> Batch:
    """Prompts as one batch [b, s] whose rows end together; spans only where some row has padding."""
    longest = max(len(ids) for ids in prompts)
    pads = [longest - len(ids) for ids in prompts]
    tokens = torch.tensor([[0] * pad + list(ids) for pad, ids in zip(pads, prompts, strict=True)], device=device)
    starts = torch.tensor(pads, device=device)[:, None]  # [b, 1]
    index = torch.arange(longest, device=device)
    positions = (index - starts).clamp_(min=0)
    spans = document_spans([[0, pad] if pad else [0] for pad in pads], longest) if any(pads) else None
    return _batch(tokens, positions, spans)


def _batch(tokens: Tensor, positions: Tensor, spans: Spans | None) -> Batch:
    return Batch(tokens, torch.full_like(tokens, IGNORED_LABEL), positions, spans)


def gather_vocabulary(logits: Tensor, vocab_size: int, mesh: Mesh) -> Tensor:
    """Put together the logits of a vocabulary cut unevenly over tp: [b, V/t] -> [b, V]."""
    ranks = mesh.size("tp")
    ends = [vocab_size * rank // ranks for rank in range(ranks + 1)]
    width = -(-vocab_size // ranks)
    padded = F.pad(logits, (0, width - logits.shape[1]))  # all_gather wants one shape
    parts = torch.split(all_gather(padded, mesh.group("tp"), dim=1), width, dim=1)
    return torch.cat([part[:, : hi - lo] for part, (lo, hi) in zip(parts, pairwise(ends), strict=True)], dim=1)
