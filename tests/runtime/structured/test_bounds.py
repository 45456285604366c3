"""Cost of a schema before its compilation: each part is visited once, for any references."""

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.constraints import constraint_for
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.tool_schema import parameter_types
from tests.runtime.structured.grammar_walks import HERMES, XML, tokenizer, tool

SECONDS = 2.0  # of CPU time; a body of the largest size takes up to 0.6, most take 0.01


class _Compiler:
    """Compiles nothing, and counts its inputs; refuses `wrong`."""

    def __init__(self, wrong: Callable[[str], bool] = lambda text: False) -> None:
        self._wrong = wrong
        self.characters = 0

    def check(self, grammar: str) -> None:
        """See `Grammars`."""
        if error := self.error_of(grammar):
            raise RequestError(error)

    def error_of(self, grammar: str) -> str:
        """See `Grammars`."""
        self.characters += len(grammar)
        return "wrong" if self._wrong(grammar) else ""


def _cost(
    tools: list[dict[str, Any]], choice: Any = "required", formats: Formats = XML, wrong: Any = None
) -> str:
    """The grammar's text or the error; fails if either takes long."""
    compiler = _Compiler(wrong) if wrong else _Compiler()
    begin = time.process_time()
    try:
        made = constraint_for(StructuredFields(), tools, choice, formats, tokenizer(), compiler)  # type: ignore[arg-type]
        said = made.grammar if made is not None else ""
    except RequestError as error:
        said = str(error)
    parameter_types(tools)
    spent = time.process_time() - begin
    assert spent < SECONDS, f"{spent:.2f} s"
    assert len(said) < 300_000 and compiler.characters < 30e6
    return said


def _chain(count: int, row: Callable[[int], Any], end: Any = None) -> dict[str, Any]:
    defs = {f"d{i}": row(i + 1) for i in range(count)}
    return {"$defs": {**defs, f"d{count}": end or {"type": "string"}}}


def _ref(number: int) -> dict[str, Any]:
    return {"$ref": f"#/$defs/d{number}"}


def _own(row: Any) -> dict[str, Any]:
    return {"$defs": {"d0": row}, "properties": {"a": _ref(0)}}


def _rows(count: int) -> dict[str, Any]:
    return {f"p{i}": _ref(i) for i in range(count)}


NAMES = ("anyOf", "oneOf", "allOf")
SCHEMAS: dict[str, Any] = {
    **{f"itself, {k} of {name}": _own({name: [_ref(0)] * k}) for name in NAMES for k in (2, 12)},
    **{
        f"twice the next, {name}": {
            **_chain(60, lambda i, name=name: {name: [_ref(i)] * 2}),  # type: ignore[misc]
            "properties": {"a": _ref(0)},
        }
        for name in NAMES
    },
    "each to each": {
        "$defs": {f"d{i}": {"anyOf": [_ref(j) for j in range(40)]} for i in range(40)},
        "properties": _rows(40),
    },
    "twelve of each": {
        "$defs": {
            f"d{i}": {NAMES[i % 3]: [_ref(i * j * 31 % 300) for j in range(12)]} for i in range(300)
        },
        "properties": _rows(300),
    },
    "a long chain": {**_chain(1500, lambda i: {"anyOf": [_ref(i)]}), "properties": _rows(200)},
    "plain references": {**_chain(1500, _ref), "properties": _rows(200)},
    "root, itself": {"anyOf": [{"$ref": "#"}] * 12, "properties": {"a": {"type": "string"}}},
    "root, twice the next": {**_chain(60, lambda i: {"allOf": [_ref(i)] * 2}, {}), **_ref(0)},
    "root, products": {
        "allOf": [
            {"anyOf": [{"properties": {f"a{i}{j}": {}}} for j in range(12)]} for i in range(12)
        ]
    },
    "root, many": {"anyOf": [{"properties": {f"a{i}": {"type": "string"}}} for i in range(2500)]},
    "definitions of all": {
        "$defs": {"d0": {"properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}},
        "properties": {
            f"q{i}": {"type": "array", "items": _ref(0), "maxItems": i} for i in range(700)
        },
    },
    "a long pointer": {
        "properties": {f"p{i}": {"$ref": "#" + "/a" * 600} for i in range(90)},
        "a": {"a": {"$ref": "#/a/a"}},
    },
    "an enum": {"properties": {"a": {"enum": [f"{i}" for i in range(6000)]}}},
    "alternatives": {"properties": {"a": {"anyOf": [{"const": f"{i}"} for i in range(1500)]}}},
    "long names": {"properties": {"n" * 20_000 + str(i): {} for i in range(6)}},
    "many names": {"properties": {f"name{i}": {"type": "string"} for i in range(1500)}},
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("strict", [False, True], ids=["lenient", "strict"])
def test_a_schema_is_walked_once(name: str, strict: bool) -> None:
    assert len(json.dumps(SCHEMAS[name])) < 128 << 10
    tools = [tool("one", SCHEMAS[name], strict)]
    _cost(tools, formats=HERMES if strict else XML)
    _cost(tools, wrong=lambda text: True)


def test_the_grammar_is_bounded_as_it_is_written() -> None:
    schema = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
    tools = [tool(f"tool{i}", schema, strict=False) for i in range(2500)]
    assert "tools cannot be enforced: it makes a grammar of more" in _cost(tools, "required")


ROWS = st.recursive(
    st.sampled_from([{"type": "string"}, {"const": "x"}, {"type": "null"}, {}, {"type": "integer"}])
    | st.integers(0, 7).map(_ref),
    lambda inner: st.builds(
        lambda name, rows: {name: rows}, st.sampled_from(NAMES), st.lists(inner, max_size=12)
    ),
    max_leaves=60,
)


@settings(max_examples=20, deadline=None)
@given(st.lists(ROWS, min_size=8, max_size=8), st.booleans(), st.booleans())
def test_any_graph_of_schemas_takes_little_time(rows: list[Any], strict: bool, root: bool) -> None:
    schema: dict[str, Any] = {"$defs": {f"d{i}": row for i, row in enumerate(rows)}}
    schema |= {"properties": _rows(8), "required": ["p0"]}
    if root:
        schema["anyOf"] = rows[:4]
    begin = time.process_time()
    _cost([tool("one", schema, strict)])
    assert time.process_time() - begin < 1
