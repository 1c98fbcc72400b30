"""ZeRO stages 2 and 3: gradients, and at stage 3 weights, that are whole only while a block needs them.

A block's matrices, of which each rank keeps its shards, are whole in a tensor that is made for it and dropped; of
either kind there are at most two at a time:

    weights    gather 0 │ compute 0, gather 1 │ compute 1, gather 2 │ …   the next block's arrive meanwhile; in backward
                                                                          those of the block before
    gradients  … │ backward 2 │ backward 1, send 2 │ backward 0, send 1   a block's leave after each microbatch, and are
                                                                          added to the shards when a third is wanted

Weights stay until a third block's are gathered, and need not be gathered again until then. The last gradients are
added to their shards when the next forward comes to its last block, where activations weigh most. All ranks gather and
send in one order: that of the pipeline's program, and within it that of the blocks.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed import Work

from nanotron.ops.chunk import Chunk
from nanotron.ops.weight_grads import add
from nanotron.parallel.comm import start_all_gather, start_reduce_scatter

if TYPE_CHECKING:
    from nanotron.optim.buckets import Bucket

AT_ONCE = 2


@dataclass(eq=False)
class Block:
    """The sharded buckets of one block, which lie one after the other in a buffer."""

    buckets: list[Bucket] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return sum(bucket.numel for bucket in self.buckets)

    def parts(self, flat: Tensor) -> Iterator[tuple[Bucket, Tensor]]:
        """Each bucket with its part of a flat tensor that holds the block."""
        return zip(self.buckets, torch.split(flat, [bucket.numel for bucket in self.buckets]), strict=True)


class WholeWeights:
    """The weights of the blocks that compute now and next (stage 3)."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._arriving: dict[Block, list[Work]] = {}  # of the blocks that are whole, or will be
        self._current: Block | None = None
        self._absent = blocks[0].buckets[0].weight_shard.new_full((), torch.nan)  # who reads what is not there sees it
        for block in blocks:
            self._leave(block)

    def use(self, block: Block, following: Block | None) -> None:
        """Have a block's weights whole, and begin to gather those of the block that comes next."""
        self._gather(block)
        self._current = block
        _wait(self._arriving[block])
        if following is not None:
            self._gather(following)

    def forget(self) -> None:
        """The shards have changed: what was gathered is not the weights any more."""
        self._current = None
        for block in list(self._arriving):
            self._drop(block)

    def _gather(self, block: Block) -> None:
        """Begin to gather a block that is not whole, in place of one that does not compute."""
        if block in self._arriving:
            return
        if len(self._arriving) == AT_ONCE:
            self._drop(next(held for held in self._arriving if held is not self._current))
        works = self._arriving[block] = []
        for bucket, flat in block.parts(self._absent.new_empty(block.numel)):
            work = start_all_gather(flat, bucket.weight_shard, bucket.weight_group)
            works += [work] if work is not None else []
            for slot in bucket.slots:
                slot.weight.data = slot.of(flat)

    def _drop(self, block: Block) -> None:
        _wait(self._arriving.pop(block))
        self._leave(block)

    def _leave(self, block: Block) -> None:
        for bucket in block.buckets:
            for slot in bucket.slots:
                slot.weight.data = self._absent.expand(slot.box.shape)


class WholeGrads:
    """The gradients that blocks add up now, and those on their way to the shards (stages 2 and 3)."""

    def __init__(self, blocks: Sequence[Block], lines: Sequence[Line], summed: set[Tensor]) -> None:
        """``lines``: of each chunk. ``summed``: weights whose place has had a gradient; not those of a new tensor."""
        self._lines, self._summed = lines, summed
        self._arrived = set[Block]()  # in the shards, in this step
        self._like = blocks[0].buckets[0].grad_shard
        self._adding: dict[Block, Tensor] = {}
        self._leaving = deque[tuple[Block, Tensor, list[Work]]]()  # oldest first

    def start(self, microbatches: int, sequence_length: int) -> None:
        """Begin a step of this many microbatches."""
        self._arrived.clear()
        for line in self._lines:
            line.start(microbatches, sequence_length)

    def of(self, block: Block) -> Tensor:
        """What a block's gradients are added to."""
        if block not in self._adding:
            while self._leaving and len(self._adding) + len(self._leaving) >= AT_ONCE:
                self._arrive()
            self._adding[block] = self._like.new_empty(block.numel)
            self._summed.difference_update(slot.weight for bucket in block.buckets for slot in bucket.slots)
        return self._adding[block]

    def contributed(self, chunk: int, block: Block) -> None:
        """Count a contribution, and send the gradients that are complete and next in the chunk's line."""
        for complete in self._lines[chunk].passed(block):
            whole, works = self.of(complete), list[Work]()
            for bucket, flat in complete.parts(whole):
                bucket.clear(flat, self._summed)
                work = start_reduce_scatter(flat[bucket.shard], flat, bucket.gradient_group)
                works += [work] if work is not None else []
            del self._adding[complete]
            self._leaving.append((complete, whole, works))

    def finish(self) -> None:
        """Have all gradients in the shards."""
        for line in self._lines:
            line.finish()
        self.settle()

    def settle(self) -> None:
        """Add all that has left to its shards."""
        while self._leaving:
            self._arrive()

    def _arrive(self) -> None:
        """Add what left first to its shards."""
        block, whole, works = self._leaving.popleft()
        _wait(works)
        for bucket, flat in block.parts(whole):
            add(bucket.grad_shard, flat[bucket.shard], block not in self._arrived)
        self._arrived.add(block)


class Line:
    """In which order a chunk's blocks send their gradients, whatever the order in which these come."""

    def __init__(self, chunk: Chunk, blocks: Mapping[str, Block]) -> None:
        """``blocks``: of the weights' names."""
        self._chunk, self._blocks = chunk, blocks

    def start(self, microbatches: int, sequence_length: int) -> None:
        """Begin a step."""
        self._needed: list[tuple[Block, int]] = []  # in the order of backward: contributions of a microbatch
        for use in reversed(self._chunk.uses(sequence_length)):
            for block, weights in Counter(self._blocks[name] for name in use.names if name in self._blocks).items():
                self._needed.append((block, weights * use.contributions))
        self._arrived = Counter[Block]()
        self._passed, self._all = 0, microbatches * len(self._needed)

    def passed(self, block: Block) -> Iterator[Block]:
        """Count a contribution to a block; the blocks whose turn has come."""
        self._arrived[block] += 1
        while self._passed < self._all:
            block, needed = self._needed[self._passed % len(self._needed)]
            if self._arrived[block] < needed:
                return
            self._arrived[block] -= needed
            self._passed += 1
            yield block

    def finish(self) -> None:
        """Complain if a gradient is missing."""
        if self._passed < self._all:
            block, _ = self._needed[self._passed % len(self._needed)]
            raise AssertionError(f"{block.buckets[0].slots[0].spec.name}…: gradients never came")


def _wait(works: list[Work]) -> None:
    for work in works:
        work.wait()
    works.clear()
