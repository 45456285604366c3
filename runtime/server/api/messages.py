"""/v1/messages and /v1/messages/count_tokens: Anthropic's form of a `ChatRequest`.

Knows its bodies and blocks. A model thinks here only when `thinking` requests it, which is the
default of this API.
"""

from collections.abc import Mapping
from typing import Any

from spark_engine.runtime.server.api.answers import Json
from spark_engine.runtime.server.api.chat_request import (
    ChatRequest,
    ThinkingFields,
    check_any,
    not_run,
)
from spark_engine.runtime.server.api.fields import BadField, short
from spark_engine.runtime.text.messages import joined
from spark_engine.runtime.text.parts import THOUGHTS, kind_of, text_of

BILLING = "x-anthropic-billing-header:"  # a line for Anthropic's own servers, new in each request
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# for errors: the body's names of a `ChatRequest`'s fields
NAMES = {
    "stop": "stop_sequences",
    "max_completion_tokens": "max_tokens",
    "response_format": "output_config",
    "reasoning_effort": "output_config",
}
PLACES = {
    "reasoning_effort": "output_config.effort",
    r"response_format(\.json_schema)?": "output_config.format",
    r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
}


class CountBody(ThinkingFields, kw_only=True):
    """/v1/messages/count_tokens. Of the fields of thinking, Anthropic's is `thinking`."""

    messages: list[dict[str, Any]]
    model: str | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # accepted and ignored: no edit is applied, no tool is run here
    context_management: dict[str, Any] | None = None
    mcp_servers: Any = None
    container: Any = None


class MessagesBody(CountBody, kw_only=True):
    """/v1/messages. The last six fields are not Anthropic's."""

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
    return_draft_counts: bool | None = None
    cache_salt: str | None = None


def to_chat_request(body: CountBody) -> ChatRequest:
    """The conversation of a body. Raises BadField that names the body's fields."""
    messages = _system(body.system)
    for i, message in enumerate(body.messages):
        messages += _message(f"messages[{i}]", message)
    chat = ChatRequest(messages=messages, model=body.model)
    offered = [_tool(f"tools[{i}]", tool) for i, tool in enumerate(body.tools or [])]
    chat.tools = [tool for tool in offered if tool is not None] or None
    _choose(chat, body)
    _think(chat, body)
    chat.chat_template_kwargs = body.chat_template_kwargs
    if messages and _may_continue(messages[-1]):
        chat.continue_final_message, chat.add_generation_prompt = True, False
    if isinstance(body, MessagesBody):
        for name in ("stream", "temperature", "top_p", "top_k", "min_p", "seed", "priority"):
            setattr(chat, name, getattr(body, name))
        chat.max_completion_tokens, chat.stop = body.max_tokens, body.stop_sequences
        chat.drafts, chat.cache_salt = body.drafts, body.cache_salt
        chat.return_draft_counts = body.return_draft_counts
    return chat


def _system(system: str | list[dict[str, Any]] | None) -> list[Json]:
    texts = [text_of(part) for part in ([system] if isinstance(system, str) else system or [])]
    text = "\n\n".join(t for t in texts if t and not t.startswith(BILLING))
    return [{"role": "system", "content": text}] if text else []


