"""The front: an ASGI application that forwards requests to replicas.

It answers /health, /ready, /load, /metrics and /replicas for all replicas, and forwards all other
paths. The replicas check keys; the front forwards their refusals.
"""

import asyncio

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from spark_engine.runtime.replicas import forward
from spark_engine.runtime.replicas.fleet import Fleet
from spark_engine.runtime.replicas.front_metrics import FrontMetrics, merge
from spark_engine.runtime.replicas.upstream import Headers, Lost, Unsendable, Upstream
from spark_engine.runtime.server.api.fields import BadField
from spark_engine.runtime.server.engine_client.client import Busy
from spark_engine.runtime.server.http.bodies import Bodies
from spark_engine.runtime.server.http.endpoints import unless_gone
from spark_engine.runtime.server.http.guard import Guard, Guarded, is_own
from spark_engine.runtime.server.operation.request_ids import RequestIds, current
from spark_engine.runtime.server.replies.errors import error_response

METRICS_S = 5.0  # time limit of one replica's metrics
ASKED = 3  # unresponsive replicas that are tried for a check of a key
JSON = [("content-type", "application/json")]
TEXT = [("content-type", "text/plain; version=0.0.4; charset=utf-8")]


class Front:
    """The application. `max_body` in bytes; all bodies together have the same limit as in a server.
    `guard`: host names and origins that may call it; None: any."""

    def __init__(
        self, fleet: Fleet, upstream: Upstream, max_body: int, guard: Guard | None = None
    ) -> None:
        self._fleet, self._upstream, self._bodies = fleet, upstream, Bodies(max_body)
        self.metrics = FrontMetrics()
        self._forwarder = forward.Forwarder(fleet, upstream, self.metrics)
        self._answers = {("GET", "/metrics"): self._metrics, ("GET", "/replicas"): self._list}
        self.draining = False
        self.app: ASGIApp = RequestIds(self if guard is None else Guarded(self, guard))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = False

        async def answer(status: int, headers: Headers, part: bytes, more: bool) -> None:
            nonlocal started
            if not started:
                rows = forward.encoded(headers)
                if not more:
                    rows.append((b"content-length", str(len(part)).encode()))
                await send({"type": "http.response.start", "status": status, "headers": rows})
                started = True
            await send({"type": "http.response.body", "body": part, "more_body": more})

        path = scope["path"]
        target = (scope.get("raw_path") or path.encode()).decode("latin-1")
        if query := scope.get("query_string", b""):
            target += "?" + query.decode("latin-1")
        if (own := self._own(scope["method"], path)) is not None:
            status, found = own
            await answer(status, JSON, msgspec.json.encode(found), False)
            return
        try:
            whole = await self._bodies.take(Request(scope, receive))
        except ClientDisconnect:
            return
        except (BadField, Busy) as error:
            status, _ = error_response(error)
            status, body, headers = forward.problem_of(path, status, str(error), current(), "busy")
            await answer(status, headers, body, False)
            return
        headers = forward.decoded(_for_replicas(scope["headers"]))
        asked = forward.ClientRequest(
            scope["method"], path, target, headers, whole, current(), answer
        )
        work = self._answers.get((asked.method, path), self._carry)(asked)
        try:
            await unless_gone(receive, work, None)
        finally:
            whole.drop()

    def _own(self, method: str, path: str) -> tuple[int, object] | None:
        """(status, body) of a path that needs no key: it contains no name or address of
        a replica."""
        if method != "GET" or path not in ("/health", "/ping", "/ready", "/load"):
            return None
        up, opened = self._fleet.up, self._fleet.router.open
        if path == "/load":
            return 200, {"server_load": sum(opened.values())}
        counts = {"up": len(up), "replicas": len(self._fleet.replicas)}
        if up and not self.draining:
            return 200, {"status": "ok", **counts}
        why = "the front is draining" if self.draining else "no replica takes requests"
        return 503, {"status": "unhealthy", "reason": why, **counts}

    async def _list(self, asked: forward.ClientRequest) -> None:
        """The replicas' names and addresses, for clients with a key that a replica accepts."""
        replicas, opened = list(self._fleet.replicas.values()), self._fleet.router.open
        rows: list[dict[str, object]] = [
            {"up": r.up, "requests": opened.get(r.name, 0)} for r in replicas
        ]
        for replica in replicas[:ASKED]:
            try:
                url = f"{replica.address.url}/v1/models"
                status, body = await self._upstream.get(url, METRICS_S, forward.credentials(asked))
            except Lost:
                continue
            if status in (401, 403):
                await asked.send(status, JSON, body, False)
                return
            if status == 200:
                more = [{"name": r.name, "url": r.address.url, "why": r.why} for r in replicas]
                rows = [a | b for a, b in zip(more, rows, strict=True)]
                break
        await asked.send(200, JSON, msgspec.json.encode({"replicas": rows}), False)

    async def _carry(self, asked: forward.ClientRequest) -> None:
        if self.draining:
            words = "the server is draining; send the request elsewhere"
            status, body, headers = forward.problem_of(asked.path, 503, words, asked.name)
            await asked.send(status, [*headers, ("connection", "close")], body, False)
            return
        try:
            await self._forwarder.forward(asked)
        except Unsendable as error:
            words = f"the request cannot be forwarded: {error}"
            status, body, headers = forward.problem_of(asked.path, 400, words, asked.name)
            await asked.send(status, headers, body, False)

    async def _metrics(self, asked: forward.ClientRequest) -> None:
        """Metrics of every replica and of the front, for clients that may read the replicas'."""
        names = [replica.name for replica in self._fleet.up]
        urls = [f"{replica.address.url}/metrics" for replica in self._fleet.up]
        headers = forward.credentials(asked)
        found = await asyncio.gather(
            *(self._upstream.get(url, METRICS_S, headers) for url in urls), return_exceptions=True
        )
        texts: dict[str, str] = {}
        for name, row in zip(names, found, strict=True):
            if isinstance(row, Lost):
                continue
            if isinstance(row, BaseException):
                raise row
            status, body = row
            if status in (401, 403):
                await asked.send(status, JSON, body, False)
                return
            if status != 200:  # treated like a replica that is shutting down
                continue
            texts[name] = body.decode("utf-8", "replace")
        opened = self._fleet.router.open
        states = {r.name: (r.up, opened.get(r.name, 0)) for r in self._fleet.replicas.values()}
        text = self.metrics.render(states) + merge(texts)
        await asked.send(200, TEXT, text.encode(), False)


def _for_replicas(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers for a replica: same-origin for a page of this front, which the replica cannot
    know."""
    hosts = [value for name, value in headers if name == b"host"]
    return [
        (name, value)
        for name, value in headers
        if not name.startswith(b"sec-fetch-") and not (name == b"origin" and is_own(value, hosts))
    ]
