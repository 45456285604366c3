"""Types of tools' parameters from their schemas, and conversion of text to values by type.

In XML calls a string has no quotes, so that `null` or `[1]` may be a string or another value. The
schema decides:

- A parameter that can only be a string is the unchanged text; so is a parameter without a type,
  and a text that equals a string of an `enum` or a `const`.
- If strings and other types are allowed, the text is the first of null, boolean, number, object
  and array that is allowed and that it parses as, otherwise a string. The conversion must lose
  nothing: `12` is a number, but `012`, `1.50` and a number beyond 2**53 are strings.
- If no string is allowed, the text is parsed as JSON, including raw newlines in its strings, a
  comma before a closing bracket, and Python's `True`, `False` and `None`. Text that does not
  parse is a string: the tool's own validation then informs the model.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from spark_engine.runtime.text.schema_root import Root, type_of

_SURROGATE = re.compile("[\ud800-\udfff]")
_WORDS = {"true": True, "True": True, "false": False, "False": False}
_NUMBER = re.compile(r"-?[\d.eE+-]*")  # the beginning of one
_EXACT = 2**53  # integers up to it are exact in every client
_COMMA = re.compile(r'("(?:[^"\\]|\\.)*")|,(?=\s*[\]}])', re.DOTALL)


@dataclass(frozen=True)
class Parameter:
    """A schema's restriction of one parameter. `types`: its JSON types, empty if unrestricted;
    `words`: the strings of its enum or const."""

    types: frozenset[str] = frozenset()
    words: frozenset[str] = frozenset()
    SHORT: ClassVar[int] = 32  # characters of a null, a boolean or a number among strings

    def is_text(self, prefix: str) -> bool:
        """Whether a value with this beginning is a string, whatever follows. Only the first SHORT
        characters count, and an opening bracket, after which it stays undecided."""
        if not self.types or self.types == {"string"}:
            return True
        if "string" not in self.types:
            return False
        start = prefix[: self.SHORT + 1].strip()
        if start[:1] == "[" or start[:1] == "{":
            return ("array" if start[0] == "[" else "object") not in self.types
        if len(prefix) > self.SHORT:
            return True
        others = ["null"] if "null" in self.types else []
        others += _WORDS if "boolean" in self.types else ()
        if any(word.startswith(start) for word in others):
            return False
        number = not self.types.isdisjoint(("integer", "number"))
        return bool(start) and not (number and _NUMBER.fullmatch(start))

    def may_be_text(self, prefix: str) -> bool:
        """True if a value that was cut off here counts as a string."""
        return "string" in self.types and prefix.lstrip()[:1] not in ("[", "{")

    def value(self, text: str) -> Any:
        if text in self.words or self.is_text(text):
            return text
        if "string" in self.types:
            return self._among_strings(text)
        try:
            value = read_json(text)
            value = self._nested(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            value = {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)
        whole = isinstance(value, float) and value.is_integer() and abs(value) <= _EXACT
        return int(value) if whole and self.types == {"integer"} else value

    def _among_strings(self, text: str) -> Any:
        plain = text.strip()
        if "boolean" in self.types and plain in _WORDS:
            return _WORDS[plain]
        try:
            value = read_json(text)
        except (ValueError, RecursionError):
            return text
        kind = type_of(value)
        if kind in ("integer", "number"):
            allowed = "number" in self.types or kind in self.types
            same = abs(value) <= _EXACT and json.dumps(value) == plain
            return value if allowed and same else text
        return value if kind in self.types and kind != "string" else text

    def _nested(self, text: str) -> Any:
        """The value inside a JSON string, if no string is allowed."""
        try:
            value = read_json(text)
        except (ValueError, RecursionError):
            return text
        return value if type_of(value) in self.types else text


Types: TypeAlias = Mapping[str, Mapping[str, Parameter]]  # of each function's parameters


def read_json(text: str) -> Any:
    """JSON as models write it: with raw newlines in strings, and commas before closing brackets.
    Raises ValueError for other text and for values that `to_json` refuses, RecursionError."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        value = json.loads(_COMMA.sub(lambda hit: hit[1] or "", text), strict=False)
    to_json(value)
    return value


def to_json(value: Any) -> str:
    """JSON that every client parses, encodable as UTF-8: half a surrogate pair, which JSON may
    contain, is escaped again. Raises ValueError for a number that JSON cannot express."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not _SURROGATE.search(text) else json.dumps(value)


def parameter_types(tools: Sequence[Mapping[str, Any]]) -> Types:
    """{function: {parameter: its restriction}}. An invalid schema restricts nothing; a parameter in
    several alternatives may have the types of each."""
    found = {}
    for tool in tools:
        function = tool.get("function")
        function = function if isinstance(function, Mapping) else {}
        root = Root(function.get("parameters"))
        rows: dict[str, Parameter] = {}
        for key, schema in root.rows():
            types, words = root.types(schema), root.words(schema)
            if (known := rows.get(str(key))) is not None:  # in another alternative
                both = bool(known.types and types)
                types, words = known.types | types if both else frozenset(), known.words | words
            rows[str(key)] = Parameter(types, words)
        found[str(function.get("name"))] = rows
    return found
