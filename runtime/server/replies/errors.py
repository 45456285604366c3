"""Exceptions as HTTP errors: the status, and the body in OpenAI's form."""

import logging

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from spark_engine.errors import CapacityError, RequestError
from spark_engine.runtime.server.api.answers import Json, error
from spark_engine.runtime.server.api.fields import BadField
from spark_engine.runtime.server.engine_client.client import Busy, ClientTooSlow, EngineDied
from spark_engine.runtime.server.operation.keys import LimitReached, Unauthorised
from spark_engine.runtime.server.operation.request_ids import current
from spark_engine.runtime.server.service.generation import GenerationFailed, TimedOut

LEFT = 499  # nginx's status for a client that closed the connection
log = logging.getLogger(__name__)


class TooLarge(BadField):
    """The body is over the limit."""

    status = 413


class UnknownEncoding(BadField):
    """The body has an unknown content encoding."""

    status = 415


class Draining(Busy):
    """The server is shutting down."""


class NoSuchPath(HTTPException):
    """A path that is not served, or not with this method."""

    def __init__(self, status: int, words: str, code: str) -> None:
        super().__init__(status, words)
        self.code = code


def error_response(problem: Exception) -> tuple[int, Json]:
    """(HTTP status, body) of an exception; the body has the request's id next to the error."""
    status, body = _response(problem)
    name = current()
    return status, {**body, "request_id": name} if name else body


# (an exception, its status, type and code); its own status or code goes before these
_ROWS: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (Unauthorised, 401, "authentication_error", "invalid_api_key"),
    (LimitReached, 429, "rate_limit_error", "rate_limit_exceeded"),
    (RequestError, 400, "invalid_request_error", None),
    (ClientTooSlow, 408, "timeout", "too_slow"),
    (TimedOut, 504, "timeout", "timeout"),
    (CapacityError, 503, "service_unavailable", "busy"),
    (EngineDied, 500, "server_error", "engine_error"),
    (GenerationFailed, 500, "server_error", "engine_error"),
)


def _response(problem: Exception) -> tuple[int, Json]:
    code = getattr(problem, "code", None)
    for kind, status, name, usual in _ROWS:
        if isinstance(problem, kind):
            param = getattr(problem, "param", None)
            words = error(str(problem), name, param, code or usual)
            return getattr(problem, "status", status), words
    if isinstance(problem, HTTPException):
        return problem.status_code, error(problem.detail, "invalid_request_error", code=code)
    if isinstance(problem, ClientDisconnect):
        return LEFT, error("the client left", "invalid_request_error")
    log.error("internal error in request %s", current(), exc_info=problem)
    return 500, error(f"internal error: {type(problem).__name__}", "server_error")
