"""What a chat request's switches come to: its prompt, what binds the answer, what is shown."""

import json
from typing import Any

import httpx
import pytest

from spark_engine.errors import OptionError
from spark_engine.runtime.server.prompts.chat_options import ChatOptions
from spark_engine.runtime.server.prompts.conversation import ChatReader
from tests.runtime.server.api.api_client import USER, ApiClient, events, tokenizer

PARAMETERS = {"properties": {"x": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}
CALL = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"
FOUR = "hm\n</think>\n\nFour."
SAID = [*USER, {"role": "assistant", "content": "It is "}]
CONTINUED = {"messages": SAID, "continue_final_message": True}


def _post(server: ApiClient, **fields: Any) -> httpx.Response:
    return server.post("/v1/chat/completions", {"messages": USER, **fields})


def _asked(chat: dict[str, Any] | None = None, **fields: Any) -> Any:
    """(text of the prompt, what binds the answer)."""
    server = ApiClient(service={"chat": ChatOptions(**(chat or {}))})
    assert _post(server, **fields).status_code == 200
    return server.prompt, server.client.submitted[-1].constraint


def _whole(text: str, **fields: Any) -> tuple[Any, list[int]]:
    server = ApiClient(text)
    return _post(server, **fields).json()["choices"][0], server.client.cancelled


def _stream(text: str, **fields: Any) -> list[Any]:
    chunks = [d for _, d in events(_post(ApiClient(text), stream=True, **fields)) if d != "[DONE]"]
    return [choice for chunk in chunks for choice in chunk["choices"]]


def test_a_budget_travels_with_the_request() -> None:
    _, bound = _asked(thinking={"type": "enabled", "budget_tokens": 7})
    assert bound.budget == 7 and bound.end_of_thought == tokenizer().id_of("</think>")
    assert bound.end_of_thought in bound.close
    chat = {"think_budget": 9}
    assert _asked(chat)[1].budget == 9
    assert _asked(chat, thinking_budget=3)[1].budget == 3
    assert _asked(chat, thinking_budget=-1)[1] is None
    assert _asked(chat, enable_thinking=False)[1] is None


def test_the_engine_receives_what_begins_a_call() -> None:
    """A call in an open thought ends it: no budget may cut the call in two."""
    begin = tokenizer().id_of("<tool_call>")
    assert _asked(thinking_budget=7, tools=[TOOL])[1].calls == (begin,)
    assert _asked(thinking_budget=7)[1].calls == ()
    assert _asked(thinking_budget=7, tools=[TOOL], tool_choice="none")[1].calls == ()


def test_a_server_without_a_thoughts_end_cannot_hold_a_budget() -> None:
    for options in (ChatOptions(think_budget=5, reasoning="none"), ChatOptions(tools="x")):
        with pytest.raises(OptionError, match=r"--think-budget is 5|--tools is 'x'"):
            ChatReader(None, tokenizer(), options)
    with pytest.raises(OptionError, match="--think-budget is 5"):
        ChatReader(None, None, ChatOptions(think_budget=5))


def test_thoughts_are_under_both_names() -> None:
    message = _whole(FOUR)[0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "hm"
    assert message["content"] == "Four."
    deltas = [c["delta"] for c in _stream(FOUR)]
    for key in ("reasoning_content", "reasoning"):
        assert "".join(d.get(key, "") for d in deltas) == "hm"
    assert "".join(d.get("content", "") for d in deltas) == "Four."


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_thoughts_are_left_out_where_they_are_not_wanted(fields: dict[str, Any]) -> None:
    message = _whole(FOUR, **fields)[0]["message"]
    shown = {key: value for key, value in message.items() if value is not None}
    assert shown == {"role": "assistant", "content": "Four."}
    deltas = [c["delta"] for c in _stream(FOUR, **fields)]
    assert "".join(d.get("content", "") for d in deltas) == "Four."
    assert not any(key.startswith("reasoning") for d in deltas for key in d)


def test_one_call_at_most() -> None:
    text = "hm\n</think>\n\n" + CALL + "\n" + CALL
    both, cancelled = _whole(text, tools=[TOOL])
    assert len(both["message"]["tool_calls"]) == 2 and cancelled == []
    one, cancelled = _whole(text, tools=[TOOL], parallel_tool_calls=False)
    (call,) = one["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"x": "1"}
    assert one["finish_reason"] == "tool_calls" and cancelled == [0]
    ends = [c["finish_reason"] for c in _stream(text, tools=[TOOL], parallel_tool_calls=False)]
    assert [end for end in ends if end] == ["tool_calls"]


def test_an_answer_continues_the_last_message() -> None:
    prompt, bound = _asked({"think_budget": 9}, **CONTINUED)
    assert prompt.endswith("assistant\nIt is ") and bound is None
    choice, _ = _whole("\nfour.", **CONTINUED, add_generation_prompt=False)
    assert choice["message"]["content"] == "\nfour."


@pytest.mark.parametrize(("form", "count"), [("qwen3_coder", 2), ("hermes", 1), ("none", 0)])
def test_the_form_of_calls_is_the_servers(form: str, count: int) -> None:
    json_call = '</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": "1"}}\n</tool_call>'
    server = ApiClient(json_call + CALL[12:], service={"chat": ChatOptions(tools=form)})
    message = _post(server, tools=[TOOL]).json()["choices"][0]["message"]
    assert len(message.get("tool_calls") or ()) == count
