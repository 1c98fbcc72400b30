"""Ours, on any layout: the trainer's own Training, driven as the trainer drives it, without files and logs."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from bench.serve import options, prepare, serve
from bench.shapes import BETAS, CLIP, EPS, LEARNING_RATE, WEIGHT_DECAY, Shape
from bench.work import microbatches
from nanotron.batch import Batch
from nanotron.config import Config, get_config_from_dict
from nanotron.data.context import ContextCut
from nanotron.launch.place import FreedMemory, keep_freed_memory
from nanotron.ops.kernels import Kernels
from nanotron.parallel.mesh import Mesh
from nanotron.training.step import Training
from nanotron.training.topology import mesh_axes, parameter_specs

MODEL = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "rms_norm_eps",
    "rope_theta",
]
"""The fields of the shape that are keys of the model's config."""


def config_of(asked: dict[str, Any]) -> Config:
    """The config that a user would write; the contender's own keys (``config``, by dotted name) come last."""
    shape, layout = Shape(**asked["shape"]), {"dp": 1, "tp": 1, "pp": 1, **asked.get("layout", {})}
    values: dict[str, Any] = {
        "parallelism": layout,
        "model": {"dtype": asked["dtype"], "model_config": {key: asdict(shape)[key] for key in MODEL}},
        "tokens": {
            "sequence_length": shape.sequence_length,
            "micro_batch_size": shape.micro_batch_size,
            "batch_accumulation_per_replica": shape.num_microbatches // layout["dp"],
        },
        "optimizer": {
            "optimizer_factory": {"adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_eps": EPS},
            "weight_decay": WEIGHT_DECAY,
            "clip_grad": CLIP,
            "learning_rate_scheduler": {"learning_rate": LEARNING_RATE},
        },
    }
    if shape.num_experts:
        names = ("num_experts", "top_k", "moe_intermediate_size")
        moe = {name: getattr(shape, name) for name in names} | {"normalize_top_k": True, "router_aux_loss_coef": 0}
        values["model"]["model_config"] |= {"is_qwen3_config": True, "moe_config": moe}
    for key, value in asked.get("config", {}).items():
        *sections, name = key.split(".")
        section = values
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return get_config_from_dict(values)


def trainer_of(asked: dict[str, Any]) -> tuple[Training, list[Batch]]:
    """The trainer with its initial weights, and this rank's share of the batch; process groups exist already."""
    config = config_of(asked)
    mesh = Mesh()
    if config.parallelism.world_size > 1:
        mesh = Mesh(mesh_axes(config), dist.get_rank())
        mesh.create_groups({spec.reduce_axes(mesh) for spec in parameter_specs(config).values()})
    shape = Shape(**asked["shape"])
    size = (shape.micro_batch_size, shape.sequence_length)
    positions = torch.arange(shape.sequence_length).expand(size)
    held, spans = ContextCut(mesh, config.parallelism.cp_mode).of(size, None)
    share = microbatches(shape, mesh.coord("dp"), mesh.size("dp"))
    batches = [
        Batch(tokens[:, held], labels[:, held], positions[:, held], spans) for tokens, labels in share
    ]  # the tokens of each row that this rank holds
    kernels: Kernels | None = None if asked.get("onednn", True) else "cpu"  # products by MKL
    training = Training(config, mesh, "cpu", kernels=kernels)
    training.initialize()
    return training, batches


def main() -> None:
    asked = options()
    imported = prepare(asked["threads"], batch_policy=asked["batch_policy"])
    keep_freed_memory()  # as nanotron.launch does on a CPU
    if int(os.environ["WORLD_SIZE"]) > 1:
        dist.init_process_group("gloo")
    training, batches = trainer_of(asked)
    update, freed_memory = 0, FreedMemory()

    def step() -> float:
        nonlocal update
        update += 1
        loss = training.step(update, batches).read().lm_loss
        freed_memory.after_step()
        return loss

    serve(step, imported)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
