"""An executor that reports the start and end of each launch.

Knows the `Executor` protocol and a device's clock; knows no listener.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from spark_engine.runtime.executors.executor import Executor, Wait
from spark_engine.tensors import Array

if TYPE_CHECKING:  # needs the extra `cuda`
    from spark_engine.device.gpu import Event
    from spark_engine.runtime.executors.device_clock import DeviceClock


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
