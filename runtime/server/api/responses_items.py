"""The items of /v1/responses as messages: texts, thoughts and calls so far.

Knows OpenAI's types of items. A client sends everything that it stored, also from other servers and
newer versions, so no item is refused: one that cannot be read becomes a note.
"""

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any

from spark_engine.runtime.server.api.answers import Json
from spark_engine.runtime.server.api.fields import BadField, short
from spark_engine.runtime.server.api.responses_tools import INPUT, ToolNames
from spark_engine.runtime.text.parts import short_json, text_of

_MOST_KIND = 80  # characters of a type in a note
# calls that OpenAI's servers ran themselves: no result follows
_RUN_THERE = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("tool_search_call", "mcp_list_tools", "mcp_approval_request"),
)
_COMPACTED = ("compaction", "compaction_summary", "context_compaction")
_ARGUMENTS = ("arguments", INPUT, "action", "operation")  # of a call; the first that it has
# of an item that is not a message: keys that are not shown to the model
_PLAIN = ("type", "id", "call_id", "status", "result", "encrypted_content", "results", "outputs")

_GROWING = ("content", "reasoning_content")  # fields of the model's turn


class Growing(list[str]):
    """The parts of a text that is not complete; never a client's value."""


def to_messages(items: Iterable[Json], names: ToolNames) -> list[Json]:
    """The messages of a chat request; the items of one turn of the model are one message.

    Raises BadField for a message without a role. The texts of a turn are lists until all items are
    read, since appending to a string would copy it for each item.
    """
    messages: list[Json] = []
    for i, item in enumerate(items):
        kind = item.get("type") or ("message" if "role" in item else "item")
        kind = kind[:_MOST_KIND] if isinstance(kind, str) else short_json(kind)
        if kind == "message":
            _add_message(f"input[{i}]", messages, item)
        elif kind == "reasoning":
            _turn(messages, "reasoning_content", _thought(item))
        elif kind == "mcp_call":
            _add_call(messages, kind, item, names)
            _add_result(messages, {**item, "output": item.get("output") or item.get("error")})
        elif kind in _COMPACTED:
            words = text_of(item.get("summary")) or "in a form that this model cannot read"
            note = f"[earlier messages, summarised: {words}]"
            messages.append({"role": "system", "content": note})
        elif kind.endswith("_output"):
            _add_result(messages, item)
        elif kind.endswith("_call") and kind not in _RUN_THERE and "call_id" in item:
            _add_call(messages, kind, item, names)
        elif kind != "item_reference" or not str(item.get("id")).startswith("rs_"):
            _note(messages, kind, item)
    for message in messages:
        for field in _GROWING:
            if isinstance(message.get(field), Growing):
                message[field] = "".join(message[field])
    return messages


def _add_message(where: str, messages: list[Json], item: Mapping[str, Any]) -> None:
    if not isinstance(role := item.get("role"), str):
        raise BadField(f"{where}.role is {short(role)}; it must be a string", "input")
    if role == "assistant":
        _turn(messages, "content", text_of(item.get("content")))
    else:
        messages.append({"role": role, "content": item.get("content")})


def _add_call(messages: list[Json], kind: str, item: Mapping[str, Any], names: ToolNames) -> None:
    name = item.get("name")
    if isinstance(name, str):
        name = names.function(name, item.get("namespace"))
    elif kind not in ("function_call", "custom_tool_call"):
        name = kind.removesuffix("_call")
    arguments = next((item[key] for key in _ARGUMENTS if item.get(key) is not None), None)
    if kind == "custom_tool_call":
        arguments = {INPUT: arguments}
    function = {"name": name, "arguments": arguments}
    row = {"id": _ident(item), "type": "function", "function": function}
    _turn(messages, "content", "").setdefault("tool_calls", []).append(row)


def _add_result(messages: list[Json], item: Mapping[str, Any]) -> None:
    output = item.get("output", item.get("tools"))
    text = output if isinstance(output, str) else text_of(output, "\n")
    messages.append({"role": "tool", "tool_call_id": _ident(item), "content": text})


def _note(messages: list[Json], kind: str, item: Mapping[str, Any]) -> None:
    """An action of the model, or an unknown item, as a line of the model's turn."""
    more = {key: value for key, value in item.items() if key not in _PLAIN}
    words = f": {short_json(more)}" if more else ""
    content = _turn(messages, "content", "")["content"]
    while content and not content[-1].rstrip():
        content.pop()
    if content:
        content[-1] = f"{content[-1].rstrip()}\n\n"
    content.append(f"[{kind}{words}]\n\n")


def _turn(messages: list[Json], field: str, text: str) -> Json:
    """The model's turn at the end of the messages, with `text` added to one of its fields."""
    last = messages[-1] if messages else {}
    begins = last.get("role") != "assistant"
    if field == "reasoning_content" and (last.get("content") or "tool_calls" in last):
        begins = True  # a thought starts a turn
    if begins:
        last = {"role": "assistant", "content": Growing()}
        messages.append(last)
    if text:
        last.setdefault(field, Growing()).append(text)
    return last


def _thought(item: Mapping[str, Any]) -> str:
    """The text of a reasoning item: as we wrote it, sealed, or in a summary."""
    if item.get("content"):
        return text_of(item["content"])
    sealed = item.get("encrypted_content")
    if isinstance(sealed, str):
        try:
            return base64.b64decode(sealed, validate=True).decode()
        except (binascii.Error, ValueError):
            pass  # another server's
    return text_of(item.get("summary"))


def _ident(item: Mapping[str, Any]) -> str:
    found = item.get("call_id") or item.get("id")
    return found if isinstance(found, str) else ""
