"""The reply parser reads any call that a grammar allows as the intended value."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.raw_values import FORMATS
from spark_engine.runtime.structured.schemas import FORMATS as KNOWN
from tests.runtime.structured.grammar_walks import grammars, spec, tokenizer, walk
from tests.runtime.structured.test_forced_text import forced
from tests.runtime.structured.test_tool_calls import XML, Call, _read, _tool

HEAD = "<tool_call>\n<function=write>\n<parameter=path>\n"
END = "\n</parameter>\n</function>\n</tool_call>"
ROWS = {"path": {"type": "string"}, "content": {"type": "string"}, "n": {"type": "integer"}}


def _takes(grammar: str, text: str) -> bool:
    """Whether a grammar allows a text, in a model's usual tokens. Marks in `text` are tokens only
    at its two ends.
    """
    start, end = "<tool_call>", "</tool_call>"
    inner = text.removeprefix(start).removesuffix(end)
    # a mark inside the text must not become its token
    parts = [piece for word in inner.split("<") for piece in (word, "<")][:-1]
    ids = [tokenizer().encode(start)[0], *(i for part in parts for i in tokenizer().encode(part))]
    follows = grammars()(grammar)
    return follows._matcher.validate_tokens([*ids, tokenizer().encode(end)[0]]) == len(ids) + 1


def _said(text: str, tools: list[Any]) -> list[Call]:
    return _read(tokenizer().encode(text), tools, XML)[1]


@pytest.mark.parametrize(
    ("value", "allowed"),
    [
        ("plain", True),
        ("a\n<b>\n</b>", True),
        ("</parameter", True),
        ("\n\nx\n", True),
        ("<param=x>", True),
        ("x\n</parameter>\ny", False),
        ("x\n</parameter>", False),
        ("x\n<parameter=content>\ny", False),
        ("<parameter=n>1", False),
        ("x</function>", False),
        ("a\n</parameter/>\n</function>", False),
        ("<function=f>\n<parameter=a>\n1", False),
    ],
)
def test_raw_text_holds_no_end_of_itself(value: str, allowed: bool) -> None:
    bound = {**ROWS, "path": {"type": "string", "minLength": 1}}
    for rows in (ROWS, bound):
        tools = [_tool("write", {"properties": rows, "required": ["path"]})]
        made = spec(tools, "required", parallel=False)
        assert made is not None
        assert _takes(made.grammar, HEAD + value + END) is allowed
        if allowed:
            assert _said(HEAD + value + END, tools) == [("write", {"path": value})]


@pytest.mark.parametrize(
    "value",
    [
        "line\n<parameter=foo>\nline",
        "a <function=x> b",
        "</parameter",
        "\n\n",
        " <think>\n</think> ",
        "null",
        "[1]",
        "",
    ],
)
def test_a_const_is_read_back(value: str) -> None:
    tools = [
        _tool("write", {"properties": {**ROWS, "path": {"const": value}}, "required": ["path"]})
    ]
    made = spec([tools[0]], "required", parallel=False)
    assert made is not None and _takes(made.grammar, HEAD + value + END)
    rows = {"properties": {"path": {"const": value}}, "required": ["path"]}
    made = spec([_tool("write", rows)], "required", parallel=False)
    assert made is not None
    ids = forced(tokenizer(), grammars(), made.grammar)
    if "<parameter=foo>" not in value:  # only this tool's names, if the parser knows them
        assert _read(ids, [_tool("write", rows)], XML)[1] == [("write", {"path": value})]


@pytest.mark.parametrize(
    "value", ["a\n</parameter>\nb", "a</function>", "<parameter=n>", "x\n<parameter= content>\ny"]
)
def test_a_const_with_an_end_is_refused_by_its_place(value: str) -> None:
    for row, place in (
        ({"const": value}, "path.const"),
        ({"enum": ["a", value]}, "path.enum[1]"),
        ({"anyOf": [{"type": "null"}, {"const": value}]}, "path.anyOf[1].const"),
    ):
        schema = {"properties": {**ROWS, "path": row}, "required": ["path"]}
        with pytest.raises(RequestError) as caught:
            spec([_tool("write", schema)], "required")
        want = f"tools[0].function.parameters.properties.{place} holds a mark"
        assert str(caught.value).startswith(want) and caught.value.param == "tools"
        made = spec([_tool("write", schema, strict=False)], "required")
        assert made is not None and _takes(made.grammar, f"{HEAD}a{END}")


UNION: dict[str, Any] = {
    "anyOf": [
        {"$ref": "#/$defs/circle"},
        {
            "type": "object",
            "properties": {"kind": {"const": "box"}, "width": {"type": "integer"}},
            "required": ["kind", "width"],
        },
    ],
    "$defs": {
        "circle": {
            "type": "object",
            "properties": {"kind": {"const": "circle"}, "radius": {"type": "number"}},
            "required": ["kind", "radius"],
        }
    },
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["anyOf", "oneOf"])
def test_a_union_at_the_root_has_the_parameters_of_one_alternative(strict: bool, name: str) -> None:
    schema = {name: UNION["anyOf"], "$defs": UNION["$defs"], "type": "object"}
    tools = [_tool("draw", schema, strict)]
    made = spec(tools, "required", parallel=False)
    assert made is not None
    seen = set()
    for seed in range(12):
        ids, whole = walk(made.grammar, seed)
        if whole:
            [(_, given)] = _read(ids, tools, XML)[1]
            Draft202012Validator(schema).validate(given)
            seen.add(given["kind"])
    assert seen == {"circle", "box"}


def test_combinations_at_the_root() -> None:
    both = {
        "properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["x"]}},
        "allOf": [{"required": ["a"]}, {"anyOf": [{"required": ["b"]}, {"properties": {"c": {}}}]}],
    }
    made = spec([_tool("f", both)], "required", parallel=False)
    assert made is not None
    head, end = "<tool_call>\n<function=f>\n", "</function>\n</tool_call>"

    def row(key: str, value: str) -> str:
        return f"<parameter={key}>\n{value}\n</parameter>\n"

    assert _takes(made.grammar, head + row("a", "1") + row("b", "x") + end)
    assert _takes(made.grammar, head + row("a", "2") + row("c", "any") + end)
    assert not _takes(made.grammar, head + row("b", "x") + end)
    assert not _takes(made.grammar, head + row("a", "1") + row("d", "1") + end)
    two = {"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    with pytest.raises(RequestError, match=r"parameters\.oneOf is not supported where two"):
        spec([_tool("f", two)], "required")
    with pytest.raises(RequestError, match=r"parameters\.anyOf\[1\]\.not is not supported"):
        spec([_tool("f", {"anyOf": [{}, {"not": {"required": ["a"]}}]})], "required")
    many = {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in "abcd"]} for i in "abcd"]}
    loose = spec([_tool("f", many, strict=False)], "required", parallel=False)
    assert loose is not None and _takes(loose.grammar, head + row("da", "1") + end)
    assert not _takes(loose.grammar, head + row("dd9", "1") + end)


def test_the_formats_of_both_forms_of_strings_are_the_same() -> None:
    assert FORMATS.keys() == KNOWN
    validator = Draft202012Validator.FORMAT_CHECKER
    for name in ("ipv6", "duration"):
        tools = [
            _tool("f", {"properties": {"a": {"type": "string", "format": name}}, "required": ["a"]})
        ]
        made = spec(tools, "required", parallel=False)
        assert made is not None
        for seed in range(12):
            ids, whole = walk(made.grammar, seed, 80)
            if whole:
                [(_, given)] = _read(ids, tools, XML)[1]
                validator.check(given["a"], name)


@pytest.mark.parametrize(
    ("row", "takes", "refuses"),
    [
        (
            {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
            ["ls -la", '["ls", "-la"]', "", "a [1]", "<b>", "null"],
            ["[1]", "[x", ' ["a"]', "{}"],
        ),
        ({"type": ["string", "null"]}, ["null", "text", "[1]"], []),
        ({"anyOf": [{"enum": ["a", "null"]}, {"type": "null"}]}, ["a", "null"], ["b"]),
        (
            {"anyOf": [{"enum": ["a"]}, {"type": "integer", "minimum": 3}, {"type": "boolean"}]},
            ["a", "12", "true"],
            ["2", '"a"', "b"],
        ),
        ({"enum": ["a", 1, [2]]}, ["a", "1", "[2]"], ["2", "[1]"]),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, ["1.50", "12", "x"], []),
    ],
)
def test_a_union_with_strings_is_written_as_it_is_read(
    row: Any, takes: list[str], refuses: list[str]
) -> None:
    schema = {"properties": {"path": row}, "required": ["path"]}
    tools = [_tool("write", schema)]
    made = spec(tools, "required", parallel=False)
    assert made is not None
    for value in takes:
        assert _takes(made.grammar, HEAD + value + END), value
        [(_, given)] = _said(HEAD + value + END, tools)
        Draft202012Validator(schema).validate(given)
    for value in refuses:
        assert not _takes(made.grammar, HEAD + value + END), value
