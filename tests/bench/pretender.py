"""A contender that trains nothing: it prints what libraries print, and fails when it is told to."""

from __future__ import annotations

import os
import time
from pathlib import Path

from bench.serve import options, serve


def main() -> None:
    asked = options()
    rank = int(os.environ["RANK"])
    if "pids" in asked:
        Path(asked["pids"], str(rank)).write_text(str(os.getpid()))
    count = 0

    def step() -> float:
        nonlocal count
        count += 1
        print("a library's chatter")
        if count == asked.get("fails_at") and rank == asked.get("fails_on", 0):
            raise RuntimeError(f"rank {rank} is out of luck")
        if count == asked.get("fails_at"):
            time.sleep(60)  # its peers wait for the one that failed
        return 4.85

    serve(step)


if __name__ == "__main__":
    main()
