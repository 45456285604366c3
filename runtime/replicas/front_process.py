"""The front's process: listens, checks the replicas, drains.

Knows uvicorn and signals; knows nothing about the start of replicas.
"""

import asyncio
import logging
import math
import socket
import time
from types import FrameType

import uvicorn

from spark_engine.runtime.replicas.fleet import Fleet, Members
from spark_engine.runtime.replicas.front import Front
from spark_engine.runtime.replicas.routing import Policy, Router
from spark_engine.runtime.replicas.upstream import Upstream
from spark_engine.runtime.server.engine_client.heap import return_large_buffers, trimmed_heap
from spark_engine.runtime.server.http.connections import Connections
from spark_engine.runtime.server.http.descriptors import connection_capacity, raise_descriptor_limit
from spark_engine.runtime.server.http.guard import guard_of
from spark_engine.runtime.server.http.tls import ServerTls
from spark_engine.runtime.server.operation.keys import Keyring
from spark_engine.runtime.server.process.http_server import config_of
from spark_engine.runtime.server.process.lifecycle import keep_loaded, on_hangup
from spark_engine.runtime.server.process.options import ServerOptions
from spark_engine.runtime.server.process.port import Listener, bind

log = logging.getLogger(__name__)


def listen(options: ServerOptions) -> Listener:
    """A socket bound to the address, not listening yet. Raises OptionError."""
    ServerTls.of(options.tls_cert, options.tls_key)
    return bind(options.host, options.port)


async def serve(
    listener: Listener, members: Members, policy: Policy, options: ServerOptions
) -> int:
    """Serves the replicas behind one address until a signal; returns the exit code.

    Uses the connection options of `options`: limits, timeouts, TLS, and the host names and origins
    that may call it without keys.
    """
    return_large_buffers()
    descriptors = raise_descriptor_limit()
    upstream = Upstream()
    fleet = Fleet(members, upstream, Router(policy))
    locked = options.api_key is not None or options.api_keys is not None
    hosts, origins = options.allowed_hosts, options.cors_origins
    guard = guard_of(hosts, options.host, listener, locked, origins)
    front = Front(fleet, upstream, options.max_body_mib << 20, guard)
    tls = ServerTls.of(options.tls_cert, options.tls_key)
    # as many are for connections to replicas, and for handshakes
    connection_limit = min(
        options.max_connections, connection_capacity(descriptors, 2 if tls is None else 3)
    )
    connections = Connections(connection_limit, options.read_timeout_s)
    watch = asyncio.create_task(fleet.watch())
    try:
        config = config_of(front.app, connections, options, lifespan="off")
        if tls is not None:
            tls.serve_with(config, options.read_timeout_s)
            listener.accepted = connections.shake
        server = _Server(config, front, listener, options.drain_timeout_s)
        with on_hangup(Keyring(), tls), trimmed_heap():
            await server.serve([listener])
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await upstream.close()
        listener.close()
    return 0


class _Server(uvicorn.Server):
    """uvicorn; on a stop it reports unhealthy, and serves for `drain_s` seconds or until its last
    request has ended."""

    def __init__(
        self, config: uvicorn.Config, front: Front, listener: socket.socket, drain_s: float
    ) -> None:
        super().__init__(config)
        self._front, self._listener, self._drain_s = front, listener, drain_s
        self._end = 0.0  # end of a started drain on the clock of `time.monotonic`

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's startup, then a log line with the address."""
        keep_loaded()
        await super().startup(sockets)
        scheme = "https" if self.config.is_ssl else "http"
        log.info("the front is at %s://%s:%d", scheme, *self._listener.getsockname()[:2])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles SIGTERM and SIGINT; a second signal ends without waiting for answers."""
        if self._front.draining:
            self.force_exit = self.should_exit = True
        self._front.draining, self._end = True, time.monotonic() + self._drain_s

    async def on_tick(self, counter: int) -> bool:
        """uvicorn's tick, ten times a second; the port stays open while requests run."""
        if self._front.draining and not self.should_exit:
            left = self._end - time.monotonic()
            self.should_exit = left <= 0 or not self.server_state.tasks
            self.config.timeout_graceful_shutdown = max(1, math.ceil(left))
        return await super().on_tick(counter)
