"""The reply parser reads any call that a grammar allows as the intended value."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.raw_values import FORMATS
from spark_engine.runtime.structured.schemas import FORMATS as KNOWN
from tests.runtime.structured.grammar_walks import (
    answers,
    given,
    grammars,
    only,
    read,
    spec,
    tokenizer,
    tool,
)
from tests.runtime.structured.test_forced_text import forced

HEAD = "<tool_call>\n<function=write>\n<parameter=path>\n"
END = "\n</parameter>\n</function>\n</tool_call>"
ROWS = {"path": {"type": "string"}, "content": {"type": "string"}, "n": {"type": "integer"}}


def _takes(grammar: str, text: str) -> bool:
    """Whether a grammar allows a text, in a model's usual tokens. Marks in `text` are tokens only
    at its two ends."""
    start, end = "<tool_call>", "</tool_call>"
    inner = text.removeprefix(start).removesuffix(end)
    # a mark inside the text must not become its token
    parts = [piece for word in inner.split("<") for piece in (word, "<")][:-1]
    ids = [tokenizer().encode(start)[0], *(i for part in parts for i in tokenizer().encode(part))]
    follows = grammars()(grammar)
    return follows._matcher.validate_tokens([*ids, tokenizer().encode(end)[0]]) == len(ids) + 1


def _grammar(schema: Any, strict: bool = True) -> str:
    """Of one call of a tool with these parameters."""
    return spec([tool("write", schema, strict)], "required", parallel=False).grammar


def _path(row: Any) -> dict[str, Any]:
    return {"properties": {**ROWS, "path": row}, "required": ["path"]}


def _said(text: str, schema: Any) -> dict[str, Any]:
    return given(tokenizer().encode(text), [tool("write", schema)])


@pytest.mark.parametrize("row", [{"type": "string"}, {"type": "string", "minLength": 1}])
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
def test_raw_text_holds_no_end_of_itself(value: str, allowed: bool, row: Any) -> None:
    assert _takes(_grammar(_path(row)), HEAD + value + END) is allowed
    if allowed:
        assert _said(HEAD + value + END, _path(row)) == {"path": value}


VALUES = ["line\n<parameter=foo>\nline", "a <function=x> b", "</parameter", "\n\n"]
VALUES += [" <think>\n</think> ", "null", "[1]", ""]


@pytest.mark.parametrize("value", VALUES)
def test_a_const_is_read_back(value: str) -> None:
    assert _takes(_grammar(_path({"const": value})), HEAD + value + END)
    rows = only({"const": value}, "path")
    ids = forced(tokenizer(), grammars(), _grammar(rows))
    if "<parameter=foo>" not in value:  # only this tool's names, if the parser knows them
        assert read(ids, [tool("write", rows)])[1] == [("write", {"path": value})]


@pytest.mark.parametrize(
    "value", ["a\n</parameter>\nb", "a</function>", "<parameter=n>", "x\n<parameter= content>\ny"]
)
def test_a_const_with_an_end_is_refused_by_its_place(value: str) -> None:
    for row, place in (
        ({"const": value}, "path.const"),
        ({"enum": ["a", value]}, "path.enum[1]"),
        ({"anyOf": [{"type": "null"}, {"const": value}]}, "path.anyOf[1].const"),
    ):
        with pytest.raises(RequestError) as caught:
            _grammar(_path(row))
        want = f"tools[0].function.parameters.properties.{place} holds a mark"
        assert str(caught.value).startswith(want) and caught.value.param == "tools"
        assert _takes(_grammar(_path(row), strict=False), f"{HEAD}a{END}")


CIRCLE = only({"const": "circle"}, "kind")
BOX = {
    "properties": {"kind": {"const": "box"}, "width": {"type": "integer"}},
    "required": ["kind", "width"],
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["anyOf", "oneOf"])
def test_a_union_at_the_root_has_the_parameters_of_one_alternative(strict: bool, name: str) -> None:
    union = [{"$ref": "#/$defs/circle"}, BOX]
    schema = {name: union, "$defs": {"circle": CIRCLE}, "type": "object"}
    tools, seen = [tool("write", schema, strict)], set()
    for ids in answers(_grammar(schema, strict), range(12)):
        arguments = given(ids, tools)
        Draft202012Validator(schema).validate(arguments)
        seen.add(arguments["kind"])
    assert seen == {"circle", "box"}


def test_combinations_at_the_root() -> None:
    both = {
        "properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["x"]}},
        "allOf": [{"required": ["a"]}, {"anyOf": [{"required": ["b"]}, {"properties": {"c": {}}}]}],
    }

    def call(**rows: str) -> str:
        lines = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in rows.items())
        return "<tool_call>\n<function=write>\n" + "".join(lines) + "</function>\n</tool_call>"

    grammar = _grammar(both)
    assert _takes(grammar, call(a="1", b="x")) and _takes(grammar, call(a="2", c="any"))
    assert not _takes(grammar, call(b="x")) and not _takes(grammar, call(a="1", d="1"))
    two = {"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    with pytest.raises(RequestError, match=r"parameters\.oneOf is not supported where two"):
        _grammar(two)
    with pytest.raises(RequestError, match=r"parameters\.anyOf\[1\]\.not is not supported"):
        _grammar({"anyOf": [{}, {"not": {"required": ["a"]}}]})
    many = {"allOf": [{"anyOf": [{"properties": {f"{i}{j}": {}}} for j in "abcd"]} for i in "abcd"]}
    loose = _grammar(many, strict=False)
    assert _takes(loose, call(da="1")) and not _takes(loose, call(dd9="1"))


@pytest.mark.parametrize("name", ["ipv6", "duration"])
def test_the_formats_of_both_forms_of_strings_are_the_same(name: str) -> None:
    assert FORMATS.keys() == KNOWN
    schema = only({"type": "string", "format": name})
    for ids in answers(_grammar(schema), range(12), 80):
        value = given(ids, [tool("write", schema)])["a"]
        Draft202012Validator.FORMAT_CHECKER.check(value, name)


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
        (
            {"anyOf": [{"enum": ["Paris"]}, {"type": "string"}, {"type": "null"}]},
            ["Paris", "Paris\n<b>", "null", "Par", "Paris\n</parameter"],
            [],
        ),
        # what a pattern finds may be anywhere
        ({"type": "string", "pattern": "b"}, ["abc"], ["ac"]),
        ({"type": "string", "pattern": "^b"}, ["bc"], ["ab"]),
        ({"type": "string", "pattern": "b$"}, ["ab"], ["bc"]),
        ({"type": "string", "pattern": "^(a|b)$"}, ["b"], ["ab"]),
    ],
)
def test_a_union_or_a_bound_string_is_written_as_it_is_read(
    row: Any, takes: list[str], refuses: list[str]
) -> None:
    schema = only(row, "path")
    grammar = _grammar(schema)
    for value in takes:
        assert _takes(grammar, HEAD + value + END), value
        Draft202012Validator(schema).validate(_said(HEAD + value + END, schema))
    for value in refuses:
        assert not _takes(grammar, HEAD + value + END), value
