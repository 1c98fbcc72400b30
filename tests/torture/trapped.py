"""A launch in which something happens when one rank comes by a chosen place for the n-th time.

    trapped.py nanotron train X.yaml …        torchrun … trapped.py --config-file X.yaml …

TRAP says what, as JSON:

    rank, place, count   where: {"rank": 1, "place": "nanotron.checkpoint.write:Saver._write_shard", "count": 2}
    signal, whom         the signal, and whether the rank itself gets it or its launcher
    note                 the file that is told the process ids of all ranks first
    patches              constants for the whole launch: {"nanotron.launch.host:END_GRACE_S": 0.5}

NETNS names the network namespace that it happens in, HOST the host that a rank takes it for, OWN_FOLDER a folder that
this host does not share with others.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import json
import os
import runpy
import socket
import sys
from pathlib import Path
from typing import Any

CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000  # of Linux
MS_REC_PRIVATE = 0x4000 | 1 << 18


def find(place: str) -> tuple[Any, str]:
    """What holds the attribute that `module:a.b` names, and the attribute's name."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    return functools.reduce(getattr, owners, importlib.import_module(module)), name


def arm(trap: dict[str, Any]) -> None:
    """Patch what is to be, and let the trap's place, if it has one, be preceded by what is to happen there."""
    for place, value in trap["patches"].items():
        setattr(*find(place), value)
    if "place" not in trap:
        return
    owner, name = find(trap["place"])
    function, calls = getattr(owner, name), [0]

    @functools.wraps(function)
    def trapped(*arguments: Any, **options: Any) -> Any:
        if os.environ.get("RANK", "0") == str(trap["rank"]):
            calls[0] += 1
            if calls[0] == trap["count"]:
                happen(trap)
        return function(*arguments, **options)

    setattr(owner, name, trapped)


def happen(trap: dict[str, Any]) -> None:
    """Note which processes there are, and do it."""
    launcher = os.getppid()
    ranks = [rank for path in Path(f"/proc/{launcher}/task").glob("*/children") for rank in path.read_text().split()]
    Path(trap["note"]).write_text(json.dumps([int(rank) for rank in ranks]), encoding="utf-8")
    os.kill(os.getpid() if trap["whom"] == "rank" else launcher, trap["signal"])


def enter(name: str) -> None:
    """Move this process to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/run/netns/{name}", os.O_RDONLY)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def hide(folder: str) -> None:
    """Put an empty file system in the place of a folder, for this process and its children alone."""
    libc = ctypes.CDLL(None, use_errno=True)
    target = os.fsencode(folder)
    for failed in (
        libc.unshare(CLONE_NEWNS),
        libc.mount(None, b"/", None, MS_REC_PRIVATE, None),
        libc.mount(b"tmpfs", target, b"tmpfs", 0, None),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), f"no folder of its own at {folder}")


if __name__ == "__main__":
    if "NETNS" in os.environ:
        enter(os.environ.pop("NETNS"))
    if "OWN_FOLDER" in os.environ:
        hide(os.environ.pop("OWN_FOLDER"))
    if "TRAP" in os.environ:
        arm(json.loads(os.environ["TRAP"]))
    if sys.argv[1:2] == ["nanotron"]:
        from nanotron.cli import main

        del sys.argv[0]
        main()
    elif sys.argv[1:2] == ["torchrun"]:
        del sys.argv[0]
        runpy.run_module("torch.distributed.run", run_name="__main__")
    else:
        if "HOST" in os.environ:
            socket.gethostname = lambda: os.environ["HOST"]
        from nanotron.launch.run import run_train

        sys.exit(run_train())
