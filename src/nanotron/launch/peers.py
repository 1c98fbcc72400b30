"""The other ranks of the run: the stores through which ranks agree, and the default process group.

    the launcher's store    where the ranks meet, agree on how to start, and tell who failed (roll.py): it outlives any
    the ranks' own store    for all that is agreed on while training; rank 0 holds it, so it outlives the launcher

Without a launcher that has a store, rank 0 holds both. Without peers nothing is stored.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from nanotron.errors import ConfigError, complain
from nanotron.launch import codes
from nanotron.launch.alike import device_problems, disagreements
from nanotron.launch.place import Place, identity_of
from nanotron.launch.roll import STORE_WAIT_S, Roll
from nanotron.parallel.agreement import POLL_S, Agreement
from nanotron.parallel.store import BoundedStore, LostPeers

if TYPE_CHECKING:
    import torch
    from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

    from nanotron.config import Config

SAY_WAIT_S = 5.0
SPARE_LOOK_S = 1.0
OTHERS_WAIT_S = 1.0  # for rank 0 to have said a mistake that every rank found


class Peers:
    """This rank's connection to the others; inert before ``meet`` and in a run of one process."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._store: Store | None = None
        self._groups_store: Store | None = None
        self._said: BoundedStore | None = None
        self._num_spares = 0
        self._agreement = Agreement("launch", 0, 1, None)
        self.roll: Roll | None = None
        self.training_store: Store | None = None
        """Where the trainer's parts agree; None in a run of one process."""

    def meet(self, timeout_s: float) -> None:
        """Connect to the stores, and wait for every rank to have come.

        Raises LostPeers that names those which do not, and ConfigError for a port that is taken.
        """
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]

        place = self._place
        if place.world == 1 or self.training_store is not None:
            return
        is_holder = place.rank == 0 and not place.store_is_launchers
        hold = is_holder and _hold_store(place.port, timeout_s)
        store: Store = hold or _reach_store(place.address, place.port, timeout_s)
        # a connection of its own: the main thread's may be in a wait
        told: Store = _reach_store(place.address, place.port, timeout_s)
        if place.restartable:
            start = _name_of_start(BoundedStore(told, timeout_s), place, timeout_s)
            store, told = PrefixStore(start, store), PrefixStore(start, told)
        self._groups_store, told = PrefixStore("groups", store), PrefixStore("launch", told)
        self.roll, self._said = Roll(told, place.rank, place.world), BoundedStore(told, STORE_WAIT_S)
        self._agreement = Agreement("launch", place.rank, place.world, store, timeout_s=timeout_s)
        self._store = store
        own = _hold_store(0, timeout_s) if place.rank == 0 else None
        where = None if own is None else [_own_address(place), own.port]
        address, port = self._agreement.decide("the ranks' own store", where, lambda places: places[0])
        self.training_store = PrefixStore("training", own or _reach_store(address, port, timeout_s))

    def gather(self, backend: str, device: torch.device, timeout: timedelta) -> None:
        """Create the default process group; collective. Raises ConfigError for ranks that share a device."""
        import torch.distributed as dist

        self.meet(timeout.total_seconds())
        problems = self._agreement.decide("devices", [device.type, identity_of(device)], device_problems)
        if problems:
            raise ConfigError(problems)
        dist.init_process_group(
            backend,
            store=self._groups_store,
            rank=self._place.rank,
            world_size=self._place.world - self._num_spares,
            timeout=timeout,
            device_id=None if device.type == "cpu" else device,
        )

    def compare(self, config: Config | None, mistakes: list[str]) -> list[str]:
        """What is wrong with the ranks' configs, ``mistakes`` being this rank's; the same lines on every rank."""
        return disagreements(self._agreement, self._place, config, mistakes)

    def agree_on(self, topic: str, value: str) -> str:
        """Rank 0's value, on every rank."""
        return str(self._agreement.decide(topic, value, lambda values: values[0]))

    def leave_spares(self, world: int) -> Place:
        """This rank's place in a run of the first ``world`` ranks, which are all that agree from here on."""
        self._num_spares = self._place.world - world
        if self._num_spares:
            rank = self._place.rank
            self._agreement = Agreement("run", rank, world, self._store, timeout_s=self._agreement.timeout_s)
        return replace(self._place, world=world)

    def wait_as_spare(self, was_told: Callable[[], bool]) -> int:
        """Wait for the end of the run, as a rank that it has no use for; returns its exit code.

        A spare that is told to stop leaves as one that has saved: it has nothing to lose.
        """
        assert self._said is not None
        while not was_told():
            with suppress(LostPeers):  # the watch notices
                if self._said.check(["mistake/said"]):
                    self._said.add("mistake/heard", 1)
                    return codes.USER_MISTAKE
                if self._said.check(["ended"]):
                    code = int(self._said.get("ended"))
                    self._said.add("heard", 1)
                    return code
            time.sleep(SPARE_LOOK_S)
        return codes.PREEMPTED

    def disband(self, code: int) -> None:
        """Take the process groups down, where there are any, once every rank is done; tell spares of the end."""
        if self.training_store is None:
            return
        import torch.distributed as dist

        if dist.is_initialized():
            dist.barrier()
            dist.destroy_process_group()
        if self._place.rank > 0 or not self._num_spares or self._said is None:
            return
        deadline = time.monotonic() + SAY_WAIT_S
        with suppress(LostPeers):
            self._said.set("ended", str(code))
            while self._said.add("heard", 0) < self._num_spares and time.monotonic() < deadline:
                time.sleep(0.05)

    def forget(self) -> None:
        """Ask the launcher's store nothing more: it does not answer."""
        self.roll = self._said = None

    # ------------------------------------------------------------ who says what

    def say_known(self, mistakes: list[str]) -> int:
        """Print mistakes that every rank knows of, once for all of them. Returns the exit code."""
        if self._place.rank == 0:
            complain(*mistakes)
        elif self._said is None:
            time.sleep(OTHERS_WAIT_S)
        self._leave_in_order(says=self._place.rank == 0)
        return codes.USER_MISTAKE

    def say_once(self, mistake: str) -> int:
        """Print a mistake that several ranks may have found, once for all of them. Returns the exit code."""
        first = True
        with suppress(LostPeers):
            first = self._said is None or self._said.add("mistake/finders", 1) == 1
        if first:
            complain(mistake)
        self._leave_in_order(says=first)
        return codes.USER_MISTAKE

    def _leave_in_order(self, *, says: bool) -> None:
        """Leave after the rank that says a mistake has done so, as torchrun ends every rank when one exits.

        Rank 0, which holds a store, leaves when all others have heard of it, or have had time to.
        """
        deadline = time.monotonic() + SAY_WAIT_S
        with suppress(LostPeers):
            if says and self._said is not None:
                self._said.set("mistake/said", "1")
            while self._said is not None and time.monotonic() < deadline:
                if self._place.rank > 0 and self._said.check(["mistake/said"]):
                    self._said.add("mistake/heard", 1)
                    return
                if self._place.rank == 0 and self._said.add("mistake/heard", 0) == self._place.world - 1:
                    return
                time.sleep(0.05)

    def mistake_was_said(self) -> bool:
        """Whether some rank ended over a mistake of the user's, which then is what broke this rank's connections."""
        try:
            return self._said is not None and self._said.add("mistake/finders", 0) > 0
        except LostPeers:
            return False


