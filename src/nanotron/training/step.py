"""One rank's share of a run, and the training step: from microbatches to updated weights.

feed ─► count targets ─► pipeline (F, B, W of all microbatches; full buckets leave meanwhile) ─► late reductions
     ─► the control word: one all-reduce over the world ─► clipped, guarded update of 1/dp ─► weights gathered
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nanotron.batch import IGNORED_LABEL, Batch
from nanotron.checkpoint.format import Piece
from nanotron.models.decoder import Llama
from nanotron.models.specs import loss_names
from nanotron.ops.fused import Fuse, as_written, fused
from nanotron.optim.buckets import Buckets
from nanotron.optim.lr import learning_rate
from nanotron.optim.optimizer import SGD, AdamW, Optimizer
from nanotron.parallel.comm import Arrival, begin_all_reduce_
from nanotron.parallel.mesh import Mesh
from nanotron.pipeline.engine import Pipeline
from nanotron.training.control import ControlWord
from nanotron.training.diagnostics import details_of
from nanotron.training.topology import layers_of_stages, parameter_specs, pipeline_schedule, tied_stages

if TYPE_CHECKING:
    from nanotron.config import Config


class Training:
    """The model chunks of one rank with everything that moves them; knows nothing of files or logs."""

    def __init__(self, config: Config, mesh: Mesh, device: torch.device | str) -> None:
        self._config, self._mesh = config, mesh
        fuse = fused if config.model.compile else as_written
        self.chunks = build_chunks(config, mesh, held_by(config, mesh.coord("pp")), device, fuse)
        self.buckets = build_buckets(config, mesh, self.chunks)
        self.optimizer = build_optimizer(config, self.buckets)
        self.pipeline = Pipeline(
            self.chunks,
            pipeline_schedule(config),
            mesh,
            hidden_size=config.model.model_config.hidden_size,
            dtype=getattr(torch, config.model.dtype),
            device=torch.device(device),
            sequence_parallel=config.parallelism.sequence_parallel,
        )

    def initialize(self) -> None:
        """Draw the initial weights, the same on every layout."""
        for chunk in self.chunks:
            chunk.initialize(self._config.general.seed)
        self.optimizer.load_masters_from_weights()

    def step(
        self, update: int, microbatches: Sequence[Batch], *, save: bool = False, stop: bool = False
    ) -> ControlWord:
        """Make update number ``update`` (from 1) with this replica's microbatches; the result need not be read at once.

        ``save`` and ``stop`` tell all ranks, through the control word, what this rank was asked for.
        """
        num_targets = cache(begin_to_count_targets(microbatches, self._mesh))
        details = details_of(update, self._config, self._mesh, self.pipeline, self.chunks)
        self.buckets.start(len(microbatches), sequence_length=microbatches[0].tokens.shape[1])
        with details.watching(microbatches) if details else nullcontext():
            losses = self.pipeline.run(microbatches, lambda: 1.0 / num_targets())
        self.buckets.finish()
        names = loss_names(self._config.model.model_config)
        word = ControlWord(self.buckets.squared_norm(), self._counted(losses), names, save=save, stop=stop)
        word.reduce(self._mesh, num_targets())
        if details:
            details.before_update(self.optimizer)
        lr = learning_rate(self._config.optimizer.learning_rate_scheduler, update)
        self.optimizer.step(lr, word.grad_scale(self._config.optimizer.clip_grad), word.found_inf())
        if details:
            details.after_update()
            word.details = details
        self.buckets.start_gather()
        return word

    def pieces(self) -> Iterator[Piece]:
        """All state that outlives a step, as boxes of global tensors: weights and optimizer state."""
        self.buckets.wait_gather()
        slots = [(bucket, slot) for bucket in self.buckets.all for slot in bucket.slots]
        for index, (bucket, slot) in enumerate(slots):
            mine = index % bucket.replicas == bucket.replica  # replicas share the writing
            writes = bucket.treatment.counted and mine
            yield Piece("weight", slot.spec.name, slot.spec.shape, slot.box, slot.weight.data, writes)
        for kind, spec, box, tensor, writes in self.optimizer.state():
            yield Piece(kind, spec.name, spec.shape, box, tensor, writes)

    def _counted(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """The losses, on one rank of those that hold copies of them."""
        return losses if self._mesh.coord("tp") == 0 else {}


def begin_to_count_targets(microbatches: Sequence[Batch], mesh: Mesh) -> Arrival:
    """The number of valid tokens of the whole global batch, which every loss and gradient is divided by.

    It crosses ranks while the last update's weights do, so it is not waited for before the first loss is there.
    """
    count = torch.stack([(batch.labels != IGNORED_LABEL).sum() for batch in microbatches]).sum().double()
    arrival = begin_all_reduce_(count, mesh.group(*mesh.data_parts, purpose="control"))
    return lambda: arrival().clamp(min=1)


class Held(NamedTuple):
    """What one chunk holds of the model: layers [lo, hi), and its two ends."""

    layers: tuple[int, int]
    embed: bool
    head: bool


def held_by(config: Config, pp_rank: int) -> list[Held]:
    """What each chunk of a pipeline rank holds."""
    schedule, layers = pipeline_schedule(config), layers_of_stages(config)
    stages = [schedule.placement(pp_rank, index) for index in range(schedule.num_chunks)]
    return [Held(layers[stage], stage == 0, stage == schedule.num_stages - 1) for stage in stages]


def build_chunks(
    config: Config, mesh: Mesh, held: Sequence[Held], device: torch.device | str, fuse: Fuse = as_written
) -> list[Llama]:
    """A rank's chunks; a tied weight whose two ends meet on the rank is one Parameter."""
    specs, layout = parameter_specs(config), config.parallelism
    chunks: list[Llama] = []
    for part in held:
        chunk = Llama(
            config.model.model_config,
            specs,
            mesh,
            layers=part.layers,
            embed=part.embed,
            head=part.head,
            dtype=getattr(torch, config.model.dtype),
            device=device,
            sequence_parallel=layout.sequence_parallel,
            recompute=layout.recompute_layer,
            recompute_allgather=layout.tp_recompute_allgather,
            overlap=bool(layout.tp_linear_async_communication),
            loss_chunk=config.model.loss_chunk,
            fuse=fuse,
            shared={name: weight for other in chunks for name, weight in other.weights.items()},
        )
        chunks.append(chunk)
    return chunks


def build_buckets(config: Config, mesh: Mesh, chunks: Sequence[Llama]) -> Buckets:
    """The flat weights and gradients of a rank's chunks, which become views of them."""
    return Buckets(
        chunks,
        mesh,
        grad_dtype=lambda dtype: _grad_dtype(dtype, in_fp32=config.optimizer.accumulate_grad_in_fp32),
        zero_stage=config.optimizer.zero_stage,
        tied_stages=tied_stages(config),
        cap_bytes=config.model.ddp_bucket_cap_mb << 20,
    )


def _grad_dtype(dtype: torch.dtype, *, in_fp32: bool) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32) if in_fp32 else dtype


def build_optimizer(config: Config, buckets: Buckets) -> Optimizer:
    """The optimizer that the config asks for, on this rank's share of the buckets."""
    factory, weight_decay = config.optimizer.optimizer_factory, config.optimizer.weight_decay
    if factory.name == "sgd":
        return SGD(buckets, weight_decay=weight_decay)
    return AdamW(
        buckets,
        weight_decay=weight_decay,
        beta1=factory.adam_beta1,
        beta2=factory.adam_beta2,
        eps=factory.adam_eps,
    )
