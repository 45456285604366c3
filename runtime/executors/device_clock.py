"""Time at which a GPU's stream reached a timed event, in seconds of the host's clock.

Assumption: an event recorded on an empty stream is reached immediately.
"""

import time

from spark_engine.device.gpu import Event
from spark_engine.device.resources import DeviceResources


class DeviceClock:
    """Marks on one stream. Each mark on an empty stream synchronises the two clocks."""

    def __init__(self, resources: DeviceResources) -> None:
        self._resources = resources
        self._free: list[Event] = []
        self._known: tuple[Event, float] | None = None  # a mark and its host time
        self._queued = 0  # marks not yet passed to `seconds`

    def mark(self) -> Event:
        event = self._free.pop() if self._free else self._resources.event(timed=True)
        self._resources.gpu.record(event)
        if not self._queued:
            self._know(event, time.perf_counter())
        self._queued += 1
        return event

    def seconds(self, mark: Event) -> float:
        """Time of the mark. Call it once for every mark, in recording order."""
        gpu = self._resources.gpu
        gpu.wait_for(mark)
        assert self._known is not None
        before, at = self._known
        if mark is not before:
            at += gpu.milliseconds(before, mark) / 1e3
            self._know(mark, at)
        self._queued -= 1
        return at

    def _know(self, event: Event, at: float) -> None:
        if self._known is not None:
            self._free.append(self._known[0])
        self._known = event, at
