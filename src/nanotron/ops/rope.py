"""Rotary position embedding (RoPE): how fast each pair of head dims turns, and the angles of a microbatch's positions.

The rotation itself is elementwise: fused.py.
"""

from __future__ import annotations

from math import ceil, floor, log, pi
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from nanotron.config.model import ModelConfig, RopeScalingArgs


def rotary_frequencies(config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Radians per position of each pair of e dims, [e/2]: rope_theta^(−2i/e), then ``rope_scaling``.

    ``linear`` divides all by ``factor`` (arXiv 2306.15595). ``llama3`` divides slow ones by ``factor``, keeps fast
    ones, and interpolates between, judged by full turns within the original context (Llama 3.1, arXiv 2407.21783).
    ``yarn`` does so too, and interpolates by the number of the pair (arXiv 2309.00071).
    """
    e = config.rotary_dim
    dims = torch.arange(0, e, 2, dtype=dtype, device=device)
    frequencies = config.rope_theta ** (-dims / e)
    scaling = config.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.rope_type == "linear":
        return frequencies / scaling.factor
    if scaling.rope_type == "yarn":
        first, last = _yarn_pairs(config, scaling)
        keep = ((last - dims / 2) / max(last - first, 0.001)).clamp(0, 1)
        return frequencies * (keep + (1 - keep) / scaling.factor)
    turns = scaling.original_max_position_embeddings * frequencies / (2 * pi)  # full turns within the original context
    keep = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    keep = keep.clamp(0, 1)  # 1: fast, kept; 0: slow, divided
    return frequencies * (keep + (1 - keep) / scaling.factor)


def _yarn_pairs(config: ModelConfig, scaling: RopeScalingArgs) -> tuple[float, float]:
    """The pairs of dims that turn ``beta_fast`` and ``beta_slow`` times within the original context."""

    def pair(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (2 * pi * turns)
        return config.rotary_dim * log(wavelength) / (2 * log(config.rope_theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = floor(first), ceil(last)
    return max(first, 0), min(last, config.rotary_dim - 1)


def rotary_length(config: ModelConfig) -> float:
    """What rotated vectors are multiplied by: under ``yarn``, so that attention stays as sharp as it was, else 1."""
    scaling = config.rope_scaling
    if scaling is None or scaling.rope_type != "yarn":
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def length(scale: float) -> float:
        return 0.1 * scale * log(scaling.factor) + 1

    if scaling.mscale and scaling.mscale_all_dim:
        return length(scaling.mscale) / length(scaling.mscale_all_dim)
    return length(1.0)


class Rotary:
    """Rotary position embedding (arXiv 2104.09864) for one microbatch: the angles of its positions, for all layers.

    positions [b, s]; frequencies [e/2], one per pair of dims; ``interleaved`` pairs dims (2i, 2i+1), else (i, i+e/2).
    Rotated vectors are ``length`` times as long.
    """

    def __init__(
        self, positions: Tensor, frequencies: Tensor, dtype: torch.dtype, *, interleaved: bool, length: float = 1.0
    ) -> None:
        angles = positions[..., None].to(frequencies.dtype) * frequencies  # [b, s, e/2]
        parts = angles.cos() * length, angles.sin() * length
        self.cos, self.sin = (part.to(dtype)[:, :, None] for part in parts)  # 2 × [b, s, 1, e/2]
        self.interleaved = interleaved
