"""Messages of every client in the form that templates take, and what is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_engine.errors import RequestError
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.messages import UNREADABLE, normalise
from tests.repository import ROOT

USER = {"role": "user", "content": "hi"}
STRICT = ROOT / "models/tiny/checkpoint/chat_template.jinja"  # it raises where Qwen's raises


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


def _called(arguments: Any) -> Any:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    made = normalise([USER, _assistant(content=None, tool_calls=[call])])
    assert made[1]["content"] == "" and made[1]["tool_calls"][0]["id"] == "c1"
    return made[1]["tool_calls"][0]["function"]["arguments"]


def test_a_plain_conversation_stays_as_it_is() -> None:
    messages = [
        _system("be brief"),
        USER,
        _assistant(content="yes", reasoning_content="hm"),
        {"role": "tool", "tool_call_id": "x", "content": "7"},
    ]
    copy = json.loads(json.dumps(messages))
    assert normalise(messages) == messages == copy


def test_system_messages_at_the_beginning_are_one() -> None:
    given = [_system("a"), {"role": "developer", "content": "b"}, _system(""), USER]
    assert normalise(given) == [_system("a\n\nb"), USER]
    assert normalise([{"role": "developer", "content": "b"}]) == [_system("b")]


def test_a_later_system_message_keeps_its_place_as_a_turn() -> None:
    """So the beginning of the prompt, which the prefix cache keeps, is that of the turn before."""
    late = [USER, _assistant(content="yes"), {"role": "developer", "content": "now blue"}, USER]
    assert normalise(late) == [*late[:2], {"role": "user", "content": "now blue"}, USER]
    template = ChatTemplate(STRICT.read_text())
    before = template.prompt([_system("s"), *late[:2], USER]).text
    after = template.prompt([_system("s"), *late]).text
    head, _, _ = before.rpartition("<|im_start|>user")
    assert after.startswith(head) and "yes" in head
    assert after.count("<|im_start|>system") == 1 and "now blue" in after


def test_parts_of_every_client_are_text() -> None:
    parts = [
        {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}},
        {"type": "input_text", "text": "b"},
        {"type": "output_text", "text": "c", "annotations": []},
        "d",
    ]
    assert normalise([{"role": "user", "content": parts}])[0]["content"] == "abcd"
    assert normalise([{"role": "user", "content": None}])[0]["content"] == ""
    assert normalise([{"role": "function", "name": "f", "content": parts}]) == [
        {"role": "tool", "name": "f", "content": "abcd"}
    ]


def test_an_assistants_thoughts_and_refusals() -> None:
    parts = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "reasoning", "text": "so"},
        {"type": "text", "text": "yes"},
        {"type": "refusal", "refusal": "no"},
    ]
    found = normalise([_assistant(content=parts)])
    assert found == [_assistant(content="yesno", reasoning_content="hm\nso")]
    assert normalise([_assistant(content=None, refusal="never")])[0]["content"] == "never"
    assert normalise([_assistant(content="yes", refusal="never")])[0]["content"] == "yes"
    for fields in ({"reasoning": "r"}, {"reasoning_content": "r"}, {"reasoning": "r", "x": 1}):
        made = normalise([_assistant(content=parts, **fields)])[0]
        assert made["reasoning_content"] == "r" and "reasoning" not in made
    both = _assistant(content="", reasoning_content="first", reasoning="second")
    assert normalise([both])[0]["reasoning_content"] == "first"
    assert "reasoning_content" not in normalise([_assistant(content="a", reasoning=None)])[0]


def test_an_old_function_call_is_a_tool_call() -> None:
    old = _assistant(content=None, function_call={"name": "f", "arguments": '{"a": 1}'})
    made = normalise([old])[0]
    assert made["tool_calls"] == [
        {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    ]
    assert "function_call" not in made
    assert "tool_calls" not in normalise([_assistant(content="a", tool_calls=None)])[0]
    assert "tool_calls" not in normalise([_assistant(content="a", tool_calls=[])])[0]


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ('{"a": "x"}', {"a": "x"}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (None, {}),
        ("null", {}),
        ('{"a": "two\nlines"}', {"a": "two\nlines"}),
        ('{"path": "/tmp/x", "text": "it was cut', {"path": "/tmp/x", "text": "it was cut"}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ('{"a": 1}\n</tool_call>', {"a": 1}),
        ('{"a": "He said "hello" and left"}', {UNREADABLE: '{"a": "He said "hello" and left"}'}),
        ("[1]", {UNREADABLE: "[1]"}),
        ('"Paris"', {UNREADABLE: '"Paris"'}),
        ("not json", {UNREADABLE: "not json"}),
    ],
)
def test_arguments_of_past_calls_are_mappings_whatever_was_written(text: Any, want: Any) -> None:
    """A model's own mistake comes back in every further request: it must not end the chat."""
    assert _called(text) == want


