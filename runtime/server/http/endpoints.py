"""Handles one HTTP request: its body, the response whole or as events, a client that disconnects.

Knows HTTP. Knows no API: `routes.py` passes the function that starts an answer.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.background import BackgroundTask
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

from spark_engine.runtime.engine.trace import NoTrace
from spark_engine.runtime.server.api.answers import Json, Part, Reply
from spark_engine.runtime.server.http.bodies import Bodies, ReceivedBody
from spark_engine.runtime.server.operation.http_request import note_model, note_problem
from spark_engine.runtime.server.prompts.contract import Blobs, JobKind
from spark_engine.runtime.server.replies.errors import LEFT, Draining, error_response
from spark_engine.runtime.server.service.models import Models
from spark_engine.runtime.server.service.service import Service

SLICE = 256 << 10  # bytes: sending one takes far less than a millisecond
T = TypeVar("T")
Start = Callable[[Service, Blobs], Awaitable[Reply]]
Run = Callable[["Endpoints", Request], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """One path. `words`: its purpose. `body`: its request body. `open`: it needs no key.
    `counts`: it counts for a key's requests a minute."""

    method: str
    path: str
    run: Run
    words: str
    body: type[msgspec.Struct] | None = None
    open: bool = False
    counts: bool = False

    @property
    def runs(self) -> bool:
        """Whether it may run for long, so that all limits of a key apply."""
        return self.body is not None

    def takes(self, path: str) -> bool:
        """Whether it is for this path, whatever the method."""
        return compile_path(self.path)[0].match(path) is not None


class Endpoints:
    """The endpoints over a service, or over those of several models; `max_body` in bytes.
    `draining` refuses new work; `metrics_by_key`: /metrics names keys, and so needs one."""

    def __init__(
        self, served: Service | Models, max_body: int | None = None, metrics_by_key: bool = False
    ) -> None:
        self.models = served if isinstance(served, Models) else Models([served])
        self.service, self.metrics_by_key = self.models.first, metrics_by_key
        self.reports: dict[Service, Json] = {}  # of the engines: `page/report.py`
        self._bodies = Bodies(max_body)
        self.draining = False

    def health(self) -> Response:
        """200 only while new work would be answered; else 503 with the reason."""
        reason = "the server is draining" if self.draining else self.models.unhealthy_reason()
        more: Json = {"models": self.models.states()} if self.models.several else {}
        if reason is None:
            return json_response({"status": "ok", **more})
        return json_response({"status": "unhealthy", "reason": reason, **more}, 503)

    def ready(self) -> Response:
        """200 only while a new request would be accepted at once: the queue is not full either."""
        if (words := self.models.full()) is not None:
            return json_response({"status": "unready", "reason": words}, 503)
        return self.health()

    def load(self) -> Response:
        stats = [service.client.stats for service in self.models.services]
        counts = {name: sum(getattr(s, name) for s in stats) for name in ("running", "waiting")}
        return json_response({"server_load": self.models.open, **counts})

    def metrics(self) -> Response:
        text = self.service.metrics.render(self.metrics_by_key)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    async def generate(self, request: Request, start: Start) -> Response:
        """Runs one request: a stream of events or one JSON object.

        A stream's status is sent with its first event: a failure before it is an error response.
        """
        return await self._run(request, partial(self._answer, start))

    async def compute(self, request: Request, kind: JobKind) -> Response:
        async def work(body: ReceivedBody) -> Response:
            service = await self._service(body)
            return SlicedJson([await service.compute(kind, body.parts)])

        return await self._run(request, work)

    async def _run(
        self, request: Request, work: Callable[[ReceivedBody], Coroutine[Any, Any, Response]]
    ) -> Response:
        if self.draining:
            raise Draining("the server is draining; send the request elsewhere")
        body = await self._bodies.take(request)
        try:
            left = Response(status_code=LEFT)
            return await unless_gone(request.receive, work(body), left)
        finally:
            body.drop()

    async def _answer(self, start: Start, body: ReceivedBody) -> Response:
        """The answer, or its start. When it is cancelled, its request is closed."""
        service = await self._service(body)
        reply = await start(service, body.parts)
        try:
            body.drop()
            if not reply.stream:
                return json_response(await reply.whole())
            events = reply.events()
            first = await anext(events)
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            sent = self._events(reply, first, events, service.client.trace)
            return _Stream(reply, sent, media_type="text/event-stream", headers=headers)
        except BaseException:
            reply.close()
            raise
        finally:
            if not reply.stream:
                reply.close()

    async def _service(self, body: ReceivedBody) -> Service:
        """The service of the model that the body names. Raises UnknownModel."""
        service = await self.models.of(body.parts)
        if self.models.several:
            note_model(service.names[0])
        return service

    async def _events(
        self, reply: Reply, first: bytes, events: AsyncIterator[bytes], trace: NoTrace
    ) -> AsyncIterator[bytes]:
        try:
            yield first
            async for event in events:
                start = trace.now()
                yield event
                trace.span("loop", "send", start)
        except Exception as problem:  # the status was sent: the error is sent in the stream
            status, answer = error_response(problem)
            note_problem(answer["error"])
            yield reply.last_words(status, answer)
        finally:
            reply.close()


class _Stream(StreamingResponse):
    """The events of `reply`, which is closed at the end: if the client disconnects before the first
    event, their iterator is never started and cannot close it."""

    def __init__(self, reply: Reply, events: AsyncIterator[bytes], **given: Any) -> None:
        super().__init__(events, **given)
        self._reply = reply

    def close(self) -> None:
        self._reply.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._reply.close()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T], left: T) -> T:
    """The result of `work`; `left` if the client disconnects before, which cancels it."""
    answer = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_wait_for_disconnect(receive))
    taken = False
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        taken = answer.done()
        return answer.result() if taken else left
    finally:
        for task in (answer, gone):
            task.cancel()
        (late, _) = await asyncio.gather(answer, gone, return_exceptions=True)
        if not taken and isinstance(late, _Stream):
            late.close()


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class SlicedJson(Response):
    """JSON that may be long, sent in slices; the event loop does other work in between."""

    media_type = "application/json"

    def __init__(self, parts: Sequence[Part], status_code: int = 200) -> None:
        self._parts = parts
        size = sum(len(part) for part in parts)
        super().__init__(None, status_code, {"content-length": str(size)}, self.media_type)
        self.background: BackgroundTask | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **start})
        for part in self._parts:
            for at in range(0, len(part), SLICE):
                body = bytes(part[at : at + SLICE])
                await send({"type": "http.response.body", "body": body, "more_body": True})
                await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b""})


def json_response(value: Json, status: int = 200) -> Response:
    data = msgspec.json.encode(value)
    if len(data) > SLICE:
        return SlicedJson([data], status)
    return Response(data, status, media_type="application/json")
