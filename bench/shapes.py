"""What everybody trains: the model's shape, the batch, and the optimizer's numbers. Imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass

LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-8, 0.1, 1.0


@dataclass(frozen=True)
class Shape:
    """A Llama and the batch of one step; the names are those of nanotron's and transformers' configs."""

    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    vocab_size: int = 4096
    sequence_length: int = 256
    micro_batch_size: int = 4
    num_microbatches: int = 4
    """Of the whole batch: with more replicas each has fewer."""
    num_experts: int = 0
    """Of every layer, which 0 leaves dense: a Qwen3 whose tokens use ``top_k``, together as wide as the dense MLP."""
    top_k: int = 4
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def moe_intermediate_size(self) -> int:
        """Inner width of an expert."""
        return self.intermediate_size // self.top_k

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the whole batch."""
        return self.num_microbatches * self.micro_batch_size * self.sequence_length


SHAPES = {
    "reference": Shape(),
    "wide": Shape(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
    ),
    "long": Shape(sequence_length=2048, micro_batch_size=1, num_microbatches=2),
    "tiny": Shape(
        hidden_size=32,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        sequence_length=16,
        micro_batch_size=2,
    ),
}
"""By the names that ``--shape`` takes; tiny only shows that everything runs."""
