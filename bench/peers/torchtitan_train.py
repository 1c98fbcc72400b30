"""torchtitan's own entry, `torchtitan.train`, on CPUs: under torchrun with --module (this file) and --config.

torchrun --nproc_per_node=8 -m bench.peers.torchtitan_train --module bench.peers.torchtitan_train --config tiny_llama
"""

from __future__ import annotations

from dataclasses import asdict

from bench.peers.torchtitan_setup import CPUTrainer, trainer_config
from bench.shapes import Shape


def tiny_llama() -> CPUTrainer.Config:
    """What first_step trains of examples/config_tiny_llama.yaml, but for the tied head, which it cannot cut."""
    shape = Shape(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        sequence_length=128,
        num_microbatches=8,
    )
    layout = {"dp": 2, "tp": 2, "pp": 2}
    return trainer_config({"shape": asdict(shape), "dtype": "float32", "layout": layout})


if __name__ == "__main__":
    from torchtitan.train import main  # after torchtitan_setup, which names the device

    main()
