"""Takes a chat answer apart while it streams: reasoning, content, tool calls.

Knows the Qwen3.5/3.6 forms only: `reasoning</think>content`, and calls as
`<tool_call><function=NAME><parameter=ARG>VALUE</parameter>…</function></tool_call>`.
Works on text, however it is cut; knows no tokens. A whole answer is a stream of one piece.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_engine.runtime.text.stops import first_match, partial_match

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(
    r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|\Z))", re.DOTALL
)


class Kind(enum.Enum):
    """What a delta is."""

    REASONING = "reasoning_content"
    CONTENT = "content"
    CALL = "tool_calls"


@dataclass(frozen=True)
class Delta:
    """A piece of the answer. `name` is set for a call; `text` is then its JSON arguments."""

    kind: Kind
    text: str
    name: str = ""


class ReplyParser:
    """One answer. `thinking`: the prompt ended inside an open think block.

    Newlines around the reasoning, and between it, the content and a call, belong to the form and
    are dropped. A call is passed on when it is complete; one that is malformed or cut off stays
    in the content as it was written, since a client can do nothing with half a call.
    """

    def __init__(self, thinking: bool, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._types = _parameter_types(tools)
        self._calls_wanted = bool(tools)
        self._kind = Kind.REASONING if thinking else Kind.CONTENT
        self._opening = True  # nothing but white space has come: `<think>` may still follow
        self._leading = thinking  # newlines at the start of this part are dropped
        self._text = ""
        self.calls = 0

    def push(self, text: str) -> list[Delta]:
        """The deltas that this further text makes certain."""
        self._text += text
        if self._opening and not self._open():
            return []
        deltas: list[Delta] = []
        while (found := self._advance(deltas)) is not None:
            self._kind = found
        return deltas

    def flush(self) -> list[Delta]:
        """What was held back, at the end of the stream."""
        text, self._text = self._text, ""
        if self._kind is Kind.CALL:
            return [Delta(Kind.CONTENT, CALL + text)]
        if self._leading:
            text = text.lstrip("\n")
        if self._kind is Kind.REASONING:
            text = text.rstrip("\n")
        return [Delta(self._kind, text)] if text else []

    def _open(self) -> bool:
        """Drops a `<think>` at the very start. False while it is not known whether one comes."""
        start = self._text.lstrip()
        if start.startswith(THINK):
            self._text = start[len(THINK) :]
            self._kind, self._leading = Kind.REASONING, True
        elif THINK.startswith(start):
            return False
        self._opening = False
        return True

    def _marks(self) -> tuple[str, ...]:
        if self._kind is Kind.CALL:
            return (END_CALL,)
        calls = (CALL,) if self._calls_wanted else ()
        return (END_THINK, *calls) if self._kind is Kind.REASONING else calls

    def _advance(self, deltas: list[Delta]) -> Kind | None:
        """Consumes up to the next mark and returns what follows it; None where there is none."""
        hit = first_match(self._text, self._marks())
        if hit is None:
            self._release(deltas)
            return None
        before, mark = self._text[: hit[0]], self._text[hit[0] : hit[1]]
        self._text = self._text[hit[1] :]
        if self._kind is Kind.CALL:
            deltas.append(self._call(before))
        else:
            self._emit(deltas, before.rstrip("\n"))
        self._leading = True
        return Kind.CALL if mark == CALL else Kind.CONTENT

    def _release(self, deltas: list[Delta]) -> None:
        """Passes on all that cannot be part of a mark or of newlines before one."""
        marks = self._marks()
        if self._kind is Kind.CALL:
            return
        cut = len(self._text) - partial_match(self._text, marks)
        if marks:
            cut = len(self._text[:cut].rstrip("\n"))
        ready, self._text = self._text[:cut], self._text[cut:]
        self._emit(deltas, ready)

    def _emit(self, deltas: list[Delta], text: str) -> None:
        if self._leading:
            text = text.lstrip("\n")
        if text:
            self._leading = False
            deltas.append(Delta(self._kind, text))

    def _call(self, block: str) -> Delta:
        parsed = parse_call(block, self._types)
        if parsed is None:
            return Delta(Kind.CONTENT, CALL + block + END_CALL)
        self.calls += 1
        return Delta(Kind.CALL, json.dumps(parsed[1], ensure_ascii=False), parsed[0])


def parse_call(
    block: str, types: Mapping[str, Mapping[str, frozenset[str]]]
) -> tuple[str, dict[str, Any]] | None:
    """(function name, arguments) of what stands inside `<tool_call>`; None when malformed."""
    function = _FUNCTION.fullmatch(block)
    if function is None:
        return None
    name, body = function[1].strip(), function[2]
    if _PARAMETER.sub("", body).strip():
        return None
    known = types.get(name, {})
    found = ((m[1].strip(), m[2]) for m in _PARAMETER.finditer(body))
    return name, {key: _value(text, known.get(key, frozenset())) for key, text in found}


def _value(text: str, types: frozenset[str]) -> Any:
    """Strings stand raw, everything else as JSON. What does not parse stays a string."""
    if not types or "string" in types:
        return text
    try:
        return json.loads(text)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)


def _parameter_types(
    tools: Sequence[Mapping[str, Any]],
) -> dict[str, dict[str, frozenset[str]]]:
    """{function: {parameter: JSON types it may have}}. A schema that is none says nothing."""
    found = {}
    for tool in tools:
        function = _mapping(tool.get("function"))
        rows = _mapping(_mapping(function.get("parameters")).get("properties"))
        found[str(function.get("name"))] = {key: _types(row) for key, row in rows.items()}
    return found


def _types(schema: Any) -> frozenset[str]:
    """The JSON types that a schema names, itself or in its alternatives."""
    schema = _mapping(schema)
    kind = schema.get("type")
    own = frozenset(
        k for k in ([kind] if isinstance(kind, str) else _list(kind)) if isinstance(k, str)
    )
    parts = [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
    return own.union(*(_types(part) for part in parts))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
