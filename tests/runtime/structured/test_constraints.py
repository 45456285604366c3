"""Constraints from requests, and errors for those that cannot be enforced."""

import json
import re
from typing import Any

import pytest

from spark_engine.errors import RequestError
from spark_engine.runtime.text.reply_formats import Formats
from tests.runtime.structured.grammar_walks import (
    accepts,
    answers,
    asked,
    form,
    spec,
    text,
    tokenizer,
    walk,
)

CLOSED = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def _named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS, NONE = [_named("one")], Formats(tools="none")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"response_format": {"type": "text"}},
        {"guided_json_object": False},
        {"tools": TOOLS},
        {"tools": TOOLS, "choice": "none"},
        {"tools": TOOLS, "choice": "auto"},
    ],
)
def test_nothing_is_asked_for(fields: dict[str, Any]) -> None:
    assert asked(**fields) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"json_object": True}},
        {"guided_json_object": True},
    ],
)
def test_json_is_an_object(fields: dict[str, Any]) -> None:
    wholes = [text(ids) for ids in answers(spec(**fields).grammar, range(20))]
    assert len(wholes) > 10 and all(isinstance(json.loads(t), dict) for t in wholes)


@pytest.mark.parametrize(
    "fields",
    [
        form(CLOSED),
        {"response_format": {"type": "json_object", "schema": CLOSED}},
        {"guided_json": CLOSED},
        {"guided_json": json.dumps(CLOSED)},
        {"structured_outputs": {"json": CLOSED}},
    ],
)
def test_a_schema_has_many_names(fields: dict[str, Any]) -> None:
    for ids in answers(spec(**fields).grammar, range(5)):
        assert isinstance(json.loads(text(ids))["a"], int)


@pytest.mark.parametrize("fields", [{"guided_regex": "x"}, {"structured_outputs": {"regex": "x"}}])
@pytest.mark.parametrize("regex", [r"\d{3}-[a-c]+", "(yes|no)/[^/]?", "[é猫]{2}", '"a\\\\"'])
def test_a_regex_is_matched_whole(fields: dict[str, Any], regex: str) -> None:
    made = spec(**json.loads(json.dumps(fields).replace('"x"', json.dumps(regex))))
    for ids in answers(made.grammar, range(10), 60):
        assert re.fullmatch(regex, text(ids))


def test_a_choice_is_one_of_its_words() -> None:
    words = ["yes", "no", "not at all", 'a "quoted" one', "naïve\n"]
    made = spec(guided_choice=words)
    found = {text(walk(made.grammar, seed)[0]) for seed in range(60)}
    assert found == set(words)


@pytest.mark.parametrize(
    "grammar",
    ['root ::= "a" ("b" | "c")+ "d"', 'start: "a" MIDDLE "d"\nMIDDLE: /[bc]+/  // & ~ of no use'],
)
def test_a_grammar_of_either_form(grammar: str) -> None:
    texts = [text(ids) for ids in answers(spec(guided_grammar=grammar).grammar, range(10))]
    assert texts and all(re.fullmatch("a[bc]+d", t) for t in texts)


def test_a_form_begins_behind_the_thought() -> None:
    made = spec(thinking=True, guided_choice=["yes"])
    assert made.end_of_thought == tokenizer().id_of("</think>")
    assert all(accepts(made.grammar, lead + "yes") for lead in ("", "\n", "\n\n"))
    for how in ({}, {"thinking": True, "formats": Formats(reasoning="none")}):
        assert spec(guided_choice=["yes"], **how).end_of_thought == -1


def test_white_space_is_as_wanted() -> None:
    def takes(answer: str, **how: Any) -> bool:
        return accepts(spec(structured_outputs={"json": CLOSED, **how}).grammar, answer)

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
        (form({"type": "foo"}, strict=True), "response_format", "schema.type cannot be enforced"),
        (form(None), "response_format", "must be an object with a schema"),
        (form(7), "response_format", "json_schema.schema is 7"),
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
        ({"choice": "some", "tools": TOOLS}, "tool_choice", "tool_choice is 'some'"),
        ({"choice": {"type": "x"}, "tools": TOOLS}, "tool_choice", "tool_choice holds"),
        ({"choice": _named("two"), "tools": TOOLS}, "tool_choice", "'two'; the tools are: one"),
        ({"choice": "required", "tools": TOOLS, "formats": NONE}, "tool_choice", "no form of tool"),
    ],
)
def test_what_cannot_be_had_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        spec(**fields)
    assert words in str(caught.value) and caught.value.param == param
