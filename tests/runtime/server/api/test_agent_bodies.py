"""What coding agents send first, and after a tool has read an image."""

import json

import pytest

from tests.clients.scripts.agent_bodies import (
    AGENT_TOOLS,
    BETAS,
    CLAUDE_TOOLS,
    CODEX_TOOLS,
    PNG,
    claude_code,
    codex,
    images,
)
from tests.runtime.server.api.api_client import THOUGHT, ApiClient, events

CONTEXT = 16384


def _names(prompt: str) -> list[str]:
    lines = prompt.partition("</tools>")[0].splitlines()[3:]
    return [json.loads(line)["function"]["name"] for line in lines]


def test_codex_is_answered() -> None:
    call = "<tool_call>\n<function=agents__wait>\n<parameter=what>\n1\n</parameter>\n</function>\n"
    server = ApiClient(THOUGHT + call + "</tool_call>", context=CONTEXT)
    body = codex("fake", "What is 3 plus 4?")
    answer = server.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    wanted = {*CODEX_TOOLS, *(f"agents__{name}" for name in AGENT_TOOLS)}
    assert set(_names(server.prompt)) == wanted
    assert server.prompt.index("All is allowed.") < server.prompt.index("Work alone.")
    (name, data) = list(events(answer))[-1]
    thought, item = data["response"]["output"]
    assert name == "response.completed" and thought["encrypted_content"]
    assert (item["name"], item["namespace"]) == ("wait", "agents")
    shown = {"prompt_cache_key": body["prompt_cache_key"], "tools": body["tools"], "store": False}
    assert {key: data["response"][key] for key in shown} == shown
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "[]"}
    body["input"] += [thought, item, result]
    before = server.prompt
    assert server.post("/v1/responses", body).status_code == 200
    assert server.prompt.startswith(before.removesuffix("<think>\n"))


def test_claude_code_is_answered() -> None:
    server = ApiClient(THOUGHT + "7", context=CONTEXT)
    heads = {"anthropic-beta": BETAS, "anthropic-version": "2023-06-01"}
    body = claude_code("fake", "What is 3 plus 4?")
    answer = server.post("/v1/messages?beta=true", body, **heads)
    assert answer.status_code == 200, answer.text
    found = dict(events(answer))
    assert found["message_delta"]["context_management"] == {"applied_edits": []}
    assert _names(server.prompt) == list(CLAUDE_TOOLS) and len(CLAUDE_TOOLS) == 24
    assert "billing" not in server.prompt and "Be brief." in server.prompt


@pytest.mark.parametrize("path", images("", ""))
def test_an_image_that_a_tool_read_is_said_to_be_one(path: str) -> None:
    server = ApiClient(THOUGHT + "7", context=CONTEXT)
    body = images("fake", "What is in a.png?")[path]
    answer = server.post(path, body)
    assert answer.status_code == 200, answer.text
    assert "[an image that this model cannot see]" in server.prompt and PNG not in server.prompt
