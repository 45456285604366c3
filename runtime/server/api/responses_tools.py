"""The tools of /v1/responses and chats as functions, and the names of these tools in items.

Knows OpenAI's types of tools. A `namespace` is offered as functions `NAMESPACE__NAME`, a `custom`
tool as a function of one text. Tools that OpenAI's servers run themselves, or that only their
models know, are omitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from spark_engine.runtime.server.api.answers import Json
from spark_engine.runtime.server.api.chat_request import ChatRequest, check_any, not_run
from spark_engine.runtime.server.api.fields import BadField, short

INPUT = "input"  # the only parameter of a custom tool
_KEYS = ("description", "parameters", "strict")
_MOST_NOTE = 16 << 10  # characters of a custom tool's grammar that its description shows


class ToolName(NamedTuple):
    """A tool's name in its items. `custom`: it takes a text and not JSON."""

    name: str
    namespace: str | None = None
    custom: bool = False


class ToolNames:
    """The tool that each offered function represents."""

    def __init__(self) -> None:
        self._tools: dict[str, ToolName] = {}  # by function
        self._functions: dict[tuple[str | None, str], str] = {}
        self._spaces: dict[str, list[str]] = {}  # functions of tools in a namespace, by their name
        self._same: dict[str, int] = {}

    def add(self, tool: ToolName) -> str:
        """The name of its function; unique for a tool in a namespace."""
        name = joined = function_name(tool.name, tool.namespace)
        while tool.namespace is not None and name in self._tools:
            self._same[joined] = self._same.get(joined, 1) + 1
            name = f"{joined}_{self._same[joined]}"
        self._tools.setdefault(name, tool)
        self._functions.setdefault((tool.namespace, tool.name), name)
        if tool.namespace is not None:
            self._spaces.setdefault(tool.name, []).append(name)
        return name

    def of(self, function: str) -> ToolName:
        return self._tools.get(function) or ToolName(function)

    def special(self) -> dict[str, ToolName]:
        """The tools that are not a function of the same name, by function: answers need them."""
        return {f: tool for f, tool in self._tools.items() if tool != ToolName(f)}

    @classmethod
    def of_special(cls, tools: Mapping[str, ToolName]) -> ToolNames:
        """The inverse of `special`; enough for `of`."""
        names = cls()
        names._tools = dict(tools)
        return names

    def function(self, name: str, namespace: Any = None) -> str:
        """The function of a tool, also of one that is no longer offered."""
        space = namespace if isinstance(namespace, str) else None
        return self._functions.get((space, name)) or function_name(name, space)

    def chosen(self, name: str, namespace: Any = None) -> str:
        """The function that a choice names: in a namespace, or in the only one that has it."""
        if namespace is None and (None, name) not in self._functions:
            if len(found := self._spaces.get(name, [])) == 1:
                return found[0]
        return self.function(name, namespace)

    def within(self, namespace: Any) -> set[str]:
        return {f for f, tool in self._tools.items() if tool.namespace == namespace}


def function_name(name: str, namespace: str | None) -> str:
    return name if namespace is None else f"{namespace}__{name}"


def offer(
    chat: ChatRequest, given: list[Json] | None, choice: Any, whole: bool = False
) -> ToolNames:
    """Sets the tools and the tool choice of a chat. `whole`: functions keep keys that are not
    OpenAI's. Raises BadField."""
    names = ToolNames()
    tools: list[Json] = []
    for where, tool, namespace in _flat(given or []):
        named = ToolName(_name(where, tool), namespace, _kind(tool) == "custom")
        function: Json = {"name": names.add(named)}
        if named.custom:
            function |= custom_function(tool)
        else:
            keys = [key for key in tool if key not in ("type", "name")] if whole else _KEYS
            function |= {key: tool[key] for key in keys if tool.get(key) is not None}
        tools.append({"type": "function", "function": function})
    chat.tools = tools or None
    if isinstance(choice, Mapping):
        choice = _choice(choice, names, chat)
    choice = "required" if choice == "any" else choice
    check_any(choice, bool(given), bool(chat.tools))
    chat.tool_choice = choice
    return names


