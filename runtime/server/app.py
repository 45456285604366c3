"""The HTTP face: routes, errors, authorisation, clients that leave.

Knows HTTP; what the endpoints mean is `runtime/server/service.py`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from spark_engine.errors import RequestError, SparkError
from spark_engine.runtime.server.client import Busy, EngineDied
from spark_engine.runtime.server.deadline import TimedOut
from spark_engine.runtime.server.generation import GenerationFailed
from spark_engine.runtime.server.page.bundle import add_page, is_of_page
from spark_engine.runtime.server.protocol import BadField
from spark_engine.runtime.server.responses import Json, error
from spark_engine.runtime.server.service import InFlight, Service, UnknownModel

MAX_BODY = 32 << 20  # bytes
SMALL_BODY = 256 << 10  # bytes of each body that are always taken
LARGE_BODIES = 4 * MAX_BODY  # bytes beyond those that all bodies together may hold
OPEN_PATHS = ("/health", "/ping", "/metrics", "/version")  # these need no key
LEFT = 499  # nginx's status for a client that closed the connection
DONE = b"data: [DONE]\n\n"
Start = Callable[[bytes], Awaitable[InFlight]]
log = logging.getLogger(__name__)


class TooLarge(BadField):
    """The body is over the limit."""

    status = 413


class Draining(Busy):
    """The server is on its way down."""


class Bodies:
    """Reads bodies. Large ones share what memory there is for them; small ones always fit."""

    def __init__(self) -> None:
        self.large = 0  # bytes held now beyond the first SMALL_BODY of each body

    @contextlib.asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytes]:
        """The body, which counts until the block is left. Raises TooLarge or Busy."""
        too_large = TooLarge(f"the body is over {MAX_BODY} bytes; send a shorter prompt")
        declared = request.headers.get("content-length", "")
        if declared.isdigit() and (len(declared) > 12 or int(declared) > MAX_BODY):
            raise too_large
        parts, size, large = [], 0, 0
        try:
            async for part in request.stream():
                parts.append(part)
                size += len(part)
                if size > MAX_BODY:
                    raise too_large
                more = max(0, size - SMALL_BODY) - large
                large, self.large = large + more, self.large + more
                if more and self.large > LARGE_BODIES:
                    raise Busy("too many long prompts are being read; retry")
            yield b"".join(parts)
        finally:
            self.large -= large


class Endpoints:
    """The endpoints over one service. `draining` turns new work away."""

    def __init__(self, service: Service, report: Json | None = None) -> None:
        self._service = service
        self._report = report or {}
        self._created = int(time.time())
        self._bodies = Bodies()
        self.draining = False

    @property
    def open(self) -> int:
        """Requests that have not ended."""
        return self._service.open

    def health(self) -> Response:
        """200 only while new work would be answered; else 503 with the reason."""
        reason = (
            "the server is draining" if self.draining else self._service.client.unhealthy_reason()
        )
        if reason is None:
            return _json({"status": "ok"})
        return _json({"status": "unhealthy", "reason": reason}, 503)

    def metrics(self) -> Response:
        """Prometheus' text format."""
        return Response(self._service.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    def report(self) -> Response:
        """What the engine is: `runtime/server/page/report.py`."""
        return _json(self._report)

    def models(self) -> Response:
        """Every name the engine is served under."""
        rows = [self._model(name) for name in self._service.names]
        return _json({"object": "list", "data": rows})

    def model(self, name: str) -> Response:
        """One of them."""
        if name not in self._service.names:
            raise UnknownModel(f"model {name!r} is not served here", "model", "model_not_found")
        return _json(self._model(name))

    async def generate(self, request: Request, start: Start) -> Response:
        """Runs one request: a stream of events or one JSON object."""
        if self.draining:
            raise Draining("the server is draining; send the request elsewhere")
        async with self._bodies.read(request) as data:
            job = await start(data)
        if job.body.stream:
            headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
            events = self._events(job)
            return StreamingResponse(events, media_type="text/event-stream", headers=headers)
        return await self._whole(request, job)

    async def compute(self, request: Request, work: Callable[[bytes], Awaitable[Json]]) -> Response:
        """Runs one request that needs no engine."""
        async with self._bodies.read(request) as data:
            return _json(await work(data))

    async def _events(self, job: InFlight) -> AsyncIterator[bytes]:
        trace = self._service.client.trace
        try:
            async for chunk in self._service.stream(job):
                start = trace.now()
                yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
                trace.span("loop", "send", start)
        except Exception as problem:  # the status line is gone: the error goes into the stream
            yield b"data: " + msgspec.json.encode(error_response(problem)[1]) + b"\n\n"
        finally:
            job.generation.close()
        yield DONE

    async def _whole(self, request: Request, job: InFlight) -> Response:
        answer = asyncio.ensure_future(self._service.answer(job))
        gone = asyncio.ensure_future(_wait_for_disconnect(request))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            return _json(answer.result()) if answer.done() else Response(status_code=LEFT)
        finally:
            job.generation.close()
            for task in (answer, gone):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await answer

    def _model(self, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "spark",
            "root": self._service.info.name,
            "parent": None,
            "max_model_len": self._service.max_model_len,
        }


def create_app(
    endpoints: Endpoints, service: Service, api_key: str | None = None, page: bool = True
) -> FastAPI:
    """The application. With `api_key` all paths but the open ones ask for it as a bearer token.

    `page`: with the page at `/`, which is open.
    """
    app = FastAPI(title="spark", docs_url=None, redoc_url=None, openapi_url=None)
    for kind in (SparkError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _on_error)
    if api_key is not None:
        app.middleware("http")(_key_check(api_key))
    _add_generation(app, endpoints, service)
    _add_information(app, endpoints)
    if page:
        add_page(app)
    return app


def _add_generation(app: FastAPI, endpoints: Endpoints, service: Service) -> None:
    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await endpoints.generate(request, service.chat)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await endpoints.generate(request, service.complete)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        return await endpoints.compute(request, service.tokenize)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        return await endpoints.compute(request, service.detokenize)


def _add_information(app: FastAPI, endpoints: Endpoints) -> None:
    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        return endpoints.health()

    @app.get("/metrics")
    async def metrics() -> Response:
        return endpoints.metrics()

    @app.get("/report")
    async def report() -> Response:
        return endpoints.report()

    @app.get("/v1/models")
    async def models() -> Response:
        return endpoints.models()

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        return endpoints.model(name)

    @app.get("/version")
    async def version_() -> Response:
        return _json({"version": version("spark-engine")})


def error_response(problem: Exception) -> tuple[int, Json]:
    """(HTTP status, body) of an exception."""
    words = str(problem)
    if isinstance(problem, RequestError):
        status = 400
        if isinstance(problem, UnknownModel | TooLarge):
            status = problem.status
        param, code = getattr(problem, "param", None), getattr(problem, "code", None)
        return status, error(words, "invalid_request_error", param, code)
    if isinstance(problem, Busy):
        return 503, error(words, "service_unavailable", code="queue_full")
    if isinstance(problem, TimedOut):
        return 504, error(words, "timeout", code="timeout")
    if isinstance(problem, HTTPException):
        return problem.status_code, error(problem.detail, "invalid_request_error")
    if isinstance(problem, EngineDied | GenerationFailed):
        return 500, error(words, "server_error", code="engine_error")
    if isinstance(problem, ClientDisconnect):
        return LEFT, error("the client left", "invalid_request_error")
    log.error("internal error", exc_info=problem)
    return 500, error(f"internal error: {type(problem).__name__}", "server_error")


async def _on_error(_: Request, problem: Exception) -> Response:
    status, body = error_response(problem)
    response = _json(body, status)
    if status == 503:
        response.headers["Retry-After"] = "1"
    return response


def _key_check(
    api_key: str,
) -> Callable[[Request, Callable[[Request], Awaitable[Response]]], Awaitable[Response]]:
    wanted = api_key.encode()

    async def check(
        request: Request, proceed: Callable[[Request], Awaitable[Response]]
    ) -> Response:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        known = hmac.compare_digest(key.strip().encode("latin-1"), wanted)
        path = request.url.path
        if path in OPEN_PATHS or is_of_page(path) or (known and scheme.lower() == "bearer"):
            return await proceed(request)
        words = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
        return _json(error(words, "authentication_error", code="invalid_api_key"), 401)

    return check


async def _wait_for_disconnect(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(value: Json, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")
