"""/v1/messages and /v1/messages/count_tokens: Anthropic's form of a `ChatRequest`.

Knows its bodies and blocks; the answers are in `messages_answer.py`. A model thinks here only when
`thinking` asks for it, since that is what this API's clients expect of a body without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from spark_engine.runtime.server.api.answers import Json, Reply, new_id
from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.server.api.fields import BadField, decode, renamed, short
from spark_engine.runtime.server.api.messages_answer import MessagesReply
from spark_engine.runtime.server.service import Service

BILLING = "x-anthropic-billing-header:"  # a line for Anthropic's own servers, new in each request
THOUGHTS = "clear_thinking"  # of context_management
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# the names under which fields of a `ChatRequest` were sent, for errors
NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
}


class CountBody(msgspec.Struct, kw_only=True):
    """/v1/messages/count_tokens."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None
    mcp_servers: list[Any] | None = None
    container: Any = None


class MessagesBody(CountBody, kw_only=True):
    """/v1/messages. The last four are no fields of Anthropic's."""

    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    priority: int | None = None
    drafts: int | None = None


async def start(service: Service, data: bytes) -> Reply:
    """Begins to answer one body. Raises RequestError, Busy, EngineDied, TimedOut."""
    deadline = service.deadline()

    def read() -> ChatRequest:
        with renamed(NAMES):
            return service.accept(to_chat_request(decode(data, MessagesBody)))

    chat = await service.checked(data, read, deadline)
    with renamed(NAMES):
        found = await service.converse(chat, deadline)
    running = service.submit(chat, found.choices, found.prompt_tokens, deadline)
    return MessagesReply(running, found, service, new_id("msg", "_"))


async def count(service: Service, data: bytes) -> Json:
    """`input_tokens` of a body."""
    with renamed(NAMES):
        return {
            "input_tokens": await service.count(lambda: to_chat_request(decode(data, CountBody)))
        }


def to_chat_request(body: CountBody) -> ChatRequest:
    """The conversation that a body means. Raises BadField in the body's own words."""
    for name in ("mcp_servers", "container"):
        if getattr(body, name):
            raise BadField(f"{name} is not supported: this server calls no tools itself", name)
    for i, edit in enumerate((body.context_management or {}).get("edits") or []):
        kind = edit.get("type") if isinstance(edit, dict) else None
        if not str(kind).startswith(THOUGHTS):  # old thoughts are the template's business
            words = f"context_management.edits[{i}] is {short(edit)}; what is sent is read whole"
            raise BadField(words, "context_management")
    messages = _system(body.system)
    for i, message in enumerate(body.messages):
        messages += _message(f"messages[{i}]", message)
    chat = ChatRequest(messages=messages, model=body.model)
    chat.tools = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or [])] or None
    _choose(chat, body.tool_choice)
    _think(chat, body)
    chat.chat_template_kwargs = body.chat_template_kwargs
    if body.messages and body.messages[-1].get("role") == "assistant":
        chat.continue_final_message, chat.add_generation_prompt = True, False
    if isinstance(body, MessagesBody):
        for name in ("stream", "temperature", "top_p", "top_k", "min_p", "seed", "priority"):
            setattr(chat, name, getattr(body, name))
        chat.max_completion_tokens, chat.stop = body.max_tokens, body.stop_sequences
        chat.drafts = body.drafts
    return chat


def _system(system: str | list[dict[str, Any]] | None) -> list[Json]:
    parts = [{"type": "text", "text": system}] if isinstance(system, str) else system or []
    texts = [_text_of(f"system[{i}]", part, "system") for i, part in enumerate(parts)]
    text = "\n\n".join(t for t in texts if not t.startswith(BILLING))
    return [{"role": "system", "content": text}] if text else []


def _message(where: str, message: Mapping[str, Any]) -> list[Json]:
    """One message; the results of tools that it holds are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        words = f"{where}.role is {short(role)}; it must be 'user' or 'assistant'"
        raise BadField(words, "messages")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        words = f"{where}.content is {short(content)}; it must be a string or a list of blocks"
        raise BadField(words, "messages")
    blocks = [(f"{where}.content[{i}]", block) for i, block in enumerate(content)]
    return [_answer(blocks)] if role == "assistant" else _turn(str(role), blocks)


def _turn(role: str, blocks: Iterable[tuple[str, Any]]) -> list[Json]:
    """The messages of a user's blocks, in their order."""
    found: list[Json] = []
    for where, block in blocks:
        if isinstance(block, dict) and block.get("type") == "tool_result":
            found.append(_result(where, block))
            continue
        part = {"type": "text", "text": _text_of(where, block)}
        if found and found[-1]["role"] == role:
            found[-1]["content"].append(part)
        else:
            found.append({"role": role, "content": [part]})
    return found or [{"role": role, "content": ""}]


