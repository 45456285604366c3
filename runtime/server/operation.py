"""Server options for operators: API keys, the access log, traces, a shorter context.

Knows the options for it and how each part begins and ends; the parts know their matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace

import msgspec

from spark_engine.errors import OptionError
from spark_engine.runtime.engine.request import capacity
from spark_engine.runtime.server.http_request import Listener
from spark_engine.runtime.server.ipc import EngineInfo
from spark_engine.runtime.server.keys import LIMITS, Keyring
from spark_engine.runtime.server.logs import AccessLog
from spark_engine.runtime.server.metrics import Metrics
from spark_engine.runtime.server.telemetry import SEND_S, Traces


def shorten(info: EngineInfo, most: int | None) -> EngineInfo:
    """The engine as if it had been built for at most so many tokens a request.

    Raises OptionError for more than it was built for.
    """
    if most is None:
        return info
    room = capacity(info.limits)
    if not 2 <= most <= room:
        words = f"--max-model-len is {most}; a request of this engine reaches 2 to {room} tokens"
        raise OptionError(words)
    return msgspec.structs.replace(info, limits=replace(info.limits, max_context=most))


@contextlib.contextmanager
def kept_keys(keys: Keyring, metrics: Metrics) -> Iterator[None]:
    """Reads the file with keys again on SIGHUP, and shows their counters."""

    def show() -> None:
        for name in keys.accounts:
            metrics.add_key(name, LIMITS)

    def again() -> None:
        if keys.reload():
            show()

    show()
    loop = asyncio.get_running_loop()
    if keys.path is not None:
        loop.add_signal_handler(signal.SIGHUP, again)
    try:
        yield
    finally:
        if keys.path is not None:
            loop.remove_signal_handler(signal.SIGHUP)


@contextlib.asynccontextmanager
async def listeners(
    access_log: bool, collector: str | None, model: str
) -> AsyncIterator[Sequence[Listener]]:
    """Who is told of every request that has ended. `collector`: a URL. Raises OptionError."""
    found: list[Listener] = []
    if access_log:
        found.append(AccessLog())
    traces = None if collector is None else Traces(collector, model)
    if traces is not None:
        found.append(traces)
    try:
        yield found
    finally:
        if traces is not None:
            # a collector that does not answer must not hold the way down up
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(traces.close), 2 * SEND_S)
