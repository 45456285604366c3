"""Calls by a tool's grammar are parsed by the reply parser, and fit the tool's schema."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from spark_engine.errors import InternalError, RequestError
from spark_engine.runtime.structured.constraints import constraint_for
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.runtime.structured.matcher import Grammars
from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.reply_parts import Delta, Kind
from spark_engine.runtime.text.tokenizer import Detokenizer
from tests.runtime.structured.grammar_walks import grammars, small, spec, text, tokenizer, walk
from tests.runtime.structured.schemas import draw_parameters

XML, HERMES = Formats(tools="qwen3_coder"), Formats(tools="hermes")
Call = tuple[str, dict[str, Any]]


def _tool(name: str, parameters: Any = None, strict: bool = True) -> dict[str, Any]:
    function = {"name": name, "strict": strict}
    if parameters is not None:
        function["parameters"] = parameters
    return {"type": "function", "function": function}


def _read(ids: list[int], tools: list[dict[str, Any]], formats: Formats) -> tuple[str, list[Call]]:
    tokens = tokenizer()
    parser = ReplyParser(False, tools, formats, tokens.marks.values(), True, True)
    deltas: list[Delta] = []
    at, decoder = 0, Detokenizer(tokens, skip_special=False)
    for i in ids:
        piece = decoder.push([i])
        deltas += parser.push(piece, [at] if i in tokens.marks else [])
        at += len(piece)
    deltas += parser.flush()
    content = "".join(d.text for d in deltas if d.kind is Kind.CONTENT)
    calls: list[tuple[str, str]] = []
    for delta in deltas:
        if delta.kind is Kind.CALL:
            name, given = (delta.name, "") if delta.name else calls.pop()
            calls.append((name, given + delta.text))
    return content, [(name, json.loads(given)) for name, given in calls]


@pytest.mark.parametrize("formats", [XML, HERMES], ids=["xml", "hermes"])
@pytest.mark.parametrize("first", range(0, 60, 30))
def test_arguments_are_of_their_schema(formats: Formats, first: int) -> None:
    wholes = 0
    for seed in range(first, first + 30):
        parameters = draw_parameters(seed)
        tools = [_tool("one", parameters), _tool("two")]
        made = spec(tools, "required", formats, parallel=False)
        assert made is not None
        for variant in range(2):
            ids, whole = walk(made.grammar, seed * 2 + variant)
            if not whole:
                continue
            wholes += 1
            content, calls = _read(ids, tools, formats)
            assert content == "" and calls, text(ids)
            for name, given in calls:
                assert name in ("one", "two")
                schema = parameters if name == "one" else {"maxProperties": 0}
                Draft202012Validator(schema).validate(given)
    assert wholes > 30


@pytest.mark.parametrize("formats", [XML, HERMES], ids=["xml", "hermes"])
@pytest.mark.parametrize("strict", [True, False])
def test_a_nullable_value_may_be_null(formats: Formats, strict: bool) -> None:
    """OpenAPI 3.0's keyword, which schemas made from its documents have."""
    string, other = {"type": "string", "nullable": True}, {"type": "array", "items": {}}
    rows: dict[str, Any] = {
        "string": {**string, "maxLength": 3},
        "enum": {**string, "enum": ["x", None]},
        "words": {"enum": ["x", "y"], "nullable": True},
        "number": {"type": "integer", "nullable": True},
        "all": {"allOf": [other], "nullable": True},
        "one": {"$ref": "#/$defs/one", "nullable": True},
        "inner": {"type": "array", "items": string},
        "not": {"type": "boolean", "nullable": False},
    }
    schema = {"type": "object", "properties": rows, "required": [*rows], "$defs": {"one": other}}
    tools = [_tool("one", schema, strict)]
    made = spec(tools, "required", formats, parallel=False)
    assert made is not None
    wanted = {**dict.fromkeys(rows), "inner": [None], "not": True}
    lines = (f"<parameter={k}>\n{json.dumps(v)}\n</parameter>\n" for k, v in wanted.items())
    call = f"<function=one>\n{''.join(lines)}</function>"
    if formats is HERMES:
        call = json.dumps({"name": "one", "arguments": wanted})
    start, end = (tokenizer().encode(mark)[0] for mark in ("<tool_call>", "</tool_call>"))
    ids = [start, *tokenizer().encode(f"\n{call}\n"), end]
    assert grammars()(made.grammar)._matcher.validate_tokens(ids) == len(ids)
    assert _read(ids, tools, formats) == ("", [("one", wanted)])
    made = spec(guided_json=schema)
    assert made is not None
    ids = tokenizer().encode(json.dumps(wanted))
    assert grammars()(made.grammar)._matcher.validate_tokens(ids) == len(ids)


def test_a_named_tool_is_called_once() -> None:
    tools = [_tool("one"), _tool("two")]
    named = {"type": "function", "function": {"name": "two"}}
    for formats in (XML, HERMES):
        made = spec(tools, named, formats)
        assert made is not None
        for seed in range(5):
            assert _read(walk(made.grammar, seed)[0], tools, formats) == ("", [("two", {})])


def test_calls_are_several_unless_they_may_not_be() -> None:
    tools = [_tool("one")]

    def counts(parallel: bool) -> set[int]:
        made = spec(tools, "required", XML, parallel=parallel)
        assert made is not None
        walks = (walk(made.grammar, seed, 60) for seed in range(40))
        return {len(_read(ids, tools, XML)[1]) for ids, whole in walks if whole}

    assert counts(False) == {1} and max(counts(True)) > 1


