"""The constraint that a request's fields set: JSON, a schema, a regex, a choice or a grammar.

Knows OpenAI's and vLLM's names. Knows no tools; compiles nothing.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.runtime.structured.lark import (
    BLANK,
    GrammarPiece,
    Lark,
    Style,
    ebnf,
    one_of,
    quoted,
    regex,
)
from spark_engine.runtime.structured.schema_errors import check_size
from spark_engine.runtime.text.parts import short

KINDS = ("json", "regex", "choice", "grammar", "json_object")
_OBJECT = {"type": "object"}
_HOW = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")
_IGNORED = ("disable_fallback", "backend")  # without effect here
# quoted parts and comments of a grammar
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*')
_SETS = re.compile("[&~]")
MOST_REGEX = 8 << 10  # characters
MOST_GRAMMAR = 32 << 10  # characters of a client's grammar
MOST_CHOICES = 4096


@dataclass(frozen=True)
class OutputForm:
    """One of KINDS, its value, and its place in the request."""

    kind: str
    value: Any
    place: str
    style: Style

    @property
    def field(self) -> str:
        return self.place.partition(".")[0]

    def write(self, lark: Lark) -> str:
        """Writes the schema's grammar expression. Raises RequestError naming the place."""
        if self.kind in ("json", "json_object"):
            least = _OBJECT if self.kind == "json_object" else True
            return lark.schema(self._schema(), self.style, self.place, least)
        return lark.piece(GrammarPiece(self.place, lambda: self.value, Style(), self._plain))

    def _plain(self, lark: Lark, _: Any) -> str:
        if self.kind == "choice":
            return lark.terminal(one_of(map(quoted, self._choices())))
        most = MOST_REGEX if self.kind == "regex" else MOST_GRAMMAR
        text = self.value
        if not isinstance(text, str) or not 0 < len(text) <= most:
            shown = f"{len(text)} characters" if isinstance(text, str) else short(text)
            raise self._error(f"is {shown}; it must be a string of 1 to {most} characters")
        if self.kind == "regex":
            return lark.terminal(regex(text))
        if _SETS.search(_QUOTED.sub("", text)):
            raise self._error(
                "uses & or ~ on lexemes, and their cost has no bound: write it without"
            )
        try:
            return lark.grammar(ebnf(text))
        except RequestError as error:
            raise self._error(f"cannot be read: {error}") from None

    def _schema(self) -> Any:
        schema = _OBJECT if self.kind == "json_object" else self.value
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise self._error(f"is not valid JSON: {error}") from None
        check_size(schema, self.place)
        return schema

    def _choices(self) -> list[str]:
        given = self.value
        texts = isinstance(given, list) and all(isinstance(v, str) and v for v in given)
        if not texts or not 0 < len(given) <= MOST_CHOICES:
            words = f"it must be a list of 1 to {MOST_CHOICES} strings, none empty"
            raise self._error(f"is {short(given)}; {words}")
        return list(dict.fromkeys(given))

    def _error(self, words: str) -> RequestError:
        return RequestError(f"{self.place} {words}", self.field)


def form_of(body: StructuredFields) -> OutputForm | None:
    """The requested form, or None. Raises RequestError for two forms, or a malformed one."""
    found = [*_response_format(body), *_structured_outputs(body), *_guided(body)]
    if len(found) > 1:
        words = f"{found[0].place} and {found[1].place} both constrain the answer: send only one"
        raise RequestError(words, found[1].field)
    return found[0] if found else None


def _response_format(body: StructuredFields) -> list[OutputForm]:
    given, place = body.response_format, "response_format"
    if given is None:
        return []
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return []
    style = Style(body.guided_whitespace_pattern or BLANK)
    if kind == "json_object":
        if given.get("schema") is None:
            return [OutputForm("json_object", None, place, style)]
        return [OutputForm("json", given["schema"], f"{place}.schema", style)]
    if kind != "json_schema":
        words = f"{place}.type is {short(kind)}; it must be 'text', 'json_object' or 'json_schema'"
        raise RequestError(words, place)
    inner = given.get("json_schema")
    if not isinstance(inner, Mapping) or inner.get("schema") is None:
        words = f"{place}.json_schema is {short(inner)}; it must be an object with a schema"
        raise RequestError(words, place)
    style = Style(style.blank, lenient=inner.get("strict") is not True)
    return [OutputForm("json", inner["schema"], f"{place}.json_schema.schema", style)]


def _structured_outputs(body: StructuredFields) -> list[OutputForm]:
    given, place = body.structured_outputs, "structured_outputs"
    if given is None:
        return []
    for key, value in given.items():
        if key not in (*KINDS, *_HOW, *_IGNORED) and value is not None:
            words = f"{place}.{key} is not supported; supported are {', '.join((*KINDS, *_HOW))}"
            raise RequestError(words, place)
    blank = given.get("whitespace_pattern") or body.guided_whitespace_pattern or BLANK
    if not isinstance(blank, str):
        words = f"{place}.whitespace_pattern is {short(blank)}; it must be a regex"
        raise RequestError(words, place)
    style = Style("" if given.get("disable_any_whitespace") else blank)
    found = [
        OutputForm(kind, given[kind], f"{place}.{kind}", style)
        for kind in KINDS
        if given.get(kind) is not None and given[kind] is not False
    ]
    if not found:
        raise RequestError(f"{place} is empty; it must hold one of {', '.join(KINDS)}", place)
    if found[0].kind == "json" and given.get("disable_additional_properties"):
        closed = _closed(found[0]._schema())
        found[0] = OutputForm("json", closed, found[0].place, style)
    return found


def _guided(body: StructuredFields) -> list[OutputForm]:
    style = Style(body.guided_whitespace_pattern or BLANK)
    given = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
        "json_object": body.guided_json_object or None,
    }
    return [OutputForm(k, v, f"guided_{k}", style) for k, v in given.items() if v is not None]


def _closed(schema: Any) -> Any:
    """The schema, with additional properties disallowed."""
    if isinstance(schema, list):
        return [_closed(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {key: _closed(value) for key, value in schema.items()}
    if isinstance(made.get("properties"), dict):
        made.setdefault("additionalProperties", False)
    return made
