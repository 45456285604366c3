"""Unenforceable keywords: removed from lenient schemas, and errors with a place in strict ones."""

from __future__ import annotations

import datetime
import enum
import json
import pathlib
import uuid
from decimal import Decimal
from typing import Annotated, Any, Literal

import pytest
from jsonschema import Draft202012Validator
from pydantic import AnyUrl, BaseModel, Field, SecretStr

from spark_engine.errors import RequestError
from spark_engine.runtime.structured import matcher, schema_errors
from spark_engine.runtime.text.reply_formats import Formats
from tests.runtime.structured.grammar_walks import (
    HERMES,
    XML,
    answers,
    form,
    given,
    only,
    read,
    spec,
    text,
    tool,
)

PARAMETERS = "tools[0].function.parameters"
AHEAD, BACK = "^(?!x)[0-9.]+$", r"^(a|b)\1$"
MAIL = (  # from zod
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9]+\.)+[A-Za-z]{2,}$"
)

# (a parameter's schema; the place below it of the error if strict, "" if it is accepted)
BINDING: list[tuple[dict[str, Any], str]] = [
    ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": AHEAD}]}, ".anyOf[1].pattern"),
    ({"type": "string", "pattern": BACK}, ".pattern"),
    ({"type": "string", "pattern": MAIL, "format": "email"}, ".pattern"),
    ({"type": "string", "pattern": "(unclosed"}, ".pattern"),
    ({"type": "array", "items": {"type": "string", "pattern": AHEAD}}, ".items.pattern"),
    ({"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}, ".uniqueItems"),
    ({"type": "array", "contains": {"const": 1}}, ".contains"),
    ({"type": "object", "propertyNames": {"format": "uuid"}}, ".propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, ".dependentRequired"),
    ({"type": "object", "dependentSchemas": {"a": {"required": ["b"]}}}, ".dependentSchemas"),
    ({"type": "integer", "not": {"const": 3}}, ".not"),
    ({"type": "string", "not": {"const": "a"}}, ".not"),
    ({"type": "string", "if": {"minLength": 1}, "then": {"maxLength": 3}}, ".if"),
    ({"type": "array", "items": {"$ref": "#/$defs/none"}}, ".items.$ref"),
    ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/none"}]}, ".anyOf[1].$ref"),
    ({"type": "integer", "$ref": "https://example.com/schema.json"}, ".$ref"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, ".minimum"),
    ({"type": "integer", "multipleOf": 99991}, ".multipleOf"),
    ({"type": "strange"}, ".type"),
    ({"type": "array", "items": [{"type": "strange"}, {"type": "integer"}]}, ".items[0].type"),
    (
        {"type": "object", "patternProperties": {AHEAD: {}}, "additionalProperties": False},
        ".patternProperties",
    ),
]
# these restrict nothing
FREE: list[dict[str, Any]] = [
    *({"type": "string", "format": f} for f in ("password", "binary", "path", "uri-reference")),
    {"type": "integer", "format": "int32"},
    {"type": "string", "title": "T", "description": "d", "default": "x", "examples": ["y"]},
    {"type": "string", "writeOnly": True, "contentMediaType": "application/json"},
    {"type": "object", "propertyNames": {"type": "string", "description": "d"}},
    {"type": "array", "uniqueItems": False, "items": {"type": "integer"}},
    {"type": "object", "dependentRequired": {}, "unevaluatedProperties": True, "minProperties": 0},
    {"type": "object", "properties": {"format": {"format": "nope"}, "title": {"type": "integer"}}},
    {"type": "object", "properties": {}, "unevaluatedProperties": False},
    {"type": "string", "x-order": 3, "errorMessage": "no", "nullable": False, "uniqueItems": True},
    {"type": "string", "format": "ipv6"},
    {"type": "string", "format": "duration"},
]


def _object(row: Any, **more: Any) -> dict[str, Any]:
    rows = {"price": row, "n": {"enum": [1, 2]}}
    closed = {"required": ["price", "n"], "additionalProperties": False}
    return {"type": "object", "properties": rows, **closed, **more}


def _asked(schema: Any, strict: bool) -> list[tuple[str, dict[str, Any]]]:
    """(place of the schema, fields), for every field that has one."""
    tools = [tool("pay", schema, strict)]
    named = {"type": "function", "function": {"name": "pay"}}
    return [
        ("response_format.json_schema.schema", form(schema, strict=strict)),
        (PARAMETERS, {"tools": tools, "choice": "required"}),
        (PARAMETERS, {"tools": tools, "choice": named, "formats": HERMES}),
        (PARAMETERS, {"tools": tools, "response_format": {"type": "json_object"}}),
        (PARAMETERS, {"tools": [*tools, tool("other")], **form({"type": "integer"})}),
    ]


@pytest.mark.parametrize(("row", "below"), BINDING, ids=lambda value: str(value)[:60])
def test_a_binding_keyword_is_let_go_or_named_with_its_place(row: Any, below: str) -> None:
    for _, fields in _asked(_object(row), strict=False)[:4]:
        spec(**fields)
    for place, fields in _asked(_object(row), strict=True):
        with pytest.raises(RequestError) as caught:
            spec(**fields)
        assert str(caught.value).startswith(f"{place}.properties.price{below}"), caught.value
        assert caught.value.param == place.partition(".")[0].partition("[")[0]


@pytest.mark.parametrize("row", FREE, ids=lambda value: str(value)[:60])
def test_what_says_nothing_is_taken_in_strict_schemas_too(row: Any) -> None:
    for _, fields in _asked(_object(row), strict=True):
        spec(**fields)


def test_strict_is_false_unless_it_is_said() -> None:
    schema = _object({"type": "string", "pattern": AHEAD})
    spec(**form(schema))
    spec(**form(schema, strict=None))
    tool = {"type": "function", "function": {"name": "pay", "parameters": schema}}
    spec([tool], "required")
    for kept in ("guided_json", "structured_outputs"):  # vLLM's fields are always strict
        with pytest.raises(RequestError, match="properties.price.pattern"):
            spec(**{kept: schema if kept == "guided_json" else {"json": schema}})


@pytest.mark.parametrize(("row", "below"), BINDING, ids=lambda value: str(value)[:60])
def test_all_else_is_still_enforced(row: Any, below: str) -> None:
    schema = _object(row, **{"$defs": {"own": row}})
    schema["properties"]["again"] = {
        "type": "array",
        "items": {"$ref": "#/$defs/own"},
        "maxItems": 1,
    }
    schema["required"].append("again")
    pay = tool("pay", schema, strict=False)
    called = spec([pay], "required", XML, parallel=False)
    loose = {"price": {}, "n": {"enum": [1, 2]}, "again": {"type": "array", "maxItems": 1}}
    check = Draft202012Validator({**schema, "properties": loose})
    for ids in answers(spec(**form(schema)).grammar, range(2)):
        check.validate(json.loads(text(ids)))
    for ids in answers(called.grammar, range(2)):
        check.validate(given(ids, [pay]))


def test_only_the_wrong_keyword_is_let_go() -> None:
    row = {"type": "string", "pattern": AHEAD, "maxLength": 3}
    tools = [tool("a", _object(row), False)]
    for fields in (form(_object(row)), {"tools": tools, "choice": "required"}):
        grammar = spec(**fields).grammar
        assert "?!" not in grammar
        assert '"maxLength": 3' in grammar or ".{0,3}" in grammar
    both = {"type": "object", "patternProperties": {"^a": {"type": "integer"}, AHEAD: {}}}
    grammar = spec(**form({**both, "additionalProperties": False})).grammar
    assert '"^a"' in grammar
    assert '"additionalProperties"' not in grammar  # it would forbid too much


def test_a_definition_is_named_where_it_is() -> None:
    defs = {"Money": {"type": "string", "pattern": AHEAD}, "Row": {"$ref": "#/$defs/Money"}}
    schema = _object({"$ref": "#/$defs/Row"}, **{"$defs": defs})
    for place, fields in _asked(schema, strict=True):
        with pytest.raises(RequestError) as caught:
            spec(**fields)
        assert str(caught.value).startswith(f"{place}.$defs.Money.pattern"), caught.value
    inner = _object({"type": "array", "items": {"$ref": "#/properties/n"}})
    inner["properties"]["n"] = {"type": "array", "uniqueItems": True}
    with pytest.raises(RequestError, match=r"parameters\.properties\.n\.uniqueItems"):
        spec([tool("a", inner)], "required")


def test_references_of_every_form_are_followed() -> None:
    more: dict[str, Any] = {
        "$defs": {"a": {"const": 5}, "o": {"$anchor": "odd", "const": 6}, "c d": {"const": 7}},
        "definitions": {"b": {"const": 8}},
        "x": {"y/z": {"const": 9}},
    }
    places = "#/$defs/a #/definitions/b #/properties/n #odd #/x/y~1z #/$defs/c%20d #"
    for place in places.split():
        row = {"type": "array", "items": {"$ref": place}, "maxItems": 1}
        schema = _object({**row, "minItems": int(place != "#")}, **more)
        for _, fields in _asked(schema, strict=True)[:2]:
            tools = fields.get("tools", [])
            for ids in answers(spec(**fields).grammar, [1]):
                found = read(ids, tools)[1][0][1] if tools else json.loads(text(ids))
                Draft202012Validator(schema).validate(found)


class _Kind(enum.Enum):
    ONE, TWO = "a <think> b", "b"


class _Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class _Dog(BaseModel):
    kind: Literal["dog"]
    name: str


class _Node(BaseModel):
    value: int
    children: list[_Node] = []
    above: _Node | None = None


class _Everything(BaseModel):
    decimal: Decimal
    names: set[str]
    frozen: frozenset[int]
    secret: SecretStr
    data: bytes
    path: pathlib.Path
    counts: dict[str, int]
    by_id: dict[uuid.UUID, int]
    by_kind: dict[_Kind, int]
    text: str | None = None
    number: int | None = None
    union: int | str | list[str]
    pet: Annotated[_Cat | _Dog, Field(discriminator="kind")]
    at: datetime.datetime
    day: datetime.date
    time: datetime.time
    span: datetime.timedelta
    id: uuid.UUID
    code: Annotated[str, Field(pattern="^[a-z]+$", min_length=2)]
    some: Annotated[list[int], Field(min_length=1, max_length=3)]
    word: Literal["x", 1, None]
    kind: _Kind
    node: _Node
    pair: tuple[int, str]
    many: tuple[int, ...]
    url: AnyUrl
    share: Annotated[float, Field(gt=0, lt=1, multiple_of=0.01)]
    any: Any = None
    free: dict[str, Any] = {}


PYDANTIC = _Everything.model_json_schema()
# what pydantic up to 2.13 writes for a Decimal, and zod 4
OLD_DECIMAL = {
    "anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}],
    "title": "Price",
}
ZOD: dict[str, Any] = {
    "record": {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "number"},
    },
    "tuple": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}]},
    "intersection": {"allOf": [only({"type": "string"}), only({"type": "number"}, "b")]},
    "int": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
    "email": {"type": "string", "format": "email", "pattern": MAIL},
    "map": {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}},
    "nullable": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "old tuple": {"type": "array", "items": [{"type": "string"}], "additionalItems": False},
}
UNENFORCED = {*("names", "frozen", "by_id", "by_kind", "email", "map", "decimal before 2.14")}
MODELS = {**PYDANTIC["properties"], **ZOD, "decimal before 2.14": OLD_DECIMAL}


