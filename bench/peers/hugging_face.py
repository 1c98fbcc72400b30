"""transformers' LlamaForCausalLM with its own loss, in a loop without the Trainer's extras."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bench.peers.loop import in_dtype, training_step
from bench.serve import options, prepare, serve
from bench.shapes import Shape
from bench.work import microbatches


def build(shape: Shape) -> LlamaForCausalLM:
    """The model with transformers' own initial weights."""
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_hidden_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        vocab_size=shape.vocab_size,
        max_position_embeddings=shape.sequence_length,
        rms_norm_eps=shape.rms_norm_eps,
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).train()


def main() -> None:
    asked = options()
    prepare(asked["threads"], batch_policy=asked["batch_policy"])
    shape = Shape(**asked["shape"])
    model = build(shape)
    precision = in_dtype(model, asked)
    forward = torch.compile(model) if asked.get("compile") else model

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = forward(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss
        return found

    serve(training_step(loss, model.parameters(), microbatches(shape), around_forward=precision))


if __name__ == "__main__":
    main()
