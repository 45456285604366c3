"""The address in front of the replicas: an ASGI application that passes requests on.

It answers for all of them: /health, /ready, /load, /metrics, /replicas. Everything else is one
replica's. Keys are the replicas' matter: whoever they turn away is turned away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from spark_engine.runtime.replicas.fleet import Fleet
from spark_engine.runtime.replicas.forward import (
    ClientRequest,
    Forwarder,
    decoded,
    encoded,
    problem_of,
)
from spark_engine.runtime.replicas.front_metrics import FrontMetrics
from spark_engine.runtime.replicas.merged_metrics import merge
from spark_engine.runtime.replicas.upstream import Headers, Lost, Unsendable, Upstream
from spark_engine.runtime.server.api.fields import BadField
from spark_engine.runtime.server.bodies import Bodies
from spark_engine.runtime.server.client import Busy
from spark_engine.runtime.server.http_errors import error_response
from spark_engine.runtime.server.request_ids import RequestIds, current

METRICS_S = 5.0  # for one replica's counters
JSON = [("content-type", "application/json")]
TEXT = [("content-type", "text/plain; version=0.0.4; charset=utf-8")]


class Front:
    """The application. `max_body` in bytes; what all bodies together may hold is as at a server."""

    def __init__(self, fleet: Fleet, upstream: Upstream, max_body: int) -> None:
        self._fleet, self._upstream, self._bodies = fleet, upstream, Bodies(max_body)
        self.metrics = FrontMetrics()
        self._forwarder = Forwarder(fleet, upstream, self.metrics)
        self.draining = False
        self.app: ASGIApp = RequestIds(self)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            return
        begun = False

        async def answer(status: int, headers: Headers, part: bytes, more: bool) -> None:
            nonlocal begun
            if not begun:
                rows = encoded(headers)
                if not more:
                    rows.append((b"content-length", str(len(part)).encode()))
                await send({"type": "http.response.start", "status": status, "headers": rows})
                begun = True
            await send({"type": "http.response.body", "body": part, "more_body": more})

        path, target = (
            scope["path"],
            (scope.get("raw_path") or scope["path"].encode()).decode("latin-1"),
        )
        if query := scope.get("query_string", b""):
            target += "?" + query.decode("latin-1")
        if (own := self._own(scope["method"], path)) is not None:
            status, body = own
            await answer(status, JSON, msgspec.json.encode(body), False)
            return
        if words := _unfit(scope, target):
            status, body, headers = problem_of(path, 400, words, current())
            await answer(status, [*headers, ("connection", "close")], body, False)
            return
        try:
            whole = await self._bodies.take(Request(scope, receive))
        except ClientDisconnect:
            return
        except (BadField, Busy) as error:
            status, _ = error_response(error)
            status, body, headers = problem_of(path, status, str(error), current(), "busy")
            await answer(status, headers, body, False)
            return
        headers = decoded(scope["headers"])
        asked = ClientRequest(scope["method"], path, target, headers, whole, current(), answer)
        work = self._metrics(asked) if path == "/metrics" else self._carry(asked)
        try:
            await _unless_gone(receive, asyncio.ensure_future(work))
        finally:
            whole.drop()

    def _own(self, method: str, path: str) -> tuple[int, object] | None:
        """(status, body) of what is answered here."""
        if method != "GET" or path not in ("/health", "/ping", "/ready", "/load", "/replicas"):
            return None
        up, opened = self._fleet.up, self._fleet.router.open
        if path == "/load":
            return 200, {"server_load": sum(opened.values()), "replicas": dict(opened)}
        rows = [
            {
                "name": replica.name,
                "url": replica.address.url,
                "up": replica.up,
                "why": replica.why,
                "requests": opened.get(replica.name, 0),
            }
            for replica in self._fleet.replicas.values()
        ]
        if path == "/replicas":
            return 200, {"replicas": rows}
        counts = {"up": len(up), "replicas": len(rows)}
        if up and not self.draining:
            return 200, {"status": "ok", **counts}
        why = "the front is draining" if self.draining else "no replica takes requests"
        return 503, {"status": "unhealthy", "reason": why, **counts}

    async def _carry(self, asked: ClientRequest) -> None:
        if self.draining:
            words = "the server is draining; send the request elsewhere"
            status, body, headers = problem_of(asked.path, 503, words, asked.name)
            await asked.send(status, [*headers, ("connection", "close")], body, False)
            return
        try:
            await self._forwarder.forward(asked)
        except Unsendable as error:
            words = f"the request cannot be sent on: {error}"
            status, body, headers = problem_of(asked.path, 400, words, asked.name)
            await asked.send(status, headers, body, False)

    async def _metrics(self, asked: ClientRequest) -> None:
        """Every replica's counters, and ours. Who may not see theirs sees none."""
        names = [replica.name for replica in self._fleet.up]
        urls = [f"{replica.address.url}/metrics" for replica in self._fleet.up]
        headers = [row for row in asked.up if row[0].lower() in ("authorization", "x-api-key")]
        found = await asyncio.gather(
            *(self._upstream.get(url, METRICS_S, headers) for url in urls), return_exceptions=True
        )
        texts: dict[str, str] = {}
        for name, row in zip(names, found, strict=True):
            if isinstance(row, Lost):
                continue
            if isinstance(row, BaseException):
                raise row
            status, body, _ = row
            if status in (401, 403):
                await asked.send(status, JSON, body, False)
                return
            if status != 200:  # as of one that is on its way down
                continue
            texts[name] = body.decode("utf-8", "replace")
        opened = self._fleet.router.open
        states = {r.name: (r.up, opened.get(r.name, 0)) for r in self._fleet.replicas.values()}
        text = self.metrics.render(states) + merge(texts)
        await asked.send(200, TEXT, text.encode(), False)


def _unfit(scope: Scope, target: str) -> str:
    """Why a request is refused before its body is read; empty where it is not."""
    if not target.startswith("/"):  # behind a replica's address it would be another's
        return f"the request's target must begin with /, not {target[:80]!r}"
    lengths = {b"content-length", b"transfer-encoding"}
    if lengths <= {name for name, _ in scope["headers"]}:  # RFC 9112, 6.3: request smuggling
        return "a request has a content-length or a transfer-encoding, not both"
    return ""


async def _unless_gone(receive: Receive, work: asyncio.Future[None]) -> None:
    """Does the work, unless the client leaves before; then it is cut off."""
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
    finally:
        rest: Sequence[asyncio.Future[None]] = [f for f in (work, gone) if not f.done()]
        for future in rest:
            future.cancel()
        await asyncio.gather(*rest, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