def _flat(given: Iterable[Json]) -> Iterator[tuple[str, Json, str | None]]:
    """(place, tool, its namespace) of tools that can be offered."""
    for i, tool in enumerate(given):
        if is_own(tool):
            yield f"tools[{i}]", unnested(tool), None
        elif _kind(tool) == "namespace" and isinstance(rows := tool.get("tools"), list):
            space = _name(f"tools[{i}]", tool)
            for k, row in enumerate(rows):
                if isinstance(row, dict) and is_own(row):
                    yield f"tools[{i}].tools[{k}]", unnested(row), space


def _kind(tool: Mapping[str, Any]) -> Any:
    """Its type; one that has a name and no type is a function, as in chat completions."""
    return tool.get("type") or ("function" if {"name", "function"} & set(tool) else None)


def is_own(tool: Mapping[str, Any]) -> bool:
    """True for a tool that the client runs."""
    return _kind(tool) in ("function", "custom")


def unnested(tool: Json) -> Json:
    """A tool in the form of this API, also where it is sent in that of chat completions."""
    kind = str(_kind(tool))
    inner = tool.get(kind)
    return {"type": kind, **inner} if isinstance(inner, dict) and "name" not in tool else tool


def custom_function(tool: Json) -> Json:
    """The description and parameters of a custom tool's function. A regex of its input becomes a
    pattern, which constrains a required call; a grammar is only shown to the model."""
    words = tool["description"] if isinstance(tool.get("description"), str) else ""
    form = tool.get("format")
    form = form.get("grammar", form) if isinstance(form, dict) else {}
    field: Json = {"type": "string"}
    if isinstance(form, dict) and isinstance(text := form.get("definition"), str):
        syntax = form.get("syntax")
        words += f"\n\nThe {INPUT} must follow this {syntax} grammar:\n{text[:_MOST_NOTE]}"
        if syntax == "regex":
            field["pattern"] = f"^(?:{text})$"
    schema = {"type": "object", "properties": {INPUT: field}, "required": [INPUT]}
    return {"description": words.strip(), "parameters": {**schema, "additionalProperties": False}}


def _choice(choice: Mapping[str, Any], names: ToolNames, chat: ChatRequest) -> Any:
    """A choice in the form of chat completions; the tools that may not be called are taken out of
    the chat."""
    kind = _kind(choice)
    if kind in ("function", "custom", "tool"):
        row = unnested(dict(choice))
        name = names.chosen(_name("tool_choice", row, "tool_choice"), row.get("namespace"))
        return {"type": "function", "function": {"name": name}}
    if kind in ("auto", "none", "required", "any"):
        return kind
    if kind != "allowed_tools":
        if isinstance(kind, str):
            raise not_run(choice.get("name") or kind)
        words = f"tool_choice.type is {short(kind)}; it must be 'function' or 'allowed_tools'"
        raise BadField(words, "tool_choice")
    inner = choice.get("allowed_tools", choice)  # nested in chats, flat in responses
    rows = inner.get("tools") if isinstance(inner, Mapping) else None
    if not isinstance(rows, list) or not all(
        isinstance(row, Mapping) and isinstance(_kind(row), str) for row in rows
    ):
        words = f"tool_choice.tools is {short(rows)}; it must be a list of tools"
        raise BadField(words, "tool_choice")
    known = {tool["function"]["name"] for tool in chat.tools or []}
    wanted: set[str] = set()
    for row in rows:
        if row.get("type") == "namespace":
            wanted |= names.within(row.get("name"))
        elif is_own(row):
            own = unnested(dict(row))
            name = names.chosen(_name("tool_choice", own, "tool_choice"), own.get("namespace"))
            if name not in known:
                there = short(", ".join(known) or "none")
                words = f"tool_choice names {short(name)}; the tools are: {there}"
                raise BadField(words, "tool_choice")
            wanted.add(name)
    chat.tools = [t for t in chat.tools or [] if t["function"]["name"] in wanted] or None
    return inner.get("mode") or "auto"


def _name(where: str, row: Mapping[str, Any], field: str = "tools") -> str:
    name = row.get("name")
    if not isinstance(name, str):
        raise BadField(f"{where}.name is {short(name)}; it must be a string", field)
    return name
