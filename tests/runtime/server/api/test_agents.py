"""What coding agents asked, as `make agents` recorded it: the whole conversation, shortened."""

import json
from typing import Any

import pytest

from tests.clients.agent_proxy import Exchange
from tests.clients.agent_rows import AGENTS, GIVEN, PICTURE, Agent
from tests.clients.agents import FIXTURES
from tests.runtime.server.api.api_client import THOUGHT, ApiClient

CONTEXT = 1 << 16
ROWS = {agent.name: agent for agent in AGENTS}


def _requests(name: str) -> list[Any]:
    return list(json.loads((FIXTURES / f"{name}.json").read_text())["requests"])


def _post(server: ApiClient, request: Any, body: Any) -> Exchange:
    answer = server.post(request["path"], {**body, "model": "fake"})
    assert answer.status_code == 200, answer.text
    return Exchange("POST", request["path"], body, "", 200, answer.text)


def _said(got: Exchange) -> tuple[str, list[tuple[str, Any]]]:
    """The text of an answer, and its calls."""
    text, calls = "", []
    for event in got.events():
        for choice in event.get("choices") or []:
            delta = choice.get("delta", choice.get("message"))
            text += delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                if name := call["function"].get("name"):
                    calls.append([name, ""])
                calls[-1][1] += call["function"].get("arguments") or ""
        if event.get("type") == "content_block_start":
            block = event["content_block"]
            calls += [[block["name"], ""]] if block["type"] == "tool_use" else []
        if event.get("type") == "content_block_delta":
            text += event["delta"].get("text", "")
            if "partial_json" in event["delta"]:
                calls[-1][1] += event["delta"]["partial_json"]
        if event.get("type") == "response.completed":
            for item in event["response"]["output"]:
                if item["type"] == "message":
                    text += "".join(part["text"] for part in item["content"])
                if item["type"] == "function_call":
                    calls.append([item["name"], item["arguments"]])
    return text, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", ROWS)
def test_each_request_is_answered_with_text(name: str) -> None:
    for request in _requests(name):
        server = ApiClient(f"{THOUGHT}Seven.", context=CONTEXT)
        got = _post(server, request, request["body"])
        assert _said(got) == ("Seven.", [])
        prompt, _ = got.usage()
        assert prompt == len(server.client.submitted[-1].prompt)


@pytest.mark.parametrize("name", ROWS)
def test_the_model_reads_what_the_tools_gave(name: str) -> None:
    (request,) = [row for row in _requests(name) if row["step"]]
    server = ApiClient(f"{THOUGHT}Seven.", context=CONTEXT)
    _post(server, request, request["body"])
    before, _, after = server.prompt.partition(GIVEN)
    assert before and after.count("<|im_start|>assistant") >= 2  # the second call, and the answer
    assert "iVBOR" not in server.prompt, "an image is no text"
    assert "image" in after or PICTURE in after


@pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.name)
def test_a_call_of_the_shell_is_in_the_form_of_the_api(agent: Agent) -> None:
    (request,) = [row for row in _requests(agent.name) if row["step"]]
    key, value = next(iter(agent.shell.arguments.items()))
    text = value if isinstance(value, str) else json.dumps(value)
    call = f"<tool_call>\n<function={agent.shell.tool}>\n<parameter={key}>\n{text}\n</parameter>\n"
    server = ApiClient(f"{THOUGHT}{call}</function>\n</tool_call>", context=CONTEXT)
    got = _post(server, request, request["body"])
    assert _said(got)[1] == [(agent.shell.tool, {key: value})]
