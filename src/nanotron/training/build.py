"""From a config to what a rank trains: its model chunks, the buckets of their weights, the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from nanotron.models.decoder import ChunkOptions, DecoderChunk
from nanotron.models.families import family_of
from nanotron.models.specs import StageModules
from nanotron.ops.chunk import Chunk
from nanotron.ops.fp8 import multiplier_of
from nanotron.ops.fused import eager, fused
from nanotron.optim.buckets import Buckets
from nanotron.optim.optimizer import SGD, AdamW, Optimizer, Rule
from nanotron.parallel.mesh import Mesh
from nanotron.training.topology import parameter_specs, tied_stages

if TYPE_CHECKING:
    from nanotron.config import Config


def chunk_options(config: Config, device: torch.device | str) -> ChunkOptions:
    """How the run's chunks compute."""
    layout, dtype = config.parallelism, getattr(torch, config.model.dtype)
    return ChunkOptions(
        dtype=dtype,
        device=device,
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute_layer,
        recompute_offload=layout.recompute_offload,
        recompute_allgather=layout.tp_recompute_allgather,
        overlap=bool(layout.tp_linear_async_communication),
        loss_chunk=config.loss_chunk,
        context_mode=layout.cp_mode,
        fuse=fused if config.model.compile is True else eager,
        fp8=multiplier_of(device, dtype) if config.model.fp8 else None,
    )


def build_chunks(
    config: Config, mesh: Mesh, stages: Sequence[StageModules], options: ChunkOptions
) -> list[DecoderChunk]:
    """A rank's chunks; a tied weight whose two ends meet on the rank is one Parameter."""
    model, specs = config.model.model_config, parameter_specs(config)
    family = family_of(model)
    kinds, chunks = family.layer_kinds(model), list[DecoderChunk]()
    for modules in stages:
        shared = {name: weight for chunk in chunks for name, weight in chunk.weights.items()}
        chunks.append(family.chunk()(model, specs, mesh, modules, options, kinds=kinds, shared=shared))
    return chunks


def build_buckets(config: Config, mesh: Mesh, chunks: Sequence[Chunk]) -> Buckets:
    """The flat weights and gradients of a rank's chunks, which become views of them."""
    return Buckets(
        chunks,
        mesh,
        grad_dtype=partial(grad_dtype, config),
        zero_stage=config.optimizer.zero_stage,
        tied_stages=tied_stages(config),
        cap_bytes=config.model.ddp_bucket_cap_mb << 20,
    )


def grad_dtype(config: Config, dtype: torch.dtype) -> torch.dtype:
    """What gradients of weights of a dtype accumulate in: float32 at least, or the same (accumulate_grad_in_fp32)."""
    return torch.promote_types(dtype, torch.float32) if config.optimizer.accumulate_grad_in_fp32 else dtype


def build_optimizer(config: Config, buckets: Buckets, mesh: Mesh) -> Optimizer:
    """The optimizer that the config asks for, on this rank's share of the buckets."""
    factory, rules = config.optimizer.optimizer_factory, dict[str, Rule](sgd=SGD())
    if factory.name != "sgd":
        rules["adamW"] = AdamW(beta1=factory.adam_beta1, beta2=factory.adam_beta2, eps=factory.adam_eps)
    if factory.name == "muon":
        from nanotron.optim.muon import Muon

        rules["muon"] = Muon(
            mesh,
            momentum=factory.muon_momentum,
            nesterov=factory.muon_nesterov,
            ns_steps=factory.muon_ns_steps,
            scale=factory.muon_scale,
            ns_dtype=getattr(torch, factory.muon_ns_dtype),
        )
    home = torch.device("cpu") if config.optimizer.offload else None
    return Optimizer(buckets, rules, ema_decay=config.optimizer.ema_decay, home=home)