def _name_of_start(store: BoundedStore, place: Place, timeout_s: float) -> str:
    """A name that this start's ranks have in common and no other start's: torchrun's store outlives them all.

    Rank 0 chooses it and tells whoever greets. It may find an earlier start's greeting, whose answer nobody reads, so
    it looks again until the last rank is there.
    """
    own = uuid.uuid4().hex
    if place.rank == 0:
        threading.Thread(target=_welcome, args=(store, own, place.world), daemon=True, name="welcome").start()
        return own
    store.set(f"greeting/{place.rank}", own)
    deadline, pause = time.monotonic() + timeout_s, 0.02
    while not store.check([f"welcome/{own}"]):
        if time.monotonic() > deadline:
            raise LostPeers(f"rank 0 did not greet within {timeout_s:g} s", [0])
        time.sleep(pause)
        pause = min(2 * pause, POLL_S[1])
    name = store.get(f"welcome/{own}").decode()
    store.set(f"{name}/greeted/{place.rank}", "")
    return name


def _welcome(store: BoundedStore, name: str, world: int) -> None:
    awaited, answered = set(range(1, world)), set[bytes]()
    with suppress(LostPeers):
        while awaited:
            for rank in sorted(awaited):
                if store.check([f"{name}/greeted/{rank}"]):
                    awaited.discard(rank)
                elif store.check([f"greeting/{rank}"]) and (own := store.get(f"greeting/{rank}")) not in answered:
                    store.set(f"welcome/{own.decode()}", name)
                    answered.add(own)
            time.sleep(0.02)


def _hold_store(port: int, timeout_s: float) -> TCPStore:
    """A store that lives in this process, at a port that other machines reach too; 0 is any that is free."""
    both = socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            ("", port), family=socket.AF_INET6 if both else socket.AF_INET, backlog=1024, dualstack_ipv6=both
        )
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = f"{os.strerror(error.errno)} on {socket.gethostname()}"
        raise ConfigError(f"MASTER_PORT={port}: {why}; choose a port that is free there") from error
    return hold_store(listener, "localhost", timeout_s)


def hold_store(listener: socket.socket, address: str, timeout_s: float) -> TCPStore:
    """A store that lives in this process, at a listener's port; ``address`` is where the process itself reaches it."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )


def _reach_store(address: str, port: int, timeout_s: float) -> TCPStore:
    """A connection to a store; raises LostPeers when nobody listens there in time."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    deadline, why = time.monotonic() + timeout_s, ""
    while time.monotonic() < deadline:
        try:
            socket.create_connection((address, port), timeout=min(5.0, timeout_s)).close()
            return TCPStore(
                address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
            )
        except OSError as error:
            why = str(error)
            time.sleep(0.1)
    raise LostPeers(f"rank 0 did not open a store at {address}:{port} within {timeout_s:g} s ({why})", [0])


def _own_address(place: Place) -> str:
    """Where other machines reach this one: the end here of a connection to the machine they all know."""
    with socket.create_connection((place.address, place.port), timeout=STORE_WAIT_S) as connection:
        here, there = connection.getsockname()[0], connection.getpeername()[0]
    return place.address if here == there else str(here)
