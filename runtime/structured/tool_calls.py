"""Tool calls as a grammar: their format, functions and arguments.

Knows both formats of `reply_formats`, which the reply parser reads. Knows no request.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.lark import Lark, Style, one_of, quoted, token
from spark_engine.runtime.structured.raw_text import without
from spark_engine.runtime.structured.raw_values import Ends, Values
from spark_engine.runtime.structured.schema_errors import check_size
from spark_engine.runtime.structured.schemas import SchemaBundle, join
from spark_engine.runtime.structured.shapes import ParameterShape, shapes
from spark_engine.runtime.text.reply_formats import (
    END_FUNCTION,
    END_PARAMETER,
    FUNCTION,
    PARAMETER,
    CallFormat,
    Formats,
)
from spark_engine.runtime.text.tokenizer import Tokenizer

_NEWLINE = "\n"
_END = quoted(END_FUNCTION)
_KEY = re.compile(r"[^<>\n]+")
_KEYS = "a name has no '<', '>' or newline, and no blanks around it, in this model's calls"


@dataclass(frozen=True)
class Tool:
    """One function. `schema`: of its arguments, at `place` in the request."""

    name: str
    schema: Any
    strict: bool
    place: str


@dataclass(frozen=True)
class CallWriter:
    """Writes calls to a grammar. `tokenizer` knows which marks are tokens."""

    lark: Lark
    form: CallFormat
    tokenizer: Tokenizer

    @classmethod
    def of(cls, lark: Lark, formats: Formats, tokenizer: Tokenizer) -> CallWriter | None:
        """A writer for the model's format; None if its replies have no calls."""
        return None if formats.calls is None else cls(lark, formats.calls, tokenizer)

    def calls(self, tools: Sequence[Tool], several: bool) -> str:
        one = self._call(tools, self._mark(self.form.start))
        if not several:
            return one
        return f'{one} ("\\n" {one})*'

    def text_or_calls(self, tools: Sequence[Tool], several: bool) -> str:
        """Free text, then optional calls, which end the answer."""
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
        """A mark, as its token if it has one."""
        number = self.tokenizer.id_of(mark)
        return quoted(mark) if number is None else token(number)

    def _object(self, tool: Tool) -> str:
        """`{"name": NAME, "arguments": {…}}`."""
        check_size(tool.schema, tool.place)
        head = f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": '
        style = Style(lenient=not tool.strict)
        values = self.lark.schema(tool.schema, style, tool.place, {"type": "object"})
        return f'{quoted(head)} {values} "}}"'

    def _xml(self, tool: Tool) -> str:
        """`<function=NAME>` and its parameters; optional ones in their order."""
        if not _is_key(tool.name):
            words = f"{tool.name!r} cannot be called: {_KEYS}"
            raise RequestError(words, "tools")
        check_size(tool.schema, tool.place)
        bundle = SchemaBundle(tool.schema, tool.place)
        marks = () if self.tokenizer.id_of(self.form.end) is not None else (self.form.end,)
        names = tuple(key for key, _ in bundle.root.rows())
        ends = Ends((END_PARAMETER, END_FUNCTION, *marks), names)
        values = Values(self.lark, bundle, Style(lenient=not tool.strict), ends)
        found = shapes(bundle, tool.place, tool.strict)
        rows = one_of(dict.fromkeys(self._parameters(tool, shape, values) for shape in found))
        return self.lark.rule(f"{quoted(f'{FUNCTION}{tool.name}>{_NEWLINE}')} {rows} {_END}")

    def _parameters(self, tool: Tool, shape: ParameterShape, values: Values) -> str:
        found = []
        for key in dict.fromkeys([*shape.rows, *shape.needed]):
            schema, at = shape.rows.get(key, (True, join(join(tool.place, "properties"), key)))
            if not _is_key(key):
                if key in shape.needed and tool.strict:
                    raise RequestError(f"{at}: {_KEYS}", "tools")
                continue
            if schema is False and key not in shape.needed:
                continue
            one = f'{quoted(f"{PARAMETER}{key}>" + _NEWLINE)} {values.value(schema, at)} "\\n"'
            found.append(one if key in shape.needed else f"({one})?")
        if not shape.rows and shape.open:
            key = self.lark.terminal("/[^<>\\n]{1,64}/")
            found.append(f'({quoted(PARAMETER)} {key} ">\\n" {values.anything()} "\\n")*')
        return self.lark.rule(" ".join(found or ['""']))


def _is_key(name: str) -> bool:
    """True if a name can be written as XML, and is parsed unchanged."""
    return _KEY.fullmatch(name) is not None and name == name.strip()
