"""The id of each request: the client's `x-request-id`, or a new one.

It is returned as a header and in errors; `current()` returns it for the log. Knows ASGI; knows no
endpoints.
"""

import contextvars
import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"
_TAKEN = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")  # a client cannot inject text into our log
_CURRENT: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="")


def current() -> str:
    """The request that is being handled; empty where there is none."""
    return _CURRENT.get()


class RequestIds:
    """Middleware: gives each request of `app` an id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == HEADER), b"")
        name = given if _TAKEN.fullmatch(given) else f"req_{secrets.token_hex(12)}".encode()
        token = _CURRENT.set(name.decode())

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER, name)]
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            _CURRENT.reset(token)