def _result(where: str, block: Mapping[str, Any]) -> Json:
    content, ident = block.get("content"), block.get("tool_use_id")
    if not isinstance(ident, str):
        words = f"{where}.tool_use_id is {short(ident)}; it must be a string"
        raise BadField(words, "messages")
    if isinstance(content, list):
        parts = enumerate(content)
        content = "\n".join(_text_of(f"{where}.content[{i}]", part) for i, part in parts)
    elif content is not None and not isinstance(content, str):
        words = f"{where}.content is {short(content)}; it must be a string or a list of blocks"
        raise BadField(words, "messages")
    text = content or ""
    if block.get("is_error") is True:  # templates have no word for it
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": ident, "content": text}


def _answer(blocks: Iterable[tuple[str, Any]]) -> Json:
    """An assistant's message."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Json] = []
    for where, block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "thinking":
            thoughts.append(_string(where, block, "thinking"))
        elif kind == "tool_use":
            call = {"name": _string(where, block, "name"), "arguments": block.get("input") or {}}
            ident = _string(where, block, "id")
            calls.append({"id": ident, "type": "function", "function": call})
        elif kind != "redacted_thinking":  # which nobody can read here
            texts.append(_text_of(where, block))
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _text_of(where: str, block: Any, field: str = "messages") -> str:
    """The text of a block. Raises BadField for one that holds something else."""
    kind = block.get("type") if isinstance(block, dict) else None
    if kind == "text":
        return _string(where, block, "text", field)
    if kind == "document" and isinstance(source := block.get("source"), dict):
        if source.get("type") == "text":
            return _string(f"{where}.source", source, "data", field)
    words = f"{where} is {short(block)}; only text can be read, in blocks of type 'text'"
    raise BadField(words, field)


def _string(where: str, block: Mapping[str, Any], name: str, field: str = "messages") -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise BadField(f"{where}.{name} is {short(value)}; it must be a string", field)
    return value


def _tool(where: str, tool: Mapping[str, Any]) -> Json:
    """OpenAI's form of a tool."""
    if tool.get("type") not in (None, "custom"):
        words = f"{where}.type is {short(tool['type'])}; this server calls no tools itself"
        raise BadField(f"{words}: offer tools with an input_schema", "tools")
    function: Json = {"name": _string(where, tool, "name", "tools")}
    if tool.get("description") is not None:
        function["description"] = _string(where, tool, "description", "tools")
    function["parameters"] = tool.get("input_schema") or {"type": "object", "properties": {}}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _choose(chat: ChatRequest, choice: Mapping[str, Any] | None) -> None:
    if choice is None:
        return
    kind = choice.get("type")
    if kind == "tool":
        name = _string("tool_choice", choice, "name", "tool_choice")
        chat.tool_choice = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in CHOICES:
        chat.tool_choice = CHOICES[kind]
    else:
        known = "'auto', 'any', 'tool' or 'none'"
        raise BadField(f"tool_choice.type is {short(kind)}; it must be {known}", "tool_choice")
    if choice.get("disable_parallel_tool_use"):
        chat.parallel_tool_calls = False


def _think(chat: ChatRequest, body: CountBody) -> None:
    """What is said of thinking, and of the form of the answer."""
    config = body.output_config or {}
    own = {"thinking", "enable_thinking"} & set(body.chat_template_kwargs or {})
    if body.thinking is not None:
        chat.thinking = body.thinking
    elif not own:
        chat.enable_thinking = False
    if (effort := config.get("effort")) is not None and body.thinking is not None:
        chat.reasoning_effort = effort
    form = config.get("format") or body.output_format
    if form is None:
        return
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        words = f"output_config.format is {short(form)}; its type must be 'json_schema'"
        raise BadField(words, "output_config")
    schema = {"name": "answer", "schema": form.get("schema"), "strict": True}
    chat.response_format = {"type": "json_schema", "json_schema": schema}
