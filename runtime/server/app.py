"""The HTTP face: the routes of `api/routes.py`, errors, authorisation.

Knows HTTP; how a request runs is in `endpoints.py`, what it means in `service.py` and `api/`.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from spark_engine.errors import SparkError
from spark_engine.runtime.server.api.answers import error
from spark_engine.runtime.server.api.routes import ROUTES, Route
from spark_engine.runtime.server.endpoints import Endpoints, json_response
from spark_engine.runtime.server.page.bundle import add_page, is_of_page
from spark_engine.runtime.server.problems import error_response

OPEN_PATHS = frozenset(route.path for route in ROUTES if route.open)


def create_app(endpoints: Endpoints, api_key: str | None = None, page: bool = True) -> FastAPI:
    """The application. With `api_key` all paths but the open ones ask for it as a bearer token.

    `page`: with the page at `/`, which is open.
    """
    app = FastAPI(title="spark", docs_url=None, redoc_url=None, openapi_url=None)
    for kind in (SparkError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _on_error)
    if api_key is not None:
        app.middleware("http")(_key_check(api_key))
    for route in ROUTES:
        app.add_route(route.path, _handler(endpoints, route), methods=[route.method])
    if page:
        add_page(app)
    return app


def _handler(endpoints: Endpoints, route: Route) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        return await route.run(endpoints, request)

    return handle


async def _on_error(_: Request, problem: Exception) -> Response:
    status, body = error_response(problem)
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
        known = hmac.compare_digest(key.strip().encode("latin-1"), wanted)
        path = request.url.path
        if path in OPEN_PATHS or is_of_page(path) or (known and scheme.lower() == "bearer"):
            return await proceed(request)
        words = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
        return json_response(error(words, "authentication_error", code="invalid_api_key"), 401)

    return check
