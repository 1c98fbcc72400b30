"""The loss that AdamW and Muon reach on the embedded corpus with the same tokens, at five learning rates each.

    python -m bench.optimizers [--steps N]

One process and one thread; every run trains the same model from the same weights on the same rows, so nothing but the
update differs, and no loss depends on what else the machine does. docs/optimizers.md has the table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from nanotron.config import get_config_from_dict
from nanotron.data.tokenize.prepare import prepare_data
from nanotron.parallel.mesh import Mesh
from nanotron.training.trainer import train

RATES = (1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
LAST = 20  # steps whose mean loss counts


def main() -> None:
    """Print the table, a row at a time."""
    parser = argparse.ArgumentParser(prog="python -m bench.optimizers")
    parser.add_argument("--steps", type=int, default=120, help="updates of each run (120)")
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    print("| learning rate | " + " | ".join(f"{rate:g}" for rate in RATES) + " |")
    print("|---|" + "---|" * len(RATES))
    for name in ("adamW", "muon"):
        losses = [loss_of(name, rate, steps) for rate in RATES]
        best = min(losses)
        cells = (f"**{loss:.3f}**" if loss == best else f"{loss:.3f}" for loss in losses)
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def loss_of(name: str, rate: float, steps: int) -> float:
    """The mean training loss of a run's last steps; rows are seen once, so it is of unseen text."""
    with tempfile.TemporaryDirectory() as folder:
        config = get_config_from_dict(values_of(name, rate, steps, folder))
        prepare_data(config)
        assert train(config, Mesh(), torch.device("cpu")) == 0
        lines = Path(folder, "metrics.jsonl").read_text().splitlines()
    last = [json.loads(line)["lm_loss"] for line in lines[-LAST:]]
    return sum(last) / len(last)


def values_of(name: str, rate: float, steps: int, folder: str) -> dict[str, Any]:
    """A run of 1,024 tokens a step."""
    return {
        "model": {
            "dtype": "float32",
            "model_config": {
                "hidden_size": 128,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 384,
                "vocab_size": 4096,
            },
        },
        "tokens": {
            "sequence_length": 64,
            "micro_batch_size": 16,
            "batch_accumulation_per_replica": 1,
            "train_steps": steps,
        },
        "optimizer": {
            "optimizer_factory": {"name": name},
            "learning_rate_scheduler": {
                "learning_rate": rate,
                "lr_warmup_steps": steps // 10,
                "lr_decay_style": "cosine",
                "min_decay_lr": rate / 10,
            },
        },
        "checkpoints": {"checkpoints_path": folder, "checkpoint_interval": steps + 1, "save_final_state": False},
        "logging": {"iteration_step_info_interval": steps},
    }


if __name__ == "__main__":
    main()
