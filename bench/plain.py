"""A Llama in plain PyTorch, whole or one stage of it, as a careful user would write it. Needs only torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LlamaShape(Protocol):
    """What is read of a shape or of nanotron's model config."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float

    @property
    def head_dim(self) -> int: ...


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [b, h, s, e] and k, v [b, kv, s, e] -> [b, h, s, e]


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of whole rows, by torch's own choice of kernel."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class PlainBlock(nn.Module):
    """Attention and SwiGLU, pre-norm."""

    def __init__(self, config: LlamaShape, attend: Attend) -> None:
        super().__init__()
        hidden, head = config.hidden_size, config.head_dim
        self.config, self.attend = config, attend
        self.q = nn.Linear(hidden, config.num_attention_heads * head, bias=False)
        self.kv = nn.Linear(hidden, 2 * config.num_key_value_heads * head, bias=False)
        self.out = nn.Linear(config.num_attention_heads * head, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.norms = nn.ParameterList([torch.ones(hidden), torch.ones(hidden)])

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        """x [b, s, d] -> [b, s, d]; angles are the cosines and sines, each [s, e/2]."""
        y = rms_norm(x, self.norms[0], self.config)
        q = self.q(y).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)  # [b, h, s, e]
        k, v = self.kv(y).unflatten(-1, (2, -1, self.config.head_dim)).transpose(1, 3).unbind(2)  # 2 × [b, kv, s, e]
        q, k = rotate(q, angles), rotate(k, angles)
        attended = self.attend(q, k, v)  # [b, h, s, e]
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(rms_norm(x, self.norms[1], self.config)).chunk(2, dim=-1)
        y = self.down(F.silu(gate) * up)
        return x + y


class PlainStage(nn.Module):
    """Some blocks, with the embedding or the head where they belong: tokens or [b, s, d] in, [b, s, d] or logits."""

    def __init__(
        self, config: LlamaShape, num_layers: int, *, embed: bool, head: bool, attend: Attend = causal_attention
    ) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size) if embed else None
        self.blocks = nn.ModuleList(PlainBlock(config, attend) for _ in range(num_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size)) if head else None
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if head else None
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """``positions`` [s] of the tokens in their rows; None: they are whole rows."""
        if self.embed is not None:
            x = self.embed(x)
        angles = rotary_angles(x, self.config, positions)
        for block in self.blocks:
            x = block(x, angles)
        return x if self.head is None else self.head(rms_norm(x, self.norm, self.config))


def rotary_angles(x: Tensor, config: LlamaShape, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary embedding (arXiv 2104.09864) for x [b, s, d], each [s, e/2]."""
    dims = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    positions = torch.arange(x.shape[1]) if positions is None else positions
    angles = positions[:, None] * config.rope_theta**-dims
    return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, config: LlamaShape) -> Tensor:
    """x [b, s, d], normed."""
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), config.rms_norm_eps)


def rotate(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (i, i + e/2) of x [b, h, s, e] by the angle of their position."""
    cos, sin = (part.to(x.dtype) for part in angles)  # autocast makes q and k of less precision than x
    one, two = x.chunk(2, dim=-1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], dim=-1)


def whole_model(config: LlamaShape, num_layers: int, attend: Attend = causal_attention) -> PlainStage:
    """All layers with both ends: tokens [b, s] in, logits [b, s, v] out."""
    return PlainStage(config, num_layers, embed=True, head=True, attend=attend)
