"""Rotary position embedding (RoPE): how fast each pair of head dims turns, and the angles of a microbatch's positions.

The rotation itself is elementwise: fused.py.
"""

from __future__ import annotations

from math import pi
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig


def rotary_frequencies(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Radians per position of each pair of dims, [head_dim/2]: rope_theta^(−2i/head_dim), then ``rope_scaling``.

    ``linear`` divides all by ``factor`` (arXiv 2306.15595). ``llama3`` divides slow ones by ``factor``, keeps fast
    ones, and interpolates between, judged by full turns within the original context (Llama 3.1, arXiv 2407.21783).
    """
    dims = torch.arange(0, config.head_dim, 2, dtype=dtype, device=device)
    frequencies = config.rope_theta ** (-dims / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    turns = scaling.original_max_position_embeddings * frequencies / (2 * pi)  # full turns within the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)  # 1: fast, kept; 0: slow, divided
    return frequencies * (keep + (1 - keep) / scaling.factor)


class Rotary:
    """Rotary position embedding (arXiv 2104.09864) for one microbatch: the angles of its positions, for all layers.

    positions [b, s]; frequencies [e/2], one per pair of dims; ``interleaved`` pairs dims (2i, 2i+1), else (i, i+e/2).
    """

    def __init__(self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype, *, interleaved: bool) -> None:
        angles = positions[..., None].to(frequencies.dtype) * frequencies  # [b, s, e/2]
        self.cos, self.sin = angles.cos().to(dtype)[:, :, None], angles.sin().to(dtype)[:, :, None]  # [b, s, 1, e/2]
        self.interleaved = interleaved