@given(text=st.text(max_size=40) | st.text('{}[]":,\\n ab1', max_size=40))
@settings(max_examples=200, deadline=None)
def test_no_arguments_end_a_chat(text: str) -> None:
    assert isinstance(_called(text), dict)


@given(
    value=st.dictionaries(
        st.text(max_size=4), st.text(max_size=8) | st.lists(st.integers(), max_size=3), max_size=3
    ),
    cut=st.integers(0, 60),
)
@settings(max_examples=200, deadline=None)
def test_arguments_that_were_cut_off_keep_what_came(value: dict[str, Any], cut: int) -> None:
    whole = json.dumps(value, ensure_ascii=False)
    found = _called(whole[: max(1, len(whole) - cut)])
    if UNREADABLE not in found:  # cut within an escape
        assert list(found) == list(value)[: len(found)]
        assert all(found[k] == value[k] for k in list(found)[:-1])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "x"}, r"messages\[1\].role is None; it must be a string"),
        ({"role": "bot", "content": "x"}, r"messages\[1\].role is 'bot'; it must be one of system"),
        ({"role": 3}, r"messages\[1\].role is 3"),
        ({"role": "user", "content": 3}, r"messages\[1\].content is 3; it must be a string or"),
        ({"role": "user", "content": {"text": "a"}}, r"messages\[1\].content is {'text'"),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]},
            "holds {'type': 'image_url'.*only text can be read",
        ),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "only text can be read"),
        ({"role": "user", "content": [{"type": "thinking", "thinking": "a"}]}, "only text"),
        ({"role": "assistant", "content": [{"type": "audio"}]}, "of an assistant 'refusal'"),
        ({"role": "user", "content": [None]}, "holds None"),
        ({"role": "user", "content": [{"type": "redacted_thinking", "data": "x"}]}, "only text"),
        ({"role": "user", "content": [{"type": ["text"]}]}, "only text can be read"),
        ({"role": "assistant", "reasoning": {"a": 1}}, r"messages\[1\].reasoning is {'a': 1}"),
        ({"role": "assistant", "tool_calls": {}}, None),
        (
            {"role": "assistant", "tool_calls": {"x": 1}},
            "tool_calls is .*; it must be a list",
        ),
        ({"role": "assistant", "tool_calls": [{}]}, r"tool_calls\[0\] is {}; it must have a funct"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 7}}]},
            r"messages\[1\].tool_calls\[0\].function.arguments is 7; it must be a JSON object",
        ),
    ],
)
def test_what_is_malformed_is_named_with_its_place(
    message: dict[str, Any], words: str | None
) -> None:
    if words is None:
        assert normalise([USER, message])
        return
    with pytest.raises(RequestError, match=words) as caught:
        normalise([USER, message])
    assert caught.value.param == "messages"


def test_a_template_that_raises_where_qwens_does_takes_what_clients_send() -> None:
    template = ChatTemplate(Path(STRICT).read_text())
    call = {"id": "1", "function": {"name": "f", "arguments": '{"x": "cut o'}}
    text = template.prompt(
        [
            _system("one"),
            {"role": "developer", "content": [{"type": "input_text", "text": "two"}]},
            USER,
            _assistant(content=[{"type": "thinking", "thinking": "why"}], tool_calls=[call]),
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "7"}]},
            _system("a reminder"),
        ]
    ).text
    assert text.startswith("<|im_start|>system\none\n\ntwo<|im_end|>\n")
    assert "<parameter=x>\ncut o\n</parameter>" in text
    assert "<|im_start|>user\na reminder<|im_end|>\n<|im_start|>assistant\n<think>\n" in text
