"""A decoder whose layers have latent attention; its parameters and letters: latent_attention.py."""

from __future__ import annotations

from collections.abc import Callable
from math import log
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotron.batch import Spans
from nanotron.models.cache import LayerCache
from nanotron.models.decoder import DecoderChunk
from nanotron.models.latent_attention import as_deepseek
from nanotron.ops.fused import Fuse, rms_norm, rotate
from nanotron.ops.linear import TensorParallel, linear
from nanotron.ops.rope import Rotary

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig


class LatentAttention(nn.Module):
    """Attention over this rank's heads, whose keys and values come from a latent vector."""

    def __init__(
        self,
        config: ModelConfig,
        make: Callable[[str], nn.Parameter],
        name: str,
        tp: TensorParallel,
        fuse: Fuse,
        attend: Callable[[Tensor, Tensor, Tensor, Spans | None], Tensor],
    ) -> None:
        super().__init__()
        self.config = as_deepseek(config)
        self.tp, self.eps, self.fuse, self.attend = tp, config.rms_norm_eps, fuse, attend
        lower = self.config.q_lora_rank is not None
        self.q_down = make(f"{name}.q_down.weight") if lower else None
        self.q_latent_norm = make(f"{name}.q_latent_norm.weight") if lower else None
        self.q, self.kv_down = make(f"{name}.q.weight"), make(f"{name}.kv_down.weight")
        self.kv_latent_norm, self.kv_up = make(f"{name}.kv_latent_norm.weight"), make(f"{name}.kv_up.weight")
        self.out = make(f"{name}.out.weight")
        self.sharpness = _sharpness(config)

    def forward(self, x: Tensor, rotary: Rotary, spans: Spans | None, cache: LayerCache | None) -> Tensor:
        config, tp = self.config, self.tp
        p, r, u = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        (down,) = linear(x, [self.kv_down], tp)  # [b, s, d] -> [b, s, c + r]
        latent, shared_key = down.split([config.kv_lora_rank, r], -1)  # type: ignore[no-untyped-call]
        latent = self.fuse(rms_norm)(latent, self.kv_latent_norm, self.eps)
        (kv,) = linear(latent, [self.kv_up], tp, enter=tp.enter)  # [b, s, c] -> [b, s, h/t·(p+u)]
        if self.q_down is not None and self.q_latent_norm is not None:
            (x,) = linear(x, [self.q_down], tp)  # [b, s, d] -> [b, s, c_q]
            x = self.fuse(rms_norm)(x, self.q_latent_norm, self.eps)
        (q,) = linear(x, [self.q], tp, enter=tp.enter)  # -> [b, s, h/t·e]
        q, k, v = self.fuse(latent_heads)(
            q.view(*q.shape[:2], -1, p + r),
            kv.view(*kv.shape[:2], -1, p + u),
            tp.entered(shared_key)[:, :, None],
            rotary.cos,
            rotary.sin,
            self.sharpness,
            interleaved=rotary.interleaved,
        )  # 3 × [b, s, h/t, e]
        if cache is not None:
            k, v = cache.append(k, v)
        attended = self.attend(q, k, v, spans)[..., :u]  # [b, s, h/t, u]
        (y,) = linear(attended.flatten(2), [self.out], tp, exit=tp.exit)
        return y


def latent_heads(
    q: Tensor, kv: Tensor, shared_key: Tensor, cos: Tensor, sin: Tensor, sharpness: float, *, interleaved: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as attention wants them, [b, s, h, e] each, values with zeros behind their u dims.

    q [b, s, h, e], kv [b, s, h, p+u], shared_key [b, s, 1, r] of all heads; cos and sin [b, s, 1, r/2].
    """
    r, e = shared_key.shape[-1], q.shape[-1]
    rotated = rotate(q[..., e - r :], cos, sin, interleaved=interleaved)
    keys, values = kv[..., : e - r], kv[..., e - r :]
    shared_key = rotate(shared_key, cos, sin, interleaved=interleaved).expand(*keys.shape[:-1], r)
    q = torch.cat([q[..., : e - r], rotated], -1) * sharpness
    return q, torch.cat([keys, shared_key], -1), F.pad(values, (0, e - values.shape[-1]))


def _sharpness(config: ModelConfig) -> float:
    """What scores are multiplied by where rotary frequencies are stretched by yarn with ``mscale_all_dim``."""
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "yarn" or not scaling.mscale_all_dim:
        return 1.0
    return float((0.1 * scaling.mscale_all_dim * log(scaling.factor) + 1) ** 2)


class LatentDecoderChunk(DecoderChunk):
    """One chunk of a DeepSeek model."""

    attention = LatentAttention
