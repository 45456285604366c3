"""Which tools an answer may, must or must not call: `tools` and `tool_choice`.

Knows OpenAI's formats of both. Knows no grammar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.tool_calls import Tool

NONE, AUTO, REQUIRED = "none", "auto", "required"
_PARAM = "tool_choice"
_LONGEST = 1000  # characters of names in an error
_KNOWN = "'none', 'auto', 'required' or {'type': 'function', 'function': {'name': …}}"
_EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class ToolChoice:
    """`mode` is NONE, AUTO or REQUIRED; `single`: exactly one call, of the named function."""

    mode: str
    tools: tuple[Tool, ...]
    single: bool = False

    @classmethod
    def of(
        cls, tools: Sequence[Mapping[str, Any]], choice: str | Mapping[str, Any] | None
    ) -> ToolChoice:
        """Raises RequestError for an unknown choice, or an unknown tool."""
        known = [_tool(tool, i) for i, tool in enumerate(tools)]
        if isinstance(choice, Mapping):
            return cls(REQUIRED, (_named(known, _name(choice)),), single=True)
        mode = choice or AUTO
        if mode not in (NONE, AUTO, REQUIRED):
            raise RequestError(f"tool_choice is {choice!r}; it must be {_KNOWN}", _PARAM)
        if mode == REQUIRED and not known:
            raise RequestError("tool_choice is 'required', but there are no tools", _PARAM)
        return cls(mode if known else NONE, tuple(known))


def _tool(tool: Mapping[str, Any], index: int) -> Tool:
    function = tool["function"]
    schema = function.get("parameters")
    place = f"tools[{index}].function.parameters"
    strict = function.get("strict") is True
    return Tool(function["name"], _EMPTY if schema is None else schema, strict, place)


def _name(choice: Mapping[str, Any]) -> str:
    """The name in `{"type": "function", "function": {"name"}}`, or in its flat form."""
    inner = choice.get("function", choice)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if choice.get("type", "function") != "function" or not isinstance(name, str):
        raise RequestError(f"tool_choice holds {choice!r}; it must be {_KNOWN}", _PARAM)
    return name


def _named(known: Sequence[Tool], name: str) -> Tool:
    by_name = {tool.name: tool for tool in reversed(known)}
    if name not in by_name:
        there = ", ".join(reversed(by_name)) or "none"
        there = there if len(there) <= _LONGEST else there[:_LONGEST] + "…"
        raise RequestError(f"tool_choice names {name!r}; the tools are: {there}", _PARAM)
    return by_name[name]
