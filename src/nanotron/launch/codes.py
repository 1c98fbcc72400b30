"""What a run's exit code says. Under raw torchrun these are the workers' codes; torchrun itself then exits with 1."""

import signal

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What tells a run to stop."""

DONE = 0
"""Done, also when nothing was left to train."""
INTERNAL_ERROR = 1
"""Something failed that the user did not cause; a traceback was printed."""
USER_MISTAKE = 2
"""One line per mistake was printed, no traceback."""
STOPPED_BY_NAN = 4
"""A loss or gradient is not finite, and ``optimizer.on_nan`` is ``stop``, or ``rollback`` and that is used up."""
REPLICAS_DIFFER = 5
"""What some rank holds is corrupt (``general.replica_check_interval``); the last complete checkpoint is not."""
PREEMPTED = 75
"""Told to stop, and a complete checkpoint was saved: start again to go on."""
PREEMPTED_UNSAVED = 76
"""Told to stop, and no checkpoint could be saved of the last steps."""
