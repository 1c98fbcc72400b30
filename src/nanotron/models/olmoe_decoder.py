"""A decoder that normalises all of a token's queries at once, and all its keys; its parameters: olmoe.py.

b rows   s tokens   t tensor-parallel ranks   h query heads   kv key/value heads   e head dim
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanotron.models.decoder import Attention, DecoderChunk
from nanotron.ops.fused import precise, queries_and_keys
from nanotron.ops.rope import Rotary
from nanotron.parallel.comm import copy_to, sum_from


class WholeNormAttention(Attention):
    """Grouped-query attention with norms over the heads of all ranks."""

    def heads(self, q: Tensor, kv: Tensor, rotary: Rotary) -> tuple[Tensor, Tensor, Tensor]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        mesh = self.tp.mesh
        k, v = kv.view(*kv.shape[:2], 2, -1).unbind(2)  # [b, s, 2·kv/t·e] -> 2 × [b, s, kv/t·e]
        means = self.fuse(mean_squares)(q, k, mesh.size("tp"))  # [b, s, 2]
        means = copy_to(sum_from(means, mesh, "tp"), mesh, "tp")
        q, k = self.fuse(normalised)(q, k, means, self.q_norm, self.k_norm, self.eps)
        q, k, v = (x.reshape(*x.shape[:2], -1, self.head_dim) for x in (q, k, v))
        q, k = self.fuse(queries_and_keys)(
            q, k, None, None, self.eps, rotary.cos, rotary.sin, interleaved=rotary.interleaved
        )
        return q, k, v


def mean_squares(q: Tensor, k: Tensor, ranks: int) -> Tensor:
    """This rank's addends to the means of q² and k² over all heads: q [b, s, h/t·e], k [b, s, kv/t·e] -> [b, s, 2].

    Ranks that share a head add it once each, and have as many channels as all others: the mean of their means is the
    mean. In float32 at least.
    """
    return torch.stack([precise(x).square().mean(-1) / ranks for x in (q, k)], -1)


def normalised(
    q: Tensor, k: Tensor, means: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """q and k, divided by the roots of their means of squares [b, s, 2], and weighted."""
    of_q, of_k = (means + eps).rsqrt().split(1, -1)  # type: ignore[no-untyped-call]
    return (precise(q) * of_q).to(q.dtype) * q_norm, (precise(k) * of_k).to(k.dtype) * k_norm


class OlmoeChunk(DecoderChunk):
    """One chunk of an OLMoE model."""

    attention = WholeNormAttention
