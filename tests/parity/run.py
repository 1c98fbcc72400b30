"""One case through the trainer's own pieces: what every rank does, and what is kept for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nanotron.batch import IGNORED_LABEL, Batch, document_spans
from nanotron.config import Config, get_config_from_dict
from nanotron.data.context import ContextCut
from nanotron.data.feed import Feed
from nanotron.parallel.mesh import Mesh
from nanotron.parallel.params import Box
from nanotron.training.replicas import SECTION
from nanotron.training.step import Training
from nanotron.training.topology import has_owners, mesh_axes, parameter_specs, pipeline_schedule, tied_stages
from tests.parity.cases import OPTIMIZERS, ROUTERS, ROWS, Case
from tests.parity.routes import near_ties
from tests.pool import Pool

VOCABULARY = 257
StateShard = tuple[str, tuple[int, ...], Box, Tensor]


class Trained(NamedTuple):
    """What one rank saw: numbers of every step, its parts of the first gradients and of the last weights."""

    losses: dict[str, list[float]]
    grad_norm: list[float]
    loads: list[list[list[float]]]
    gaps: list[list[float]]
    first_grads: list[StateShard]
    weights: list[StateShard]


@dataclass
class Record:
    """What a run did: a number per step, and tensors by global name (whole, whatever the layout was)."""

    losses: dict[str, list[float]]
    """By the model's name for each."""
    grad_norm: list[float]
    loads: list[list[list[float]]]
    """[steps][layers that have experts][experts]: tokens."""
    gaps: list[list[float]]
    """[steps][layers that have experts]: how close the routers came to another choice (routes.py)."""
    first_grads: dict[str, Tensor]
    weights: dict[str, Tensor]
    """After the last step."""

    @property
    def lm_loss(self) -> list[float]:
        return self.losses["lm"]


def config_of(case: Case) -> Config:
    """The config file that a user would write for this case."""
    return get_config_from_dict(
        {
            "general": {"seed": 11},
            "parallelism": {
                "dp": case.dp,
                "tp": case.tp,
                "pp": case.pp,
                "context_parallel_size": case.cp,
                "cp_mode": case.cp_mode,
                "expert_parallel_size": case.ep,
                "dp_shard": case.dp_shard,
                "pp_engine": case.schedule,
                "tp_mode": case.tp_mode,
                "recompute_layer": case.recompute_layer,
                "tp_recompute_allgather": case.tp_recompute_allgather,
                "tp_linear_async_communication": case.overlap,
                "pp_layers": list(case.pp_layers) if case.pp_layers else None,
            },
            "model": {
                "dtype": case.dtype,
                "fp8": "block128" if case.fp8 else None,
                "compile": case.compile,
                "loss_chunk": case.loss_chunk,
                "init_method": {"use_mup": case.mup},
                "model_config": {
                    f"is_{case.family}_config": True,
                    "num_hidden_layers": case.layers,
                    **(IN_BLOCKS if case.fp8 else SIZES),
                    "vocab_size": VOCABULARY,
                    "tie_word_embeddings": case.tied,
                    "z_loss_enabled": case.z_loss,
                    "z_loss_coefficient": 1e-2,
                    "sliding_window_size": case.window,
                    "sliding_window_layers": list(case.window_layers) if case.window_layers else None,
                    "moe_config": moe_config(case),
                    **FAMILIES.get(case.family, {}),
                },
            },
            "optimizer": {
                "zero_stage": case.zero_stage,
                "accumulate_grad_in_fp32": case.accumulate_in_fp32,
                **OPTIMIZERS[case.optimizer],
                "learning_rate_scheduler": {"learning_rate": 3e-3, "lr_warmup_steps": 4},
            },
            "tokens": {
                "sequence_length": case.length,
                "micro_batch_size": case.micro_batch_size,
                "global_batch_size": ROWS,
                "batch_ramp": [{"global_batch_size": case.ramp, "steps": 1}] if case.ramp else [],
                "train_steps": case.steps,
            },
            "data_stages": [{"name": "random", "start_training_step": 1, "data": {"dataset": None}}],
        }
    )


SIZES = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128}
IN_BLOCKS = {
    "hidden_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 256,
}
"""Each side of a matrix is a multiple of 128, also on one of two tensor-parallel ranks."""

FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "num_key_value_heads": None,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 8, "mscale_all_dim": 1},
    }
}
"""Keys of the model that a family has, or sees otherwise."""


def moe_config(case: Case) -> dict[str, Any] | None:
    """Small experts, of which each token uses two, and losses large enough to show."""
    if not case.experts:
        return None
    common = {"num_experts": case.experts, "moe_intermediate_size": 32, "router_aux_loss_coef": 0.1}
    widths = {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 256} if case.fp8 else {}
    return common | ROUTERS[case.router] | widths


def microbatches_of(feed: Feed, update: int, case: Case, mesh: Mesh) -> list[Batch]:
    """A step's microbatches as walks, of which a context-parallel rank holds its part."""
    return [cut(to_walk(batch, case), case, mesh) for batch in feed.step(update).microbatches]


def feed_of(config: Config, mesh: Mesh) -> Feed:
    """The replica's whole rows."""
    whole = Mesh({"dp": mesh.num_replicas}, mesh.replica)
    return Feed(config, whole, device=torch.device("cpu"))


