"""Watches the host's memory where a GPU has the same: whether so little is left that the engine
gives back what it can, and takes no new request.

Such a machine does not fail an allocation when memory ends: it stops answering. Knows the kernel's
MemAvailable and two limits; knows no engine. A thread reads, so that no step waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from spark_engine.host_memory import available_memory
from spark_engine.shared_memory import host_room

GIB = 1 << 30
LOW, HIGH = 6 * GIB, 7 * GIB  # bytes: short from below LOW until HIGH is there again
EVERY_S = 1.0


class MemoryWatch:
    """`available` gives the bytes that can be taken, None where that is not known."""

    def __init__(self, available: Callable[[], int | None] = available_memory) -> None:
        self.short = False
        self._available = available
        self._ended = threading.Event()

    def look(self) -> None:
        """Reads once."""
        found = self._available()
        if found is not None:
            self.short = found < (HIGH if self.short else LOW)

    def start(self) -> None:
        """Reads every second from now on, in a thread that does not keep the process alive."""
        threading.Thread(target=self._run, name="memory", daemon=True).start()

    def stop(self) -> None:
        """Reads no more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.look()


def watch_memory() -> MemoryWatch | None:
    """One that reads from now on, where the host's memory is the GPU's; None elsewhere."""
    if not host_room(None).shared:
        return None
    watch = MemoryWatch()
    watch.start()
    return watch
