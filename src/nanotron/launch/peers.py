"""The other ranks of the run: the store through which ranks agree, and the default process group.

The store belongs to the launcher, so it outlives any rank. It holds two facts under ``launch/``: the mistake that some
rank has said (so that no other says it again), and the failures claimed so far (so that every rank's last line can name
the first one). Without peers nothing is stored.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from nanotron.launch import codes
from nanotron.launch.alike import disagreements
from nanotron.launch.failures import KINDS, Failure
from nanotron.launch.place import Place
from nanotron.parallel.agreement import Agreement

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch.distributed import Store  # type: ignore[attr-defined]

    from nanotron.config import Config

CLAIM_WAIT_S = 1.0  # how long a rank that lost a peer waits for that peer's own account
SAY_WAIT_S = 5.0
LEAVE_WAIT_S = 10.0


class Peers:
    """This rank's connection to the others; inert before ``meet`` and in a run of one process."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store: Store | None = None
        self._groups_store: Store | None = None
        self.training_store: Store | None = None
        """Where the trainer's parts agree; None in a run of one process."""

    def meet(self, timeout: timedelta) -> None:
        """Connect to the store that all ranks share."""
        from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

        store, _, _ = next(rendezvous("env://", timeout=timeout))
        store.set_timeout(timeout)
        self._store = PrefixStore("launch", store)
        self._groups_store = PrefixStore("groups", store)
        self.training_store = PrefixStore("training", store)

    def gather(self, backend: str, device: torch.device, timeout: timedelta) -> None:
        """Create the default process group; collective."""
        import torch.distributed as dist

        if self._store is None:
            self.meet(timeout)
        dist.init_process_group(
            backend,
            store=self._groups_store,
            rank=self._place.rank,
            world_size=self._place.world,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )

    def compare(self, config: Config | None, mistakes: list[str], timeout: timedelta) -> list[str]:
        """What is wrong with the ranks' configs, ``mistakes`` being this rank's; the same lines on every rank."""
        place = self._place
        agreement = Agreement("config", place.rank, place.world, self.training_store, timeout_s=timeout.total_seconds())
        lines = disagreements(agreement, place, config, mistakes)
        if lines:
            self._leave_last("config/read")
        return lines

    def _leave_last(self, topic: str) -> None:
        """Keep rank 0, where the store may live, until every rank has come here."""
        assert self._store is not None
        self._store.add(topic, 1)
        deadline = time.monotonic() + LEAVE_WAIT_S
        while self._place.rank == 0 and self._store.add(topic, 0) < self._place.world and time.monotonic() < deadline:
            time.sleep(0.05)

    def agree_on(self, topic: str, value: str) -> str:
        """Rank 0's value, on every rank."""
        if self._store is None:
            return value
        if self._place.rank == 0:
            self._store.set(topic, value)
        return str(self._store.get(topic).decode())

    def disband(self) -> None:
        """Take the process groups down once every rank is done."""
        if self._store is None:
            return
        import torch.distributed as dist

        dist.barrier()
        dist.destroy_process_group()

    # ------------------------------------------------------------ who says what

    def say_once(self, mistake: str) -> int:
        """Print a mistake that several ranks may have found, once for all of them. Returns the exit code."""
        if self._store is None or self._store.add("mistake/finders", 1) == 1:
            print(mistake, file=sys.stderr, flush=True)
            if self._store is not None:
                self._store.set("mistake/said", "1")
        else:  # torchrun ends every rank as soon as one exits, so the one that prints goes first
            self._wait_for("mistake/said", SAY_WAIT_S)
        return codes.USER_MISTAKE

    def mistake_was_said(self) -> bool:
        """Whether some rank ended over a mistake of the user's, which then is what broke this rank's connections."""
        if self._store is None:
            return False
        try:
            return self._store.add("mistake/finders", 0) > 0
        except (RuntimeError, ConnectionError):
            return False

    def claim(self, failure: Failure) -> Failure:
        """Tell the others about a failure, and return the one that came first as far as anybody has told.

        A rank that only lost its peers, or waited for them in vain, first gives them time for their own accounts.
        """
        if self._store is None:
            return failure
        try:
            self._store.compare_set(f"failure/{failure.kind}", "", json.dumps(asdict(failure)))
            if failure.kind in ("peer", "timeout"):
                time.sleep(CLAIM_WAIT_S)
            known = [kind for kind in KINDS if self._store.check([f"failure/{kind}"])]
            return Failure(**json.loads(self._store.get(f"failure/{known[0]}")))
        except (RuntimeError, ConnectionError):  # the launcher is gone, and the store with it
            return failure

    def _wait_for(self, key: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._store is not None and not self._store.check([key]) and time.monotonic() < deadline:
            time.sleep(0.05)
