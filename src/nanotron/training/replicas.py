"""Silent corruption: what replicas hold copies of has to be equal in every bit, and checksums tell whether it is.

                         rank 0   rank 1   rank 2   rank 3
    weights, over dp        a        a        a        b       3 of 4 agree: rank 3 is wrong
    moments                 c        c        c        c

A checksum is the sum of all bits taken as whole numbers, so no rounding is forgiven. Each rank fills its own row; added
up over all ranks, in the control word of every ``general.replica_check_interval``-th step and once more before a save,
the rows tell every rank the same. Compared are the copies that dp and cp make: weights, unless these are sharded
(ZeRO-3); moments where nothing shards them (ZeRO-0); of hybrid sharding, the copies of shards. What tp ranks compute
twice, each by itself, is compared over replicas only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nanotron.errors import shorten
from nanotron.launch.alike import named
from nanotron.metrics.record import coordinates
from nanotron.optim.buckets import Buckets
from nanotron.optim.optimizer import Optimizer
from nanotron.parallel.comm import all_reduce_
from nanotron.parallel.mesh import Mesh
from nanotron.training.balance import ExpertBalance
from nanotron.training.host_copy import HostCopy
from nanotron.training.topology import parameter_specs

if TYPE_CHECKING:
    from nanotron.config import Config

WEIGHTS, MOMENTS = "weights", "moments or master weights"
SECTION = "replicas"
"""Of the control word."""


class Difference(NamedTuple):
    """Ranks that should hold the same, and do not."""

    kind: str
    wrong: tuple[int, ...]
    """Those that more than half of the ranks contradict; all of them where there is no such majority."""
    right: tuple[int, ...]


class ReplicasDiffer(Exception):
    """What some rank holds is corrupt, found at a step."""

    def __init__(self, step: int, differences: Sequence[Difference]) -> None:
        super().__init__(f"step {step}: {differences}")
        self._step, self._differences = step, differences

    def lines(self, mesh: Mesh, hosts: Sequence[str]) -> list[str]:
        """What to tell; ``hosts``: each rank's."""
        lines = []
        for kind, wrong, right in self._differences:
            shown = [f"rank {rank} on {hosts[rank]}{coordinates(mesh.seen_by(rank))}" for rank in wrong]
            if right:
                lines += [f"the {kind} of {rank} are not those of {named(right)}, which have copies" for rank in shown]
            else:
                lines.append(f"the {kind} of {' and '.join(shorten(shown))} should be equal; one of them is wrong")
        advice = "memory, a device or a link is at fault there (see `nanotron doctor`): stopping without a save"
        return [*(f"step {self._step}: {line}" for line in shorten(lines)), advice]


class Replicas:
    """The copies that this rank's state has on other ranks."""

    def __init__(
        self, config: Config, mesh: Mesh, buckets: Buckets, optimizer: Optimizer, balance: ExpertBalance
    ) -> None:
        self._mesh, self._buckets, self._optimizer, self._balance = mesh, buckets, optimizer, balance
        self._interval = config.general.replica_check_interval
        wholes = {spec.reduce_axes(mesh) for spec in parameter_specs(config).values()}
        axes = sorted({part for whole in wholes for part in (whole, mesh.shards_and_copies(whole)[1])} - {()})
        self._columns = [(kind, part) for kind in (WEIGHTS, MOMENTS) for part in axes]

    def vectors(self, update: int) -> dict[str, Tensor]:
        """This rank's addend of the control word, in the steps whose word has such a section."""
        due = self._columns and self._interval is not None and update % self._interval == 0
        return {SECTION: self._rows().view(-1)} if due else {}

    def demand_equal(self, step: int, vectors: Mapping[str, Sequence[float]] | None = None) -> None:
        """Raises ReplicasDiffer for what differs now, or did when the step's control word with ``vectors`` was made."""
        differences = self.compare() if vectors is None else self.differences(vectors.get(SECTION, ()))
        if differences:
            raise ReplicasDiffer(step, differences)

    def compare(self) -> list[Difference]:
        """What differs now; a collective that the host waits for."""
        if not self._columns or self._interval is None:
            return []
        self._buckets.wait_gather()
        return self.differences(HostCopy(all_reduce_(self._rows(), self._mesh.world_group())).read())

    def differences(self, numbers: Sequence[float]) -> list[Difference]:
        """What all ranks' rows tell; nothing where they were not asked for."""
        sums = list(zip(numbers[::2], numbers[1::2], strict=True))
        found = list[Difference]()
        for column, (kind, axes) in enumerate(self._columns if numbers else ()):
            for ranks in self._holders[axes]:
                held = {rank: sums[rank * len(self._columns) + column] for rank in ranks}
                if len(set(held.values())) > 1:
                    ((usual, count),) = Counter(held.values()).most_common(1)
                    right = tuple(rank for rank in ranks if held[rank] == usual) if 2 * count > len(ranks) else ()
                    found.append(Difference(kind, tuple(rank for rank in ranks if rank not in right), right))
        return found

    def _rows(self) -> Tensor:
        """[world, columns, 2], float64: of each checksum the lower 32 bits and the upper ones, exact there."""
        device = self._optimizer.updates.device
        mine = {column: torch.zeros((), dtype=torch.int64, device=device) for column in self._columns}
        for kind, axes, flat in self._held():
            if axes:
                mine[kind, axes] += checksum(flat).to(device, non_blocking=True)
        sums = torch.stack([*mine.values()])
        rows = torch.zeros(self._mesh.world, len(sums), 2, dtype=torch.float64, device=device)
        rows[self._mesh.rank] = torch.stack([sums & 0xFFFFFFFF, sums >> 32], dim=1).double()
        return rows

    def _held(self) -> Iterator[tuple[str, tuple[str, ...], Tensor]]:
        """(kind, axes whose ranks have copies, tensor) of all state of this rank."""
        for bucket in self._buckets.all:
            if bucket.weights is None:
                yield WEIGHTS, bucket.copies, bucket.weight_shard
            else:
                yield WEIGHTS, bucket.key.reduce_axes, bucket.weights
        for piece in self._balance.state():
            yield WEIGHTS, self._mesh.data_parts, piece.tensor
        for _, bucket, flat in self._optimizer.flat_state():
            yield MOMENTS, bucket.copies, flat

    @cached_property
    def _holders(self) -> dict[tuple[str, ...], list[tuple[int, ...]]]:
        """By axes: all groups of ranks that hold copies of one another's."""
        everyone = [self._mesh.seen_by(rank) for rank in range(self._mesh.world)]
        axes = {axes for _, axes in self._columns}
        return {part: list(dict.fromkeys(mesh.ranks_along(*part) for mesh in everyone)) for part in axes}


def checksum(flat: Tensor) -> Tensor:
    """The sum of a tensor's bits as whole numbers, modulo 2^64: [] int64, in one pass over it."""
    data = flat.detach().view(-1).view(torch.uint8)
    whole = len(data) // 8 * 8
    return data[:whole].view(torch.int64).sum() + data[whole:].sum()
