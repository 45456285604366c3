"""OpenAI's responses: what a body means, the form of answers and events, what is kept."""

import asyncio
import re
from base64 import b64decode
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest

from spark_engine.runtime.engine.request import FinishReason
from spark_engine.runtime.server.api.chat_request import ChatRequest
from spark_engine.runtime.server.api.fields import decode
from spark_engine.runtime.server.api.responses import MOST_REPEATED, ResponsesBody, to_chat_request
from spark_engine.runtime.server.operation.keys import Keyring
from spark_engine.runtime.server.prompts.contract import JobKind
from spark_engine.runtime.server.replies.blocks import Blocks
from spark_engine.runtime.server.service import stored_responses
from tests.patient import until
from tests.runtime.server.api.api_client import (
    CALL,
    SCHEMA,
    THOUGHT,
    USER,
    ApiClient,
    events,
    failing_script,
    script,
)

PATH = "/v1/responses"
TOOLS = [{"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}]
BODY: dict[str, Any] = {"model": "fake", "input": "hi"}


def _chat(items: Any, **fields: Any) -> ChatRequest:
    body = decode(msgspec.json.encode({**BODY, **fields}), ResponsesBody)
    return to_chat_request(body, items)[0]


def _call(ident: str, name: str = "f", arguments: str = "{}") -> Any:
    return {"type": "function_call", "call_id": ident, "name": name, "arguments": arguments}


def test_items_are_messages() -> None:
    def made(ident: str, name: str = "f", arguments: str = "{}") -> Any:
        function = {"name": name, "arguments": arguments}
        return {"id": ident, "type": "function", "function": function}

    two = [{"type": "input_text", "text": "2"}]
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": two},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        _call("c1", arguments='{"x": 1}'),
        _call("c2", "g"),
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": two},
        {"type": "reasoning", "summary": [], "encrypted_content": "dTI="},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}]},
        _call("c3"),
    ]
    calls = [made("c1", arguments='{"x": 1}'), made("c2", "g")]
    first = {"role": "assistant", "content": "b", "reasoning_content": "t"}
    second = {"role": "assistant", "content": "", "reasoning_content": "u2s"}
    assert _chat(items, instructions="i").messages == [
        {"role": "system", "content": "i"},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": two},
        {**first, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
        {"role": "tool", "tool_call_id": "c2", "content": "2"},
        {**second, "tool_calls": [made("c3")]},
    ]


def test_a_thought_begins_a_turn() -> None:
    def thought(text: str) -> Any:
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}

    said = {"type": "message", "role": "assistant", "content": "a"}
    first, second = _chat([thought("t"), said, thought("u"), said]).messages
    wanted = {"role": "assistant", "content": "a"}
    assert first == {**wanted, "reasoning_content": "t"}
    assert second == {**wanted, "reasoning_content": "u"}


def test_choices_have_their_counterparts() -> None:
    """What the other fields do: test_conformance.py."""
    chat = _chat([], tools=TOOLS, tool_choice="required", reasoning={"effort": "low"})
    function = {"name": "weather", "parameters": SCHEMA, "strict": True}
    assert chat.tools == [{"type": "function", "function": function}]
    assert (chat.tool_choice, chat.reasoning) == ("required", {"effort": "low"})
    named = {"type": "function", "name": "weather"}
    wanted = {"type": "function", "function": {"name": "weather"}}
    assert _chat([], tools=TOOLS, tool_choice=named).tool_choice == wanted
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"name": "weather"}]}
    more = [*TOOLS, {"type": "function", "name": "other"}]
    chat = _chat([], tools=more, tool_choice=allowed)
    assert chat.tool_choice == "required" and len(chat.tools or []) == 1


def test_a_whole_answer() -> None:
    server = ApiClient(THOUGHT + "Let me look.\n" + CALL)
    answer = server.post(PATH, {**BODY, "tools": TOOLS, "metadata": {"a": "b"}}).json()
    thought, message, call = answer.pop("output")
    assert (thought["type"], thought["content"][0]["text"]) == ("reasoning", "I think.")
    assert thought["summary"] == [] and thought["id"].startswith("rs_")
    assert b64decode(thought["encrypted_content"]) == b"I think."
    part = {"type": "output_text", "text": "Let me look.", "annotations": [], "logprobs": []}
    assert message.pop("id").startswith("msg_")
    wanted = {"type": "message", "status": "completed", "role": "assistant"}
    assert message == {**wanted, "content": [part]}
    assert call.items() >= _call(call["call_id"], "weather", '{"city": "Paris"}').items()
    assert answer["status"] == "completed" and answer["metadata"] == {"a": "b"}
    usage = answer["usage"]
    assert usage["input_tokens"] == len(server.client.submitted[0].prompt)
    assert usage["output_tokens"] + usage["input_tokens"] == usage["total_tokens"]
    ids = [event.token for event in script(THOUGHT)][:-1]
    thought_tokens = usage["output_tokens_details"]["reasoning_tokens"]
    assert 0 < thought_tokens <= len(ids) < usage["output_tokens"]


