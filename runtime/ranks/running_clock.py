"""A clock that stands still while this process does.

A process that was stopped (a debugger, a suspended machine, a paused VM) finds when it goes on that
the system's clock is far ahead, though nobody whom it waits for has been late. Limits on others
are counted by this clock instead. Knows time only.
"""

from __future__ import annotations

import time

TICK_S = 0.25  # how often who waits by the clock asks it
MOST_S = 1.0  # between two askings; what is beyond it, this process did not run


class RunningClock:
    """Seconds since it was made, for one thread that asks at least every TICK_S."""

    def __init__(self) -> None:
        self._asked = time.monotonic()
        self.last = 0.0  # what `now` said last; any thread may read it

    def now(self) -> float:
        """Seconds in which the process ran, as far as is seen: up to MOST_S of a stop count."""
        asked = time.monotonic()
        self.last += min(asked - self._asked, MOST_S)
        self._asked = asked
        return self.last
