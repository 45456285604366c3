"""Messages of every client in the templates' form, and errors with their place."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.messages import UNNAMED, UNREADABLE, normalise
from tests.repository import ROOT

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "7"}
STRICT = ROOT / "models/tiny/checkpoint/chat_template.jinja"  # it raises where Qwen's raises


def _system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def _assistant(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", **fields}


def _one(**fields: Any) -> dict[str, Any]:
    return normalise([USER, _assistant(**fields)])[1]


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
    empty = {"role": "user", "content": ""}
    assert normalise([{"role": "developer", "content": "b"}]) == [_system("b"), empty]


def test_a_later_system_message_keeps_its_place_as_a_turn() -> None:
    """So the prompt starts like the cached one of the previous turn."""
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
    for own in ({"type": "dir", "n": 3}, {"text": 3}):  # a tool's own object
        found = normalise([USER, {"role": "tool", "content": own}])[1]["content"]
        assert json.loads(found) == own
    result = {"role": "tool", "name": "f", "content": "abcd"}
    assert normalise([USER, {**result, "role": "function", "content": parts}])[1:] == [result]


def test_an_assistants_thoughts_and_refusals() -> None:
    parts = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "reasoning", "text": "so"},
        {"type": "text", "text": "yes"},
        {"type": "refusal", "refusal": "no"},
    ]
    assert _one(content=parts) == _assistant(content="yesno", reasoning_content="hm\nso")
    assert _one(content=None, refusal="never")["content"] == "never"
    assert _one(content="yes", refusal="never")["content"] == "yes"
    for fields in ({"reasoning": "r"}, {"reasoning_content": "r"}, {"reasoning": "r", "x": 1}):
        made = _one(content=parts, **fields)
        assert made["reasoning_content"] == "r" and "reasoning" not in made
    both = _one(content="", reasoning_content="first", reasoning="second")
    assert both["reasoning_content"] == "first"
    assert "reasoning_content" not in _one(content="a", reasoning=None)


def test_an_old_function_call_is_a_tool_call() -> None:
    made = _one(content=None, function_call={"name": "f", "arguments": '{"a": 1}'})
    (call,) = made["tool_calls"]
    assert call == {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    assert "function_call" not in made
    assert "tool_calls" not in _one(content="a", tool_calls=None)
    assert "tool_calls" not in _one(content="a", tool_calls=[])


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
        (7, {UNREADABLE: "7"}),
        ([1], {UNREADABLE: "[1]"}),
        ('{"a": tru', {UNREADABLE: '{"a": tru'}),
        ('{"a": "He said "hello" and left"}', {UNREADABLE: '{"a": "He said "hello" and left"}'}),
        ("[1]", {UNREADABLE: "[1]"}),
        ('"Paris"', {UNREADABLE: '"Paris"'}),
        ("not json", {UNREADABLE: "not json"}),
    ],
)
def test_arguments_of_past_calls_are_mappings_whatever_was_written(text: Any, want: Any) -> None:
    """A model's mistake is in every further request: it must not end the chat."""
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
    ("fields", "want"),
    [
        ({"content": {"type": "text", "text": "a"}}, {"content": "a"}),
        ({"reasoning": {"a": 1}}, {"content": ""}),
        ({"reasoning": [{"type": "text", "text": "t"}]}, {"content": "", "reasoning_content": "t"}),
        ({"tool_calls": {}}, {"content": ""}),
        ({"tool_calls": "x"}, {"content": ""}),
        ({"tool_calls": [{}, None]}, {"content": ""}),
    ],
)
def test_what_an_assistants_message_lacks_ends_no_chat(
    fields: dict[str, Any], want: dict[str, Any]
) -> None:
    assert _one(**fields) == {"role": "assistant", **want}


@pytest.mark.parametrize(
    ("call", "want"),
    [
        ({"index": 0}, {"name": UNNAMED, "arguments": {}}),
        ({"function": {"name": None, "arguments": None}}, {"name": UNNAMED, "arguments": {}}),
        ({"function": {"name": "f"}}, {"name": "f", "arguments": {}}),
        ({"custom": {"name": "f", "input": "t"}}, {"name": "f", "arguments": {"input": "t"}}),
    ],
)
def test_a_call_that_was_cut_off_ends_no_chat(call: dict[str, Any], want: dict[str, Any]) -> None:
    made = _one(tool_calls=[call])["tool_calls"][0]["function"]
    assert {key: made[key] for key in want} == want


def test_a_role_that_no_template_knows_is_the_users() -> None:
    assert normalise([{"role": "critic", "content": "x"}]) == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "rest",
    [
        [],
        [_assistant(content="Hello!")],
        [_assistant(tool_calls=[CALL]), RESULT],
        [RESULT],
        [{"role": "user", "content": "<tool_response>\n7\n</tool_response>"}],
    ],
)
@pytest.mark.parametrize("system", [[], [_system("s")]])
def test_a_chat_without_a_question_gets_an_empty_one(
    rest: list[dict[str, Any]], system: list[dict[str, Any]]
) -> None:
    """Agents that cut their history send such chats, which could not continue otherwise."""
    if not (given := [*system, *rest]):
        return
    roles = [m["role"] for m in normalise(given)]
    assert roles == [*(m["role"] for m in system), "user", *(m["role"] for m in rest)]
    text = ChatTemplate(STRICT.read_text()).prompt(given).text
    assert text.endswith("<|im_start|>assistant\n<think>\n")
    assert "<|im_start|>user\n<|im_end|>\n" in text


REMINDERS = [_system("No list."), {"role": "developer", "content": [{"text": "No list."}]}]


@pytest.mark.parametrize("reminder", REMINDERS)
def test_a_reminder_in_a_loop_of_calls_is_part_of_the_result(reminder: dict[str, Any]) -> None:
    loop = [USER, _assistant(reasoning_content="why", tool_calls=[CALL]), RESULT]
    found = normalise([*loop, reminder, reminder])
    assert [m["role"] for m in found] == ["user", "assistant", "tool"]
    assert found[-1]["content"] == "7\n\nNo list.\n\nNo list."
    between = normalise([*loop[:2], reminder, RESULT])
    assert between[-1]["content"] == "7\n\nNo list." and len(between) == 3
    alone = normalise([*loop[:2], reminder, USER])
    assert [m["role"] for m in alone] == ["user", "assistant", "user", "user"]


def test_a_users_turn_of_reminders_alone_is_part_of_the_result() -> None:
    def said(text: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "text", "text": text}]}

    loop = [USER, _assistant(reasoning_content="why", tool_calls=[CALL]), RESULT]
    alone = "<system-reminder>No list.</system-reminder>\n"
    found = normalise([*loop, said(alone), _system("More."), said(alone)])
    assert found[-1]["content"] == f"7\n\n{alone}\n\nMore.\n\n{alone}" and len(found) == 3
    for words in (f"{alone}Stop.", "Stop."):
        assert normalise([*loop, said(words)])[3] == {"role": "user", "content": words}
    assert [m["role"] for m in normalise([USER, said(alone)])] == ["user", "user"]
