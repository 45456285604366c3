"""Answers that a stop string, an end token or a limit cut, in three APIs: half a call is not called
a call, and stop strings leave the thought alone."""

from typing import Any

import pytest

from spark_engine.runtime.engine.request import FinishReason
from tests.runtime.server.api.api_client import (
    CALL,
    CHAT,
    MESSAGES,
    RESPONSES,
    SCHEMA,
    THOUGHT,
    USER,
    ApiClient,
    events,
)

HALF = CALL[: CALL.index("\n</parameter>")]
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
FUNCTION = {"name": "weather", "parameters": SCHEMA}


def _ask(path: str, answer: str, finish: FinishReason, stream: bool, stop: str | None) -> Any:
    body: dict[str, Any] = {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]}
    if path == MESSAGES:
        body |= {"tools": [{"name": "weather", "input_schema": SCHEMA}]}
        body |= {"thinking": {"type": "adaptive"}, "stop_sequences": stop and [stop]}
    elif path == RESPONSES:
        body = {"input": "hi", "tools": [{"type": "function", **FUNCTION}]}
    server = ApiClient(answer, finish)
    body |= {} if path == MESSAGES else {"stop": stop}
    response = server.post(path, {"max_tokens": 99, "stream": stream, **body})
    assert response.status_code == 200, response.text
    said = answer.partition("</think>")[2].lstrip("\n")
    assert server.client.cancelled == ([0] if stop and stop in said else [])
    return [data for _, data in events(response)] if stream else response.json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("answer", "finish", "stop", "reason"),
    [
        (THOUGHT + HALF, STOP, None, "stop"),
        (THOUGHT + CALL, STOP, "ris", "stop"),
        (THOUGHT + HALF + " </tool_call> is", STOP, "is", "stop"),
        (THOUGHT + f"{CALL}\n{HALF}", STOP, None, "stop"),
        (THOUGHT + HALF, LENGTH, None, "length"),
        (THOUGHT + CALL, STOP, None, "tool_calls"),
        (THOUGHT + CALL + "\nDone. Yes", STOP, ". Y", "tool_calls"),
        (THOUGHT + HALF + "\n</tool_call>", STOP, None, "tool_calls"),
        ("So it is.\n</think>\n\n" + HALF + " </tool_call> is", STOP, "is", "stop"),
        ("So\n\nit is.\n</think>\n\n" + CALL + "\n\nDone", STOP, "\n\n", "tool_calls"),
    ],
)
def test_only_a_whole_call_is_a_reason_to_end(
    answer: str, finish: FinishReason, stop: str | None, reason: str, stream: bool
) -> None:
    chat = _ask(CHAT, answer, finish, stream, stop)
    assert (chat[-2] if stream else chat)["choices"][0]["finish_reason"] == reason
    response = _ask(RESPONSES, answer, finish, stream, stop)
    status = "completed" if reason == "tool_calls" else "incomplete"
    end = response[-1]["response"] if stream else response
    assert end["status"] == end["output"][-1]["status"] == status
    why = {"stop": "incomplete_call", "length": "max_output_tokens"}.get(reason)
    assert end["incomplete_details"] == (None if why is None else {"reason": why})
    if stream:
        assert response[-1]["type"] == f"response.{status}"
        items = [e["item"] for e in response if e["type"] == "response.output_item.done"]
        assert items == end["output"]
        done = [e for e in response if e["type"] == "response.function_call_arguments.done"]
        calls = [item for item in items if item["type"] == "function_call"]
        assert len(done) == len([item for item in calls if item["status"] == "completed"])
    message = _ask(MESSAGES, answer, finish, stream, stop)
    words = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reason]
    end = message[-2]["delta"] if stream else message
    assert end["stop_reason"] == ("stop_sequence" if stop else words)


def test_stop_strings_of_a_prompt_count_from_the_start() -> None:
    server = ApiClient("So I think.\n</think>\n\nYes.")
    body = {"model": "fake", "prompt": "<|im_start|>assistant\n<think>\n", "max_tokens": 50}
    choice = server.post("/v1/completions", {**body, "stop": ["I"]}).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("So ", "stop")
