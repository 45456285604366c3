"""What a chat request's switches come to: its prompt, what binds the answer, what is shown."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from spark_engine.errors import OptionError, RequestError
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.engine.request import Event, FinishReason
from spark_engine.runtime.server.prompts.conversation import ChatOptions, ChatReader
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.runtime import small_tokenizer
from tests.runtime.fake_client import FakeClient, Served, service

USER = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"properties": {"x": {"type": "string"}}}},
}
CALL = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(small_tokenizer.write(tmp_path_factory.mktemp("t")))


def _served(client: FakeClient, tokenizer: Tokenizer, **chat: Any) -> Served:
    template = ChatTemplate(small_tokenizer.TEMPLATE)
    return service(client, tokenizer, template=template, chat=ChatOptions(**chat), context=512)


def _events(tokenizer: Tokenizer, text: str) -> list[Event]:
    ids = tokenizer.encode(text)
    return [Event(0, i) for i in ids[:-1]] + [Event(0, ids[-1], finish=FinishReason.STOP)]


def _body(**fields: Any) -> bytes:
    return json.dumps({"messages": USER, **fields}).encode()


def _asked(tokenizer: Tokenizer, chat: dict[str, Any] | None = None, **fields: Any) -> Any:
    """(text of the prompt, what binds the answer)."""
    client = FakeClient()
    asyncio.run(_served(client, tokenizer, **(chat or {})).chat(_body(**fields)))
    request = client.submitted[0]
    return tokenizer.decode(request.prompt, skip_special=False), request.constraint


def _whole(tokenizer: Tokenizer, text: str, **fields: Any) -> tuple[Any, FakeClient]:
    client = FakeClient(_events(tokenizer, text))

    async def ask() -> Any:
        return await (await _served(client, tokenizer).chat(_body(**fields))).whole()

    return asyncio.run(ask())["choices"][0], client


def _stream(tokenizer: Tokenizer, text: str, **fields: Any) -> list[Any]:
    client = FakeClient(_events(tokenizer, text))

    async def ask() -> list[Any]:
        reply = await _served(client, tokenizer).chat(_body(stream=True, **fields))
        return [json.loads(line[6:]) async for line in reply.events() if b"[DONE]" not in line]

    return [c for chunk in asyncio.run(ask()) for c in chunk["choices"]]


OFF = "<think>\n\n</think>\n\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"enable_thinking": False},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"reasoning": {"effort": "none"}},
        {"thinking": {"type": "disabled"}},
        {"thinking": False},
        {"thinking_budget": 0},
    ],
)
def test_every_switch_turns_thinking_off(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    prompt, bound = _asked(tokenizer, **fields)
    assert prompt.endswith(OFF) and bound is None
    prompt, _ = _asked(tokenizer)
    assert prompt.endswith("<think>\n")


def test_a_budget_travels_with_the_request(tokenizer: Tokenizer) -> None:
    for fields in ({"thinking_budget": 7}, {"thinking": {"type": "enabled", "budget_tokens": 7}}):
        _, bound = _asked(tokenizer, **fields)
        assert isinstance(bound, ConstraintSpec) and bound.budget == 7
        assert bound.end_of_thought == tokenizer.id_of("</think>")
        assert bound.end_of_thought in bound.close
    chat = {"think_budget": 9}
    assert _asked(tokenizer, chat)[1].budget == 9
    assert _asked(tokenizer, chat, thinking_budget=3)[1].budget == 3
    assert _asked(tokenizer, chat, thinking_budget=-1)[1] is None
    assert _asked(tokenizer, chat, enable_thinking=False)[1] is None


def test_the_engine_receives_what_begins_a_call(tokenizer: Tokenizer) -> None:
    """A call in an open thought ends it: no budget may cut the call in two."""
    begin = tokenizer.id_of("<tool_call>")
    assert _asked(tokenizer, thinking_budget=7, tools=[TOOL])[1].calls == (begin,)
    assert _asked(tokenizer, thinking_budget=7)[1].calls == ()
    assert _asked(tokenizer, thinking_budget=7, tools=[TOOL], tool_choice="none")[1].calls == ()


def test_what_contradicts_is_refused_with_the_field(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="contradict") as caught:
        _asked(tokenizer, enable_thinking=True, reasoning_effort="none")
    assert caught.value.param == "reasoning_effort"


def test_a_server_without_a_thoughts_end_cannot_hold_a_budget(tokenizer: Tokenizer) -> None:
    for options in (ChatOptions(think_budget=5, reasoning="none"), ChatOptions(tools="x")):
        with pytest.raises(OptionError, match=r"--think-budget is 5|--tools is 'x'"):
            ChatReader(None, tokenizer, options)
    with pytest.raises(OptionError, match="--think-budget is 5"):
        ChatReader(None, None, ChatOptions(think_budget=5))


def test_thoughts_stand_under_both_names(tokenizer: Tokenizer) -> None:
    choice, _ = _whole(tokenizer, "hm\n</think>\n\nFour.")
    message = choice["message"]
    assert message["reasoning_content"] == message["reasoning"] == "hm"
    assert message["content"] == "Four."
    deltas = [c["delta"] for c in _stream(tokenizer, "hm\n</think>\n\nFour.")]
    for key in ("reasoning_content", "reasoning"):
        assert "".join(d.get(key, "") for d in deltas) == "hm"
    assert "".join(d.get("content", "") for d in deltas) == "Four."


@pytest.mark.parametrize("fields", [{"include_reasoning": False}, {"reasoning": {"exclude": True}}])
def test_thoughts_are_left_out_where_they_are_not_wanted(
    tokenizer: Tokenizer, fields: dict[str, Any]
) -> None:
    choice, _ = _whole(tokenizer, "hm\n</think>\n\nFour.", **fields)
    assert choice["message"] == {"role": "assistant", "content": "Four."} | {
        k: v for k, v in choice["message"].items() if v is None
    }
    deltas = [c["delta"] for c in _stream(tokenizer, "hm\n</think>\n\nFour.", **fields)]
    assert "".join(d.get("content", "") for d in deltas) == "Four."
    assert not any(key.startswith("reasoning") for d in deltas for key in d)


def test_one_call_at_most(tokenizer: Tokenizer) -> None:
    """The second is not generated: the request is cancelled after the first."""
    text = "hm\n</think>\n\n" + CALL + "\n" + CALL
    both, client = _whole(tokenizer, text, tools=[TOOL])
    assert len(both["message"]["tool_calls"]) == 2 and client.cancelled == []
    one, client = _whole(tokenizer, text, tools=[TOOL], parallel_tool_calls=False)
    (call,) = one["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"x": "1"}
    assert one["finish_reason"] == "tool_calls" and client.cancelled == [0]
    ends = [
        c["finish_reason"]
        for c in _stream(tokenizer, text, tools=[TOOL], parallel_tool_calls=False)
        if c["finish_reason"]
    ]
    assert ends == ["tool_calls"]


def test_an_answer_continues_the_last_message(tokenizer: Tokenizer) -> None:
    messages = [*USER, {"role": "assistant", "content": "It is "}]
    fields = {"messages": messages, "continue_final_message": True}
    prompt, bound = _asked(tokenizer, {"think_budget": 9}, **fields)
    assert prompt.endswith("assistant\nIt is ") and bound is None
    choice, _ = _whole(tokenizer, "\nfour.", **fields, add_generation_prompt=False)
    assert choice["message"]["content"] == "\nfour."
    with pytest.raises(RequestError, match="both true"):
        _asked(tokenizer, **fields, add_generation_prompt=True)


def test_a_prompt_may_end_with_its_last_message(tokenizer: Tokenizer) -> None:
    prompt, _ = _asked(tokenizer, add_generation_prompt=False)
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n"


def test_messages_of_every_client_are_taken(tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "input_text", "text": "brief"}]},
        {"role": "system", "content": "kind"},
        *USER,
    ]
    prompt, _ = _asked(tokenizer, messages=messages)
    assert prompt.startswith("<|im_start|>system\nbrief\n\nkind<|im_end|>\n<|im_start|>user\nhi")


def test_the_form_of_calls_is_the_servers(tokenizer: Tokenizer) -> None:
    """By name, since this template shows none."""
    text = (
        '</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": "1"}}\n</tool_call>' + CALL[12:]
    )

    async def ask(tools: str) -> Any:
        client = FakeClient(_events(tokenizer, text))
        served = _served(client, tokenizer, tools=tools)
        return await (await served.chat(_body(tools=[TOOL]))).whole()

    counts = {}
    for form in ("qwen3_coder", "hermes", "none"):
        message = asyncio.run(ask(form))["choices"][0]["message"]
        counts[form] = len(message.get("tool_calls") or ())
    assert counts == {"qwen3_coder": 2, "hermes": 1, "none": 0}
