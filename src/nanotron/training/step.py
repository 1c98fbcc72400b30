"""One rank's share of a run, and the training step: from microbatches to updated weights.

feed ─► count targets ─► pipeline (F, B, W of all microbatches; full buckets leave meanwhile) ─► late reductions
     ─► the control word: one all-reduce over the world ─► clipped, guarded update of 1/dp ─► weights gathered
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nanotron.batch import IGNORED_LABEL, Batch
from nanotron.checkpoint.format import StateShard
from nanotron.models.specs import ROUTER_LOSSES, loss_names
from nanotron.ops.kernels import Kernels
from nanotron.optim.lr import learning_rate
from nanotron.parallel.comm import AsyncHandle, begin_all_reduce_
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import draw
from nanotron.pipeline.engine import Pipeline
from nanotron.training.balance import ExpertBalance
from nanotron.training.build import build_buckets, build_chunks, build_optimizer, chunk_options
from nanotron.training.control import ControlWord
from nanotron.training.diagnostics import diagnostics_of
from nanotron.training.replicas import Replicas
from nanotron.training.topology import modules_of_ranks, parameter_specs, pipeline_schedule

if TYPE_CHECKING:
    from nanotron.config import Config


class Training:
    """The model chunks of one rank with everything that moves them; knows nothing of files or logs."""

    def __init__(
        self, config: Config, mesh: Mesh, device: torch.device | str, *, kernels: Kernels | None = None
    ) -> None:
        """``kernels``: who computes matmuls and attention; None: what is fastest on the device."""
        self._config, self._mesh = config, mesh
        stages = modules_of_ranks(config)[mesh.coord("pp")]
        options = replace(chunk_options(config, device), kernels=kernels, without_storage=True)
        self.chunks = build_chunks(config, mesh, stages, options)
        self.buckets = build_buckets(config, mesh, self.chunks)
        self.optimizer = build_optimizer(config, self.buckets, mesh)
        self.balance = ExpertBalance(config, mesh, self.chunks)
        self.replicas = Replicas(config, mesh, self.buckets, self.optimizer, self.balance)
        self.pipeline = Pipeline(
            self.chunks,
            pipeline_schedule(config),
            mesh,
            hidden_size=config.model.model_config.hidden_size,
            dtype=getattr(torch, config.model.dtype),
            device=torch.device(device),
            sequence_parallel=config.parallelism.sequence_parallel,
            fills_waits=config.optimizer.zero_stage < 2,
        )

    def initialize(self) -> None:
        """Draw the initial weights, the same on every layout."""
        specs, seed, threads = parameter_specs(self._config), self._config.general.seed, torch.get_num_threads()
        for shard in self._weights():
            shard.tensor.copy_(torch.from_numpy(draw(specs[shard.name], shard.box, seed, threads=threads)))
        self.optimizer.load_masters_from_weights()

    def step(
        self, update: int, microbatches: Sequence[Batch], *, save: bool = False, stop: bool = False
    ) -> ControlWord:
        """Make update number ``update`` (from 1) with this replica's microbatches; the result need not be read at once.

        ``save`` and ``stop`` tell all ranks, through the control word, what this rank was asked for.
        """
        num_targets = cache(begin_to_count_targets(microbatches, self._mesh))
        diagnostics = diagnostics_of(update, self._config, self._mesh, self.pipeline, self.chunks)
        self.buckets.start(len(microbatches), sequence_length=microbatches[0].tokens.shape[1])
        with diagnostics.watching(microbatches) if diagnostics else nullcontext():
            losses = self.pipeline.run(microbatches, lambda: 1.0 / num_targets().clamp(min=1))
        self.buckets.finish()
        names = loss_names(self._config.model.model_config)
        vectors = self.balance.vectors(self.pipeline.metrics) | self.replicas.vectors(update)
        word = ControlWord(self.buckets.squared_norm(), self._counted(losses), names, vectors, save=save, stop=stop)
        word.reduce(self._mesh, num_targets())
        if diagnostics:
            diagnostics.before_update(self.optimizer)
        lr = learning_rate(self._config.optimizer.learning_rate_scheduler, update)
        self.optimizer.step(lr, word.grad_scale(self._config.optimizer.clip_grad), word.found_inf())
        self.balance.move_biases(word)
        if diagnostics:
            diagnostics.after_update()
            word.diagnostics = diagnostics
        self.buckets.start_gather()
        return word

    def state_shards(self) -> Iterator[StateShard]:
        """The sharded state dict: all that outlives a step, as boxes of global tensors; weights and optimizer state."""
        yield from self._weights()
        for kind, spec, box, tensor, writes in self.optimizer.state():
            yield StateShard(kind, spec.name, spec.shape, box, tensor, writes)

    def _weights(self) -> Iterator[StateShard]:
        for spec, box, tensor, writes in self.buckets.weights():
            yield StateShard("weight", spec.name, spec.shape, box, tensor, writes)
        yield from self.balance.state()

    def _counted(self, losses: dict[str, Tensor]) -> dict[str, Tensor]:
        """The losses, on one rank of those that hold copies of them: routers may see their own rank's tokens only."""
        if self._mesh.coord("tp") == 0:
            return losses
        own = ROUTER_LOSSES if self._config.parallelism.sequence_parallel else ()
        return {name: loss for name, loss in losses.items() if name in own}


def begin_to_count_targets(microbatches: Sequence[Batch], mesh: Mesh) -> AsyncHandle:
    """The number of valid tokens of the whole global batch; every loss and gradient is divided by it, or by 1.

    It crosses ranks while the last update's weights do, so it is not waited for before the first loss is there.
    """
    count = torch.stack([(batch.labels != IGNORED_LABEL).sum() for batch in microbatches]).sum().double()
    return begin_all_reduce_(count, mesh.group(*mesh.data_parts, purpose="control"))
