"""When a GPU's stream reached a timed event, in seconds of the host's clock.

Knows timed events, and that one recorded on a stream with nothing queued happens at once.
"""

from __future__ import annotations

import time

from spark_engine.device.gpu import Event
from spark_engine.device.resources import DeviceResources


class DeviceClock:
    """Marks on one stream. Two clocks drift, so each mark on an empty stream sets it anew."""

    def __init__(self, resources: DeviceResources) -> None:
        self._resources = resources
        self._free: list[Event] = []
        self._known: tuple[Event, float] | None = None  # a mark, and when it happened
        self._queued = 0  # marks that nobody has asked for yet

    def mark(self) -> Event:
        """Queues a mark."""
        event = self._free.pop() if self._free else self._resources.event(timed=True)
        self._resources.gpu.record(event)
        if not self._queued:
            self._know(event, time.perf_counter())
        self._queued += 1
        return event

    def seconds(self, mark: Event) -> float:
        """When the mark was reached; asked once of every mark, in their order."""
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
