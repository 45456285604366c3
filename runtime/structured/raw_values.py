"""Parameters of calls that are written as XML: strings stand raw, everything else as JSON.

Knows what the reply parser makes of a value (`tool_schema`), so that what a schema asks for is what
the arguments hold. Knows no function and no call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.lark import (
    Lark,
    Style,
    in_regex,
    one_of,
    quoted,
    regex,
)
from spark_engine.runtime.structured.raw_text import without
from spark_engine.runtime.structured.schema_errors import join
from spark_engine.runtime.text.reply_formats import END_PARAMETER
from spark_engine.runtime.text.tool_schema import resolve, types_of

_END = f"\n{END_PARAMETER}"
_ANY = "(?s:.*)"
_SAYS = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}  # read here, or by `types_of`
_BOUNDS = {"pattern", "minLength", "maxLength", "format"}
_OF_OTHERS = {  # keywords that strings do not have: they bind other types
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("properties", "required", "additionalProperties", "items", "prefixItems"),
    *("minItems", "maxItems", "patternProperties"),
}
_NOTES = {  # keywords that bind nothing
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$comment", "$schema", "$id", "$defs", "definitions", "discriminator", "nullable"),
    *("contentMediaType", "contentEncoding", "example"),
}
_SHARED = ("$defs", "definitions")
_POINTERS = ("#/$defs/", "#/definitions/")
# the 29th of February is left out: not every year has one
_SHORT = r"02-(0[1-9]|1\d|2[0-8])|(04|06|09|11)-(0[1-9]|[12]\d|30)"
_DAY = rf"[12]\d{{3}}-({_SHORT}|(01|03|05|07|08|10|12)-(0[1-9]|[12]\d|3[01]))"
_TIME = r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d(\.\d{1,9})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
_HEX = "[0-9a-fA-F]"
FORMATS = {  # of raw strings; JSON's are the compiler's
    "date": _DAY,
    "time": _TIME,
    "date-time": f"{_DAY}T{_TIME}",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "email": r"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@([A-Za-z0-9-]+\.)+[A-Za-z]{2,}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
    "hostname": r"[A-Za-z0-9]+(-[A-Za-z0-9]+)*(\.[A-Za-z0-9]+(-[A-Za-z0-9]+)*)*",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9_.~!$&'()*+,;=:@%/?#-]+",
}


@dataclass(frozen=True)
class Values:
    """Parameters of one function. `root` is its schema, to which references go."""

    lark: Lark
    root: Mapping[str, Any]
    style: Style

    def value(self, schema: Any, place: str) -> str:
        """The expression of one value with the mark of its end.

        Raises RequestError naming the place of what cannot be held.
        """
        types = types_of(schema, self.root)
        if types and "string" not in types:
            return f"{self.lark.json(self._whole(schema, place), self.style, place)} {quoted(_END)}"
        found = list(self._strings(schema, place, 0))
        if "null" in types and not types <= {"string", "null"}:
            found.append(quoted("null" + _END))
        if not found:
            raise RequestError(f"{place} allows no value that can be written", _param(place))
        # the others would be lexemes beside those of any text, and take their letters
        return whole if (whole := self.anything()) in found else one_of(dict.fromkeys(found))

    def anything(self) -> str:
        """Any string with the mark of its end."""
        return f"{without(self.lark, [END_PARAMETER])} {quoted(END_PARAMETER)}"

    def _whole(self, schema: Any, place: str) -> Any:
        """The schema with what its references point to."""
        if not isinstance(schema, Mapping):
            return schema
        shared = {k: self.root[k] for k in _SHARED if k in self.root}
        whole = {**shared, **{k: v for k, v in schema.items() if k not in shared}}
        for where in _references(whole):
            if isinstance(where, str) and not where.startswith(_POINTERS):
                words = f"refers to {where!r}; a parameter may refer to {_POINTERS[0]}NAME"
                raise RequestError(f"{place} {words}", _param(place))
        return whole

    def _strings(self, schema: Any, place: str, depth: int) -> Iterator[str]:
        """The strings that a schema allows, an expression for each alternative."""
        plain = resolve(schema, self.root)
        if depth > 8 or not isinstance(schema, Mapping):
            yield self.anything()
            return
        said = types_of(plain, self.root)
        if said and "string" not in said:
            return
        self._refuse_others(plain, place)
        parts = [(name, plain[name]) for name in ("anyOf", "oneOf", "allOf") if name in plain]
        values = [plain["const"]] if "const" in plain else plain.get("enum")
        if isinstance(values, list):
            yield from (quoted(v + _END) for v in values if self._fits(v))
        elif parts and not plain.keys() & _BOUNDS:
            name, rows = parts[0]
            if (len(parts) > 1 or (name == "allOf" and len(rows) > 1)) and not self.style.lenient:
                words = "a string's alternatives cannot be combined with others here"
                raise RequestError(f"{join(place, name)}: {words}", _param(place))
            for i, row in enumerate(rows):
                yield from self._strings(row, join(join(place, name), i), depth + 1)
        else:
            yield self._bound(plain, place)

    def _fits(self, value: Any) -> bool:
        return isinstance(value, str) and END_PARAMETER not in value

    def _refuse_others(self, schema: Mapping[str, Any], place: str) -> None:
        """Keywords that would bind a string and are not known."""
        if self.style.lenient:
            return
        for key in schema:
            known = _SAYS | _BOUNDS | _OF_OTHERS | _NOTES
            if key not in known and not key.startswith("x-"):
                words = f"{join(place, key)} is not supported for a parameter that is a string"
                raise RequestError(words, _param(place))

    def _bound(self, schema: Mapping[str, Any], place: str) -> str:
        """A string with bounds, or any."""
        regexes = []
        low, high = (_count(schema, key, place) for key in ("minLength", "maxLength"))
        if low or high is not None:
            regexes.append(f"(?s:.{{{low or 0},{'' if high is None else high}}})")
        if isinstance(pattern := schema.get("pattern"), str):
            regexes.append(self._search(pattern, join(place, "pattern")))
        if (form := schema.get("format")) is not None:
            if form in FORMATS:
                regexes.append(FORMATS[form])
            elif not self.style.lenient:
                words = f"is {form!r}; a parameter that is a string may have {', '.join(FORMATS)}"
                raise RequestError(f"{join(place, 'format')} {words}", _param(place))
        if not regexes:
            return self.anything()
        free = f"~{regex(_ANY + in_regex(END_PARAMETER) + _ANY)}"
        both = " & ".join([*map(regex, regexes), free])
        return self.lark.terminal(f"({both}) {quoted(_END)}")

    def _search(self, pattern: str, place: str) -> str:
        """A regex of whole strings from one that is found anywhere in them."""
        begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
        inner = pattern[begins : len(pattern) - ends]
        if (begins or ends) and _has_bar(inner):
            if self.style.lenient:
                return _ANY
            words = "^ and $ must stand around alternatives in parentheses: ^(a|b)$"
            raise RequestError(f"{place} is {pattern!r}; {words}", _param(place))
        return f"{'' if begins else _ANY}({inner}){'' if ends else _ANY}"


def _references(schema: Any) -> Iterator[Any]:
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            yield schema["$ref"]
        for part in schema.values():
            yield from _references(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from _references(part)


def _has_bar(text: str) -> bool:
    """Whether a regex has alternatives outside parentheses."""
    depth, inside, at = 0, False, 0
    while at < len(text):
        letter = text[at]
        if letter == "\\":
            at += 1
        elif inside:
            inside = letter != "]"
        elif letter in "([":
            depth, inside = depth + (letter == "("), letter == "["
        elif letter == ")":
            depth -= 1
        elif letter == "|" and not depth:
            return True
        at += 1
    return False


def _count(schema: Mapping[str, Any], key: str, place: str) -> int | None:
    value = schema.get(key)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    words = f"{join(place, key)} is {value!r}; it must be a number of characters"
    raise RequestError(words, _param(place))


def _param(place: str) -> str:
    return re.split(r"[.\[]", place)[0]
