"""The table of all paths that are served; a 404 lists them."""

from collections.abc import Callable, Mapping

from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse

from spark_engine.runtime.engine.request import capacity
from spark_engine.runtime.server.api.answers import Json, Part
from spark_engine.runtime.server.api.chat import ChatBody
from spark_engine.runtime.server.api.completions import CompletionBody, DetokenizeBody, TokenizeBody
from spark_engine.runtime.server.api.messages import CountBody, MessagesBody
from spark_engine.runtime.server.api.responses import ResponsesBody
from spark_engine.runtime.server.http.endpoints import (
    Endpoints,
    Route,
    Run,
    SlicedJson,
    Start,
    json_response,
)
from spark_engine.runtime.server.http.openapi import document
from spark_engine.runtime.server.operation.release import release
from spark_engine.runtime.server.page.bundle import INDEX, read_bundle
from spark_engine.runtime.server.page.live import live
from spark_engine.runtime.server.prompts.contract import JobKind
from spark_engine.runtime.server.replies import chat, completions, messages, responses
from spark_engine.runtime.server.service.service import Service


def _generates(start: Start) -> Run:
    return lambda endpoints, request: endpoints.generate(request, start)


def _computes(kind: JobKind) -> Run:
    return lambda endpoints, request: endpoints.compute(request, kind)


def _shows(show: Callable[[Endpoints], Response]) -> Run:
    async def run(endpoints: Endpoints, request: Request) -> Response:
        return show(endpoints)

    return run


def _json(make: Callable[[Endpoints], Json]) -> Run:
    return _shows(lambda endpoints: json_response(make(endpoints)))


def _kept(work: Callable[[Service, str, Mapping[str, str]], list[Part]]) -> Run:
    """An operation on one stored response, with JSON as its result."""

    async def run(endpoints: Endpoints, request: Request) -> Response:
        return SlicedJson(work(endpoints.service, request.path_params["id"], request.query_params))

    return run


async def _model(endpoints: Endpoints, request: Request) -> Response:
    if not (name := request.path_params["name"].rstrip("/")):
        return RedirectResponse(request.url.replace(path=request.url.path.rstrip("/")))
    return json_response(_model_row(endpoints.models.named(name), name))


def _models(endpoints: Endpoints) -> Json:
    return {"object": "list", "data": [_model_row(one, name) for name, one in endpoints.models]}


def _model_row(service: Service, name: str) -> Json:
    state = service.client.state
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "spark",
        "root": service.info.name,
        "parent": None,
        "max_model_len": capacity(service.info.limits),
        **({} if state is None else {"state": state}),
    }


async def _live(endpoints: Endpoints, request: Request) -> Response:
    service = _asked(endpoints, request)
    found = live(service.metrics, service.client.stats, service.info.limits.drafts)
    return json_response(found)


async def _report(endpoints: Endpoints, request: Request) -> Response:
    return json_response(endpoints.reports.get(_asked(endpoints, request), {}))


def _asked(endpoints: Endpoints, request: Request) -> Service:
    """The service of the query's `model`, by default the first. Raises UnknownModel."""
    return endpoints.models.named(request.query_params.get("model"))


def page_routes() -> tuple[Route, ...]:
    """The page's routes; its files are read now. They need no key: they contain nothing of the
    engine."""
    bundle = read_bundle()

    async def run(_: Endpoints, request: Request) -> Response:
        name = request.path_params.get("name", INDEX)
        if name not in bundle:
            raise HTTPException(404, f"the page has no file {name!r}")
        return bundle[name].response(request.headers.get("if-none-match", ""))

    return (
        Route("GET", "/", run, "a page to chat and to see what the server does", open=True),
        Route("GET", LIVE, _live, "what the page's plots are drawn from", open=True),
        Route("GET", "/page/{name:path}", run, "the page's files", open=True),
    )


_MESSAGES, _COUNT = _generates(messages.start), _computes(JobKind.COUNT)
_CHAT, _TEXT = _generates(chat.start), _generates(completions.start)
_RESPONSES, _ONE = _generates(responses.start), "/v1/responses/{id}"
_TOKENIZE, _DETOKENIZE = _computes(JobKind.TOKENIZE), _computes(JobKind.DETOKENIZE)
METRICS, LIVE = "/metrics", "/page/live"
_HEALTH, _METRICS = _shows(Endpoints.health), _shows(Endpoints.metrics)
_DOCUMENT = _json(lambda _: document(ROUTES))
ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/chat/completions", _CHAT, "answers a conversation", ChatBody),
    Route("POST", "/v1/completions", _TEXT, "continues a text", CompletionBody),
    Route("POST", "/v1/responses", _RESPONSES, "answers, and keeps the answer", ResponsesBody),
    Route("GET", _ONE, _kept(responses.find), "an answer that is kept", counts=True),
    Route("DELETE", _ONE, _kept(responses.delete), "forgets one", counts=True),
    Route("POST", _ONE + "/cancel", _kept(responses.cancel), "ends one that runs", counts=True),
    Route("GET", _ONE + "/input_items", _kept(responses.inputs), "what it answers", counts=True),
    Route("POST", "/v1/messages", _MESSAGES, "answers, in Anthropic's form", MessagesBody),
    Route("POST", "/v1/messages/count_tokens", _COUNT, "tokens of such a prompt", CountBody),
    Route("GET", "/v1/models", _json(_models), "the models that are served"),
    Route("GET", "/v1/models/{name:path}", _model, "one of them"),
    Route("POST", "/tokenize", _TOKENIZE, "token ids of a text or a conversation", TokenizeBody),
    Route("POST", "/detokenize", _DETOKENIZE, "the text of token ids", DetokenizeBody),
    Route("GET", "/health", _HEALTH, "200 while new work would be answered", open=True),
    Route("GET", "/ping", _HEALTH, "the same", open=True),
    Route("GET", "/ready", _shows(Endpoints.ready), "200 while one would be at once", open=True),
    Route("GET", "/load", _shows(Endpoints.load), "how many requests run or wait", open=True),
    Route("GET", METRICS, _METRICS, "counters for Prometheus", open=True),
    Route("GET", "/openapi.json", _DOCUMENT, "this table, for tools", open=True),
    Route("GET", "/report", _report, "what the engine is, and what it takes"),
    Route("GET", "/version", _json(lambda _: dict(release())), "the server's version", open=True),
)
