"""Exceptions as HTTP errors: the status, and the body in OpenAI's form."""

import logging

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from spark_engine.errors import CapacityError, RequestError
from spark_engine.runtime.server.api.answers import Json, error
from spark_engine.runtime.server.api.fields import BadField, UnknownModel
from spark_engine.runtime.server.engine_client.client import Busy, ClientTooSlow, EngineDied
from spark_engine.runtime.server.operation.keys import LimitReached, Unauthorised
from spark_engine.runtime.server.operation.request_ids import current
from spark_engine.runtime.server.service.deadline import TimedOut
from spark_engine.runtime.server.service.generation import GenerationFailed
from spark_engine.runtime.server.service.stored_responses import UnknownResponse

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


def _response(problem: Exception) -> tuple[int, Json]:
    words = str(problem)
    if isinstance(problem, Unauthorised):
        return 401, error(words, "authentication_error", code="invalid_api_key")
    if isinstance(problem, LimitReached):
        return 429, error(words, "rate_limit_error", code="rate_limit_exceeded")
    if isinstance(problem, RequestError):
        status = 400
        if isinstance(problem, UnknownModel | UnknownResponse | TooLarge | UnknownEncoding):
            status = problem.status
        param, code = getattr(problem, "param", None), getattr(problem, "code", None)
        return status, error(words, "invalid_request_error", param, code)
    if isinstance(problem, Busy):
        return 503, error(words, "service_unavailable", code=problem.code)
    if isinstance(problem, ClientTooSlow):
        return 408, error(words, "timeout", code="too_slow")
    if isinstance(problem, TimedOut):
        return 504, error(words, "timeout", code="timeout")
    if isinstance(problem, CapacityError):
        return 503, error(words, "service_unavailable", code="busy")
    if isinstance(problem, HTTPException):
        code = getattr(problem, "code", None)
        return problem.status_code, error(problem.detail, "invalid_request_error", code=code)
    if isinstance(problem, EngineDied | GenerationFailed):
        return 500, error(words, "server_error", code="engine_error")
    if isinstance(problem, ClientDisconnect):
        return LEFT, error("the client left", "invalid_request_error")
    log.error("internal error in request %s", current(), exc_info=problem)
    return 500, error(f"internal error: {type(problem).__name__}", "server_error")
