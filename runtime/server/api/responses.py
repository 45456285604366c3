"""/v1/responses: OpenAI's newer form of a conversation, as a `ChatRequest`.

Knows its body and its items; the answers are in `responses_answer.py`, those that are kept in
`runtime/server/stored_responses.py`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from spark_engine.runtime.server import http_request
from spark_engine.runtime.server.api.answers import Json, Reply, new_id
from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.server.api.fields import BadField, decode, renamed, short
from spark_engine.runtime.server.api.responses_answer import ResponsesReply
from spark_engine.runtime.server.service import Service

LOGPROBS = "message.output_text.logprobs"  # of `include`
# the names under which fields of a `ChatRequest` were sent, for errors
NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
    "reasoning_effort": "reasoning",
}
# fields that would need more than this server has: what they may hold
ONLY: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "conversation": ((), "say previous_response_id"),
    "prompt": ((), "send the prompt's text as instructions"),
    "context_management": (([],), "what is sent is read whole"),
    "moderation": ((), "this server judges nothing"),
}
CARRIED = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stream", "priority", "drafts")


class ResponsesBody(msgspec.Struct, kw_only=True):
    """/v1/responses. The last row is of no fields of OpenAI's."""

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
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    truncation: str | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None
    moderation: Any = None

    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    priority: int | None = None
    drafts: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None


async def start(service: Service, data: bytes) -> Reply:
    """Begins to answer one body. Raises RequestError, Busy, EngineDied, TimedOut."""
    deadline = service.deadline()

    body = await service.checked(data, lambda: decode(data, ResponsesBody), deadline)
    ident, owner = body.previous_response_id, http_request.key()
    last = service.responses.ended(ident, owner) if ident else None

    def read() -> tuple[bytes, ChatRequest]:
        items = _items(body, last.items() if last else [])
        with renamed(NAMES):
            return msgspec.json.encode(items), service.accept(to_chat_request(body, items))

    items, chat = await service.checked(data, read, deadline, last.size if last else 0)
    with renamed(NAMES):
        found = await service.converse(chat, deadline)
    running = service.submit(chat, found.choices, found.prompt_tokens, deadline)
    try:
        head = _head(body, service, new_id("resp", "_"))
        reply = ResponsesReply(running, found, service, head, LOGPROBS in (body.include or ()))
        if body.store is not False:
            reply.keep(service.responses.put(head, items, owner), service.responses)
    except BaseException:
        running.close()
        raise
    if body.background:
        reply.run_by_itself()
    return reply


def to_chat_request(body: ResponsesBody, items: Iterable[Json]) -> ChatRequest:
    """The conversation that a body means, whose items are `items`. Raises BadField."""
    for name, (neutral, instead) in ONLY.items():
        value = getattr(body, name)
        if value is not None and value not in neutral:
            raise BadField(f"{name} ({short(value)}) is not supported: {instead}", name)
    if body.background and (body.store is False or body.stream):
        raise BadField("background needs store: true and stream: false", "background")
    messages: list[Json] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    for i, item in enumerate(items):
        _add(f"input[{i}]", item, messages)
    chat = ChatRequest(messages=messages, model=body.model)
    for name in CARRIED:
        setattr(chat, name, getattr(body, name))
    chat.max_completion_tokens = body.max_output_tokens
    chat.chat_template_kwargs = body.chat_template_kwargs
    chat.parallel_tool_calls = body.parallel_tool_calls
    if LOGPROBS in (body.include or ()) or body.top_logprobs:
        chat.logprobs, chat.top_logprobs = True, body.top_logprobs or 0
    _offer(chat, body)
    _shape(chat, body)
    return chat


def _items(body: ResponsesBody, before: list[Json]) -> list[Json]:
    """What was said so far: the conversation that is gone on from, and the body's own items."""
    if isinstance(body.input, str):
        return [*before, {"type": "message", "role": "user", "content": body.input}]
    known = [item["id"] for item in before if "id" in item]
    own = []
    for i, item in enumerate(body.input or []):
        if item.get("type") == "item_reference":
            if item.get("id") not in known:
                words = f"input[{i}] refers to {short(item.get('id'))}, which is not kept"
                raise BadField(words, "input")
        else:
            own.append(item)
    if not before and not own:
        raise BadField("input is empty; it must be a text or hold an item", "input")
    return before + own


def _add(where: str, item: Mapping[str, Any], messages: list[Json]) -> None:
    """Adds an item to the messages; those of one turn of the model's are one message."""
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        message = {"role": role, "content": item.get("content")}
        if role == "assistant":
            text = _text(f"{where}.content", item.get("content"))
            _turn(messages, "content", text)
        else:
            messages.append(message)
    elif kind == "reasoning":
        _turn(messages, "reasoning_content", _thought(where, item))
    elif kind == "function_call":
        call = {"name": _string(where, item, "name"), "arguments": item.get("arguments") or "{}"}
        ident = _string(where, item, "call_id")
        message = _turn(messages, "content", "")
        message.setdefault("tool_calls", []).append(
            {"id": ident, "type": "function", "function": call}
        )
    elif kind == "function_call_output":
        output = _text(f"{where}.output", item.get("output"))
        ident = _string(where, item, "call_id")
        messages.append({"role": "tool", "tool_call_id": ident, "content": output})
    else:
        known = "'message', 'reasoning', 'function_call' and 'function_call_output'"
        raise BadField(f"{where}.type is {short(kind)}; only {known} can be read", "input")


