"""Tools and choices on chat in every client's form, and the calls of custom tools."""

import json
from typing import Any

import pytest

from spark_engine.errors import RequestError
from spark_engine.runtime.server.api.chat import ChatBody
from tests.runtime.server.api.api_client import (
    CALL,
    CHAT,
    MESSAGES,
    RESPONSES,
    SCHEMA,
    TEXT,
    THOUGHT,
    USER,
    ApiClient,
    events,
)

FUNCTION = {"name": "weather", "parameters": SCHEMA, "strict": False}
NESTED = {"type": "function", "function": FUNCTION}
PATCH = {"type": "custom", "custom": {"name": "patch", "description": "d"}}
HOSTED = [{"type": "web_search"}, {"type": "code_interpreter", "container": {}}]
PATCHED = 'a "b"\n</x>'
INPUT = f"<parameter=input>\n{PATCHED}\n</parameter>\n"
CUSTOM = f"<tool_call>\n<function=patch>\n{INPUT}</function>\n</tool_call>"


def read(tools: list[dict[str, Any]], choice: Any = None) -> tuple[Any, Any]:
    """The tools and the choice of a chat."""
    chat, _ = ChatBody(messages=USER, tools=tools, tool_choice=choice).modern()
    return chat.tools, chat.tool_choice


@pytest.mark.parametrize("tool", [NESTED, {"function": FUNCTION}, {"type": "function", **FUNCTION}])
def test_every_form_of_a_function(tool: dict[str, Any]) -> None:
    (found,), _ = read([tool])
    assert found["function"] == FUNCTION


def test_tools_that_another_server_runs_are_left_out() -> None:
    server = ApiClient(THOUGHT + "Hello")
    answer = server.post(CHAT, {"messages": USER, "tools": [*HOSTED, NESTED]})
    assert answer.status_code == 200 and "web_search" not in server.prompt
    assert server.post(CHAT, {"messages": USER, "tools": HOSTED}).status_code == 200


@pytest.mark.parametrize(
    ("choice", "want"),
    [
        ("any", "required"),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "weather"}, ["weather"]),
        ({"type": "custom", "custom": {"name": "patch"}}, ["patch"]),
        ({"type": "function", "name": "weather"}, ["weather"]),
        (None, None),
    ],
)
def test_every_form_of_a_choice(choice: Any, want: Any) -> None:
    if isinstance(want, list):
        want = {"type": "function", "function": {"name": want[0]}}
    assert read([NESTED, PATCH], choice)[1] == want
    body = {"messages": USER, "tools": [NESTED, PATCH], "tool_choice": choice}
    assert ApiClient(THOUGHT + "Hello").post(CHAT, body).status_code == 200


def test_of_tools_only_the_allowed_ones_are_offered() -> None:
    rows = [{"type": "web_search"}, {"type": "custom", "custom": {"name": "patch"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": rows}}
    (found,), mode = read([NESTED, PATCH, *HOSTED], choice)
    assert (found["function"]["name"], mode) == ("patch", "required")
    only = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": rows[:1]}}
    assert read([NESTED, *HOSTED], only) == (None, "auto")
    for row in (NESTED, {"type": "function", "name": "weather"}):
        inner = {"mode": "auto", "tools": [row]}
        for form in ({"type": "allowed_tools", **inner}, {"allowed_tools": inner}):
            found, mode = read([NESTED, PATCH], {"type": "allowed_tools", **form})
            assert (found, mode) == ([NESTED], "auto")


@pytest.mark.parametrize("tool", [{}, {"type": "function"}, {"type": "custom", "custom": {}}])
def test_a_function_without_a_name_is_refused(tool: dict[str, Any]) -> None:
    with pytest.raises(
        RequestError, match=r'tools\[0\] has no function with a name; it is like {"'
    ):
        read([tool])


@pytest.mark.parametrize("stream", [False, True])
def test_the_call_of_a_custom_tool(stream: bool) -> None:
    server = ApiClient(THOUGHT + CUSTOM + "\n" + CALL)
    answer = server.post(CHAT, {"messages": USER, "tools": [PATCH, NESTED], "stream": stream})
    if stream:
        calls: dict[int, Any] = {}
        for _, data in events(answer):
            delta = {} if data == "[DONE]" else data["choices"][0]["delta"]
            for row in delta.get("tool_calls", []):
                if row["index"] in calls:
                    kind = "custom" if "custom" in row else "function"
                    key = "input" if "custom" in row else "arguments"
                    calls[row["index"]][kind][key] += row[kind][key]
                else:
                    calls[row["index"]] = {k: v for k, v in row.items() if k != "index"}
        custom, function = calls.values()
    else:
        custom, function = answer.json()["choices"][0]["message"]["tool_calls"]
    assert (custom["type"], custom["custom"]) == ("custom", {"name": "patch", "input": PATCHED})
    assert json.loads(function["function"]["arguments"]) == {"city": "Paris"}
    said = {"role": "assistant", "content": None, "tool_calls": [custom, function]}
    again = [*USER, said, {"role": "tool", "tool_call_id": custom["id"], "content": "done"}]
    assert server.post(CHAT, {"messages": again, "tools": [PATCH]}).status_code == 200
    assert f"input={PATCHED}" in server.prompt


def test_usage_is_null_until_the_last_event() -> None:
    body = {"messages": USER, "stream": True, "stream_options": {"include_usage": True}}
    found = [d for _, d in events(ApiClient(THOUGHT + "Hello").post(CHAT, body)) if d != "[DONE]"]
    assert all(data["usage"] is None for data in found[:-1])
    assert found[-1]["usage"]["completion_tokens"] > 3 and found[-1]["choices"] == []


def test_a_path_with_a_slash_behind_it() -> None:
    server = ApiClient("x")
    moved = server.get("/v1/models/?a=b")
    assert (moved.status_code, moved.headers["location"]) == (307, "http://x/v1/models?a=b")
    assert server.get("/v1/models/fake/").json()["id"] == "fake"
    assert server.get("/", "HEAD").status_code == 200  # Claude Code asks whether anybody is there


@pytest.mark.parametrize("half", [r"\ud83d", r"a\udc00b", r"\ud83d\ud83d\ude42"])
def test_half_a_character_in_a_history_ends_no_chat(half: str) -> None:
    """Agents cut what their tools say, some in the middle of a character."""
    server, text = ApiClient("Hello"), f'[{{"role": "user", "content": "{half}"}}]'
    for path, name in ((CHAT, "messages"), (MESSAGES, "messages"), (RESPONSES, "input")):
        answer = server.post(path, f'{{"{name}": {text}}}'.encode())
        assert answer.status_code == 200 and "\ufffd" in server.prompt
    counted = server.post(MESSAGES + "/count_tokens", f'{{"messages": {text}}}'.encode())
    assert counted.status_code == 200
    assert server.post(TEXT, f'{{"prompt": "{half}"}}'.encode()).status_code == 400


def test_a_chat_that_is_too_long_says_what_to_do() -> None:
    server = ApiClient("x", context=64)
    long = [{"role": "user", "content": "a bear " * 200}]
    for path, name in ((CHAT, "messages"), (MESSAGES, "messages"), (RESPONSES, "input")):
        error = server.post(path, {name: long}).json()["error"]["message"]
        assert error.startswith("prompt is too long: ") and "context length is 64 tokens" in error
        assert "start a new one" in error and "--max-context" in error
