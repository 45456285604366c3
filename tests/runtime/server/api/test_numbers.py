"""No number in a body, however large, is a server's error, or goes where it does not fit."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from spark_engine.runtime.server.api.chat import ChatBody
from spark_engine.runtime.server.api.completions import CompletionBody, DetokenizeBody
from spark_engine.runtime.server.api.messages import CountBody, MessagesBody
from spark_engine.runtime.server.api.responses import ResponsesBody
from spark_engine.runtime.server.engine_client.ipc import Submit
from tests.runtime.server.api.api_client import USER, ApiClient

HUGE, LONGEST = "9" * 400, "9" * 5000
# as JSON: some are no number that Python's own reader would make
VALUES = (
    *(str(sign * size) for size in (2**31, 2**63, 2**64) for sign in (1, -1)),
    *(HUGE, f"-{HUGE}", LONGEST, f"-{LONGEST}", "1e308", "-1e308", "1e400", "0.5", "-1", "NaN"),
    *('"NaN"', '"Infinity"', f'"{2**64}"', "true"),
)
BODIES: dict[type, tuple[str, dict[str, Any]]] = {
    ChatBody: ("/v1/chat/completions", {"messages": USER}),
    CompletionBody: ("/v1/completions", {"prompt": "a bear"}),
    ResponsesBody: ("/v1/responses", {"input": "hi"}),
    MessagesBody: ("/v1/messages", {"messages": USER}),
    CountBody: ("/v1/messages/count_tokens", {"messages": USER}),
    DetokenizeBody: ("/detokenize", {"tokens": [5]}),
}
# numbers within other fields; @ is where one is put
INSIDE: list[tuple[type, str]] = [
    (ChatBody, '{"thinking": {"type": "enabled", "budget_tokens": @}}'),
    (ChatBody, '{"reasoning": {"max_tokens": @}}'),
    (ChatBody, '{"chat_template_kwargs": {"thinking_budget": @}}'),
    (ChatBody, '{"chat_template_kwargs": {"anything": @}}'),
    (ChatBody, '{"logit_bias": {"5": @}}'),
    (ChatBody, '{"logit_bias": {"@": 1}}'),
    (ChatBody, '{"logprobs": true, "top_logprobs": @}'),
    (ChatBody, '{"tools": [{"type": "function", "function": {"name": "f", "n": @}}]}'),
    (CompletionBody, '{"prompt": [5, @]}'),
    (CompletionBody, '{"prompt": [[@], [5]]}'),
    (CompletionBody, '{"prompt": [@], "echo": true}'),
    (CompletionBody, '{"prompt": [@], "logprobs": 1, "echo": true, "max_tokens": 0}'),
    (MessagesBody, '{"thinking": {"type": "enabled", "budget_tokens": @}}'),
    (MessagesBody, '{"context_management": {"edits": [{"keep": @}]}}'),
    (CountBody, '{"thinking": {"type": "enabled", "budget_tokens": @}}'),
    (ResponsesBody, '{"reasoning": {"max_tokens": @}}'),
    (ResponsesBody, '{"context_management": [{"compact_threshold": @}]}'),
    (ResponsesBody, '{"input": [{"type": "function_call_output", "output": @}]}'),
]


def _numbers() -> Iterator[tuple[type, str]]:
    """Every field that may hold a number, or a list of them."""
    for kind in BODIES:
        for row in msgspec.structs.fields(kind):
            shape = str(row.type)
            if "int" in shape or "float" in shape:
                inner = "[@]" if "list[int]" in shape else "@"
                yield kind, f'{{"{row.name}": {inner}}}'
    yield from INSIDE


@pytest.mark.parametrize("kind", BODIES)
def test_no_number_is_a_servers_error(kind: type) -> None:
    path, base = BODIES[kind]
    fields = [text for owner, text in _numbers() if owner is kind]
    assert fields
    server, inside = ApiClient("Hello", context=512), {text for _, text in INSIDE}

    async def ask(http: httpx.AsyncClient) -> None:
        for text in fields:
            for value in VALUES:
                own = text.replace("@", value.strip('"') if '"@"' in text else value)
                body = json.dumps(base)[:-1] + ", " + own[1:]
                answer = await http.post(path, content=body.encode())
                assert answer.status_code < 500, (own, answer.text)
                if answer.status_code >= 400:
                    said = answer.json()["error"]["message"]
                    huge = value.strip("-") in (HUGE, LONGEST) and text not in inside
                    name = text.split('"')[1]
                    assert name in said.split()[0] if huge else said, own
                    assert len(answer.content) < 1000, own

    server.run(ask)
    for number, request in enumerate(server.client.submitted):
        msgspec.msgpack.encode(Submit.of(number, request))


def test_more_than_fits_is_no_limit() -> None:
    server = ApiClient("Hello", context=512)
    for path, fields in (
        ("/v1/chat/completions", {"max_tokens": 2**70}),
        ("/v1/chat/completions", {"max_completion_tokens": 10**400}),
        ("/v1/chat/completions", {"thinking_budget": 2**64}),
        ("/v1/chat/completions", {"seed": 10**400}),
    ):
        assert server.post(path, {"messages": USER, **fields}).status_code == 200
        request = server.client.submitted[-1]
        assert (request.params.max_tokens or 0) < 512 and request.constraint is None


def test_stop_ids_are_few_and_different() -> None:
    server = ApiClient("Hello", context=512)
    path = "/v1/chat/completions"
    many = {"messages": USER, "stop_token_ids": [5, 6] * 100_000, "n": 2}
    assert server.post(path, many).status_code == 200
    assert {r.params.stop_token_ids for r in server.client.submitted} == {(5, 6)}


def test_a_long_prompt_times_its_choices_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spark_engine.runtime.server.api.common.MOST_SUBMITTED", 64)
    server = ApiClient("Hello", context=512)
    body = {"prompt": [5] * 9}
    assert server.post("/v1/completions", body).status_code == 200
    over = server.post("/v1/completions", {**body, "n": 2})
    assert over.status_code == 400 and "n" == over.json()["error"]["param"]
