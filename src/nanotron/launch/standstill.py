"""A rank that lives and does not go on: all others wait for it, and nothing moves anywhere.

rank 0   waits at parallel/comm.py:217     step 9      A rank that waits is not to blame. What moves is which rank
rank 1   at data/feed.py:210 _wait         step 9      waits, and its stage, step and action. A rank may be busy for
rank 2   waits at pipeline/transport.py    step 9      long (it compiles, saves, reads), but not for longer than
                                                       collectives would wait for it: general.timeout_s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nanotron.launch.roll import Beat

PATIENT = ("parallel/agreement.py", "parallel/store.py")
"""Where ranks wait without a limit, as long as whom they wait for says that it is at work."""


class Standstill:
    """Looks at the signs of life of a run again and again."""

    def __init__(self) -> None:
        self._state: dict[int, tuple[bool, dict[str, Any]]] = {}
        self._since = 0.0

    def look(self, beats: Mapping[int, Beat], now: float) -> tuple[list[int], float]:
        """The ranks that all others wait for, if there are any, and for how many seconds nothing has moved.

        Who trains says where it is: a spare does not, nor a rank that still begins.
        """
        beats = {rank: beat for rank, beat in beats.items() if beat.where}
        state = {rank: (beat.waits, beat.where) for rank, beat in beats.items()}
        if state != self._state or any(beat.waits and beat.at.startswith(PATIENT) for beat in beats.values()):
            self._state, self._since = state, now
        busy = [rank for rank, beat in beats.items() if not beat.waits]
        return (busy if len(busy) < len(beats) else []), now - self._since
