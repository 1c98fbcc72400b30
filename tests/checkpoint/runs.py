"""Whole training runs inside a pool's workers, and what they leave behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nanotron.checkpoint.read import load
from nanotron.checkpoint.write import Saver
from nanotron.config import Config, get_config_from_dict
from nanotron.data.tokenize.prepare import may_stream
from nanotron.parallel.mesh import Mesh
from nanotron.training.step import Training
from nanotron.training.topology import has_owners, mesh_axes, parameter_specs
from nanotron.training.trainer import train
from tests.checkpoint.read_checkpoint import read_tensor

KEPT = ("step", "lm_loss", "grad_norm", "lr", "consumed_samples", "consumed_tokens")
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "moe_intermediate_size": 16,
    "router_z_loss_coef": 0.01,
    "bias_update_rate": 0.01,
    "layers": [1, 2],
}
"""Of a ``moe_config`` whose routers keep biases."""
SAMPLES = 12  # of a batch; dp divides it


def values_of(folder: Path | str, layout: tuple[int, int, int] = (1, 1, 1), **changes: Any) -> dict[str, Any]:
    """A tiny run of (dp, tp, pp) in ``folder``; ``changes`` of keys are given as section__key=value."""
    dp, tp, pp = layout
    microbatches = 3 if SAMPLES // dp % 2 else 2  # as few as a run can have that sums over them
    values: dict[str, Any] = {
        "general": {"seed": 3},
        "parallelism": {"dp": dp, "tp": tp, "pp": pp},
        "model": {
            "dtype": "float32",
            "model_config": {
                "is_llama_config": True,
                "hidden_size": 32,
                "num_hidden_layers": 4,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 48,
                "vocab_size": 67,
            },
        },
        "optimizer": {
            "learning_rate_scheduler": {"learning_rate": 1e-2, "lr_warmup_steps": 3, "min_decay_lr": 1e-3},
            "zero_stage": 1,
        },
        "tokens": {
            "sequence_length": 16,
            "micro_batch_size": SAMPLES // dp // microbatches,
            "batch_accumulation_per_replica": microbatches,
            "train_steps": 8,
        },
        "data_stages": [{"name": "only", "start_training_step": 1, "data": {"dataset": None, "seed": 5}}],
        "checkpoints": {"checkpoints_path": str(folder), "checkpoint_interval": 4},
    }
    for name, value in changes.items():
        section, _, key = name.partition("__")
        values[section][key] = value
    return values


def sparse_values_of(folder: Path | str, layout: tuple[int, int, int], ep: int, **changes: Any) -> dict[str, Any]:
    """``values_of`` a model with experts, which ``ep`` replicas share."""
    values = values_of(folder, layout, parallelism__expert_parallel_size=ep, **changes)
    values["model"]["model_config"]["moe_config"] = EXPERTS
    return values


def mesh_of(config: Config, rank: int) -> Mesh:
    """A rank's mesh with the groups that a run creates."""
    mesh = Mesh(mesh_axes(config), rank)
    reductions = {spec.reduce_axes(mesh) for spec in parameter_specs(config).values()}
    mesh.create_groups(reductions, rows=may_stream(config), owners=has_owners(config))
    return mesh


def run(rank: int, world: int, values: dict[str, Any], store: Any = None) -> int:
    """Train in this worker as one rank; returns the exit code. Ranks agree through the default group's store."""
    import torch.distributed as dist

    config = get_config_from_dict(values)
    mesh = mesh_of(config, rank)
    store = store or (dist.distributed_c10d._get_default_store() if world > 1 else None)
    return train(config, mesh, torch.device("cpu"), store=store)


def save_again(rank: int, world: int, values: dict[str, Any], source: str, target: str) -> list[str]:
    """Load a checkpoint into a run of some layout and save it at once, untrained."""
    import torch.distributed as dist

    config = get_config_from_dict(values)
    mesh = mesh_of(config, rank)
    training = Training(config, mesh, torch.device("cpu"))
    load(source, training.state_shards())
    saver = Saver(target, rank, world, dist.distributed_c10d._get_default_store() if world > 1 else None)
    saver.save(1, list(training.state_shards()), {})
    saver.wait()
    return saver.poll()


def metrics_of(folder: Path | str) -> list[dict[str, Any]]:
    """What each step said, at full precision, without what a clock measured."""
    lines = (json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines())
    return [{key: line[key] for key in KEPT} for line in lines]


def tensors_of(checkpoint: Path | str) -> dict[str, np.ndarray[Any, Any]]:
    """Every global tensor of a checkpoint, put together."""
    index = json.loads(Path(checkpoint, "index.json").read_text())
    return {name: read_tensor(Path(checkpoint), tensor) for name, tensor in index["tensors"].items()}


def different(a: Path | str, b: Path | str) -> list[str]:
    """Names of the global tensors that are not the same, bit for bit, in two checkpoints."""
    first, second = tensors_of(a), tensors_of(b)
    return [name for name in first.keys() | second.keys() if not np.array_equal(first.get(name), second.get(name))]
