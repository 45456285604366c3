"""Normalises clients' messages to the form that chat templates expect.

Knows the formats of OpenAI's and Anthropic's clients. Knows no template, no tokens, and of a
request only `messages`. Normalised are:

    developer           becomes a system message
    system messages     those at the beginning are joined. A later one keeps its position, since a
                        move to the front would change the cached prefix. Templates accept none
                        there: after a tool's result it becomes a part of that result, elsewhere
                        a user's turn. A user's turn after a result that holds only an agent's
                        reminder becomes a part of the result, too
    user                if no turn is the user's, an empty one follows the system message:
                        templates refuse a chat without one
    parts               of text are joined; an assistant's thinking is its `reasoning_content`.
                        Other parts become a note at their position (`parts`)
    function            a tool's answer; an assistant's `function_call` is one of its `tool_calls`
    arguments           of past calls are mappings. Truncated JSON is completed; text that is not
                        JSON is kept under one name

A client sends its whole history with each request, so only entries that are not messages are
refused.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from pydantic_core import from_json

from spark_engine.errors import RequestError
from spark_engine.runtime.text.parts import THOUGHTS, kind_of, short, text_of, thought_of, to_json

Message: TypeAlias = dict[str, Any]
ROLES = {"developer": "system", "function": "tool"}
KNOWN = ("system", "user", "assistant", "tool")  # any other role becomes the user's
UNREADABLE = "arguments"  # the name of arguments that are not JSON
UNNAMED = "unknown"  # the name of a call that was cut off before its name
_RESULT = ("<tool_response>", "</tool_response>")  # around tool results in a client's own text
_REMINDER = ("<system-reminder>", "</system-reminder>")  # around agents' automatic text


def normalise(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """The messages in the form that templates expect; the input is not changed.

    Raises RequestError with `param` "messages" that names the place of an entry which is not a
    message.
    """
    return _order([_message(f"messages[{i}]", given) for i, given in enumerate(messages)])


def joined(first: str, second: str) -> str:
    """Two texts with a blank line between them, unless one is empty."""
    return f"{first}\n\n{second}" if first and second else first or second


def _order(messages: list[Message]) -> list[Message]:
    """One system message at the beginning, none later, and at least one user's turn."""
    first = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    head, rest = messages[:first], messages[first:]
    if len(head) > 1:
        texts = [m["content"] for m in head if m["content"]]
        head = [{**head[0], "content": "\n\n".join(texts)}]
    rest = _without_reminders(rest)
    if messages and not any(map(_is_question, rest)):
        rest = [{"role": "user", "content": ""}, *rest]
    return head + rest


def _without_reminders(messages: list[Message]) -> list[Message]:
    """Moves reminders into the tool's result before them; system messages also into a result after
    them, if they are between a call and its result, and otherwise into user's turns."""
    made: list[Message] = []
    waiting: list[str] = []  # texts between a call and its result
    texts: list[str] = []  # texts of the last message, a tool's result
    for message in messages:
        last = made[-1] if made else {}
        if last.get("role") == "tool" and _is_reminder(message):
            texts.append(message["content"])
            continue
        if message["role"] == "system" and last.get("tool_calls"):
            waiting.append(message["content"])
            continue
        _end_result(made, texts)
        if message["role"] == "tool":
            texts = [message["content"], *waiting]
            made.append({**message})
        else:
            if any(waiting):
                made.append({"role": "user", "content": _paragraphs(waiting)})
            made.append({**message, "role": "user"} if message["role"] == "system" else message)
        waiting = []
    _end_result(made, texts)
    return [*made, {"role": "user", "content": _paragraphs(waiting)}] if any(waiting) else made


def _end_result(made: list[Message], texts: list[str]) -> None:
    """Adds the texts to the tool's result at the end; joining all at once avoids
    quadratic copies."""
    if texts:
        made[-1]["content"] = _paragraphs(texts)
        texts.clear()


