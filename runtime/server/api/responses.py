"""/v1/responses: OpenAI's newer form of a conversation, as a `ChatRequest`.

Knows its body and its items. Stored responses are in `runtime/server/service/stored_responses.py`.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from spark_engine.runtime.server.api.answers import Json
from spark_engine.runtime.server.api.chat_request import ChatRequest, ThinkingFields
from spark_engine.runtime.server.api.fields import BadField, short
from spark_engine.runtime.server.api.responses_items import to_messages
from spark_engine.runtime.server.api.responses_tools import ToolNames, offer
from spark_engine.runtime.server.api.unsupported_fields import VERBOSITIES

MOST_REPEATED = 256 << 10  # bytes of one field of a request that its response repeats
LOGPROBS = "message.output_text.logprobs"  # of `include`
# for errors: the body's names of a `ChatRequest`'s fields
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
}
PLACES = {
    r"response_format(\.json_schema)?": "text.format",
    r"(tools\[\d+\])\.function\.parameters": r"\1.parameters",
}
UNSUPPORTED = {  # fields, and the alternative
    "conversation": "say previous_response_id",
    "prompt": "send the prompt's text as instructions",
    "moderation": "this server judges nothing",
}
CARRIED = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream", "priority", "drafts"),
    *("return_draft_counts", "cache_salt"),
)


class ResponsesBody(ThinkingFields, kw_only=True):
    """/v1/responses. The last group of fields is not OpenAI's, nor are those of thinking other than
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
    context_management: Any = None  # accepted: everything is read
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None

    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    priority: int | None = None
    drafts: int | None = None
    return_draft_counts: bool | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def to_chat_request(body: ResponsesBody, items: Iterable[Json]) -> tuple[ChatRequest, ToolNames]:
    """The conversation of a body with these items, and the names of its tools. Raises BadField."""
    for name, instead in UNSUPPORTED.items():
        if (value := getattr(body, name)) is not None:
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


def items_of(body: ResponsesBody, before: list[Json]) -> list[Json]:
    """The items of the conversation: `before`, which it continues, and the body's own."""
    if isinstance(body.input, str):
        return [*before, {"type": "message", "role": "user", "content": body.input}]
    known = {item["id"] for item in before if isinstance(item.get("id"), str)}
    own = [item for item in body.input or [] if not _refers(item, known)]
    if not before and not own:
        raise BadField("input is empty; it must be a text or hold an item", "input")
    return before + own


def _refers(item: Json, known: set[str]) -> bool:
    ident = item.get("id")
    return item.get("type") == "item_reference" and isinstance(ident, str) and ident in known


def _shape(chat: ChatRequest, body: ResponsesBody) -> None:
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


def repeated_fields(body: ResponsesBody) -> Json:
    """The request's fields that a response repeats, as raw JSON, without long values: a stream
    repeats them three times."""
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
