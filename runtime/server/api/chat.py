"""/v1/chat/completions: its body, its tools and tool choice, in every form that clients send.

Knows OpenAI's form, the flat one of /v1/responses, and Anthropic's choices. A custom
tool is offered as a function of one text, as in /v1/responses; tools of other types are omitted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from spark_engine.runtime.server.api.answers import Json
from spark_engine.runtime.server.api.chat_request import ChatRequest, check_any, not_run
from spark_engine.runtime.server.api.fields import BadField
from spark_engine.runtime.server.api.responses_tools import custom_function
from spark_engine.runtime.text.parts import kind_of

_MODES = {"auto": "auto", "none": "none", "required": "required", "any": "required"}


class ChatBody(ChatRequest, kw_only=True):
    """/v1/chat/completions: a conversation, and the older fields for functions."""

    functions: list[dict[str, Any]] | None = None
    function_call: str | dict[str, Any] | None = None
    echo: bool | None = None

    def modern(self) -> tuple[ChatRequest, frozenset[str]]:
        """The same with `tools` and `tool_choice`, and the names of custom tools. Raises BadField
        where old and new fields are both given, and what `read_tools` raises."""
        if self.echo:
            raise BadField("echo is not supported for chats; use /v1/completions", "echo")
        given, choice = self.tools, self.tool_choice
        for old, new in (("functions", "tools"), ("function_call", "tool_choice")):
            if getattr(self, old) is not None and getattr(self, new) is not None:
                raise BadField(f"{old} and {new} say the same; give {new}", old)
        if self.functions is not None or self.function_call is not None:
            choice = self.function_call or choice
            if isinstance(choice, dict):
                choice = {"type": "function", "function": choice}
            functions = [{"type": "function", "function": f} for f in self.functions or []]
            given = given or functions
        found = read_tools(given, choice)
        chat = msgspec.structs.replace(self, tools=found.tools, tool_choice=found.choice)
        return chat, found.custom


@dataclass(frozen=True)
class ChatTools:
    """The tools of a request. `custom`: names of functions that represent custom tools."""

    tools: list[Json] | None
    choice: str | Json | None
    custom: frozenset[str]


def read_tools(given: list[Json] | None, choice: str | Json | None) -> ChatTools:
    """Raises BadField for a function without a name, and a choice that cannot be met."""
    tools: list[Json] = []
    custom: set[str] = set()
    hosted: set[str] = set()
    for i, tool in enumerate(given or []):
        kind, made = tool.get("type", "function"), _tool(tool)
        if made is not None:
            tools.append(made)
        elif kind in ("function", "custom"):
            words = 'it is like {"type": "function", "function": {"name": …, "parameters": …}}'
            raise BadField(f"tools[{i}] has no function with a name; {words}", "tools")
        else:
            hosted.add(str(kind))
        if kind == "custom" and made is not None:
            custom.add(made["function"]["name"])
    chosen = _MODES.get(choice, choice) if isinstance(choice, str) else choice
    if isinstance(choice, dict):
        chosen = _choice(choice, hosted)
    check_any(chosen, bool(given), bool(tools))
    allowed = _allowed(chosen)
    if allowed is not None and allowed <= {tool["function"]["name"] for tool in tools}:
        # no grammar constrains a free answer, so tools that may not be called are not offered
        tools, chosen = [t for t in tools if t["function"]["name"] in allowed], None
    return ChatTools(tools or None, chosen, frozenset(custom))


def _tool(tool: Json) -> Json | None:
    """A function, in OpenAI's form; None for other tools, or without a name."""
    kind = tool.get("type", "function")
    if kind not in ("function", "custom"):
        return None
    inner = tool.get(kind)
    if not isinstance(inner, dict):
        inner = {key: value for key, value in tool.items() if key != "type"}
    if not isinstance(inner.get("name"), str):
        return None
    if kind == "custom":
        return {"type": "function", "function": {"name": inner["name"], **custom_function(inner)}}
    return tool if "function" in tool else {"type": "function", "function": inner}


def _choice(choice: Json, hosted: set[str]) -> str | Json:
    kind = choice.get("type")
    if not isinstance(kind, str):
        return choice
    if kind in _MODES:
        return _MODES[kind]
    if kind in hosted:
        raise not_run(kind)
    if kind in ("custom", "tool"):
        return _named(choice, kind)
    if kind != "allowed_tools":
        return choice
    inner = choice.get("allowed_tools", choice)
    rows = inner.get("tools") if isinstance(inner, Mapping) else None
    if not isinstance(inner, Mapping) or not isinstance(rows, list) or not rows:
        return choice
    kept = [
        _named(row, "custom") if kind_of(row) == "custom" else row
        for row in rows
        if kind_of(row) not in hosted
    ]
    return {"type": kind, "allowed_tools": {"mode": inner.get("mode") or "auto", "tools": kept}}


def _allowed(choice: Any) -> set[str] | None:
    """The names that an "auto" choice allows; None for other choices, and for a malformed one,
    which is refused later."""
    inner = choice.get("allowed_tools") if isinstance(choice, Mapping) else None
    rows = (
        inner.get("tools") if isinstance(inner, Mapping) and inner.get("mode") == "auto" else None
    )
    if not isinstance(rows, list):
        return None
    plain = [row if isinstance(row, Mapping) else {} for row in rows]
    found = [_named(row, "function")["function"]["name"] for row in plain]
    return set(found) if all(isinstance(name, str) for name in found) else None


def _named(row: Mapping[str, Any], kind: str) -> Json:
    inner = row.get(kind)
    inner = inner if isinstance(inner, Mapping) else row
    return {"type": "function", "function": {"name": inner.get("name")}}
