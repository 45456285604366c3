"""Calls by a tool's grammar are parsed by the reply parser, and fit the tool's schema."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from spark_engine.errors import RequestError
from spark_engine.runtime.structured.constraints import constraint_for
from spark_engine.runtime.structured.fields import StructuredFields
from spark_engine.runtime.structured.matcher import Grammars
from spark_engine.runtime.text.reply_formats import Formats
from tests.runtime.structured.grammar_walks import (
    HERMES,
    XML,
    accepts,
    answers,
    asked,
    given,
    only,
    read,
    small,
    spec,
    text,
    tokenizer,
    tool,
    walk,
)
from tests.runtime.structured.schemas import draw_parameters


@pytest.mark.parametrize("formats", [XML, HERMES], ids=["xml", "hermes"])
@pytest.mark.parametrize("first", range(0, 60, 30))
def test_arguments_are_of_their_schema(formats: Formats, first: int) -> None:
    wholes = 0
    for seed in range(first, first + 30):
        parameters = draw_parameters(seed)
        tools = [tool("one", parameters), tool("two")]
        made = spec(tools, "required", formats, parallel=False)
        for ids in answers(made.grammar, range(2 * seed, 2 * seed + 2)):
            wholes += 1
            content, calls = read(ids, tools, formats)
            assert content == "" and calls, text(ids)
            for name, arguments in calls:
                assert name in ("one", "two")
                schema = parameters if name == "one" else {"maxProperties": 0}
                Draft202012Validator(schema).validate(arguments)
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
    tools = [tool("one", schema, strict)]
    wanted = {**dict.fromkeys(rows), "inner": [None], "not": True}
    lines = (f"<parameter={k}>\n{json.dumps(v)}\n</parameter>\n" for k, v in wanted.items())
    call = f"<function=one>\n{''.join(lines)}</function>"
    if formats is HERMES:
        call = json.dumps({"name": "one", "arguments": wanted})
    call = f"<tool_call>\n{call}\n</tool_call>"
    assert accepts(spec(tools, "required", formats, parallel=False).grammar, call)
    assert read(tokenizer().encode(call), tools, formats) == ("", [("one", wanted)])
    assert accepts(spec(guided_json=schema).grammar, json.dumps(wanted))


@pytest.mark.parametrize("formats", [XML, HERMES], ids=["xml", "hermes"])
def test_a_named_tool_is_called_once(formats: Formats) -> None:
    tools = [tool("one"), tool("two")]
    made = spec(tools, {"type": "function", "function": {"name": "two"}}, formats)
    for seed in range(5):
        assert read(walk(made.grammar, seed)[0], tools, formats) == ("", [("two", {})])


def test_calls_are_several_unless_they_may_not_be() -> None:
    tools = [tool("one")]

    def counts(parallel: bool) -> set[int]:
        made = spec(tools, "required", XML, parallel=parallel)
        return {len(read(ids, tools)[1]) for ids in answers(made.grammar, range(40), 60)}

    assert counts(False) == {1} and max(counts(True)) > 1


def test_auto_binds_calls_of_strict_tools_and_no_text() -> None:
    rows = only({"enum": [1, 2]}, "n")
    assert asked([tool("one", rows, strict=False)], "auto") is None
    grammar = spec([tool("one", rows)], None).grammar
    call = "I look. <tool_call>\n<function=one>\n<parameter=n>\n2\n</parameter>\n</function>\n"
    assert accepts(grammar, call + "</tool_call>") and not accepts(grammar, call)
    assert not accepts(grammar, call.replace("2", "3") + "</tool_call>")
    assert accepts(grammar, "I am not <b>sure</b>, {really}")


def test_auto_with_a_form_is_either() -> None:
    made = spec([tool("one")], "auto", guided_choice=["yes", "no"])
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
    schema = {"properties": rows, "required": [*rows], "$defs": {"unit": {"enum": ["C", "F"]}}}
    tools = [tool("one", schema)]
    found = [*answers(spec(tools, "required", XML, parallel=False).grammar, range(30))]
    check = Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
    for ids in found:
        check.validate(given(ids, tools))
    assert len(found) > 5


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
        spec([tool("one", parameters)], "required")
    assert words in str(caught.value) and caught.value.param == "tools"
    assert "tools[0].function.parameters" in str(caught.value)


def test_a_tokenizer_without_the_marks_writes_them_out(tmp_path: Path) -> None:
    plain = small(tmp_path)
    barred = Grammars(lambda: plain, 512, [plain.encode("<|im_end|>")[0]])
    made = constraint_for(StructuredFields(), [tool("one")], "required", XML, plain, barred)
    assert made is not None
    follows, row = barred(made.grammar), np.zeros(16, np.uint32)
    for token in plain.encode("<tool_call>\n<function=one>\n</function>\n</tool_call>"):
        follows.fill(row)
        assert row[token // 32] >> np.uint32(token % 32) & np.uint32(1)
        follows.advance(token)
    assert follows.accepting
