"""The nanotron command, or one rank of it under torchrun, in which one rank sends itself a signal at a chosen place.

    python trapped.py nanotron train X.yaml …        torchrun … trapped.py --config-file X.yaml …

What to do is in TRAP, as JSON: {"rank": 1, "place": "nanotron.checkpoint.write:Saver._write_shard", "count": 2,
"signal": 19, "file": "where the process id is put first"}.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def arm(rank: int, place: str, count: int, signal: int, file: str) -> None:
    """Let the ``count``-th call of the function at ``place`` be preceded by the signal, on that rank."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
    function, calls = getattr(owner, name), [0]

    @functools.wraps(function)
    def trapped(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == count and os.environ.get("RANK") == str(rank):
            Path(file).write_text(str(os.getpid()), encoding="utf-8")
            os.kill(os.getpid(), signal)
        return function(*arguments, **options)

    setattr(owner, name, trapped)


if __name__ == "__main__":
    if "TRAP" in os.environ:
        arm(**json.loads(os.environ["TRAP"]))
    if sys.argv[1:2] == ["nanotron"]:
        from nanotron.cli import main

        del sys.argv[0]
        main()
    else:
        from nanotron.launch.run import run_train

        sys.exit(run_train())
