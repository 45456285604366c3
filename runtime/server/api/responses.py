"""/v1/responses: OpenAI's newer form of a conversation, as a `ChatRequest`.

Knows its body and its items; the answers are in `responses_answer.py`, those that are kept in
`runtime/server/stored_responses.py`.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from spark_engine.runtime.server import http_request
from spark_engine.runtime.server.api.answers import Json, Reply, new_id
from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.server.api.fields import BadField, decode, renamed, short
from spark_engine.runtime.server.api.responses_answer import ResponsesReply
from spark_engine.runtime.server.api.responses_items import to_messages
from spark_engine.runtime.server.api.responses_tools import ToolNames, offer
from spark_engine.runtime.server.api.thinking_fields import ThinkingFields
from spark_engine.runtime.server.api.unsupported_fields import VERBOSITIES
from spark_engine.runtime.server.prompts.contract import Asked, Blobs, JobKind, Missing, Prepared
from spark_engine.runtime.server.prompts.preparer import Preparer
from spark_engine.runtime.server.service import Service
from spark_engine.runtime.server.sliced import Part
from spark_engine.runtime.server.stored_items import StoredItems, store_items

Query = Mapping[str, str]
MOST_LISTED = 100  # items of one page
MOST_REPEATED = 256 << 10  # bytes of one field of a request that its response repeats
LOGPROBS = "message.output_text.logprobs"  # of `include`
# the names under which fields of a `ChatRequest` were sent, for errors
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
}
PLACES = {
    r"response_format(\.json_schema)?": "text.format",
    r"(tools\[\d+\])\.function\.parameters": r"\1.parameters",
}
# fields that would need more than this server has: what they may hold
ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "conversation": ((), "say previous_response_id"),
    "prompt": ((), "send the prompt's text as instructions"),
    "moderation": ((), "this server judges nothing"),
}
CARRIED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream", "priority", "drafts"),
    "cache_salt",
)


class ResponsesBody(ThinkingFields, kw_only=True):
    """/v1/responses. The last row is of no fields of OpenAI's, nor are those of thinking but for
    `reasoning`."""

    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    context_management: Any = None  # accepted: what is sent is read whole
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None

    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    priority: int | None = None
    drafts: int | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def prepare(preparer: Preparer, blobs: Sequence[bytes]) -> tuple[Prepared | Missing, list[bytes]]:
    """Reads one body; further blobs are the items and the answer of `previous_response_id`, which
    is asked for where they are not there. Raises RequestError."""
    body = decode(blobs[0], ResponsesBody, halves=True)
    before: list[Json] = []
    if body.previous_response_id:
        if len(blobs) == 1:
            return Missing(body.previous_response_id), []
        before = msgspec.json.decode(blobs[1])
        before += msgspec.json.decode(blobs[2])["output"]
    items = _items(body, before)
    asked = Asked(background=bool(body.background), store=body.store is not False)
    asked.token_chances = LOGPROBS in (body.include or ())
    with renamed(NAMES, PLACES):
        stored = store_items(items)  # it bounds their number
        chat, names = to_chat_request(body, items)
        asked.names = names.special()
        found, prompts = preparer.converse(preparer.accept(chat), asked)
    ends = array("Q", stored.ends).tobytes()
    return found, [*prompts, stored.data, ends, msgspec.json.encode(_asked(body))]


async def start(service: Service, data: Blobs) -> Reply:
    """Begins to answer one body. Raises RequestError, Busy, EngineDied, TimedOut."""
    deadline, owner = service.deadline(), http_request.key()

    def stored(ident: str) -> Sequence[Blobs]:
        last = service.responses.ended(ident, owner)
        return last.before.parts, [last.data]

    with renamed(NAMES, PLACES):  # a form that its worker refuses
        found = await service.prepare(JobKind.RESPONSES, data, deadline, stored)
    asked, (kept, ends, repeated) = found.asked, found.more
    items = StoredItems(kept, array("Q", ends))
    if asked.store:
        service.responses.check(items, owner)
    running = service.submit(found, deadline)
    try:
        head = _head(repeated, service, new_id("resp", "_"))
        names = ToolNames.of_special(asked.names)
        reply = ResponsesReply(running, found, service, head, asked.token_chances, names)
        if asked.store:
            reply.keep(service.responses, items, owner)
    except BaseException:
        running.close()
        raise
    if asked.background:
        reply.run_by_itself()
    return reply


def to_chat_request(body: ResponsesBody, items: Iterable[Json]) -> tuple[ChatRequest, ToolNames]:
    """The conversation that a body means, whose items are `items`, and the names of its tools.
    Raises BadField."""
    for name, (neutral, instead) in ONLY.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise BadField(f"{name} ({short(value)}) is not supported: {instead}", name)
    if body.background and (body.store is False or body.stream):
        raise BadField("background needs store: true and stream: false", "background")
    chat = ChatRequest(messages=[], model=body.model)
    names = offer(chat, body.tools, body.tool_choice)
    if body.instructions:
        chat.messages.append({"role": "system", "content": body.instructions})
    chat.messages += to_messages(items, names)
    for name in CARRIED:
        setattr(chat, name, getattr(body, name))
    chat.max_completion_tokens = body.max_output_tokens
    chat.chat_template_kwargs = body.chat_template_kwargs
    chat.parallel_tool_calls = body.parallel_tool_calls
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs or 0
    _shape(chat, body)
    return chat, names


def _items(body: ResponsesBody, before: list[Json]) -> list[Json]:
    """What was said so far: the conversation that is gone on from, and the body's own items."""
    if isinstance(body.input, str):
        return [*before, {"type": "message", "role": "user", "content": body.input}]
    known = {item["id"] for item in before if isinstance(item.get("id"), str)}
    own = [item for item in body.input or [] if not _refers(item, known)]
    if not before and not own:
        raise BadField("input is empty; it must be a text or hold an item", "input")
    return before + own


