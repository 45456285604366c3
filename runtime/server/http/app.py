"""The ASGI application: routes, errors, authorisation.

Knows HTTP; `routes.py` has the routes, `endpoints.py` runs a request.
"""

import math
from collections.abc import Awaitable, Callable, Sequence

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from spark_engine.errors import SparkError
from spark_engine.runtime.server.http.endpoints import Endpoints, Route, json_response
from spark_engine.runtime.server.http.guard import Guard, Guarded
from spark_engine.runtime.server.http.routes import LIVE, METRICS, ROUTES, page_routes
from spark_engine.runtime.server.http.unknown_paths import in_api_form, no_such_path
from spark_engine.runtime.server.operation import http_request
from spark_engine.runtime.server.operation.keys import Keyring, LimitReached, Unauthorised
from spark_engine.runtime.server.operation.request_ids import RequestIds
from spark_engine.runtime.server.replies.errors import Draining, error_response

ASK_AGAIN_S = 600  # how long a browser may cache a CORS answer


def create_app(
    endpoints: Endpoints,
    keys: Keyring | None = None,
    listeners: Sequence[http_request.Listener] = (),
    origins: Sequence[str] = (),
    page: bool = True,
    guard: Guard | None = None,
) -> FastAPI:
    """The application. All paths except the open ones need one of `keys`, if there are any.

    `listeners` are called with every request that has ended. `origins`: pages of these may use
    the server from a browser (`*`: of all). `page`: serve the page at `/`. `guard`: the names and
    pages by which it may be called; None: any.
    """
    routes = (*ROUTES, *(page_routes() if page else ()))
    keys, metrics = keys or Keyring(), endpoints.service.metrics
    metrics.add_routes((route.method, route.path) for route in routes)
    app = FastAPI(title="spark", docs_url=None, redoc_url=None, openapi_url=None)
    for kind in (SparkError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _on_error)
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=sorted({route.method for route in ROUTES}),
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
            max_age=ASK_AGAIN_S,
        )
    if guard is not None:
        app.add_middleware(Guarded, guard=guard)
    app.add_middleware(http_request.RequestMiddleware, metrics=metrics, listeners=listeners)
    app.add_middleware(RequestIds)  # the outermost
    for route in routes:
        app.add_route(route.path, _handler(endpoints, keys, route), methods=[route.method])
    return app


def _handler(
    endpoints: Endpoints, keys: Keyring, route: Route
) -> Callable[[Request], Awaitable[Response]]:
    metrics = endpoints.service.metrics
    is_open = route.open and not (route.path in (METRICS, LIVE) and endpoints.metrics_by_key)

    async def handle(request: Request) -> Response:
        try:
            http_request.note_route(route.path)
            if not is_open:
                http_request.admit(request.headers, keys, route.runs, metrics, route.counts)
            return await route.run(endpoints, request)
        except Exception as problem:  # here the request's id is still known
            return await _on_error(request, problem)

    return handle


async def _on_error(request: Request, problem: Exception) -> Response:
    path = request.url.path
    if isinstance(problem, HTTPException) and problem.status_code in (404, 405):
        problem = no_such_path(request.method, path)
    status, body = error_response(problem)
    http_request.note_problem(body["error"])
    body = in_api_form(path, status, body)
    response = json_response(body, status)
    if status == 503:
        response.headers["Retry-After"] = "1"
        if isinstance(problem, Draining):  # the client must not retry on this connection
            response.headers["Connection"] = "close"
    elif isinstance(problem, LimitReached):
        response.headers["Retry-After"] = str(math.ceil(problem.retry_s))
    elif isinstance(problem, Unauthorised):
        response.headers["WWW-Authenticate"] = "Bearer"
    return response
