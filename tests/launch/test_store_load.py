"""What a start asks of the store: as many calls of every rank, however many there are, and few looks a second."""

from __future__ import annotations

import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from nanotron.config import get_config_from_dict
from nanotron.launch import codes
from nanotron.launch.peers import Peers
from nanotron.launch.place import Place
from nanotron.parallel.agreement import POLL_S
from nanotron.parallel.store import BoundedStore
from tests.checkpoint import runs
from tests.checkpoint.runs import values_of
from tests.pool import Pool

MOST_CALLS = 70  # of a rank, looks left out


def counted_start(rank: int, world: int, values: dict[str, Any], port: int) -> tuple[Counter[str], int, float]:
    """Meet, compare, begin, make a step and save it: calls by kind, keys that are left, seconds."""
    calls, keys, make = Counter[str](), Counter[str](), BoundedStore._make

    def counted(self: BoundedStore, call: Any, *arguments: Any) -> Any:
        name = call.__name__
        calls[name] += 1
        if name in ("set", "delete_key"):
            keys[arguments[0]] += 1 if name == "set" else -1
        return make(self, call, *arguments)

    BoundedStore._make = counted  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        peers = Peers(Place(rank, world, rank, world, "127.0.0.1", port))
        peers.meet(60.0)
        config = get_config_from_dict(values)
        assert peers.compare(config, []) == []
        peers.agree_on("run", "x")
        assert runs.run(rank, world, values, store=peers.training_store) == codes.DONE
        dist.barrier()  # rank 0 holds the store
    finally:
        BoundedStore._make = make  # type: ignore[method-assign]
    return calls, sum(1 for count in keys.values() if count > 0), time.monotonic() - began


def test_the_stores_load_of_a_rank_does_not_grow_with_the_ranks(pool: Pool, tmp_path: Path) -> None:
    starts = {}
    for world in (2, 4):
        values = values_of(tmp_path / str(world), (world, 1, 1), tokens__train_steps=1)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        starts[world] = pool.run(world, counted_start, values, port)
    for calls, keys, seconds in [*starts[2], *starts[4]]:
        looks = calls.pop("check")
        questions = calls["set"]
        assert calls.total() <= MOST_CALLS
        assert keys <= 7, "the last answers of rank 0"
        assert looks <= 8 * questions + seconds / POLL_S[1], "they become rarer until there are 4 a second"
    assert [calls for calls, *_ in starts[4]] == [starts[2][0][0], *[starts[2][1][0]] * 3]