def _paragraphs(texts: Iterable[str]) -> str:
    return "\n\n".join(filter(None, texts))


def _is_reminder(message: Message) -> bool:
    """True if a message only adds context and asks nothing."""
    user = message["role"] == "user" and _is_within(message["content"], _REMINDER)
    return user or message["role"] == "system"


def _is_question(message: Message) -> bool:
    """True if templates treat it as a user's turn, and not as a tool's result."""
    return message["role"] == "user" and not _is_within(message["content"], _RESULT)


def _is_within(text: str, marks: tuple[str, str]) -> bool:
    text = text.strip()
    return text.startswith(marks[0]) and text.endswith(marks[1])


def _message(where: str, given: Mapping[str, Any]) -> Message:
    role = given.get("role")
    if not isinstance(role, str):
        raise _error(f"{where}.role is {short(role)}; it must be a string")
    role = ROLES.get(role, role)
    if role not in KNOWN:
        role = "user"
    content = given.get("content")
    if not isinstance(content, str | list | Mapping | None) and role != "tool":
        raise _error(f"{where}.content is {short(content)}; it must be a string or a list of parts")
    if role != "assistant":
        return {**given, "role": role, "content": text_of(content)}
    return _answer(given, content)


def _answer(given: Mapping[str, Any], content: Any) -> Message:
    parts = content if isinstance(content, list) else []
    thoughts = [thought_of(part) for part in parts if kind_of(part) in THOUGHTS]
    visible = [part for part in parts if kind_of(part) not in THOUGHTS] if parts else content
    made = {**given, "role": "assistant", "content": text_of(visible)}
    if not made["content"] and isinstance(given.get("refusal"), str):
        made["content"] = given["refusal"]
    own = made.pop("reasoning", None)
    own = either if (either := made.pop("reasoning_content", None)) is not None else own
    if own is not None and not isinstance(own, Mapping):
        made["reasoning_content"] = text_of(own)
    elif any(thoughts):
        made["reasoning_content"] = "\n".join(filter(None, thoughts))
    old, calls = made.pop("function_call", None), made.pop("tool_calls", None)
    if calls is None and old is not None:
        calls = [{"type": "function", "function": old}]
    if found := [_call(call) for call in _listed(calls)]:
        made["tool_calls"] = found
    return made


def _call(given: Mapping[str, Any]) -> Message:
    """One call. A stored call that was cut off may lack any field."""
    function = given.get("function", given.get("custom"))
    function = function if isinstance(function, Mapping) else given
    name, arguments = function.get("name"), function.get("arguments", function.get("input"))
    if "custom" in given:
        arguments = {"input": arguments}
    name = name if isinstance(name, str) and name else UNNAMED
    kept = {key: value for key, value in given.items() if key != "custom"}
    return {**kept, "function": {**function, "name": name, "arguments": _arguments(arguments)}}


def _listed(calls: Any) -> list[Mapping[str, Any]]:
    rows = [calls] if isinstance(calls, Mapping) else calls
    return [r for r in rows if isinstance(r, Mapping) and r] if isinstance(rows, list) else []


def _arguments(given: Any) -> Mapping[str, Any]:
    """A call's arguments as a mapping, from any model output."""
    if given is None or isinstance(given, Mapping):
        return given or {}
    if not isinstance(given, str):
        given = to_json(given)
    text = given.strip()
    if not text or text == "null":
        return {}
    try:
        found = _read_json(text)
    except (ValueError, TypeError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {UNREADABLE: given}


def _read_json(text: str) -> Any:
    """A JSON value, which may be truncated or followed by text."""
    try:
        return json.loads(text, strict=False)  # models write raw newlines into strings
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return json.loads(text[: error.pos], strict=False)
        if error.msg.startswith("Unterminated string") or error.pos >= len(text):
            return from_json(text, allow_partial="trailing-strings")
        raise


def _error(words: str) -> RequestError:
    return RequestError(words, "messages")