@pytest.mark.parametrize("name", MODELS)
def test_schemas_of_pydantic_and_zod(name: str) -> None:
    schema = _object(MODELS[name], **{"$defs": PYDANTIC["$defs"]})
    for _, fields in _asked(schema, strict=False)[:3]:
        spec(**fields)
    for place, fields in _asked(schema, strict=True)[:3]:
        if name not in UNENFORCED:
            spec(**fields)
            continue
        with pytest.raises(RequestError) as caught:
            spec(**fields)
        assert str(caught.value).startswith(f"{place}.properties.price."), caught.value


@pytest.mark.parametrize("formats", [XML, HERMES])
def test_the_whole_of_such_a_model(formats: Formats) -> None:
    tools = [tool("a", PYDANTIC, strict=False)]
    spec(tools, "required", formats)
    spec(**form(PYDANTIC))


def test_malformed_schemas_of_tools_do_not_end_a_chat() -> None:
    for parameters in (
        {"type": "object", "properties": None},
        {
            "type": "object",
            "properties": {"a": {"type": "string", "required": True}},
            "required": True,
        },
        {"type": "object", "properties": {"a": {"type": "any"}, "b": "string", "c": None}},
        {"type": "object", "properties": {"a<b>": {}, " c": {}}, "required": ["a<b>"]},
        {"type": "object", "properties": {"a": {"enum": []}, "b": {"anyOf": []}, "c": False}},
        {"type": "object", "properties": {"a": {"type": "string", "minLength": "3"}}},
        {"properties": {"a": {"const": "x</parameter>y"}, "b": {"$ref": "#/$defs/b"}}, "$defs": 3},
        True,
    ):
        for formats in (XML, HERMES):
            spec([tool("a", parameters, strict=False)], "required", formats)


