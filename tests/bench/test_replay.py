"""Recorded conversations: what is asked in which turn, and marks that keep runs apart."""

import json
from pathlib import Path
from typing import Any

import pytest

from spark_engine.bench import replay
from spark_engine.errors import OptionError
from tests.repository import ROOT

AGENT = ROOT / "bench" / "agent.json"
SYSTEM: dict[str, Any] = {"role": "system", "content": "Be brief."}
USER: dict[str, Any] = {"role": "user", "content": "Hi", "pause_s": 2.0}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "Hello", "max_tokens": 5}
RESULT: dict[str, Any] = {"role": "tool", "content": "42", "pause_s": 0.5}
PLAIN = [{k: v for k, v in m.items() if k not in ("pause_s", "max_tokens")} for m in (USER, ANSWER)]


def test_each_answer_is_a_turn() -> None:
    again = {**ANSWER, "content": "x" * 400}
    del again["max_tokens"]
    messages = [SYSTEM, USER, ANSWER, RESULT, USER, again]
    turns = replay.turns({"messages": messages}, "Run 7.", own_answers=False)
    assert [turn.most for turn in turns] == [5, 100]
    assert turns[0].new == [{**SYSTEM, "content": "Run 7.\nBe brief."}, PLAIN[0]]
    assert turns[1].new == [{"role": "tool", "content": "42"}, PLAIN[0]]
    assert turns[0].answer == [PLAIN[1]] and [turn.pause_s for turn in turns] == [2.0, 2.5]
    own = replay.turns({"messages": [USER, ANSWER]}, "Run 7.", own_answers=True)
    assert own[0].answer is None and own[0].new[0] == {"role": "system", "content": "Run 7."}


def test_what_the_system_says_in_parts_is_marked_by_a_part() -> None:
    part = {"type": "text", "text": "Be brief."}
    messages = [{"role": "system", "content": [part]}, {**ANSWER, "content": None}]
    (turn,) = replay.turns({"messages": messages}, "Run 7.", own_answers=False)
    assert turn.new[0]["content"] == [{"type": "text", "text": "Run 7."}, part]  # type: ignore[call-overload,index]


def test_tools_are_marked_too_for_they_may_come_first() -> None:
    tools = [{"function": {"name": "f", "description": "Does it."}}, {"function": {"name": "g"}}]
    row = {"messages": [USER, ANSWER], "tools": tools, "chat_template_kwargs": {"a": 1}}
    found = replay.more(row, "Run 7.")
    assert found["tools"][0]["function"] == {"name": "f", "description": "Run 7. Does it."}
    assert found["tools"][1] == tools[1] and "messages" not in found
    assert found["chat_template_kwargs"] == {"a": 1}
    assert tools[0]["function"]["description"] == "Does it.", "the record stays as it is"


def test_the_agent_that_comes_with_it_has_ten_turns_with_tools() -> None:
    (row,) = replay.read(AGENT)
    turns = replay.turns(row, "Run 1.", own_answers=False)
    assert len(turns) == 10 and len(row["tools"]) == 4
    names = {tool["function"]["name"] for tool in row["tools"]}
    calls = [c for m in row["messages"] for c in m.get("tool_calls", ())]
    assert {call["function"]["name"] for call in calls} == names
    assert all(json.loads(call["function"]["arguments"]) for call in calls)
    results = [m["tool_call_id"] for m in row["messages"] if m["role"] == "tool"]
    assert results == [call["id"] for call in calls]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", r"is no JSON .* it must be an object with messages, or a list"),
        ("", "is no JSON"),
        ('{"messages": []}\n{"messages": []}\n', "is no JSON .Extra data: line 2"),
        ("[]", "no conversation"),
        ('[{"messages": 5}]', "conversation 0 has no messages"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "with an answer"),
        ('[{"messages": [{"role": "assistant"}]}, 7]', "conversation 1"),
        ('{"messages": [{"role": "assistant", "max_tokens": "9"}]}', "max_tokens of '9'"),
        ('{"messages": [{"role": "assistant", "max_tokens": 0}]}', "max_tokens of 0"),
        ('{"messages": [{"role": "assistant"}, {"pause_s": -1}]}', "pause_s of -1; it must"),
        ('{"messages": [{"role": "assistant", "content": 5}]}', "the content 5; it must be text"),
        ('{"messages": [{"role": "assistant"}], "tools": [{}]}', "a tool without its function"),
        ('{"messages": [{"role": "assistant"}], "tools": {"a": 1}}', "they must be a list"),
    ],
)
def test_what_is_no_record_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(OptionError, match=words):
        replay.read(tmp_path / "r.json")
    with pytest.raises(OptionError, match="none.json"):
        replay.read(tmp_path / "none.json")
