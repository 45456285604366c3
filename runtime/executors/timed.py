"""An executor that reports the start and end of each launch, and the clock of a device's launches.

Knows the `Executor` protocol and timed events; knows no listener.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from spark_engine.runtime.executors.executor import Executor, Wait
from spark_engine.tensors import Array

if TYPE_CHECKING:  # needs the extra `cuda`
    from spark_engine.device.gpu import Event
    from spark_engine.device.resources import DeviceResources


class DeviceClock:
    """Times at which a GPU's stream reached marks, in seconds of the host's clock. Each mark on an
    empty stream synchronises the two clocks, since it is reached at once."""

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


class TimedExecutor:
    """Wraps `inner` and passes the start and end of each launch to `tell`, in seconds.

    Without a clock a launch is synchronous and is timed around its call.
    """

    def __init__(
        self, inner: Executor, clock: DeviceClock | None, tell: Callable[[float, float], None]
    ) -> None:
        self.specs = inner.specs
        self._inner, self._clock, self._tell = inner, clock, tell

    def run(self, buffers: Mapping[str, Array]) -> None:
        """See `Executor`; not timed."""
        self._inner.run(buffers)

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        """See `Executor`; the returned function reports the times."""
        clock = self._clock
        if clock is None:
            start = time.perf_counter()
            done = self._inner.launch(buffers)
            self._tell(start, time.perf_counter())
            return done
        first = clock.mark()
        return self._reported(first, self._inner.launch(buffers), clock)

    def launch_to_sample(self, buffers: Mapping[str, Array]) -> Callable[[], Wait]:
        """See `Executor`; the wait between the two calls counts as run time."""
        clock = self._clock
        if clock is None:
            return lambda: self.launch(buffers)  # a synchronous executor starts no part early
        first, rest = clock.mark(), self._inner.launch_to_sample(buffers)
        return lambda: self._reported(first, rest(), clock)

    def _reported(self, first: Event, inner: Wait, clock: DeviceClock) -> Wait:
        last = clock.mark()

        def wait() -> None:
            inner()
            self._tell(clock.seconds(first), clock.seconds(last))

        return wait

    def close(self) -> None:
        self._inner.close()