def test_looking_for_what_is_wrong_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {f"p{i}": {"type": "string", "pattern": f"(?=a){i}"} for i in range(500)}
    tools = [tool(f"t{i}", {"properties": rows}, strict=False) for i in range(3)]
    monkeypatch.setattr(schema_errors, "TRIALS", 20)
    made: list[str] = []
    real = matcher._compile
    monkeypatch.setattr(matcher, "_compile", lambda t, g: made.append(g) or real(t, g))  # type: ignore[func-returns-value]
    found = spec(tools, "required")
    assert "<parameter=p499>" in found.grammar and len(made) < 26


def test_a_grammar_that_takes_too_long_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def compiled(tokens: Any, grammar: str) -> Any:
        asked.append(grammar)
        raise matcher.GrammarTooSlow("it did not compile within 5 s")

    monkeypatch.setattr(matcher, "_compile", compiled)
    for strict, count in ((True, 1), (False, 2)):
        asked.clear()
        tools = [tool("slow", {"properties": {"a": {"maxLength": 7 + strict}}}, strict)]
        with pytest.raises(RequestError, match="tools cannot be enforced: it did not compile"):
            spec(tools, "required")
        assert len(asked) == count


def test_a_grammar_that_is_too_long_is_loosened_or_refused() -> None:
    big = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(800)}}
    row = {"type": "array", "items": {"$ref": "#/$defs/big"}}
    rows = {f"q{i}": {**row, "maxItems": i} for i in range(20)}
    schema = {"properties": rows, "$defs": {"big": big}}
    with pytest.raises(RequestError, match="cannot be enforced: it makes a grammar of more than"):
        spec([tool("a", schema)], "required")
    made = spec([tool("a", schema, strict=False)], "required")
    assert "<parameter=q19>" in made.grammar and '"array"' in made.grammar
