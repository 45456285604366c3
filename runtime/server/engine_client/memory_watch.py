"""Watches the memory that host and GPU share: when little is left, the engine releases what it can
and the server accepts no new request.

Such a machine does not fail an allocation when memory runs out: it stops answering. Knows the
kernel's MemAvailable and two limits; knows no engine. A thread reads, so that no step waits.
"""

import threading
from collections.abc import Callable

from spark_engine.device.host_memory import available_memory
from spark_engine.device.shared_memory import host_budget

GIB = 1 << 30
LOW, HIGH = 6 * GIB, 7 * GIB  # bytes: short from below LOW until above HIGH
EVERY_S = 1.0


class MemoryWatch:
    """`available` returns the bytes that can be allocated, None where that is not known."""

    def __init__(self, available: Callable[[], int | None] = available_memory) -> None:
        self.short = False
        self._available = available
        self._ended = threading.Event()

    def look(self) -> None:
        found = self._available()
        if found is not None:
            self.short = found < (HIGH if self.short else LOW)

    def start(self) -> None:
        """Reads every second from now on, in a thread that does not keep the process alive."""
        threading.Thread(target=self._run, name="memory", daemon=True).start()

    def stop(self) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            self.look()


def watch_memory() -> MemoryWatch | None:
    """One that reads from now on, where the host's memory is the GPU's; None elsewhere."""
    if not host_budget(None).shared:
        return None
    watch = MemoryWatch()
    watch.start()
    return watch