def _refers(item: Json, known: set[str]) -> bool:
    """Whether it refers to an item that is there already."""
    ident = item.get("id")
    return item.get("type") == "item_reference" and isinstance(ident, str) and ident in known


def _shape(chat: ChatRequest, body: ResponsesBody) -> None:
    """What is said of the answer's form, and of thinking."""
    if body.truncation not in (None, "auto", "disabled"):
        words = f"truncation is {short(body.truncation)}; it must be 'auto' or 'disabled'"
        raise BadField(words, "truncation")
    body.copy_to(chat)
    text = body.text or {}
    if text.get("verbosity") not in (None, *VERBOSITIES):
        words = f"text.verbosity is {short(text['verbosity'])}; it must be low, medium or high"
        raise BadField(words, "text")
    form = text.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        own = {key: value for key, value in form.items() if key != "type"}
        form = {"type": "json_schema", "json_schema": own}
    chat.response_format = form


def _asked(body: ResponsesBody) -> Json:
    """What was asked, as OpenAI repeats it: as JSON, which costs nothing more, and without what is
    long: a stream would repeat it three times."""
    effort = body.reasoning.get("effort") if isinstance(body.reasoning, dict) else None
    asked = {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
        "metadata": body.metadata or {},
    }
    found = {name: msgspec.json.encode(value) for name, value in asked.items()}
    empty = {"tools": b"[]", "metadata": b"{}"}
    return {
        name: msgspec.Raw(data if len(data) <= MOST_REPEATED else empty.get(name, b"null"))
        for name, data in found.items()
    }


def _head(repeated: bytes, service: Service, ident: str) -> Json:
    """The response before it has said anything. What it repeats of its request stays JSON."""
    asked = msgspec.json.decode(repeated, type=dict[str, msgspec.Raw])
    return {
        "id": ident,
        "object": "response",
        "created_at": service.now(),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "model": service.names[0],
        "output": [],
        "usage": None,
        **asked,
    }


def find(service: Service, ident: str, query: Query) -> list[Part]:
    """GET /v1/responses/ID."""
    if query.get("stream", "false") != "false":
        raise BadField("a stored response is not streamed; leave stream out", "stream")
    return [service.responses.find(ident, http_request.key()).data]


def inputs(service: Service, ident: str, query: Query) -> list[Part]:
    """GET /v1/responses/ID/input_items: the newest first, unless `order` says otherwise."""
    order, limit = query.get("order", "desc"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise BadField(f"order is {short(order)}; it must be 'asc' or 'desc'", "order")
    if not re.fullmatch("[0-9]{1,9}", limit) or not 1 <= int(limit) <= MOST_LISTED:
        raise BadField(f"limit is {short(limit)}; it must be 1 to {MOST_LISTED}", "limit")
    before = service.responses.find(ident, http_request.key()).before
    return before.page(int(limit), query.get("after"), order == "asc")


def delete(service: Service, ident: str, query: Query) -> list[Part]:
    """DELETE /v1/responses/ID."""
    service.responses.drop(ident, http_request.key())
    return [msgspec.json.encode({"id": ident, "object": "response", "deleted": True})]


def cancel(service: Service, ident: str, query: Query) -> list[Part]:
    """POST /v1/responses/ID/cancel: what runs ends; what has ended stays as it is."""
    entry = service.responses.find(ident, http_request.key())
    if entry.stop is not None:
        entry.stop()
    return [entry.data]
