"""Small runs whose activations weigh as much as their state."""

from __future__ import annotations

from typing import Any

from nanotron.config import Config, get_config_from_dict

VOCABULARY = 2000


def small(
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    cp_mode: str = "ALL_GATHER",
    schedule: str = "1f1b",
    sequence_parallel: bool = False,
    recompute: bool | str = False,
    zero: int = 1,
    dtype: str = "float32",
    sum_in_fp32: bool = True,
    micro_batch: int = 2,
    accumulation: int = 4,
    layers: int = 4,
    tied: bool = False,
    loss_chunk: int | None = None,
    hidden: int = 256,
    sequence: int = 256,
    window: int | None = None,
    window_layers: list[int] | None = None,
    ep: int = 1,
    experts: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
) -> Config:
    """The config of a layout of a model of 3 million parameters; ``experts``: keys of its moe_config."""
    values: dict[str, Any] = {
        "parallelism": {
            "dp": dp,
            "tp": tp,
            "pp": pp,
            "context_parallel_size": cp,
            "cp_mode": cp_mode,
            "expert_parallel_size": ep,
            "pp_engine": schedule,
            "tp_mode": "REDUCE_SCATTER" if sequence_parallel else "ALL_REDUCE",
            "recompute_layer": recompute,
        },
        "model": {
            "dtype": dtype,
            "loss_chunk": loss_chunk,
            "model_config": {
                "hidden_size": hidden,
                "num_hidden_layers": layers,
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "intermediate_size": 704,
                "vocab_size": VOCABULARY,
                "tie_word_embeddings": tied,
                "sliding_window_size": window,
                "sliding_window_layers": window_layers,
                "moe_config": experts,
            },
        },
        "optimizer": {
            "zero_stage": zero,
            "accumulate_grad_in_fp32": sum_in_fp32,
            "learning_rate_scheduler": {"learning_rate": 1e-3},
            "optimizer_factory": optimizer,
        },
        "tokens": {
            "sequence_length": sequence,
            "micro_batch_size": micro_batch,
            "batch_accumulation_per_replica": accumulation,
            "train_steps": 5,
        },
    }
    return get_config_from_dict(values)
