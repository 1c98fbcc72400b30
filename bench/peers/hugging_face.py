"""transformers' LlamaForCausalLM, or Qwen3MoeForCausalLM, with its own loss, in a loop without the Trainer's extras."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from bench.peers.loop import in_dtype, training_step
from bench.serve import options, prepare, serve
from bench.shapes import Shape
from bench.work import microbatches


def build(shape: Shape, experts: str | None) -> PreTrainedModel:
    """The model with transformers' own initial weights; ``experts``: its implementation of them, None is its choice."""
    common = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.sequence_length,
        "rms_norm_eps": shape.rms_norm_eps,
        "tie_word_embeddings": False,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    if not shape.num_experts:
        return LlamaForCausalLM(LlamaConfig(**common)).train()
    config = Qwen3MoeConfig(
        **common,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.top_k,
        moe_intermediate_size=shape.moe_intermediate_size,
        norm_topk_prob=True,
        experts_implementation=experts,
    )
    return Qwen3MoeForCausalLM(config).train()


def main() -> None:
    asked = options()
    imported = prepare(asked["threads"], batch_policy=asked["batch_policy"])
    shape = Shape(**asked["shape"])
    model = build(shape, asked.get("experts"))
    precision = in_dtype(model, asked)
    forward = torch.compile(model) if asked.get("compile") else model

    def loss(tokens: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = forward(input_ids=tokens, labels=labels, shift_labels=labels, use_cache=False).loss
        return found

    serve(training_step(loss, model.parameters(), microbatches(shape), around_forward=precision), imported)


if __name__ == "__main__":
    main()