def _message(where: str, message: Mapping[str, Any]) -> list[Json]:
    """One message; each result of a tool in it becomes a separate message."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        words = f"{where}.role is {short(role)}; it must be 'user' or 'assistant'"
        raise BadField(words, "messages")
    if content is None or isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list | dict):
        words = f"{where}.content is {short(content)}; it must be a string or a list of blocks"
        raise BadField(words, "messages")
    blocks = content if isinstance(content, list) else [content]
    return [_answer(blocks)] if role == "assistant" else _turn(role, blocks)


def _may_continue(message: Json) -> bool:
    """True if the message is an answer to continue: text without a call. Not every template can
    continue a thought without text."""
    if message["role"] != "assistant" or "tool_calls" in message:
        return False
    blocks = message["content"]
    return any(text_of(b) for b in blocks if kind_of(b) not in THOUGHTS) if blocks else False


def _turn(role: str, blocks: list[Any]) -> list[Json]:
    """The messages of a user's blocks: the results of tools, else one turn.

    Text next to results becomes part of the result before it (or of the first). It is mostly a
    reminder of the client; a user's turn would end the model's loop of calls, and lose the loop's
    thoughts and cached prefix.
    """
    results: list[Json] = []
    rest: list[Any] = []
    for block in blocks:
        if kind_of(block) == "tool_result":
            _append(results, rest)
            rest = [] if results else rest
            results.append(_result(block))
        else:
            rest.append(block)
    if not results:
        return [{"role": role, "content": blocks}]
    _append(results, rest)
    return results


def _append(results: list[Json], blocks: list[Any]) -> None:
    """Adds the text of blocks to the last result, if there is one."""
    if results:
        results[-1]["content"] = joined(results[-1]["content"], text_of(blocks))


def _result(block: Mapping[str, Any]) -> Json:
    text = text_of(block.get("content"), "\n")
    if block.get("is_error") is True:  # templates have no field for it
        text = f"Error: {text}"
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text}


def _answer(blocks: list[Any]) -> Json:
    message: Json = {"role": "assistant", "content": []}
    for block in blocks:
        if kind_of(block) == "tool_use":
            call = {"name": block.get("name"), "arguments": block.get("input")}
            row = {"id": str(block.get("id")), "type": "function", "function": call}
            message.setdefault("tool_calls", []).append(row)
        else:
            message["content"].append(block)
    return message


def _string(where: str, row: Mapping[str, Any], name: str, field: str) -> str:
    value = row.get(name)
    if not isinstance(value, str):
        raise BadField(f"{where}.{name} is {short(value)}; it must be a string", field)
    return value


def _tool(where: str, tool: Mapping[str, Any]) -> Json | None:
    """OpenAI's form of a tool; None for a type that only Anthropic's models know."""
    if tool.get("type") not in (None, "custom", "function") and "input_schema" not in tool:
        return None
    if isinstance(inner := tool.get("function"), dict):
        _string(f"{where}.function", inner, "name", "tools")
        return {"type": "function", "function": inner}
    function: Json = {"name": _string(where, tool, "name", "tools")}
    if tool.get("description") is not None:
        function["description"] = _string(where, tool, "description", "tools")
    function["parameters"] = tool.get("input_schema") or {"type": "object", "properties": {}}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": function}


def _choose(chat: ChatRequest, body: CountBody) -> None:
    choice = body.tool_choice
    if choice is None:
        return
    kind = choice.get("type")
    if kind == "tool":
        name = _string("tool_choice", choice, "name", "tool_choice")
        offered = [tool["function"].get("name") for tool in chat.tools or []]
        if name not in offered and any(tool.get("name") == name for tool in body.tools or []):
            raise not_run(name)
        chat.tool_choice = {"type": "function", "function": {"name": name}}
    elif isinstance(kind, str) and kind in CHOICES:
        chat.tool_choice = CHOICES[kind]
        check_any(chat.tool_choice, bool(body.tools), bool(chat.tools))
    else:
        known = "'auto', 'any', 'tool' or 'none'"
        raise BadField(f"tool_choice.type is {short(kind)}; it must be {known}", "tool_choice")
    if choice.get("disable_parallel_tool_use"):
        chat.parallel_tool_calls = False


def _think(chat: ChatRequest, body: CountBody) -> None:
    config = body.output_config or {}
    asks = body.copy_to(chat)
    effort = config.get("effort")
    if asks and effort is not None and body.reasoning_effort is None:
        chat.reasoning_effort = effort
    if not asks and not {"thinking", "enable_thinking"} & set(body.chat_template_kwargs or {}):
        chat.enable_thinking = False
    form = config.get("format") or body.output_format
    if form is None:
        return
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        words = f"output_config.format is {short(form)}; its type must be 'json_schema'"
        raise BadField(words, "output_config")
    schema = {"name": "answer", "schema": form.get("schema"), "strict": True}
    chat.response_format = {"type": "json_schema", "json_schema": schema}
