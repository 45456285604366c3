"""A clock that stops while this process is stopped.

After a stop (a debugger, a suspended machine, a paused VM) the system's clock has advanced,
although no peer was late. Time limits on peers therefore use this clock. Knows time only.
"""

import time

TICK_S = 0.25  # polling interval of waiters
MOST_S = 1.0  # longest counted interval between two calls; the process was stopped for the rest


class RunningClock:
    """Seconds of running time since its creation, for one thread that calls it at least every
    TICK_S."""

    def __init__(self) -> None:
        self._asked = time.monotonic()
        self.last = 0.0  # last result of `now`; any thread may read it

    def now(self) -> float:
        """Seconds of running time; up to MOST_S of each stop are counted."""
        asked = time.monotonic()
        self.last += min(asked - self._asked, MOST_S)
        self._asked = asked
        return self.last
