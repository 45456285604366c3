"""The messages of clients as chat templates expect them.

Knows the forms in which OpenAI's and Anthropic's clients write a message. Knows no template, no
fields of requests beside `messages`, and no tokens. What is brought into one form:

    developer           is a system message
    system messages     those at the beginning are one; a later one keeps its place as a turn of
                        the user's, since templates take none there. It is not moved to the front:
                        every new one would change the beginning of the prompt, which is cached
    parts               of text are joined; an assistant's thinking is its `reasoning_content`
    function            a tool's answer; an assistant's `function_call` is one of its `tool_calls`
    arguments           of past calls are mappings. JSON that was cut off is closed; what is no JSON
                        stands as text under one name, since it cannot be made unwritten
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from pydantic_core import from_json

from spark_engine.errors import RequestError

Message: TypeAlias = dict[str, Any]
ROLES = {"developer": "system", "function": "tool"}
KNOWN = ("system", "user", "assistant", "tool")  # and those that ROLES makes one of them
TEXT = {"text", "input_text", "output_text"}  # parts with a `text`
THOUGHT = {"thinking": "thinking", "reasoning": "text", "reasoning_text": "text"}  # and its key
HIDDEN = {"redacted_thinking"}  # parts that no model here can read
UNREADABLE = "arguments"  # the name under which arguments stand that are no JSON
_SHOWN = 80  # characters of a value in an error


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages in the one form that templates take; those given are not changed.

    Raises RequestError with `param` "messages" that names the place of what is malformed.
    """
    return _order([_message(f"messages[{i}]", given) for i, given in enumerate(messages)])


def _order(messages: list[Message]) -> list[Message]:
    """One system message at the beginning, and none behind it."""
    first = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    head, rest = messages[:first], messages[first:]
    if len(head) > 1:
        texts = [m["content"] for m in head if m["content"]]
        head = [{**head[0], "content": "\n\n".join(texts)}]
    later = [{**m, "role": "user"} if m["role"] == "system" else m for m in rest]
    return head + later


def _message(where: str, given: Mapping[str, Any]) -> Message:
    role = given.get("role")
    if not isinstance(role, str):
        raise _error(f"{where}.role is {_short(role)}; it must be a string")
    role = ROLES.get(role, role)
    if role not in KNOWN:
        raise _error(f"{where}.role is {_short(role)}; it must be one of {', '.join(KNOWN)}")
    text, thought = _content(f"{where}.content", given.get("content"), role == "assistant")
    made = {**given, "role": role, "content": text}
    if role != "assistant":
        return made
    if not text and isinstance(given.get("refusal"), str):
        made["content"] = given["refusal"]
    reasoning = _reasoning(where, given)
    thought = thought if reasoning is None else reasoning
    made.pop("reasoning", None)
    made.pop("reasoning_content", None)
    if thought is not None:
        made["reasoning_content"] = thought
    if calls := _calls(where, made.pop("function_call", None), given.get("tool_calls")):
        made["tool_calls"] = calls
    else:
        made.pop("tool_calls", None)
    return made


def _reasoning(where: str, given: Mapping[str, Any]) -> str | None:
    for name in ("reasoning_content", "reasoning"):
        if (value := given.get(name)) is not None:
            if not isinstance(value, str):
                raise _error(f"{where}.{name} is {_short(value)}; it must be a string")
            return value
    return None


def _content(where: str, content: Any, assistant: bool) -> tuple[str, str | None]:
    """(text, thought); a thought only of an assistant."""
    if content is None or isinstance(content, str):
        return content or "", None
    if not isinstance(content, list):
        raise _error(f"{where} is {_short(content)}; it must be a string or a list of parts")
    texts: list[str] = []
    thoughts: list[str] = []
    for part in content:
        kind, text = _part(part)
        if kind in HIDDEN and assistant:
            continue
        if text is None or (kind in THOUGHT and not assistant):
            words = "only text can be read, in parts of type 'text', 'input_text' or 'output_text'"
            also = ", and of an assistant 'refusal' and 'thinking'"
            raise _error(f"{where} holds {_short(part)}; {words}{also if assistant else ''}")
        (thoughts if kind in THOUGHT else texts).append(text)
    return "".join(texts), "\n".join(thoughts) if thoughts else None


def _part(part: Any) -> tuple[str, str | None]:
    """(type, text) of one part of a content; the text is None where it has none."""
    if isinstance(part, str):
        return "text", part
    if not isinstance(part, Mapping):
        return "", None
    kind = part.get("type")
    if not isinstance(kind, str):
        return "", None
    if kind in TEXT:
        text = part.get("text")
    elif kind == "refusal":
        text = part.get("refusal", part.get("text"))
    elif kind in THOUGHT:
        text = part.get(THOUGHT[kind], part.get("text"))
    else:
        text = None
    return kind, text if isinstance(text, str) else None


def _calls(where: str, old: Any, given: Any) -> list[Message]:
    """The `tool_calls` of a message; `old` is its `function_call`."""
    if given is None and old is not None:
        given = [{"type": "function", "function": old}]
    if not isinstance(given or [], list):
        raise _error(f"{where}.tool_calls is {_short(given)}; it must be a list")
    return [_call(f"{where}.tool_calls[{i}]", call) for i, call in enumerate(given or [])]


def _call(where: str, call: Any) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _error(f"{where} is {_short(call)}; it must have a function with a name")
    arguments = function.get("arguments")
    if arguments is not None and not isinstance(arguments, str | Mapping):
        words = "must be a JSON object or the text of one"
        raise _error(f"{where}.function.arguments is {_short(arguments)}; it {words}")
    return {**call, "function": {**function, "arguments": _arguments(arguments or {})}}


def _arguments(given: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments as a mapping, whatever a model wrote."""
    if not isinstance(given, str):
        return given
    text = given.strip()
    if not text or text == "null":
        return {}
    try:
        found = _read_json(text)
    except (ValueError, TypeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {UNREADABLE: given}


def _read_json(text: str) -> Any:
    """A value, also one that was cut off, or that has words behind it."""
    try:
        return json.loads(text, strict=False)  # models write newlines into strings as they are
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return json.loads(text[: error.pos], strict=False)
        if error.msg.startswith("Unterminated string") or error.pos >= len(text):
            return from_json(text, allow_partial="trailing-strings")
        raise


def _error(words: str) -> RequestError:
    return RequestError(words, "messages")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
