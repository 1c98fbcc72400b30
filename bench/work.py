"""What the processes of ours and of the peers have in common: the tokens. Needs torch and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.shapes import Shape


def microbatches(shape: Shape, replica: int = 0, replicas: int = 1) -> list[tuple[Tensor, Tensor]]:
    """One replica's share of the batch that every step repeats, as (tokens, labels), each [b, s] int64.

    A label is the next token; all are random, so the loss of an untrained model is about ln(vocabulary).
    """
    assert shape.num_microbatches % replicas == 0, f"{shape.num_microbatches} microbatches for {replicas} replicas"
    rows = shape.num_microbatches * shape.micro_batch_size
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(shape.vocab_size, (rows, shape.sequence_length + 1), generator=generator)
    share = text.chunk(replicas)[replica].split(shape.micro_batch_size)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in share]