def test_the_tokens_of_a_thought_are_counted_to_its_mark() -> None:
    for text, wanted in ((THOUGHT + "So.", "I think.\n</think>"), ("I never stop", "I never stop")):
        finish = FinishReason.STOP if "</think>" in text else FinishReason.LENGTH
        answer = ApiClient(text, finish).post(PATH, BODY).json()
        count = len(script(wanted, FinishReason.LENGTH))
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == count
    off = {**BODY, "reasoning": {"effort": "none"}}
    answer = ApiClient("So.").post(PATH, off).json()
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 0


def test_a_stream_adds_up_to_the_whole() -> None:
    server = ApiClient(THOUGHT + "Let me look.\n" + CALL)
    body = {**BODY, "tools": TOOLS, "include": ["message.output_text.logprobs"]}
    whole = server.post(PATH, body).json()
    found = list(events(server.post(PATH, {**body, "stream": True})))
    assert [data["sequence_number"] for _, data in found] == list(range(len(found)))
    assert all(data["type"] == name for name, data in found)
    names = [name.removeprefix("response.") for name, _ in found]
    assert names[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert names[-1] == "completed" and "[DONE]" not in names
    last = found[-1][1]["response"]
    assert [item["type"] for item in last["output"]] == ["reasoning", "message", "function_call"]
    assert last["usage"] == whole["usage"]
    for one, other in zip(last["output"], whole["output"], strict=True):
        same = {"content", "name", "arguments", "type", "status"} & set(one)
        assert {k: one[k] for k in same} == {k: other[k] for k in same}
    deltas: dict[tuple[str, int], str] = {}
    for name, data in found:
        if name.endswith(".delta"):
            key = (name, data["output_index"])
            deltas[key] = deltas.get(key, "") + data["delta"]
    assert deltas == {
        ("response.reasoning_text.delta", 0): "I think.",
        ("response.output_text.delta", 1): "Let me look.",
        ("response.function_call_arguments.delta", 2): '{"city": "Paris"}',
    }
    for name, data in found:
        if name.endswith("_text.done") or name.endswith("arguments.done"):
            key = (name.replace(".done", ".delta"), data["output_index"])
            assert deltas[key] == data.get("text", data.get("arguments"))
    rows = last["output"][1]["content"][0]["logprobs"]
    assert rows and all(row["logprob"] == -0.5 for row in rows)
    sent = [row for name, d in found if name.endswith("output_text.delta") for row in d["logprobs"]]
    assert sent and all(row in rows for row in sent)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "status", "reason"),
    [
        (FinishReason.STOP, "completed", None),
        (FinishReason.LENGTH, "incomplete", {"reason": "max_output_tokens"}),
        (FinishReason.CANCELLED, "incomplete", {"reason": "server_shutdown"}),
    ],
)
def test_why_it_ended(finish: FinishReason, status: str, reason: Any, stream: bool) -> None:
    body = {**BODY, "reasoning": {"effort": "none"}, "stream": stream}
    answer = ApiClient("hello", finish).post(PATH, body)
    end = list(events(answer))[-1][1]["response"] if stream else answer.json()
    assert (end["status"], end["incomplete_details"]) == (status, reason)
    assert end["output"][0]["status"] == status


