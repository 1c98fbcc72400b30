"""Attacks until the time is over; python -m tests.torture [--seconds N] [--seed N] [--only NAME …]

A round is one attack of each kind, drawn from one seed. What a seed finds is found again with `--seed` and `--only`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.pool import Pool
from tests.torture import disks, flips, kills, launches, links

Attack = Callable[[Pool, Path, int], None]
ATTACKS: dict[str, Attack] = {
    "kills": lambda pool, folder, seed: kills.torture(pool, folder, 2, seed),
    "launches": lambda pool, folder, seed: launches.torture(folder, launches.draw(seed)),
    "flips": lambda pool, folder, seed: flips.torture(pool, folder, 40, seed),
    "files": disks.limit_files,
    "disks": disks.fill_disk,
    "links": lambda pool, folder, seed: links.torture(folder, seed),
}
NEEDS = {"disks": disks.why_not, "links": links.why_not}


def install_iproute2() -> None:
    """Have `ip`, where that is root's to decide; without it the attack on links is left out, and says so."""
    if shutil.which("ip") is None and shutil.which("apt-get") is not None and os.getuid() == 0:
        for command in (["update"], ["install", "--yes", "--no-install-recommends", "iproute2"]):
            subprocess.run(["apt-get", "--quiet", *command], check=False, stdout=subprocess.DEVNULL)


def possible(names: list[str]) -> dict[str, Attack]:
    """The attacks that this machine allows; says why it does not allow others."""
    attacks = {}
    for name in names:
        reason = NEEDS[name]() if name in NEEDS else ""
        if reason:
            print(f"{name}: left out, {reason}", flush=True)
        else:
            attacks[name] = ATTACKS[name]
    return attacks


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description="Attack runs until the time is over.")
    parser.add_argument("--seconds", type=float, default=1800.0, help="no round begins after this time (1800)")
    parser.add_argument("--seed", type=int, default=0, help="the first round's (0); every next one's is one larger")
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), help="kinds of attack")
    asked = parser.parse_args()
    install_iproute2()
    attacks, pool = possible(asked.only), Pool()
    deadline = time.monotonic() + asked.seconds
    rounds = ((seed, name) for seed in itertools.count(asked.seed) for name in attacks)
    for seed, name in rounds if attacks else ():
        if time.monotonic() > deadline:
            break
        print(f"--- {name}, seed {seed}", flush=True)
        with tempfile.TemporaryDirectory(prefix="torture-") as folder:
            attacks[name](pool, Path(folder), seed)
    pool.close()


if __name__ == "__main__":
    main()
