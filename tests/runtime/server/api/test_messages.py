"""Anthropic's API: what a body means, and the form of its answers."""

import asyncio
from typing import Any

import httpx2
import msgspec
import pytest

from spark_engine.runtime.engine.request import FinishReason
from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.server.api.fields import decode
from spark_engine.runtime.server.api.messages import MessagesBody, to_chat_request
from spark_engine.runtime.server.operation.keys import Keyring
from spark_engine.runtime.text.messages import normalise
from tests.runtime.server.api.api_client import (
    CALL,
    SCHEMA,
    THOUGHT,
    USER,
    ApiClient,
    events,
    failing_script,
)

BODY: dict[str, Any] = {"model": "fake", "max_tokens": 200, "messages": USER}
TOOLS = [{"name": "weather", "description": "d", "input_schema": SCHEMA}]
HOSTED = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "text_editor_20250728", "name": "str_replace_based_edit_tool"},
    {"type": "computer_20250124", "name": "computer", "display_width_px": 10},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "mcp_toolset", "mcp_server_name": "m"},
]
PATH = "/v1/messages"


def _chat(**fields: Any) -> ChatRequest:
    return to_chat_request(decode(msgspec.json.encode({**BODY, **fields}), MessagesBody))


def test_a_conversation_of_blocks_is_one_of_messages() -> None:
    cached, no = {"cache_control": {"type": "ephemeral"}}, [{"type": "text", "text": "no"}]
    call = {"name": "weather", "input": {"city": "Paris"}}
    said = [
        {"type": "thinking", "thinking": "t", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "b"},
        {"type": "tool_use", "id": "c1", **call},
    ]
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "wet"},
        {"type": "tool_result", "tool_use_id": "c2", "is_error": True, "content": no},
        {"type": "text", "text": "so?"},
        {"type": "document", "source": {"type": "text", "data": "doc"}},
    ]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a", **cached}]},
        {"role": "assistant", "content": said},
        {"role": "user", "content": results},
        {"role": "user", "content": "and?"},
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: v=1"},
        {"type": "text", "text": "be", **cached},
        {"type": "text", "text": "kind"},
    ]
    made = {"name": "weather", "arguments": {"city": "Paris"}}
    assert normalise(_chat(messages=messages, system=system).messages) == [
        {"role": "system", "content": "be\n\nkind"},
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "b",
            "reasoning_content": "t",
            "tool_calls": [{"id": "c1", "type": "function", "function": made}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "wet"},
        {"role": "tool", "tool_call_id": "c2", "content": "Error: no\n\nso?\ndoc"},
        {"role": "user", "content": "and?"},
    ]


