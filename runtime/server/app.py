"""The HTTP face: the routes of `api/routes.py`, errors, authorisation.

Knows HTTP; how a request runs is in `endpoints.py`, what it means in `service.py` and `api/`.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from spark_engine.errors import SparkError
from spark_engine.runtime.server.api.answers import error
from spark_engine.runtime.server.api.paths import in_the_form_of, no_such_path
from spark_engine.runtime.server.api.routes import ROUTES, Route
from spark_engine.runtime.server.endpoints import Endpoints, json_response
from spark_engine.runtime.server.problems import error_response
from spark_engine.runtime.server.request_ids import RequestIds

ASK_AGAIN_S = 600  # what a browser may remember of what is allowed
OPEN_PATHS = frozenset(route.path for route in ROUTES if route.open)


def create_app(
    endpoints: Endpoints, api_key: str | None = None, origins: Sequence[str] = ()
) -> FastAPI:
    """The application. With `api_key` all paths but the open ones ask for it.

    `origins`: pages of these may use the server from a browser (`*`: of all).
    """
    app = FastAPI(title="spark", docs_url=None, redoc_url=None, openapi_url=None)
    for kind in (SparkError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _on_error)
    if api_key is not None:
        app.middleware("http")(_key_check(api_key))
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=sorted({route.method for route in ROUTES}),
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
            max_age=ASK_AGAIN_S,
        )
    app.add_middleware(RequestIds)  # the outermost
    for route in ROUTES:
        app.add_route(route.path, _handler(endpoints, route), methods=[route.method])
    return app


def _handler(endpoints: Endpoints, route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        try:
            return await route.run(endpoints, request)
        except Exception as problem:  # here it still has its request's name
            return await _on_error(request, problem)

    return handle


async def _on_error(request: Request, problem: Exception) -> Response:
    path = request.url.path
    if isinstance(problem, HTTPException) and problem.status_code in (404, 405):
        problem = no_such_path(request.method, path)
    status, body = error_response(problem)
    body = in_the_form_of(path, status, body)
    response = json_response(body, status)
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
        if not key and "x-api-key" in request.headers:  # as Anthropic's clients send it
            scheme, key = "bearer", request.headers["x-api-key"]
        known = hmac.compare_digest(key.strip().encode("latin-1"), wanted)
        path = request.url.path
        if path in OPEN_PATHS or (known and scheme.lower() == "bearer"):
            return await proceed(request)
        words = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
        body = error(words, "authentication_error", code="invalid_api_key")
        return json_response(in_the_form_of(path, 401, body), 401)

    return check
