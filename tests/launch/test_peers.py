"""Where ranks meet, and what they say when they cannot."""

from __future__ import annotations

import socket
import time

import pytest

from nanotron.errors import ConfigError
from nanotron.launch.peers import Peers
from nanotron.launch.place import Place
from nanotron.parallel.store import LostPeers


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_a_port_that_is_taken_is_the_users_mistake() -> None:
    with socket.create_server(("", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^MASTER_PORT={port}: Address already in use on .*; choose a port"):
            Peers(Place(0, 2, 0, 2, "127.0.0.1", port)).meet(timeout_s=5)


def test_a_rank_that_finds_no_store_names_rank_0_in_time() -> None:
    began, port = time.monotonic(), free_port()
    with pytest.raises(LostPeers, match=rf"^rank 0 did not open a store at 127\.0\.0\.1:{port} within 0\.5 s") as lost:
        Peers(Place(1, 2, 1, 2, "127.0.0.1", port)).meet(timeout_s=0.5)
    assert lost.value.ranks == [0]
    assert time.monotonic() - began < 30


def test_ranks_that_do_not_come_to_the_meeting_are_named() -> None:
    with pytest.raises(LostPeers, match=r"^rank 1, 2 did not answer within 0\.5 s$") as lost:
        Peers(Place(0, 3, 0, 3, "127.0.0.1", free_port())).meet(timeout_s=0.5)
    assert lost.value.ranks == [1, 2]
