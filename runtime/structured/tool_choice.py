"""Which tools an answer may, must or must not call: `tools` and `tool_choice`.

Knows OpenAI's formats of both. Knows no grammar.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
            return cls._of_mapping(known, choice)
        mode = choice or AUTO
        if mode not in (NONE, AUTO, REQUIRED):
            raise RequestError(f"tool_choice is {choice!r}; it must be {_KNOWN}", _PARAM)
        if mode == REQUIRED and not known:
            raise RequestError("tool_choice is 'required', but there are no tools", _PARAM)
        return cls(mode if known else NONE, tuple(known))

    @classmethod
    def _of_mapping(cls, known: list[Tool], choice: Mapping[str, Any]) -> ToolChoice:
        if choice.get("type") == "allowed_tools":
            inner = choice.get("allowed_tools", choice)  # nested in chat, flat in responses
            rows = inner.get("tools") if isinstance(inner, Mapping) else None
            if not isinstance(rows, list) or not rows:
                raise RequestError("tool_choice allows no tools; name at least one", _PARAM)
            mode = inner.get("mode", AUTO)
            if mode not in (AUTO, REQUIRED):
                words = f"tool_choice.mode is {mode!r}; it must be 'auto' or 'required'"
                raise RequestError(words, _PARAM)
            names = [_name(tool) for tool in rows]
            return cls(mode, tuple(_named(known, names)))
        return cls(REQUIRED, tuple(_named(known, [_name(choice)])), single=True)


def _tool(tool: Mapping[str, Any], index: int) -> Tool:
    function = tool["function"]
    schema = function.get("parameters")
    place = f"tools[{index}].function.parameters"
    strict = function.get("strict") is True
    return Tool(function["name"], _EMPTY if schema is None else schema, strict, place)


def _name(choice: Any) -> str:
    """The name in `{"type": "function", "function": {"name"}}`, or in its flat form."""
    plain = choice if isinstance(choice, Mapping) else {}
    inner = plain.get("function", plain)
    name = inner.get("name") if isinstance(inner, Mapping) else None
    if plain.get("type", "function") != "function" or not isinstance(name, str):
        raise RequestError(f"tool_choice holds {choice!r}; it must be {_KNOWN}", _PARAM)
    return name


def _named(known: Sequence[Tool], names: Iterable[str]) -> Iterator[Tool]:
    by_name = {tool.name: tool for tool in reversed(known)}
    for name in names:
        if name not in by_name:
            there = ", ".join(reversed(by_name)) or "none"
            there = there if len(there) <= _LONGEST else there[:_LONGEST] + "…"
            raise RequestError(f"tool_choice names {name!r}; the tools are: {there}", _PARAM)
        yield by_name[name]
