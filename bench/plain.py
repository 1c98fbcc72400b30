"""A Llama stage in plain PyTorch, as a user of torch.distributed.pipelining would write it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanotron.config.model import ModelConfig
from nanotron.layers import Rotary
from nanotron.models.rotary import rotary_frequencies


class PlainBlock(nn.Module):
    """Attention and SwiGLU, pre-norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, head = config.hidden_size, config.head_dim
        self.config = config
        self.q = nn.Linear(hidden, config.num_attention_heads * head, bias=False)
        self.kv = nn.Linear(hidden, 2 * config.num_key_value_heads * head, bias=False)
        self.out = nn.Linear(config.num_attention_heads * head, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, hidden, bias=False)
        self.norms = nn.ParameterList([torch.ones(hidden), torch.ones(hidden)])

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        y = self._norm(x, 0)
        q = self.q(y).unflatten(-1, (-1, self.config.head_dim))  # [b, s, h, e]
        k, v = self.kv(y).unflatten(-1, (2, -1, self.config.head_dim)).unbind(2)  # 2 × [b, s, kv, e]
        q, k, v = (part.transpose(1, 2) for part in (rotary(q), rotary(k), v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)  # [b, h, s, e]
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self._norm(x, 1)).chunk(2, dim=-1)
        y: Tensor = self.down(F.silu(gate) * up)
        return x + y

    def _norm(self, x: Tensor, index: int) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.norms[index], self.config.rms_norm_eps)


class PlainStage(nn.Module):
    """Some blocks, with the embedding or the head where they belong: tokens or [b, s, d] in, [b, s, d] or logits."""

    def __init__(self, config: ModelConfig, num_layers: int, *, embed: bool, head: bool) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size) if embed else None
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(num_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False) if head else None
        self.frequencies = rotary_frequencies(config, torch.float32, "cpu")

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        positions = torch.arange(x.shape[1]).expand(x.shape[:2])
        rotary = Rotary(positions, self.frequencies, x.dtype, interleaved=False)
        for block in self.blocks:
            x = block(x, rotary)
        return x if self.head is None else self.head(F.rms_norm(x, (x.shape[-1],)))
