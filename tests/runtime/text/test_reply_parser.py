"""Parsed chat answers: the taught form at every split point, and what flows before the end."""

import json
import random

import pytest

from spark_engine.runtime.text.reply_formats import Formats
from spark_engine.runtime.text.reply_parser import ReplyParser
from spark_engine.runtime.text.reply_parts import Delta, Kind
from tests.runtime.text.reply_cuts import tool

R, C = Kind.REASONING, Kind.CONTENT
HOURS = {"anyOf": [{"type": "array"}, {"type": "null"}]}
TOOLS = [tool("weather", city={"type": "string"}, days={"type": "integer"}, hours=HOURS)]
ONE = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nPa\nris\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n<parameter=hours>\n[1, 2]\n</parameter>\n"
    "</function>\n</tool_call>"
)
SHORT = ("weather", {"city": "Rome"})
ROME = "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>"
Parts = tuple[str, str, list[tuple[str, object]]]


def collect(deltas: list[Delta]) -> tuple[str, str, list[tuple[str, str]]]:
    """Reasoning, content, and (name, arguments as text) of each call."""
    texts = {k: "".join(d.text for d in deltas if d.kind is k) for k in (R, C)}
    calls: list[tuple[str, str]] = []
    for delta in (d for d in deltas if d.kind is Kind.CALL):
        if delta.name:
            calls.append((delta.name, ""))
        calls[-1] = calls[-1][0], calls[-1][1] + delta.text
    return texts[R], texts[C], calls


def parts(pieces: list[str], thinking: bool, tools: bool, calls: str = "qwen3_coder") -> Parts:
    parser = ReplyParser(thinking, TOOLS if tools else (), formats=Formats(tools=calls))
    deltas: list[Delta] = []
    for piece in pieces:
        deltas += parser.push(piece)
    deltas += parser.flush()
    assert all(d.text for d in deltas)
    reasoning, content, made = collect(deltas)
    assert parser.calls == len(made)
    return reasoning, content, [(name, json.loads(text)) for name, text in made]


def test_answers_of_the_taught_form_at_every_split_point() -> None:
    rng = random.Random(3)
    alphabet = ["a", "é", "猫", "\n", " ", "<", ">", "</", '"', "\\", "{", "=", "</b>", "\t"]
    for _ in range(25):
        thought = "".join(rng.choices(alphabet[:5], k=rng.randrange(9))).strip("\n")
        wanted, text = [], thought + "\n</think>\n\n"
        for _ in range(rng.randrange(1, 3)):
            value = "".join(rng.choices(alphabet, k=rng.randrange(8)))
            days = rng.randrange(100)
            wanted.append(("weather", {"city": value, "days": days}))
            text += (
                f"<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n"
                f"<parameter=days>\n{days}\n</parameter>\n</function>\n</tool_call>\n"
            )
        for i in range(len(text) + 1):
            got = parts([text[:i], text[i:]], True, True)
            assert got == (thought.strip("\n"), "", wanted), (text[:i], text[i:])


def test_deltas_flow_before_the_end() -> None:
    parser = ReplyParser(thinking=True)
    assert parser.push("hello ") == [Delta(R, "hello ")]
    assert parser.push("world</thi") == [Delta(R, "world")]
    assert parser.push("nk>\n\nfour") == [Delta(C, "four")]


def test_arguments_flow_as_they_are_written() -> None:
    parser = ReplyParser(False, TOOLS)
    assert parser.push("<tool_call>\n<function=weather>\n") == [Delta(Kind.CALL, "{", "weather")]
    said = parser.push("<parameter=city>\nNew Y")
    assert "".join(d.text for d in said) == '"city": "New Y'
    assert parser.push('or"k') == [Delta(Kind.CALL, 'or\\"k')]
    end = parser.push("\n</parameter>\n</function>\n</tool_call>") + parser.flush()
    assert "".join(d.text for d in end) == '"}'


@pytest.mark.parametrize("cut", range(len("<tool_call>\n<function=weather>\n") - 1, len(ONE) - 20))
def test_a_call_that_is_cut_off_is_not_closed(cut: int) -> None:
    """A client must not run half a call: its arguments are not JSON."""
    parser = ReplyParser(False, TOOLS)
    _, content, calls = collect(parser.push(ONE[:cut]) + parser.flush())
    if not calls:
        assert content == ONE[:cut].rstrip("\n") or content == ONE[:cut]
        return
    with pytest.raises(ValueError):
        json.loads(calls[0][1])


@pytest.mark.parametrize("text", ["NaN", "[1, Infinity]", "1e999", "-Infinity"])
def test_an_object_with_numbers_that_json_has_no_word_for_stays_text(text: str) -> None:
    given = f'<tool_call>{{"name": "weather", "arguments": {{"days": {text}}}}}</tool_call>'
    assert parts([given], False, True, "hermes") == ("", given, [])


def test_half_a_surrogate_pair_is_escaped_again() -> None:
    """JSON may contain what UTF-8 cannot encode."""
    text = ONE.replace("[1, 2]", '["\\ud83d", "é"]')
    deltas = ReplyParser(False, TOOLS).push(text)
    "".join(d.text for d in deltas).encode()
    assert parts([text], False, True)[2][0][1]["hours"] == ["\ud83d", "é"]  # type: ignore[index]
    named = '<tool_call>{"name": "\\ud83d", "arguments": {}}</tool_call>'
    assert parts([named], False, True, "hermes") == ("", named, [])


def test_other_forms_by_name() -> None:
    parser = ReplyParser(True, formats=Formats(reasoning="none"))
    assert collect(parser.push("a</think>b") + parser.flush())[:2] == ("", "a</think>b")
    call = '<tool_call>\n{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}\n</tool_call>'
    assert parts([call], False, True, "hermes") == ("", "", [SHORT])
    assert parts([ROME], False, True, "hermes") == ("", ROME, [])