def test_conversations_continue_from_what_is_kept() -> None:
    server = ApiClient(THOUGHT + "One.")
    first = server.post(PATH, {**BODY, "input": "first", "instructions": "be brief"}).json()
    second = server.post(PATH, {"input": "second", "previous_response_id": first["id"]}).json()
    prompt = server.prompt
    assert re.search("first.*One.*second", prompt, re.DOTALL)
    assert "be brief" not in prompt  # instructions are of one response
    listed = server.get(f"{PATH}/{second['id']}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in listed] == ["message", "reasoning", "message", "message"]
    assert server.get(f"{PATH}/{first['id']}").json() == first
    assert server.get(f"{PATH}/{first['id']}?stream=true").status_code == 400
    own = [{"type": "item_reference", "id": first["output"][1]["id"]}, *USER]
    third = server.post(PATH, {"input": own, "previous_response_id": first["id"]})
    assert third.status_code == 200 and server.prompt.count("One.") == 1
    assert server.get(f"{PATH}/{first['id']}", "DELETE").json()["deleted"] is True
    for path, method in ((f"/{first['id']}", "GET"), ("/resp_x", "DELETE"), ("/x/cancel", "POST")):
        answer = server.get(PATH + path, method)
        assert answer.status_code == 404 and "no response" in answer.json()["error"]["message"]
    again = server.post(PATH, {"input": "x", "previous_response_id": first["id"]})
    assert again.status_code == 404
    unkept = server.post(PATH, {**BODY, "store": False}).json()
    assert server.get(f"{PATH}/{unkept['id']}").status_code == 404


async def _ended(http: httpx.AsyncClient, path: str) -> Any:
    """What runs by itself, once it has ended."""
    async with asyncio.timeout(60):
        while (now := (await http.get(path)).json())["status"] == "in_progress":
            await asyncio.sleep(0.005)
    return now


def _stuck() -> ApiClient:
    """Its last event never comes."""
    server = ApiClient("")
    server.client._script = script("Hello", FinishReason.LENGTH)[:-1]
    return server


def test_what_runs_by_itself_can_be_asked_for_and_cancelled() -> None:
    async def ask(http: httpx.AsyncClient) -> None:
        started = (await http.post(PATH, json={**BODY, "background": True})).json()
        path = f"{PATH}/{started['id']}"
        now = await _ended(http, path)
        assert now["status"] == "completed" and now["output"][-1]["content"][0]["text"] == "Hello"
        assert (await http.post(path + "/cancel")).json() == now

    whole = ApiClient(THOUGHT + "Hello")
    whole.run(ask)
    assert whole.client.cancelled == []

    async def cancel(http: httpx.AsyncClient) -> None:
        started = (await http.post(PATH, json={**BODY, "background": True})).json()
        path = f"{PATH}/{started['id']}"
        await until(lambda: boxes and boxes[0].empty())
        assert (started["status"], started["output"]) == ("in_progress", [])
        again = {"input": "x", "previous_response_id": started["id"]}
        early = await http.post(PATH, json=again)
        assert early.status_code == 400 and "has not ended" in early.json()["error"]["message"]
        ended = (await http.post(path + "/cancel")).json()
        assert ended["status"] == "cancelled" == (await http.get(path)).json()["status"]
        assert ended["output"][0]["content"][0]["text"].startswith("Hel")
        assert stuck.client.cancelled

    stuck = _stuck()
    boxes, submit = [], stuck.client.submit

    def noted(requests: Any, box: Any, slots: int) -> list[int]:
        boxes.append(box)
        return submit(requests, box, slots)

    stuck.client.submit = noted  # type: ignore[method-assign]
    stuck.run(cancel)


def test_a_client_that_leaves_ends_its_response() -> None:
    server, stored = _stuck(), list[str]()
    put = server.service.responses.put

    def noted(response: Any, *others: Any) -> Any:
        stored.append(response["id"])
        return put(response, *others)

    server.service.responses.put = noted  # type: ignore[method-assign]

    async def leave(http: httpx.AsyncClient) -> Any:
        asking = asyncio.ensure_future(http.post(PATH, json=BODY))
        await until(lambda: stored)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return (await http.get(f"{PATH}/{stored[0]}")).json()

    assert server.run(leave)["status"] == "cancelled" and server.client.cancelled == [0]


def test_what_is_stored_is_listed_in_pages() -> None:
    server = ApiClient("Hello")
    items = [{"role": "user", "content": str(i), "junk": "j" * 1000} for i in range(30)]
    path = f"{PATH}/{server.post(PATH, {'input': items}).json()['id']}/input_items"
    first = server.get(path).json()
    assert [item["content"] for item in first["data"]] == [str(i) for i in range(29, 9, -1)]
    assert first["has_more"] and "junk" not in first["data"][0]
    rest = server.get(f"{path}?after={first['last_id']}").json()
    assert [item["content"] for item in rest["data"]] == [str(i) for i in range(9, -1, -1)]
    for query in ("limit=0", "limit=101", "limit=x", "limit=" + "1" * 5000, "order=up", "after=x"):
        answer = server.get(f"{path}?{query}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == query.partition("=")[0]


def test_what_is_long_is_not_repeated() -> None:
    found = ApiClient("Hello").post(PATH, {**BODY, "metadata": {"a": "x" * MOST_REPEATED}}).json()
    assert found["metadata"] == {} and found["instructions"] is None


def test_too_much_that_runs_and_is_stored_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ApiClient("Hello")
    monkeypatch.setattr(stored_responses, "MOST_RUNNING_BYTES", 10)
    answer = server.post(PATH, BODY)
    assert answer.status_code == 503 and "store: false" in answer.json()["error"]["message"]
    assert server.post(PATH, {**BODY, "store": False}).status_code == 200


def test_failures_are_said_and_kept() -> None:
    server = ApiClient("x")
    server.client._script = failing_script()
    assert server.post(PATH, BODY).status_code == 500
    found = list(events(server.post(PATH, {**BODY, "stream": True})))
    (_, error), (name, failed) = found[-2:]
    assert error["type"] == "error" and error["message"] == "nan"
    assert name == "response.failed" and failed["response"]["status"] == "failed"
    kept = server.get(f"{PATH}/{failed['response']['id']}").json()
    assert kept["error"]["message"] == "nan"


def test_a_bug_in_the_background_is_logged_and_not_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("an inner matter")

    monkeypatch.setattr(Blocks, "push", broken)

    async def ask(http: httpx.AsyncClient) -> Any:
        ident = (await http.post(PATH, json={**BODY, "background": True})).json()["id"]
        return await _ended(http, f"{PATH}/{ident}")

    found = ApiClient("Hello").run(ask)
    assert (found["status"], found["error"]["message"]) == ("failed", "internal error: ValueError")
    assert any(record.exc_info for record in caplog.records)


def test_what_is_kept_is_its_keys_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text('[[key]]\nname = "ann"\nkey = "a"\n[[key]]\nname = "bob"\nkey = "b"\n')
    server = ApiClient("Hello", keys=Keyring(path))
    ann, bob = ({"authorization": f"Bearer {key}"} for key in "ab")
    ident = server.post(PATH, BODY, **ann).json()["id"]
    for method, end in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
        refused = server.get(f"{PATH}/{ident}{end}", method, **bob)
        assert refused.status_code == 404 and ident in refused.json()["error"]["message"]
    more = {**BODY, "previous_response_id": ident}
    assert server.post(PATH, more, **bob).status_code == 404
    assert server.post(PATH, more, **ann).status_code == 200
    assert server.get(f"{PATH}/{ident}", **ann).json()["id"] == ident


def test_a_response_that_cannot_be_kept_leaves_nothing_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = ApiClient("Hello")
    monkeypatch.setattr(server.service.responses, "put", lambda *_: 1 / 0)
    assert server.post(PATH, BODY).status_code == 500
    assert server.client.cancelled == [0]


def test_a_response_that_is_gone_on_from_is_read_by_the_pool() -> None:
    """The event loop knows the id alone, and hands its bytes on."""
    server = ApiClient("Hello")
    first = server.post(PATH, BODY).json()["id"]
    jobs = server.service._pool.jobs  # type: ignore[attr-defined]
    jobs.clear()
    assert server.post(PATH, {**BODY, "previous_response_id": first}).status_code == 200
    assert jobs == [JobKind.RESPONSES] * 2  # the first asked for the response


def test_the_real_client_reads_it() -> None:
    server = ApiClient(THOUGHT + "Let me look.\n" + CALL)
    kwargs: Any = {**BODY, "tools": TOOLS}

    async def ask(http: httpx.AsyncClient) -> Any:
        client = openai.AsyncOpenAI(api_key="k", base_url="http://x/v1", http_client=http)
        whole = await client.responses.create(**kwargs)
        async with client.responses.stream(**kwargs) as stream:
            streamed = await stream.get_final_response()
        got = await client.responses.retrieve(streamed.id)
        items = await client.responses.input_items.list(streamed.id)
        await client.responses.delete(streamed.id)
        return whole, streamed, got, items

    try:
        whole, streamed, got, items = server.run(ask)
    except TypeError:  # a client on httpx's successor
        import httpx2

        async def alone() -> Any:
            return await ask(httpx2.AsyncClient(transport=httpx2.ASGITransport(server.app)))

        whole, streamed, got, items = asyncio.run(alone())
    assert whole.output_text == streamed.output_text == got.output_text == "Let me look."
    assert [item.type for item in got.output] == ["reasoning", "message", "function_call"]
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    assert len(items.data) == 1