def test_auto_binds_calls_of_strict_tools_and_no_text() -> None:
    rows = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    assert spec([_tool("one", rows, strict=False)], "auto") is None
    made = spec([_tool("one", rows)], None)
    assert made is not None
    follows = grammars()(made.grammar)
    call = "I look. <tool_call>\n<function=one>\n<parameter=n>\n2\n</parameter>\n</function>\n"
    for token in tokenizer().encode(call):
        follows.advance(token)
    assert not follows.accepting and not follows.done
    follows.advance(tokenizer().encode("</tool_call>")[0])
    assert follows.accepting
    free = grammars()(made.grammar)
    for token in tokenizer().encode("I am not <b>sure</b>, {really}"):
        free.advance(token)
    assert free.accepting


def test_auto_with_a_form_is_either() -> None:
    made = spec([_tool("one")], "auto", guided_choice=["yes", "no"])
    assert made is not None
    texts = {text(walk(made.grammar, seed)[0])[:20] for seed in range(20)}
    assert texts == {"yes", "no", "<tool_call>\n<function="[:20]}


def test_raw_strings_keep_their_bounds() -> None:
    rows: dict[str, Any] = {
        "day": {"type": "string", "format": "date"},
        "code": {"type": "string", "pattern": "^[A-Z]{2}$"},
        "any": {"type": "string", "pattern": "b"},
        "short": {"type": "string", "minLength": 2, "maxLength": 4},
        "unit": {"$ref": "#/$defs/unit"},
        "free": {"type": "string"},
    }
    schema = {
        "type": "object",
        "properties": rows,
        "required": [*rows],
        "$defs": {"unit": {"enum": ["C", "F"]}},
    }
    tools = [_tool("one", schema)]
    made = spec(tools, "required", XML, parallel=False)
    assert made is not None
    seen = 0
    for seed in range(30):
        ids, whole = walk(made.grammar, seed)
        if whole:
            seen += 1
            [(_, given)] = _read(ids, tools, XML)[1]
            check = Draft202012Validator.FORMAT_CHECKER
            Draft202012Validator(schema, format_checker=check).validate(given)
    assert seen > 5


@pytest.mark.parametrize(
    ("pattern", "takes", "refuses"),
    [("b", "abc", "ac"), ("^b", "bc", "ab"), ("b$", "ab", "bc"), ("^(a|b)$", "b", "ab")],
)
def test_what_a_pattern_finds_may_be_anywhere(pattern: str, takes: str, refuses: str) -> None:
    rows = {"properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}
    made = spec([_tool("one", rows)], "required")
    assert made is not None
    call = "<tool_call>\n<function=one>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"

    def follow(value: str) -> None:
        follows = grammars()(made.grammar)
        for token in tokenizer().encode(call.format(value)):
            follows.advance(token)
        assert follows.accepting

    follow(takes)
    with pytest.raises(InternalError):
        follow(refuses)


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"properties": {"a": {"type": "string", "not": {}}}}, "properties.a.not is not supp"),
        ({"properties": {"a": {"type": "string", "pattern": "^a|b$"}}}, "must enclose"),
        ({"properties": {"a": {"type": "string", "minLength": "3"}}}, "minLength is '3'"),
        ({"properties": {"a<": {}}, "required": ["a<"]}, 'properties["a<"]: a name has no'),
        ({"properties": {"a": {"type": "array", "items": {"$ref": "x"}}}}, "a.items.$ref cannot"),
        ({"properties": {"a": {"anyOf": [{"$ref": "#/x"}]}}}, "a.anyOf[0].$ref is '#/x'"),
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "a.uniqueItems cannot"),
        ({"properties": {}, "minProperties": 1}, "parameters.minProperties is not supported"),
        ({"properties": 3}, "must be an object"),
        (3, "tools[0].function.parameters is 3"),
    ],
)
def test_what_a_strict_tool_cannot_hold_is_named(parameters: Any, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        spec([_tool("one", parameters)], "required")
    assert words in str(caught.value) and caught.value.param == "tools"
    assert "tools[0].function.parameters" in str(caught.value)


def test_a_lenient_tool_leaves_out_what_it_cannot_hold() -> None:
    rows = {"a": {"type": "string", "not": {}, "format": "x"}, "b": {"uniqueItems": True}}
    for formats in (XML, HERMES):
        made = spec([_tool("one", {"properties": rows}, strict=False)], "required", formats)
        assert made is not None


def test_a_tokenizer_without_the_marks_writes_them_out(tmp_path: Path) -> None:
    plain = small(tmp_path)
    barred = Grammars(lambda: plain, 512, [plain.encode("<|im_end|>")[0]])
    body, tools = StructuredFields(), [_tool("one")]
    made = constraint_for(body, tools, "required", XML, plain, barred)
    assert made is not None
    marks = {plain.encode(mark)[0] for mark in ("<tool_call>", "</tool_call>")}
    follows, row = barred(made.grammar), np.zeros(16, np.uint32)
    for token in plain.encode("<tool_call>\n<function=one>\n</function>\n</tool_call>"):
        follows.fill(row)
        assert row[token // 32] >> np.uint32(token % 32) & np.uint32(1)
        follows.advance(token)
    assert follows.accepting and len(marks) == 2
