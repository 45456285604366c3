"""One HTTP request, from its head to the end of its answer: its API key, status, tokens and times.

The middleware passes each finished request to the metrics, the access log and the traces. Code
within a request finds it by `current`. Knows HTTP and clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from spark_engine.runtime.engine.request import SamplingParams
from spark_engine.runtime.server.operation import request_ids
from spark_engine.runtime.server.operation.keys import Account, Keyring, LimitReached

if TYPE_CHECKING:  # Prometheus's library is not needed to start
    from spark_engine.runtime.server.operation.metrics import Metrics

NO_ROUTE = "none"  # the handler of a path that does not exist
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
BROKEN = 500  # the status of a request that ended without an answer
LEFT = 499  # the status of a request whose client disconnected first


@dataclass(slots=True)
class EngineUse:
    """The engine's work for a request; times in seconds, None if unknown.

    Attributes:
        prompt, cached: tokens of the prompts, each counted once, and those not computed.
    """

    prompt: int
    cached: int
    completion: int  # tokens generated, of all choices
    ends: tuple[str, ...]  # how the choices ended, in their order
    queued: float | None  # until the engine started the first of them
    first: float | None  # from the request's submission to the first token of any
    params: SamplingParams  # how the first choice was sampled


@dataclass(slots=True)
class HttpRequest:
    """One HTTP request.

    Attributes:
        account: its key's; None where no key is needed. `held`: it counts for that key's limits.
        start: `time.monotonic` at its head; `wall`: the same as `time.time_ns`.
    """

    id: str  # its x-request-id
    method: str
    path: str  # as it was sent, without the query; `handler` is its route's
    client: str
    headers: dict[str, str]
    start: float = field(default_factory=time.monotonic)
    wall: int = field(default_factory=time.time_ns)
    handler: str = NO_ROUTE
    account: Account | None = None
    held: bool = False
    status: int = 0
    model: str = ""  # that answers it, where there are several
    problem: str = ""  # the code of the error in its answer, also within a stream
    use: EngineUse | None = None
    pending: bool = False  # the engine still works for it, after the answer, in the background
    seconds: float = 0.0  # to the end of its answer, once that was sent
    after: Callable[[HttpRequest], None] | None = None  # called when it is no longer pending

    @property
    def key(self) -> str:
        """The name of its key; empty where no key is needed."""
        return "" if self.account is None else self.account.key.name

    def begin(self, prompt: int) -> None:
        """The engine starts with this many prompt tokens; `finish` reports the result."""
        self.pending = True
        self.charge(prompt)

    def finish(self, use: EngineUse) -> None:
        self.use, self.pending = use, False
        if self.after is not None:
            self.after(self)

    def charge(self, tokens: int) -> None:
        if self.account is not None and self.held:
            self.account.charge(tokens)


_CURRENT: ContextVar[HttpRequest | None] = ContextVar("request", default=None)
Listener = Callable[[HttpRequest], None]


def current() -> HttpRequest | None:
    """The request that this task belongs to; None where there is none, as in tests."""
    return _CURRENT.get()


def key() -> str:
    """The name of the current request's key; empty where no key is needed."""
    request = _CURRENT.get()
    return "" if request is None else request.key


def owner() -> str:
    """The owner of the current request in queues: its key, or its connection without a key."""
    request = _CURRENT.get()
    return "" if request is None else request.key or request.client


def note_route(path: str) -> None:
    request = _CURRENT.get()
    if request is not None:
        request.handler = path


def note_model(name: str) -> None:
    request = _CURRENT.get()
    if request is not None:
        request.model = name


def note_problem(error: Mapping[str, Any]) -> None:
    request = _CURRENT.get()
    if request is not None:
        request.problem = str(error.get("code") or error.get("type") or "error")


class RequestMiddleware:
    """The outermost layer of the application: it opens and ends an `HttpRequest`.

    `listeners` are called with each when it has ended. An exception of theirs ends only that
    request.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, listeners: Sequence[Listener]) -> None:
        self._app = app
        self._metrics = metrics
        self._listeners = listeners

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = begin(scope)
        token = _CURRENT.set(request)

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                request.status = message["status"]
                message["headers"] = [*message["headers"], *_headers(request)]
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, answer)
        except BaseException:
            request.status = request.status or BROKEN
            raise
        finally:
            _CURRENT.reset(token)
            self._end(request)

    def _end(self, request: HttpRequest) -> None:
        request.seconds = time.monotonic() - request.start
        metrics = self._metrics
        metrics.in_flight.dec()
        method = request.method if request.method in METHODS else "other"
        metrics.http(method, request.handler, request.status or LEFT, request.seconds)
        if request.pending:
            request.after = self._release_key
        else:
            self._release_key(request)
        for listener in self._listeners:
            listener(request)

    def _release_key(self, request: HttpRequest) -> None:
        if request.account is not None and request.held:
            request.account.leave()
            if (use := request.use) is not None:
                self._metrics.charged(request.key, use.prompt, use.completion)


def begin(scope: Scope) -> HttpRequest:
    headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
    client = scope.get("client")
    return HttpRequest(
        id=request_ids.current(),
        method=scope["method"],
        path=(scope.get("raw_path") or scope["path"].encode()).decode("latin-1"),
        client=f"{client[0]}:{client[1]}" if client else "",
        headers=headers,
    )


def admit(
    headers: Mapping[str, str], keys: Keyring, runs: bool, metrics: Metrics, counts: bool = False
) -> None:
    """Admits the current request under its key, where the server needs one. All of the key's limits
    apply to one that `runs`. One that only `counts` is limited by requests a minute and not by
    requests at once: it queries or ends one that runs. Raises Unauthorised and LimitReached."""
    request = _CURRENT.get()
    if not keys.locked:
        return
    account = keys.find(_secret(headers))
    if request is None:
        return
    request.account = account
    try:
        if runs:
            account.enter()
        elif counts:
            account.count()
    except LimitReached as reached:
        metrics.limited(account.key.name, reached.kind)
        raise
    request.held = runs


def _secret(headers: Mapping[str, str]) -> bytes:
    """The key of a request, as a bearer token or as Anthropic's clients send it."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        token = headers.get("x-api-key", "")
    return token.strip().encode("latin-1")


def _headers(request: HttpRequest) -> list[tuple[bytes, bytes]]:
    """The key's remaining limits."""
    rows: list[tuple[str, str]] = []
    if request.account is not None:
        for kind in ("requests", "tokens"):
            bucket = getattr(request.account, kind)
            if bucket is not None:
                left = max(0, int(bucket.level))
                rows.append((f"x-ratelimit-limit-{kind}", str(int(bucket.rate))))
                rows.append((f"x-ratelimit-remaining-{kind}", str(left)))
                rows.append((f"x-ratelimit-reset-{kind}", f"{bucket.wait(bucket.rate):.0f}s"))
    return [(name.encode(), value.encode()) for name, value in rows]
