"""Constraints from requests, and errors for those that cannot be enforced."""

import json
import re
from typing import Any

import pytest

from spark_engine.errors import RequestError
from spark_engine.runtime.text.reply_formats import Formats
from tests.runtime.structured.grammar_walks import grammars, spec, text, tokenizer, walk

TOOL = {"type": "function", "function": {"name": "one"}}
CLOSED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def _schema(schema: Any, **more: Any) -> dict[str, Any]:
    inner = {"name": "x", "schema": schema, **more}
    return {"response_format": {"type": "json_schema", "json_schema": inner}}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"guided_json_object": False},
        {"tools": [TOOL]},
        {"tools": [TOOL], "choice": "none"},
        {"tools": [TOOL], "choice": "auto"},
    ],
)
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert spec(**fields) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"guided_json_object": True},
    ],
)
def test_json_is_an_object(fields: dict[str, Any]) -> None:
    made = spec(**fields)
    assert made is not None
    wholes = [text(ids) for ids, whole in (walk(made.grammar, i) for i in range(20)) if whole]
    assert len(wholes) > 10 and all(isinstance(json.loads(t), dict) for t in wholes)


@pytest.mark.parametrize(
    "fields",
    [
        _schema(CLOSED),
        {"response_format": {"type": "json_object", "schema": CLOSED}},
        {"guided_json": CLOSED},
        {"guided_json": json.dumps(CLOSED)},
        {"structured_outputs": {"json": CLOSED}},
    ],
)
def test_a_schema_has_many_names(fields: dict[str, Any]) -> None:
    made = spec(**fields)
    assert made is not None
    for seed in range(5):
        ids, whole = walk(made.grammar, seed)
        assert not whole or isinstance(json.loads(text(ids))["a"], int)


@pytest.mark.parametrize("fields", [{"guided_regex": "x"}, {"structured_outputs": {"regex": "x"}}])
@pytest.mark.parametrize("regex", [r"\d{3}-[a-c]+", "(yes|no)/[^/]?", "[é猫]{2}", '"a\\\\"'])
def test_a_regex_is_matched_whole(fields: dict[str, Any], regex: str) -> None:
    asked = json.loads(json.dumps(fields).replace('"x"', json.dumps(regex)))
    made = spec(**asked)
    assert made is not None
    for seed in range(10):
        ids, whole = walk(made.grammar, seed, 60)
        assert not whole or re.fullmatch(regex, text(ids))


def test_a_choice_is_one_of_its_words() -> None:
    words = ["yes", "no", "not at all", 'a "quoted" one', "naïve\n"]
    made = spec(guided_choice=words)
    assert made is not None
    found = {text(walk(made.grammar, seed)[0]) for seed in range(60)}
    assert found == set(words)


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "a" ("b" | "c")+ "d"', 'start: "a" MIDDLE "d"\nMIDDLE: /[bc]+/  // & ~ of no use'],
)
def test_a_grammar_of_either_form(grammar: str) -> None:
    made = spec(guided_grammar=grammar)
    assert made is not None
    texts = [text(ids) for ids, whole in (walk(made.grammar, i) for i in range(10)) if whole]
    assert texts and all(re.fullmatch("a[bc]+d", t) for t in texts)


def test_a_form_begins_behind_the_thought() -> None:
    made = spec(thinking=True, guided_choice=["yes"])
    assert made is not None and made.end_of_thought == tokenizer().id_of("</think>")
    for lead in ("", "\n", "\n\n"):
        follows = grammars()(made.grammar)
        for token in tokenizer().encode(lead + "yes"):
            follows.advance(token)
        assert follows.accepting
    plain = spec(guided_choice=["yes"])
    assert plain is not None and plain.end_of_thought == -1
    none = spec(thinking=True, guided_choice=["yes"], formats=Formats(reasoning="none"))
    assert none is not None and none.end_of_thought == -1


def test_white_space_is_as_wanted() -> None:
    def takes(answer: str, **how: Any) -> bool:
        made = spec(structured_outputs={"json": CLOSED, **how})
        assert made is not None
        follows = grammars()(made.grammar)
        try:
            for token in tokenizer().encode(answer):
                follows.advance(token)
        except Exception:
            return False
        return follows.accepting

    assert takes('{"a": 1}') and takes('{\n    "a": 1\n}') and takes('{"a":1}')
    assert not takes('{  "a": 1}') and not takes('{\n\n"a": 1}')
    assert takes('{"a":1}', disable_any_whitespace=True)
    assert not takes('{"a": 1}', disable_any_whitespace=True)
    assert takes('{\t\t"a":1}', whitespace_pattern=r"\t+")
    assert takes('{"a":1,"b":2}')
    assert not takes('{"a":1,"b":2}', disable_additional_properties=True)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        (
            _schema({"type": "foo"}, strict=True),
            "response_format",
            "json_schema.schema.type cannot be enforced",
        ),
        (_schema(None), "response_format", "must be an object with a schema"),
        (_schema(7), "response_format", "json_schema.schema is 7"),
        ({"response_format": {"type": "xml"}}, "response_format", "type is 'xml'"),
        ({"guided_json": "{"}, "guided_json", "not valid JSON"),
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_regex": 3}, "guided_regex", "guided_regex is 3"),
        ({"guided_regex": "a" * 9000}, "guided_regex", "9000 characters"),
        ({"guided_grammar": 'root ::= "a'}, "guided_grammar", "neither EBNF nor Lark"),
        ({"guided_grammar": "start: a"}, "guided_grammar", "unknown name"),
        ({"guided_grammar": "start: A\nA: /a/ & /b/"}, "guided_grammar", "uses & or ~"),
        ({"guided_choice": []}, "guided_choice", "a list of 1 to"),
        ({"guided_choice": ["a", ""]}, "guided_choice", "none empty"),
        ({"structured_outputs": {}}, "structured_outputs", "is empty"),
        ({"structured_outputs": {"tag": 1}}, "structured_outputs", "tag is not supported"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs", "send only one"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "both constrain the answer"),
        ({"choice": "required"}, "tool_choice", "there are no tools"),
        ({"choice": "some", "tools": [TOOL]}, "tool_choice", "tool_choice is 'some'"),
        ({"choice": {"type": "x"}, "tools": [TOOL]}, "tool_choice", "tool_choice holds"),
        (
            {"choice": {"type": "function", "function": {"name": "two"}}, "tools": [TOOL]},
            "tool_choice",
            "names 'two'; the tools are: one",
        ),
        (
            {"choice": "required", "tools": [TOOL], "formats": Formats(tools="none")},
            "tool_choice",
            "no form of tool calls",
        ),
    ],
)
def test_what_cannot_be_had_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        spec(**fields)
    assert words in str(caught.value) and caught.value.param == param


def test_strict_false_leaves_out_what_no_grammar_holds() -> None:
    schema = {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}}
    with pytest.raises(RequestError, match=r"schema\.uniqueItems cannot be enforced"):
        spec(**_schema(schema, strict=True))
    for more in ({}, {"strict": False}, {"strict": None}):  # OpenAI's default is false
        assert spec(**_schema(schema, **more)) is not None
