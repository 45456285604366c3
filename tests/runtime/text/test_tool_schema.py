"""Types of parameters, and their texts' values, whole and while they stream."""

import json
import time
from typing import Any

import pytest

from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.tool_schema import parameter_types

S, INT, N, B = ({"type": kind} for kind in ("string", "integer", "number", "boolean"))
A, OBJ, NULL = ({"type": kind} for kind in ("array", "object", "null"))


def _any(*schemas: Any) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


ROWS: list[tuple[Any, str, Any]] = [  # schema, text, value
    (S, "12", "12"),
    (S, "null", "null"),
    (S, "[1]", "[1]"),
    *(({}, text, text) for text in ("12", "true", "[1]", "null")),
    (_any(S, A), '["ls", "-la"]', ["ls", "-la"]),
    (_any(S, A), "ls -la", "ls -la"),
    (_any(S, A), "[ls", "[ls"),
    (_any(S, A), '{"a": 1}', '{"a": 1}'),
    (_any(S, A), '["a\nb",]', ["a\nb"]),
    (_any(A, OBJ, S), '{"a": [1]}', {"a": [1]}),
    (_any(S, NULL), "null", None),
    (_any(S, NULL), "null and void", "null and void"),
    (_any(S, NULL), "nul", "nul"),
    (_any(S, NULL), "", ""),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "None", "None"),
    ({"type": "string", "nullable": True}, "null", None),
    ({"type": "string", "nullable": False}, "null", "null"),
    ({"allOf": [S], "nullable": True}, "null", None),
    ({"$ref": "#/properties/b", "nullable": True}, "null", None),
    ({"type": ["string", "boolean"]}, "true", True),
    ({"type": ["string", "boolean"]}, "truely", "truely"),
    ({"type": ["string", "boolean"]}, "12", "12"),
    (_any(S, INT), "12", 12),
    (_any(S, INT), "-12", -12),
    (_any(S, INT), "012", "012"),
    (_any(S, INT), "1.5", "1.5"),
    (_any(S, INT), "12 apples", "12 apples"),
    (_any(S, INT), str(2**60), str(2**60)),
    (_any(S, N), "1.5", 1.5),
    (_any(S, N), "1.50", "1.50"),
    (_any(S, N), "1e5", "1e5"),
    (_any(S, N), "NaN", "NaN"),
    ({"enum": ["1", "2", 3]}, "1", "1"),
    ({"enum": ["1", "2", 3]}, "3", 3),
    (_any({"const": "null"}, NULL), "null", "null"),
    ({"enum": ["a", None]}, "null", None),
    (INT, "3", 3),
    (INT, "3.0", 3),
    (INT, '"3"', 3),
    (N, "3.0", 3.0),
    (INT, "three", "three"),
    *((INT, text, text) for text in ("NaN", "[1, Infinity]", "1e999", "-Infinity")),
    (_any(A, NULL), "None", None),
    (B, "True", True),
    (B, "False", False),
    (_any(INT, NULL), "None", None),
    (A, '[{"old": "line1\nline2\tx"}]', [{"old": "line1\nline2\tx"}]),
    (A, "[1, 2, ]", [1, 2]),
    (OBJ, '{"a": ",]", "b": [1,],}', {"a": ",]", "b": [1]}),
    (OBJ, '"{\\"a\\": 1}"', {"a": 1}),
    (A, "a, b", "a, b"),
    (OBJ, "{'a': 1}", "{'a': 1}"),
]


@pytest.mark.parametrize(("schema", "text", "value"), ROWS)
def test_values_of_texts(schema: Any, text: str, value: Any) -> None:
    parameters = {"properties": {"a": schema, "b": S}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    found = parameter_types(tools)["f"]["a"].value(text)
    assert found == value and type(found) is type(value)
    call = f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>"
    for size in (1, 3, 999):
        parser = ReplyParser(False, tools)
        deltas = [d for i in range(0, len(call), size) for d in parser.push(call[i : i + size])]
        given = "".join(delta.text for delta in deltas + parser.flush())
        assert given == f'{{"a": {json.dumps(value, ensure_ascii=False)}}}', size


def test_a_nullable_string_streams_once_it_cannot_be_null() -> None:
    tools = [{"function": {"name": "f", "parameters": {"properties": {"a": _any(S, NULL, A)}}}}]
    parser = ReplyParser(False, tools)
    parser.push("<tool_call>\n<function=f>\n<parameter=a>\n")
    said = [[d.text for d in parser.push(text)] for text in ("nu", "ll", "ify", " it")]
    assert said == [[], [], ['"nullify'], [" it"]]


def test_properties_of_parts_and_alternatives_are_parameters() -> None:
    root = {
        "$defs": {"x": {"properties": {"a": INT, "b": S}}},
        "allOf": [{"$ref": "#/$defs/x"}],
        "oneOf": [{"properties": {"a": S, "c": {"$ref": "#"}}}, {"properties": {"d": B}}],
    }
    found = parameter_types([{"function": {"name": "f", "parameters": root}}])["f"]
    types = {key: set(row.types) for key, row in found.items()}
    assert types == {"a": {"integer", "string"}, "b": {"string"}, "c": set(), "d": {"boolean"}}


def test_schemas_that_refer_to_the_same_large_one_take_no_long_time() -> None:
    large = {"anyOf": [{"type": "array"} for _ in range(3000)]}
    rows = {f"p{i}": {"anyOf": [{"$ref": "#/$defs/x"}, S]} for i in range(3000)}
    deep: dict[str, Any] = {}
    for _ in range(3000):
        deep = {"anyOf": [deep]}
    tools = [
        {"function": {"name": "f", "parameters": {"$defs": {"x": large}, "properties": rows}}},
        {"function": {"name": "g", "parameters": {"properties": {"a": deep}}}},
    ]
    start = time.process_time()
    found = parameter_types(tools)
    assert time.process_time() - start < 1.5, "it was 59 s"
    assert len(found["f"]) == 3000 and found["f"]["p0"].types == {"array", "string"}
