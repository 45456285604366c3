"""Starts, reloads and stops what operators configure: keys, certificate, access log, traces."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from spark_engine.runtime.server.http.tls import ServerTls
from spark_engine.runtime.server.operation.http_request import Listener
from spark_engine.runtime.server.operation.keys import LIMITS, Keyring
from spark_engine.runtime.server.operation.logs import AccessLog
from spark_engine.runtime.server.operation.telemetry import SEND_S, Traces

if TYPE_CHECKING:  # Prometheus's library is not needed to start
    from spark_engine.runtime.server.operation.metrics import Metrics


def keep_loaded() -> None:
    """Excludes loaded objects from garbage collection: a full collection of them would block the
    event loop for 50 ms and more. Called once, before requests arrive."""
    gc.freeze()


def show_keys(keys: Keyring, metrics: Metrics) -> None:
    for name in keys.accounts:
        metrics.add_key(name, LIMITS)


@contextlib.contextmanager
def on_hangup(
    keys: Keyring, tls: ServerTls | None, loaded: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """SIGHUP reloads the file of keys, then calls `loaded`, and reloads the certificate.

    Without either file the signal ends the process, as at the closing of a terminal.
    """
    loop = asyncio.get_running_loop()

    def again() -> None:
        if keys.path is not None and keys.reload():
            loaded()
        if tls is not None:
            loop.run_in_executor(None, tls.reload)  # a handshake: too long for the event loop

    if keys.path is None and tls is None:
        yield
        return
    loop.add_signal_handler(signal.SIGHUP, again)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)


@contextlib.asynccontextmanager
async def listeners(
    access_log: bool, whole: bool, collector: str | None, model: str
) -> AsyncIterator[Sequence[Listener]]:
    """The listeners that get every request that has ended. `whole`: the access log includes
    probes. `collector`: a URL. Raises OptionError."""
    found: list[Listener] = []
    if access_log:
        found.append(AccessLog(whole))
    traces = None if collector is None else Traces(collector, model)
    if traces is not None:
        found.append(traces)
    try:
        yield found
    finally:
        if traces is not None:
            # a collector that does not answer must not delay the shutdown
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.to_thread(traces.close), 2 * SEND_S)