def to_walk(batch: Batch, case: Case) -> Batch:
    """Turn random tokens into walks of steps 1 to 3, which can be learnt, with targets missing unevenly over rows.

    With documents, one begins wherever the random token says so, and the walk goes on.
    """
    window = torch.cat([batch.tokens[:, :1], batch.labels], dim=1)  # [b, s+1]
    walk = (window[:, :1] + (1 + window % 3).cumsum(1)) % VOCABULARY
    missing = window[:, 1:] % 4 < window[:, :1] % 4  # none of the targets in some rows, most of them in others
    tokens, labels = walk[:, :-1].contiguous(), walk[:, 1:].masked_fill(missing, IGNORED_LABEL)
    if not case.documents:
        return Batch(tokens, labels, batch.positions)
    index = torch.arange(tokens.shape[1]).expand_as(tokens)
    doc_starts = index.where(window[:, :-1] % 9 == 0, torch.zeros_like(index)).cummax(1).values
    spans = document_spans([row.unique().tolist() for row in doc_starts], tokens.shape[1])
    return Batch(tokens, labels, index - doc_starts, spans)


def cut(batch: Batch, case: Case, mesh: Mesh) -> Batch:
    """The part of each row that this rank holds."""
    rows = [[span.q_lo for span in row for _ in range(span.q_lo, span.q_hi)] for row in batch.spans or ()]
    held, spans = ContextCut(mesh, case.cp_mode).of(batch.tokens.shape, np.array(rows) if rows else None)
    tokens, labels, positions = (part[:, held].contiguous() for part in batch[:3])
    return Batch(tokens, labels, positions, spans)


def train(rank: int, world: int, case: Case, check_copies: bool = True) -> Trained:
    """This rank's part of the case."""
    torch.use_deterministic_algorithms(True)  # which also fills new tensors with nan: reading one would show
    config = config_of(case)
    config = replace(config, general=replace(config.general, replica_check_interval=1 if check_copies else None))
    mesh = Mesh(mesh_axes(config), rank)
    assert mesh.world == world
    training = prepare(config, mesh)
    feed = feed_of(config, mesh)
    first_grads: list[StateShard] = []
    capture_before_update(training, first_grads)
    outcomes, gaps, sparse_layers = [], [], config.model.model_config.sparse_layers
    with near_ties(training) as ties:
        for update in range(1, case.steps + 1):
            outcomes.append(training.step(update, microbatches_of(feed, update, case, mesh)).read())
            gaps.append(ties.take(sparse_layers))
            assert not training.replicas.differences(outcomes[-1].vectors.get(SECTION, ())), "copies differ"
    assert not training.replicas.compare(), "copies differ"
    feed.close()
    torch.use_deterministic_algorithms(False)  # the process serves other tests too
    weights = [
        (piece.name, piece.shape, piece.box, piece.tensor.detach().clone())
        for piece in training.state_shards()
        if piece.kind == "weight"
    ]
    return Trained(
        {name: [outcome.losses[name] for outcome in outcomes] for name in outcomes[0].losses},
        [outcome.grad_norm for outcome in outcomes],
        [
            np.reshape(outcome.vectors.get("load", []), (len(sparse_layers), case.experts)).tolist()
            for outcome in outcomes
        ],
        gaps,
        first_grads,
        weights,
    )


def prepare(config: Config, mesh: Mesh) -> Training:
    """Groups, model and initial weights, as the trainer sets them up."""
    if mesh.world > 1:
        mesh.create_groups(
            {spec.reduce_axes(mesh) for spec in parameter_specs(config).values()},
            tied_stages=[stage for stages in tied_stages(config).values() for stage in stages],
            edges=pipeline_schedule(config).edges,
            owners=has_owners(config),
        )
    training = Training(config, mesh, "cpu")
    training.initialize()
    return training


def capture_before_update(training: Training, found: list[StateShard]) -> None:
    """Keep the first step's gradients, as the optimizer gets them: fully summed, not yet clipped."""
    update = training.optimizer.step

    def capture(*args: Any, **options: Any) -> None:
        if not found:
            found.extend(gradient_pieces(training))
        update(*args, **options)

    training.optimizer.step = capture  # type: ignore[method-assign]


def gradient_pieces(training: Training) -> Iterator[StateShard]:
    for bucket in training.buckets.all:
        for spec, box, view in bucket.boxes(bucket.grad_shard, bucket.shard):
            yield spec.name, spec.shape, box, view.clone()


def record(pool: Pool, case: Case, function: Callable[..., Trained] = train, *args: Any) -> Record:
    """Run a case on its ranks and put its tensors together."""
    ranks = pool.run(case.world, function, case, *args, timeout=300.0)
    first = ranks[0]
    assert all(rank[:3] == first[:3] for rank in ranks), "ranks know different numbers"
    return Record(
        first.losses,
        first.grad_norm,
        first.loads,
        [np.min(of_ranks, axis=0).tolist() for of_ranks in zip(*(rank.gaps for rank in ranks), strict=True)],
        put_together([piece for rank in ranks for piece in rank.first_grads]),
        put_together([piece for rank in ranks for piece in rank.weights]),
    )


def put_together(pieces: list[StateShard]) -> dict[str, Tensor]:
    """Whole tensors by name from their parts; parts that several ranks hold must be equal in every bit."""
    wholes: dict[str, Tensor] = {}
    for name, shape, box, part in pieces:
        whole = wholes.setdefault(name, torch.full(shape, torch.nan, dtype=part.dtype))
        held = whole[box.slices()]
        assert torch.equal(part.where(held.isnan(), held), part), f"{name}: two ranks hold different copies"
        whole[box.slices()] = part
    for name, whole in wholes.items():
        assert not whole.isnan().any(), f"{name}: a part is missing, or not a number"
    return wholes
