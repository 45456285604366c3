"""Log-probabilities of a prompt's own tokens, in each form in which clients ask for them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spark_engine.runtime.engine.request import Event, FinishReason, Request
from spark_engine.runtime.server.engine_client.client import Mailbox
from spark_engine.runtime.server.operation.http_request import HttpRequest
from spark_engine.runtime.server.operation.keys import Keyring
from tests.loop_watch import LIMIT_S, watched
from tests.runtime.fake_client import FakeClient
from tests.runtime.server.api.api_client import TEXT, ApiClient, events, tokenizer
from tests.runtime.server.operation.test_metrics import samples

PROMPT = "a small bear (xyz) went"


def _chance(token: int) -> float:
    return -token / 1000


class Scoring(FakeClient):
    """The prompt's forced tokens, then `answer` again and again; two tokens a round. The best of
    each place are the neighbours, then the token itself."""

    answer = (65, 66)

    def submit(self, requests: Sequence[Request], box: Mailbox, slots: int) -> list[int]:
        first = len(self.submitted)
        self.submitted += requests
        for number, request in enumerate(requests, first):
            bound, most = request.constraint, request.params.max_tokens or 0
            ids = [*(bound.forced if bound else ()), *self.answer * most][:most]
            made = [self._event(number, i, request.params.logprobs or 0) for i in ids]
            made[-1] = made[-1]._replace(finish=FinishReason.LENGTH)
            for at in range(0, len(made), 2):
                box.put_nowait(made[at : at + 2])
        return list(range(first, len(self.submitted)))

    def _event(self, number: int, token: int, k: int) -> Event:
        top = tuple((token + i, _chance(token + i)) for i in (1, 2, 0))[:k]
        return Event(number, token, _chance(token), top)


class ByTurns(Scoring):
    """Two tokens in each turn of the event loop."""

    def submit(self, requests: Sequence[Request], box: Mailbox, slots: int) -> list[int]:
        made: Mailbox = asyncio.Queue()
        self.feeding = asyncio.create_task(self._feed(made, box))
        return super().submit(requests, made, slots)

    async def _feed(self, made: Mailbox, box: Mailbox) -> None:
        while not made.empty():
            box.put_nowait(made.get_nowait())
            await asyncio.sleep(0)


def _client(kind: type[Scoring] = Scoring, **options: Any) -> ApiClient:
    server = ApiClient("x", **options)
    server.client = server.service.client = kind()  # type: ignore[assignment]
    return server


def _words(ids: Sequence[int]) -> list[str]:
    return [tokenizer().token_bytes(i).decode(errors="replace") for i in ids]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("most", [0, 1, 3])
def test_an_echo_has_the_log_probabilities_of_the_prompt(stream: bool, most: int) -> None:
    ids = tokenizer().encode(PROMPT)
    server = _client()
    body = {"prompt": PROMPT, "echo": True, "logprobs": 2, "max_tokens": most, "stream": stream}
    body["stream_options"] = {"include_usage": True} if stream else None
    answer = server.post(TEXT, body)
    (request,) = server.client.submitted
    assert [*request.prompt] == ids[:1] and request.constraint is not None
    assert request.constraint.forced == tuple(ids[1:])
    assert request.params.max_tokens == len(ids) - 1 + most
    chunks = [data for _, data in events(answer)][:-1] if stream else [answer.json()]
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    rows = [c["logprobs"] for c in choices if c.get("logprobs")]
    found = {key: sum((row[key] for row in rows), []) for key in rows[0]}
    whole = [*ids, *(65, 66, 65)[:most]]
    words = _words(whole)
    assert found["tokens"] == words
    assert found["token_logprobs"] == [None, *map(_chance, whole[1:])]
    assert found["top_logprobs"][0] is None and all(len(t) == 2 for t in found["top_logprobs"][1:])
    assert found["text_offset"] == [sum(map(len, words[:i])) for i in range(len(words))]
    assert "".join(c["text"] for c in choices) == PROMPT + "".join(words[len(ids) :])
    usage = chunks[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), most)


def test_many_choices_and_prompts_are_scored_each() -> None:
    server = _client()
    prompts = ["a bear", "the fish was"]
    body = {"prompt": prompts, "n": 2, "echo": True, "logprobs": 0, "max_tokens": 1}
    choices = server.post(TEXT, body).json()["choices"]
    for i, choice in enumerate(choices):
        words = _words(tokenizer().encode(prompts[i // 2]))
        assert choice["logprobs"]["tokens"] == [*words, "b"]
        assert choice["text"] == prompts[i // 2] + "b"
        assert all(t == {} for t in choice["logprobs"]["top_logprobs"][1:])


def test_prompt_logprobs_come_with_the_answers() -> None:
    ids = tokenizer().encode(PROMPT)
    body: dict[str, Any] = {"prompt": PROMPT, "prompt_logprobs": 1, "max_tokens": 2}
    choice = _client().post(TEXT, body).json()["choices"][0]
    rows = choice["prompt_logprobs"]
    assert choice["logprobs"] is None and choice["text"] == "bc"
    assert rows[0] is None and len(rows) == len(ids)
    for token, row in zip(ids[1:], rows[1:], strict=True):
        assert row[str(token)]["logprob"] == _chance(token) and row[str(token)]["rank"] is None
        best = {"logprob": _chance(token + 1), "rank": 1}
        assert {k: row[str(token + 1)][k] for k in best} == best and len(row) == 2
    both = {**body, "prompt_logprobs": 3, "logprobs": 1}
    choice = _client().post(TEXT, both).json()["choices"][0]
    assert all(len(row) == 3 for row in choice["prompt_logprobs"][1:])
    assert all(len(row) == 1 for row in choice["logprobs"]["top_logprobs"])
    server = _client()
    chat = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0, "max_tokens": 2}
    answer = server.post("/v1/chat/completions", chat).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert all(len(row) == 1 for row in answer["prompt_logprobs"][1:])
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_alone(stream: bool) -> None:
    answer = _client().post(
        TEXT, {"prompt": PROMPT, "echo": True, "max_tokens": 0, "stream": stream}
    )
    assert answer.status_code == 200 and PROMPT in answer.text
    if not stream:
        (choice,) = answer.json()["choices"]
        assert (choice["text"], choice["logprobs"]) == (PROMPT, None)
        assert answer.json()["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_of_one_token_has_nothing_to_score(stream: bool) -> None:
    ids = tokenizer().encode("a bear")
    body = {"prompt": [ids[:1], ids], "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = _client().post(TEXT, {**body, "stream": stream})
    assert answer.status_code == 200
    if not stream:
        one, whole = answer.json()["choices"]
        assert (one["text"], one["logprobs"]["tokens"]) == (_words(ids)[0], _words(ids[:1]))
        assert one["logprobs"]["token_logprobs"] == one["logprobs"]["top_logprobs"] == [None]
        assert whole["logprobs"]["tokens"] == _words(ids)
        assert answer.json()["usage"]["completion_tokens"] == 0
    answer = _client().post(TEXT, {"prompt": ids[:1], "max_tokens": 0, "prompt_logprobs": 1})
    assert answer.json()["choices"][0]["prompt_logprobs"] == [None]


def test_the_scores_of_a_long_prompt_do_not_hold_the_event_loop() -> None:
    body = {"prompt": [70] * 12_000, "echo": True, "logprobs": 20, "prompt_logprobs": 20}
    server = _client(ByTurns, context=16_384)
    with watched() as longest:
        choice = server.post(TEXT, {**body, "max_tokens": 1}).json()["choices"][0]
    assert len(choice["prompt_logprobs"]) == len(choice["logprobs"]["tokens"]) - 1 == 12_000
    assert longest.seconds < LIMIT_S, longest


def test_a_scored_prompt_counts_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text('[[key]]\nname = "ann"\nkey = "a"\ntokens_per_minute = 1000\n')
    requests: list[HttpRequest] = []
    keys = Keyring(path, clock=lambda: 0.0)  # nothing is refilled
    server = _client(keys=keys, listeners=[requests.append])
    ids = tokenizer().encode(PROMPT)
    body = {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 2, "n": 2}
    answer = server.post(TEXT, {**body, "return_token_ids": True}, authorization="Bearer a")
    assert answer.json()["choices"][1]["prompt_token_ids"] == ids
    (request,) = requests
    assert request.use is not None and request.use.prompt == len(ids)
    found = samples(server.service.metrics)
    assert found["spark:key_tokens_total{key=ann,kind=prompt}"] == len(ids)
    (asked,) = (v for k, v in found.items() if k.startswith("vllm:request_params_max_tokens_sum"))
    assert asked == 2
    left = keys.accounts["ann"].tokens
    assert left is not None and left.level == 1000 - len(ids) - 2 * 2


def test_stop_ids_of_the_prompt_end_nothing() -> None:
    """The engine says so too; here they must not be taken for the answer's end."""
    ids = tokenizer().encode(PROMPT)
    body = {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 2}
    answer = _client().post(TEXT, {**body, "stop_token_ids": ids[1:2], "stop": "xyz"}).json()
    choice = answer["choices"][0]
    assert choice["text"] == PROMPT + "bc" and choice["finish_reason"] == "length"