def test_choices_have_their_counterparts() -> None:
    """What the other fields do: test_conformance.py."""
    chat = _chat(tools=TOOLS, tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert (chat.tool_choice, chat.parallel_tool_calls) == ("required", False)
    function = {"name": "weather", "description": "d", "parameters": SCHEMA}
    assert chat.tools == [{"type": "function", "function": function}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    chat = _chat(thinking=thinking, output_config={"effort": "low"})
    assert (chat.reasoning_effort, chat.thinking) == ("low", thinking)
    for choice, wanted in (
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ):
        assert _chat(tool_choice=choice).tool_choice == wanted


def test_tools_that_anthropic_runs_are_left_out() -> None:
    for choice in (None, {"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "weather"}):
        chat = _chat(tools=[*HOSTED, *TOOLS], tool_choice=choice)
        assert [tool["function"]["name"] for tool in chat.tools or []] == ["weather"]
    server = ApiClient("hello")
    body = {**BODY, "tools": HOSTED, "mcp_servers": [{"type": "url"}], "container": {"skills": []}}
    assert server.post(PATH, body).status_code == 200 and "# Tools" not in server.prompt


def test_edits_of_the_context_are_taken_and_none_is_applied() -> None:
    edits = [
        {"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 9}},
        {"type": "clear_thinking_20251015", "keep": "all"},
        {"type": "compact_20260112"},
        None,
    ]
    body = {**BODY, "context_management": {"edits": edits}}
    server = ApiClient("hello")
    assert server.post(PATH, body).json()["context_management"] == {"applied_edits": []}
    end = dict(events(server.post(PATH, {**body, "stream": True})))["message_delta"]
    assert end["context_management"] == {"applied_edits": []}
    counted = server.post(PATH + "/count_tokens", body).json()
    assert counted["context_management"] == {"original_input_tokens": counted["input_tokens"]}
    assert "context_management" not in server.post(PATH, BODY).json()


def test_text_next_to_results_is_part_of_them() -> None:
    """A reminder is no turn of the user's, which would cost the loop's thoughts and its cache."""
    result = {"type": "tool_result", "tool_use_id": "c", "content": "r"}
    said = {"type": "text", "text": "<system-reminder>"}
    use = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f"}]}
    for blocks, wanted in (
        ([result, said], ["r\n\n<system-reminder>"]),
        ([said, result], ["r\n\n<system-reminder>"]),
        ([result, said, result], ["r\n\n<system-reminder>", "r"]),
        ([result, {"type": "image"}], ["r\n\n[an image that this model cannot see]"]),
        ([result, {"type": "text", "text": ""}], ["r"]),
    ):
        made = _chat(messages=[*USER, use, {"role": "user", "content": blocks}]).messages[2:]
        assert [(m["role"], m["content"]) for m in made] == [("tool", text) for text in wanted]


@pytest.mark.parametrize(
    "blocks",
    [
        [{"type": "tool_use", "id": "c", "name": "f", "input": {}}],
        [{"type": "text", "text": "I"}, {"type": "tool_use", "id": "c", "name": "f", "input": {}}],
        [{"type": "thinking", "thinking": "t", "signature": "s"}],
        [],
        "",
    ],
)
def test_an_answer_that_cannot_be_continued_is_answered(blocks: Any) -> None:
    """It was interrupted, and what the client has stored ends with it."""
    server = ApiClient("hello")
    messages = [*USER, {"role": "assistant", "content": blocks}]
    answer = server.post(PATH, {**BODY, "messages": messages})
    assert answer.status_code == 200
    assert server.prompt.endswith("assistant\n<think>\n\n</think>\n\n"), "none was asked for"


def test_an_answer_that_is_started_is_continued() -> None:
    server = ApiClient("lo")
    body = {**BODY, "messages": [*USER, {"role": "assistant", "content": "hel"}]}
    answer = server.post(PATH, body).json()
    assert server.prompt.endswith("hel")
    assert answer["content"] == [{"type": "text", "text": "lo"}]


def test_a_whole_answer() -> None:
    server = ApiClient(THOUGHT + "Let me look.\n" + CALL)
    body = {**BODY, "tools": TOOLS, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    answer = server.post(PATH, body).json()
    thought, text, call = answer.pop("content")
    assert thought["type"] == "thinking" and thought["thinking"] == "I think."
    assert thought["signature"] and text == {"type": "text", "text": "Let me look."}
    assert call.pop("id").startswith("call_")
    assert call == {"type": "tool_use", "name": "weather", "input": {"city": "Paris"}}
    assert answer.pop("id").startswith("msg_")
    usage = answer.pop("usage")
    assert usage["input_tokens"] == len(server.client.submitted[0].prompt)
    assert usage["output_tokens"] > 20 and usage["cache_read_input_tokens"] == 0
    wanted = {"type": "message", "role": "assistant", "model": "fake"}
    assert answer == {**wanted, "stop_reason": "tool_use", "stop_sequence": None}


def test_cached_tokens_are_counted_apart() -> None:
    server = ApiClient("hello")
    server.client._script = [event._replace(cached=4) for event in server.client._script]
    usage = server.post(PATH, BODY).json()["usage"]
    assert usage["cache_read_input_tokens"] == 4
    assert usage["input_tokens"] == len(server.client.submitted[0].prompt) - 4


@pytest.mark.parametrize(
    ("text", "finish", "reason", "stop"),
    [
        ("hello", FinishReason.STOP, "end_turn", None),
        ("hello", FinishReason.LENGTH, "max_tokens", None),
        ("hello", FinishReason.CANCELLED, "pause_turn", None),
        ("heXllo", FinishReason.STOP, "stop_sequence", "X"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_why_it_ended(
    text: str, finish: FinishReason, reason: str, stop: str | None, stream: bool
) -> None:
    body = {**BODY, "stop_sequences": ["X"], "stream": stream}
    answer = ApiClient(text, finish).post(PATH, body)
    end = answer.json() if not stream else dict(events(answer))["message_delta"]["delta"]
    assert (end["stop_reason"], end["stop_sequence"]) == (reason, stop)


def test_a_stream_adds_up_to_the_whole() -> None:
    server = ApiClient(THOUGHT + "Let me look.\n" + CALL + CALL)
    body = {**BODY, "tools": TOOLS, "thinking": {"type": "adaptive"}}
    whole = server.post(PATH, body).json()
    found = list(events(server.post(PATH, {**body, "stream": True})))
    names = [name for name, _ in found]
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert all(data["type"] == name for name, data in found)
    start = found[0][1]["message"]
    assert start["content"] == [] and start["usage"]["output_tokens"] == 0
    assert found[-2][1]["usage"] == whole["usage"]
    starts = [data for name, data in found if name == "content_block_start"]
    assert [data["index"] for data in starts] == [0, 1, 2, 3]
    assert starts[2]["content_block"]["input"] == {}
    texts = {0: "", 1: "", 2: "", 3: ""}
    for name, data in found:
        if name == "content_block_delta":
            kind = data["delta"]["type"].removesuffix("_delta")
            key = {"input_json": "partial_json"}.get(kind, kind)
            texts[data["index"]] += data["delta"][key] if key != "signature" else ""
    assert texts[0] == whole["content"][0]["thinking"] and texts[1] == whole["content"][1]["text"]
    assert msgspec.json.decode(texts[2]) == whole["content"][2]["input"] == {"city": "Paris"}
    assert sum(name == "content_block_stop" for name in names) == 4


def test_a_thought_that_is_not_wanted_is_left_out() -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    server = ApiClient(THOUGHT + "Hello")
    answer = server.post(PATH, {**BODY, "thinking": thinking}).json()
    assert [block["type"] for block in answer["content"]] == ["text"]
    found = list(events(server.post(PATH, {**BODY, "thinking": thinking, "stream": True})))
    starts = [data for name, data in found if name == "content_block_start"]
    assert [(s["index"], s["content_block"]["type"]) for s in starts] == [(0, "text")]


def test_a_call_that_was_cut_off_keeps_what_came() -> None:
    cut = CALL[: CALL.index("ris\n")]
    answer = ApiClient(cut, FinishReason.LENGTH).post(PATH, {**BODY, "tools": TOOLS}).json()
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][0]["input"] == {"city": "Pa"}


def test_tokens_are_counted_without_an_engine() -> None:
    server = ApiClient("x")
    body = {k: v for k, v in BODY.items() if k != "max_tokens"} | {"tools": TOOLS, "system": "s"}
    counted = server.post(PATH + "/count_tokens", body).json()
    assert server.client.submitted == []
    answer = server.post(PATH, {**body, "max_tokens": 5}).json()
    assert counted == {"input_tokens": answer["usage"]["input_tokens"]}


def test_other_errors_have_the_form_too() -> None:
    locked = ApiClient("x", keys=Keyring(None, "k"))
    answer = locked.post(PATH, BODY)
    assert (answer.status_code, answer.json()["error"]["type"]) == (401, "authentication_error")
    assert locked.post(PATH, BODY, **{"x-api-key": "k"}).status_code == 200
    failing = ApiClient("x")
    failing.client._script = failing_script()
    whole = failing.post(PATH, BODY)
    assert (whole.status_code, whole.json()["error"]["type"]) == (500, "api_error")
    name, data = list(events(failing.post(PATH, {**BODY, "stream": True})))[-1]
    assert name == "error" and data["error"] == {"type": "api_error", "message": "nan"}


def test_the_real_client_reads_it() -> None:
    import anthropic  # takes 2 s of each worker that collects this file

    server = ApiClient(THOUGHT + "Let me look.\n" + CALL)
    kwargs: Any = {**BODY, "tools": TOOLS, "thinking": {"type": "adaptive"}}

    async def ask() -> Any:
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(server.app))
        client = anthropic.AsyncAnthropic(
            api_key="k", base_url="http://x", http_client=http, max_retries=0
        )
        message = await client.messages.create(**kwargs)
        async with client.messages.stream(**kwargs) as stream:
            streamed = await stream.get_final_message()
        counted = await client.messages.count_tokens(messages=kwargs["messages"], model="fake")
        return message, streamed, counted

    message, streamed, counted = asyncio.run(ask())
    kinds = [block.type for block in message.content]
    assert kinds == ["thinking", "text", "tool_use"] == [b.type for b in streamed.content]
    assert streamed.content[2].input == message.content[2].input == {"city": "Paris"}
    assert streamed.content[0].thinking == message.content[0].thinking
    assert streamed.stop_reason == "tool_use" and counted.input_tokens > 0
    assert streamed.usage.output_tokens == message.usage.output_tokens
