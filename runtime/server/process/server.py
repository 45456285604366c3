"""The server process: starts the engine process, and serves HTTP once its engine is loaded.

Knows which part of a server begins when; `http_server.py` serves, `runtime/server/http/app.py` has
the endpoints.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from spark_engine.runtime.server.engine_client.early import EarlyProcess
from spark_engine.runtime.server.engine_client.heap import return_large_buffers, trimmed_heap
from spark_engine.runtime.server.http.descriptors import raise_descriptor_limit
from spark_engine.runtime.server.http.host_names import is_loopback
from spark_engine.runtime.server.http.tls import ServerTls
from spark_engine.runtime.server.operation.keys import Keyring
from spark_engine.runtime.server.operation.log_limit import limited_log
from spark_engine.runtime.server.operation.telemetry import check_endpoint
from spark_engine.runtime.server.process import leaving, lifecycle
from spark_engine.runtime.server.process.open_service import open_service, prepare
from spark_engine.runtime.server.process.options import ServerOptions
from spark_engine.runtime.server.process.port import bind

if TYPE_CHECKING:
    from spark_engine.runtime.server.service.models import Models

log = logging.getLogger(__name__)


def run(folder: Path, options: ServerOptions, early: EarlyProcess | None = None) -> int:
    """Serves the engine in `folder` until a signal, by `early` where it is given; returns the exit
    code.

    Raises EngineError, CapacityError or OptionError when it cannot start.
    """
    command, options = prepare(folder, options)
    _check(options)
    return leaving.run(serve(command, folder, options, early))


def run_models(folders: Mapping[str, Path], options: ServerOptions) -> int:
    """Serves engines under their names, each loaded while it is wanted. Raises what `run` does."""
    # imported here: one engine starts without it
    from spark_engine.runtime.server.process.models import open_models, plan_models

    rows, budgets = plan_models(folders, options)
    _check(options)
    opened = open_models(rows, budgets, options.idle_unload_s)
    return leaving.run(_serve(opened, [row.folder for row in rows], options))


def _check(options: ServerOptions) -> None:
    ServerTls.of(options.tls_cert, options.tls_key)
    if options.traces is not None:
        check_endpoint(options.traces)


async def serve(
    command: Sequence[str], folder: Path, options: ServerOptions, early: EarlyProcess | None = None
) -> int:
    """Serves a folder by the engine process of `command`; the socket's address is added to it."""

    @contextlib.asynccontextmanager
    async def opened() -> AsyncIterator[Models]:
        async with open_service(command, folder, options, early=early) as service:
            # imported here, as below
            from spark_engine.runtime.server.service.models import Models

            yield Models([service])

    return await _serve(opened(), [folder], options)


async def _serve(
    opened: contextlib.AbstractAsyncContextManager[Models],
    folders: Sequence[Path],
    options: ServerOptions,
) -> int:
    return_large_buffers()
    descriptors = raise_descriptor_limit()
    tls = ServerTls.of(options.tls_cert, options.tls_key)
    listener = bind(options.host, options.port)
    keys = Keyring(None if options.api_keys is None else Path(options.api_keys), options.api_key)
    _warn_without_keys(keys, listener)
    models: Models | None = None
    stack = contextlib.AsyncExitStack()

    def show() -> None:
        if models is not None:
            lifecycle.show_keys(keys, models.first.metrics)

    try:
        stack.enter_context(limited_log())
        stack.enter_context(trimmed_heap())
        stack.enter_context(lifecycle.on_hangup(keys, tls, show))
        models = await stack.enter_async_context(opened)
        # imported here: `open_service` begins it when the engine process has started
        from spark_engine.runtime.server.process.http_server import serve_http

        return await serve_http(models, folders, options, keys, tls, listener, descriptors)
    finally:
        listener.close()
        await stack.aclose()


def _warn_without_keys(keys: Keyring, listener: socket.socket) -> None:
    if not keys.locked and not is_loopback(listener):
        words = "WARNING: any client that reaches %s:%d may use this server: give --api-key"
        log.warning(words + ", or --host 127.0.0.1", *listener.getsockname()[:2])
