"""An executor that reports when each of its launches ran.

Knows the `Executor` protocol and a device's clock; knows neither who listens nor why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from spark_engine.runtime.executors.executor import Executor, Specs, Wait
from spark_engine.tensors import Array


class Clock(Protocol):
    """When a device came to a place in its queue."""

    def mark(self) -> Any:
        """Queues a mark."""
        ...

    def seconds(self, mark: Any) -> float:
        """When the device came to the mark, as `time.perf_counter` counts; waits until it does.

        Asked once of every mark, in their order.
        """
        ...


class TimedExecutor:
    """`inner`; `tell` gets the start and the end of each of its launches, in seconds.

    Without a clock a launch is synchronous, and ran while it was called.
    """

    def __init__(
        self, inner: Executor, clock: Clock | None, tell: Callable[[float, float], None]
    ) -> None:
        self._inner, self._clock, self._tell = inner, clock, tell

    @property
    def specs(self) -> Specs:
        """The inner one's."""
        return self._inner.specs

    def run(self, buffers: Mapping[str, Array]) -> None:
        """The inner one's."""
        self._inner.run(buffers)

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        """The inner one's; its wait tells."""
        clock = self._clock
        if clock is None:
            start = time.perf_counter()
            done = self._inner.launch(buffers)
            self._tell(start, time.perf_counter())
            return done
        first = clock.mark()
        return self._told(first, self._inner.launch(buffers), clock)

    def launch_to_sample(self, buffers: Mapping[str, Array]) -> Callable[[], Wait]:
        """The inner one's; what it waits for in between counts as its run."""
        clock = self._clock
        if clock is None:
            return lambda: self.launch(buffers)  # synchronous: there is nothing to start early
        first, rest = clock.mark(), self._inner.launch_to_sample(buffers)
        return lambda: self._told(first, rest(), clock)

    def _told(self, first: Any, inner: Wait, clock: Clock) -> Wait:
        last = clock.mark()

        def wait() -> None:
            inner()
            self._tell(clock.seconds(first), clock.seconds(last))

        return wait

    def close(self) -> None:
        """Closes the inner one."""
        self._inner.close()