def _turn(messages: list[Json], field: str, text: str) -> Json:
    """The model's turn at the end of the messages, with `text` added to one of its fields."""
    last = messages[-1] if messages else {}
    begins = last.get("role") != "assistant"
    if field == "reasoning_content" and (last.get("content") or "tool_calls" in last):
        begins = True  # a thought is the first of a turn
    if begins:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if text:
        last[field] = last.get(field, "") + text
    return last


def _text(where: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind else None
        if not isinstance(text, str):
            words = f"{where} holds {short(part)}; only text can be read"
            raise BadField(words, "input")
        texts.append(text)
    return "".join(texts)


def _thought(where: str, item: Mapping[str, Any]) -> str:
    """The text of a reasoning item: as we wrote it, sealed, or in a summary."""
    if item.get("content"):
        return _text(f"{where}.content", item["content"])
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str):
        try:
            return base64.b64decode(sealed, validate=True).decode()
        except (binascii.Error, ValueError):
            pass  # another server's
    return _text(f"{where}.summary", item.get("summary"))


def _string(where: str, item: Mapping[str, Any], name: str, field: str = "input") -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BadField(f"{where}.{name} is {short(value)}; it must be a string", field)
    return value


def _offer(chat: ChatRequest, body: ResponsesBody) -> None:
    """Tools, and what is said of calling them."""
    tools: list[Json] = []
    for i, tool in enumerate(body.tools or []):
        if tool.get("type") != "function":
            words = f"tools[{i}].type is {short(tool.get('type'))}; this server calls no tools"
            raise BadField(f"{words} itself: offer tools of type 'function'", "tools")
        function: Json = {"name": _string(f"tools[{i}]", tool, "name", "tools")}
        keys = ("description", "parameters", "strict")
        function |= {key: tool[key] for key in keys if tool.get(key) is not None}
        tools.append({"type": "function", "function": function})
    choice = body.tool_choice
    if isinstance(choice, dict):
        kind = choice.get("type")
        if kind == "allowed_tools":
            rows = choice.get("tools")
            if not isinstance(rows, list):
                words = f"tool_choice.tools is {short(rows)}; it must be a list of tools"
                raise BadField(words, "tool_choice")
            names = [row.get("name") for row in rows if isinstance(row, dict)]
            tools = [tool for tool in tools if tool["function"]["name"] in names]
            choice = choice.get("mode", "auto")
        elif kind == "function":
            name = _string("tool_choice", choice, "name", "tool_choice")
            choice = {"type": "function", "function": {"name": name}}
        else:
            words = f"tool_choice.type is {short(kind)}; it must be 'function' or 'allowed_tools'"
            raise BadField(words, "tool_choice")
    chat.tools, chat.tool_choice = tools or None, choice


def _shape(chat: ChatRequest, body: ResponsesBody) -> None:
    """What is said of the answer's form, and of thinking."""
    if body.truncation not in (None, "auto", "disabled"):
        words = f"truncation is {short(body.truncation)}; it must be 'auto' or 'disabled'"
        raise BadField(words, "truncation")
    chat.reasoning_effort = (body.reasoning or {}).get("effort")
    text = body.text or {}
    if text.get("verbosity") not in (None, "medium"):
        words = f"text.verbosity is {short(text['verbosity'])}; ask for it in instructions"
        raise BadField(words, "text")
    form = text.get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        own = {key: value for key, value in form.items() if key != "type"}
        form = {"type": "json_schema", "json_schema": own}
    chat.response_format = form


def _head(body: ResponsesBody, service: Service, ident: str) -> Json:
    """The response before it has said anything: what was asked, as OpenAI repeats it."""
    return {
        "id": ident,
        "object": "response",
        "created_at": service.now(),
        "status": "in_progress",
        "background": bool(body.background),
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "model": service.names[0],
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
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
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }


def find(service: Service, ident: str) -> Json:
    """GET /v1/responses/ID."""
    return service.responses.find(ident, http_request.key()).response


def inputs(service: Service, ident: str) -> Json:
    """GET /v1/responses/ID/input_items."""
    rows = msgspec.json.decode(service.responses.find(ident, http_request.key()).before)
    ends = {"first_id": rows[0].get("id"), "last_id": rows[-1].get("id")} if rows else {}
    return {"object": "list", "data": rows, "has_more": False, **ends}


def delete(service: Service, ident: str) -> Json:
    """DELETE /v1/responses/ID."""
    service.responses.drop(ident, http_request.key())
    return {"id": ident, "object": "response", "deleted": True}


def cancel(service: Service, ident: str) -> Json:
    """POST /v1/responses/ID/cancel: what runs ends; what has ended stays as it is."""
    entry = service.responses.find(ident, http_request.key())
    if entry.stop is not None:
        entry.stop()
    return entry.response
