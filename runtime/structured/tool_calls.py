"""Tool calls as a grammar: in which format, of which functions, with which arguments.

Knows both forms of `reply_formats`, which the reply parser reads. Knows no request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.lark import (
    Lark,
    Style,
    one_of,
    quoted,
    token,
)
from spark_engine.runtime.structured.raw_text import without
from spark_engine.runtime.structured.raw_values import Values
from spark_engine.runtime.structured.schema_errors import check_size, join
from spark_engine.runtime.text.reply_formats import (
    END_FUNCTION,
    FUNCTION,
    PARAMETER,
    CallFormat,
    Formats,
)
from spark_engine.runtime.text.tokenizer import Tokenizer
from spark_engine.runtime.text.tool_schema import resolve

_NEWLINE = "\n"
_END = quoted(END_FUNCTION)
_KEY = re.compile(r"[^<>\n]+")  # a parameter's name that can be written as XML
_READ = {"properties", "required", "additionalProperties", "type", "$ref"}
_NOTES = {"$schema", "$id", "$defs", "definitions", "title", "description", "$comment", "default"}


@dataclass(frozen=True)
class Tool:
    """One function. `schema` is of its arguments, and stands at `place` in the request."""

    name: str
    schema: Any
    strict: bool
    place: str


@dataclass(frozen=True)
class CallWriter:
    """Writes calls into a grammar. `tokenizer` says which marks are tokens."""

    lark: Lark
    form: CallFormat
    tokenizer: Tokenizer

    @classmethod
    def of(cls, lark: Lark, formats: Formats, tokenizer: Tokenizer) -> CallWriter | None:
        """None where replies have no calls."""
        return None if formats.calls is None else cls(lark, formats.calls, tokenizer)

    def calls(self, tools: Sequence[Tool], several: bool) -> str:
        """One call, or one or more."""
        one = self._call(tools, self._mark(self.form.start))
        if not several:
            return one
        return f'{one} ("\\n" {one})*'

    def text_or_calls(self, tools: Sequence[Tool], several: bool) -> str:
        """Free text, then maybe calls, which end the answer."""
        start = self.form.start
        barred = [FUNCTION] if self.form.xml else []
        if self.tokenizer.id_of(start) is not None:
            text = without(self.lark, barred) if barred else self.lark.terminal("/(?s:.*)/")
            return one_of([f"{text} {self.calls(tools, several)}", text])
        text = without(self.lark, [*barred, start])
        first = self._call(tools, f"{text} {quoted(start)}")
        more = f' ("\\n" {self._call(tools, self._mark(start))})*' if several else ""
        return one_of([f"{first}{more}", text])

    def _call(self, tools: Sequence[Tool], start: str) -> str:
        write = self._xml if self.form.xml else self._object
        bodies = one_of(write(tool) for tool in tools)
        return self.lark.rule(f'{start} "\\n" {bodies} "\\n" {self._mark(self.form.end)}')

    def _mark(self, mark: str) -> str:
        """A mark, as the token that it is where it is one."""
        number = self.tokenizer.id_of(mark)
        return quoted(mark) if number is None else token(number)

    def _object(self, tool: Tool) -> str:
        """`{"name": NAME, "arguments": {…}}`."""
        check_size(tool.schema, tool.place)
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
        style = Style(lenient=not tool.strict)
        return f'{quoted(head)} {self.lark.json(tool.schema, style, tool.place)} "}}"'

    def _xml(self, tool: Tool) -> str:
        """`<function=NAME>` and its parameters, those that may be left out in their order."""
        if not _KEY.fullmatch(tool.name):
            words = f"{tool.name!r} cannot be called: a name holds no '<', '>' or newline"
            raise RequestError(words, "tools")
        check_size(tool.schema, tool.place)
        root = tool.schema if isinstance(tool.schema, Mapping) else {}
        values = Values(self.lark, root, Style(lenient=not tool.strict))
        head = quoted(f"{FUNCTION}{tool.name}>" + "\n")
        return self.lark.rule(" ".join([head, *self._parameters(tool, values), _END]))

    def _parameters(self, tool: Tool, values: Values) -> list[str]:
        root = values.root
        schema, place = _object_schema(tool, root)
        rows = schema.get("properties", {})
        needed = schema.get("required", [])
        if not isinstance(rows, Mapping) or not isinstance(needed, list):
            words = "properties must be an object and required a list"
            raise RequestError(f"{place}: {words}", "tools")
        found = []
        for key in dict.fromkeys([*rows, *(k for k in needed if isinstance(k, str))]):
            at = join(join(place, "properties"), key)
            if not _KEY.fullmatch(key):
                if key not in needed:
                    continue
                words = "a parameter's name holds no '<', '>' or newline in this model's calls"
                raise RequestError(f"{at}: {words}", "tools")
            value = values.value(rows[key], at) if key in rows else values.anything()
            one = f'{quoted(f"{PARAMETER}{key}>" + _NEWLINE)} {value} "\\n"'
            found.append(one if key in needed else f"({one})?")
        if not rows and schema.get("additionalProperties", True) in (True, {}):
            key = self.lark.terminal("/[^<>\\n]{1,64}/")
            found.append(f'({quoted(PARAMETER)} {key} ">\\n" {values.anything()} "\\n")*')
        return found


def _object_schema(tool: Tool, root: Mapping[str, Any]) -> tuple[Mapping[str, Any], str]:
    """(schema, place) of a function's parameters, seen through references."""
    schema = resolve(root, root)
    for key in schema:
        if tool.strict and key not in _READ | _NOTES and not key.startswith("x-"):
            words = "is not supported for a function's parameters with strict: true"
            raise RequestError(f"{join(tool.place, key)} {words}", "tools")
    return schema, tool.place
