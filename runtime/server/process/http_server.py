"""Serves HTTP for models that are open, drains, and returns the exit code.

Knows uvicorn, signals and deadlines. Imported while an engine loads (`server.py`), as its libraries
take half a second.
"""

import asyncio
import logging
import signal
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.config import LifespanType

from spark_engine.runtime.server.engine_client import engine_folder
from spark_engine.runtime.server.http.app import create_app
from spark_engine.runtime.server.http.connections import Connection, Connections
from spark_engine.runtime.server.http.descriptors import connection_capacity
from spark_engine.runtime.server.http.endpoints import Endpoints
from spark_engine.runtime.server.http.guard import guard_of
from spark_engine.runtime.server.http.tls import ServerTls
from spark_engine.runtime.server.operation.keys import Keyring
from spark_engine.runtime.server.page.report import make_report
from spark_engine.runtime.server.process import leaving, lifecycle
from spark_engine.runtime.server.process.options import ServerOptions
from spark_engine.runtime.server.process.port import Listener
from spark_engine.runtime.server.service.models import Models
from spark_engine.runtime.server.service.service import Service

BACKLOG = 2048  # connections that the kernel may queue
KEEP_ALIVE_S = 75  # above usual idle times of clients' pools, which must not find them closed
LEAVE_S = 30.0  # for the rest of the shutdown; then the process exits
FORCE_S = 5.0  # between the last message to clients and closing their connections
log = logging.getLogger(__name__)


async def serve_http(
    models: Models,
    folders: Sequence[Path],
    options: ServerOptions,
    keys: Keyring,
    tls: ServerTls | None,
    listener: Listener,
    descriptors: int,
) -> int:
    """Serves the models of these folders until a signal; returns the exit code.

    `descriptors`: files that this process may open.
    """
    metrics = models.first.metrics
    endpoints = Endpoints(models, options.max_body_mib << 20, options.metrics_by_key)
    for service, folder in zip(models.services, folders, strict=True):
        manifest = engine_folder.find_manifest(folder)
        endpoints.reports[service] = make_report(service.info, manifest, options.chat)
        if manifest is not None and not models.several:
            for words in engine_folder.unmet(options.engine, service.info, manifest):
                log.warning(words)
    limit = _most_connections(options, descriptors)
    connections = Connections(limit, options.read_timeout_s, refused=metrics.turned_away)
    name = ", ".join(_spelled(service, options) for service in models.services)
    logged = options.access_log, options.access_log_all
    async with lifecycle.listeners(*logged, options.traces, models.first.names[0]) as callbacks:
        hosts, origins = options.allowed_hosts, options.cors_origins
        guard = guard_of(hosts, options.host, listener, keys.locked, origins)
        app = create_app(endpoints, keys, callbacks, origins, options.page, guard)
        # A backlog of 1 makes asyncio accept one connection a turn: without descriptors it
        # would try, and log, once for each place. `_Server.startup` sets the real one.
        config = config_of(app, connections, options, backlog=1)
        if tls is not None:
            tls.serve_with(config, options.read_timeout_s)
            listener.accepted = connections.shake
        server = _Server(config, endpoints, options, name)
        lifecycle.show_keys(keys, metrics)
        return await server.run_until_done(listener)


def _spelled(service: Service, options: ServerOptions) -> str:
    """The model for the log: its name and what its engine has."""
    name, info, engine = service.names[0], service.info, options.engine
    if (state := service.client.state) is not None:
        return f"{name} ({state})"
    drafts = engine_folder.describe_drafts(engine.drafts, info.limits, engine.fixed_drafts)
    return name + drafts + engine_folder.describe_cache(info)


def _most_connections(options: ServerOptions, descriptors: int) -> int:
    limit = connection_capacity(descriptors, 1 if options.tls_cert is None else 2)
    if limit < options.max_connections:
        words = "at most %d connections: this process may open %d files (ulimit -n)"
        log.warning(words, limit, descriptors)
    return min(limit, options.max_connections)


def config_of(
    app: ASGIApp,
    connections: Connections,
    options: ServerOptions,
    backlog: int = BACKLOG,
    lifespan: LifespanType = "auto",
) -> uvicorn.Config:
    """uvicorn's configuration of a server with our connections."""
    return uvicorn.Config(
        app,
        http=cast(Any, partial(Connection, connections)),
        ws="none",
        lifespan=lifespan,
        backlog=backlog,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_certfile=options.tls_cert,
        ssl_keyfile=options.tls_key,
    )


class _Server(uvicorn.Server):
    """uvicorn with our shutdown: drain, then cancel, then close, and an exit code."""

    def __init__(
        self, config: uvicorn.Config, endpoints: Endpoints, options: ServerOptions, name: str
    ) -> None:
        super().__init__(config)
        self._name = name
        self._endpoints = endpoints
        self._models = endpoints.models
        self._client = endpoints.service.client  # the only one, where it is not on demand
        self._options = options
        self._stop_requested = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._signals = 0
        self._code = 0
        self._dumping: asyncio.Future[list[Path | None]] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, then the real backlog; logged once signals are handled too."""
        lifecycle.keep_loaded()
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)
            scheme = "https" if self.config.is_ssl else "http"
            address = (scheme, *listener.getsockname()[:2])
            log.info("serving %s on %s://%s:%d", self._name, *address)

    async def run_until_done(self, listener: socket.socket) -> int:
        """Serves; returns the exit code."""
        tasks = [asyncio.create_task(t) for t in (self._drain(), self._on_engine_death())]
        self._loop.add_signal_handler(signal.SIGUSR1, self._dump)
        await self.serve([listener])
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        log.info("stopped")
        return self._code

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM and SIGINT. A second one does not wait for the drain."""
        self._signals += 1
        if self._signals == 1:
            most = self._options.drain_timeout_s + FORCE_S + LEAVE_S
            leaving.leave_later(most, lambda: self._code)
        self._endpoints.draining = True
        self._loop.call_soon_threadsafe(self._stop_requested.set)

    async def _drain(self) -> None:
        """The port stays open: probes and new work are answered with 503."""
        await self._stop_requested.wait()
        if (going := self._models.in_flight) and self._signals < 2:
            words = "stopping: requests that run, %d, may finish within %g s; again to cancel them"
            log.info(words, going, self._options.drain_timeout_s)
        limit = asyncio.get_running_loop().time() + self._options.drain_timeout_s
        while self._models.open and self._loop.time() < limit and self._signals < 2:
            await asyncio.sleep(0.05)
        if going := self._models.in_flight:
            log.warning("cancelling requests that run: %d", going)
            self._models.cancel_all()
        self.should_exit = True
        await self._force_exit_later()

    async def _on_engine_death(self) -> None:
        await self._client.died.wait()
        log.error("the engine process died: %s", self._client.reason)
        self._code = self._client.exit_code
        await asyncio.sleep(self._options.grace_s)
        self.should_exit = True
        await self._force_exit_later()

    def _dump(self) -> None:
        """SIGUSR1: writes a dump of both processes, for each model, to a file; logs its path."""
        clients = [service.client for service in self._models.services]
        self._dumping = asyncio.gather(*(one.dump("asked for by SIGUSR1") for one in clients))

    async def _force_exit_later(self) -> None:
        await asyncio.sleep(FORCE_S)
        self.force_exit = True
