"""A request leaves nothing in the engine, however it ends."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from spark_engine.runtime.engine.masks import _too_long
from spark_engine.runtime.engine.request import Event, FinishReason, Request, SamplingParams
from spark_engine.runtime.server.engine_client.client import EngineClient, Mailbox, Started
from spark_engine.runtime.server.operation.engine_metrics import EngineCollector
from spark_engine.runtime.server.operation.metrics import Metrics
from spark_engine.runtime.server.replies.errors import error_response
from spark_engine.runtime.server.service import generation
from spark_engine.runtime.server.service.generation import (
    CompletionChoice,
    Deadline,
    Generation,
    GenerationFailed,
    QueuedTooLong,
    TimedOut,
)
from spark_engine.runtime.text.text_stream import TextStream
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.clocks import leap
from tests.runtime.fake_client import FakeClient


def _generation(
    client: Any,
    deadline: Deadline,
    tokenizer: Tokenizer | None = None,
    stop: str = "",
    count: int = 1,
) -> Generation:
    params = SamplingParams(stop=(stop,) if stop else ())
    choices = [
        CompletionChoice(Request((1,), params), TextStream(tokenizer, params, (1,)))
        for _ in range(count)
    ]
    return Generation(
        client, Metrics(EngineCollector("m", lambda: (client.stats, 0.0))), choices, 4, deadline
    )


def _run(client: Any, tokenizer: Tokenizer, stop: str, count: int = 1) -> list[str]:
    """The pieces' texts of `count` choices that end before `stop`."""

    async def pieces() -> list[str]:
        made = _generation(client, Deadline(None), tokenizer, stop, count)
        return [piece.text async for _, piece in made.pieces()]

    return asyncio.run(pieces())


def test_a_stop_string_cancels_in_the_engine(tokenizer: Tokenizer) -> None:
    client = FakeClient([Event(0, i) for i in tokenizer.encode("ab.cd")])
    assert "".join(_run(client, tokenizer, ".", 2)) == "abab"
    assert sorted(client.cancelled) == [0, 1]


def test_what_ended_by_itself_is_not_cancelled(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab")
    events = [Event(0, i) for i in ids[:-1]] + [Event(0, ids[-1], finish=FinishReason.LENGTH)]
    client = FakeClient(events)
    assert "".join(_run(client, tokenizer, ".")) == "ab"
    assert client.cancelled == []


def test_one_choice_that_fails_cancels_the_others(tokenizer: Tokenizer) -> None:
    client = FakeClient([Event(0, finish=FinishReason.ERROR, message="not finite")])
    with pytest.raises(GenerationFailed, match="not finite"):
        _run(client, tokenizer, ".", 3)
    assert client.cancelled == [0, 1, 2]


def test_a_grammar_that_is_too_slow_is_no_error_of_the_server(tokenizer: Tokenizer) -> None:
    client = FakeClient([Event(0, finish=FinishReason.ERROR, message=_too_long(10.0))])
    with pytest.raises(GenerationFailed, match="longer than 10 s .*: send a smaller one") as found:
        _run(client, tokenizer, ".")
    status, body = error_response(found.value)
    assert (status, body["error"]["code"]) == (503, "grammar_too_slow")


@pytest.mark.usefixtures("_clock")
def test_the_deadline_is_the_requests_and_not_each_tokens() -> None:
    class Slow(FakeClient):
        def submit(self, requests: Sequence[Request], box: Mailbox, slots: int) -> list[int]:
            for i in range(20):
                later = asyncio.get_running_loop().call_later
                later(0.05 * i, box.put_nowait, [Event(0, 40)])
            return [0]

    async def count() -> int:
        client, came = Slow(), 0
        with pytest.raises(TimedOut, match=r"more than 0\.22 s"):
            async for _ in _generation(client, Deadline(0.22)).pieces():
                came += 1
        assert client.cancelled == [0]
        return came

    assert leap(count()) == 5


@pytest.fixture
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        generation, "time", SimpleNamespace(monotonic=lambda: asyncio.get_running_loop().time())
    )


class Queued(FakeClient):
    """Starts a request after 0.1 s, and sends its token 0.3 s later."""

    def submit(self, requests: Sequence[Request], box: Mailbox, slots: int) -> list[int]:
        later = asyncio.get_running_loop().call_later
        later(0.1, box.put_nowait, Started(0, 0.0))
        later(0.4, box.put_nowait, [Event(0, 40, finish=FinishReason.LENGTH)])
        return [0]


async def _wait_in_queue(timeout_s: float | None, queue_s: float | None) -> tuple[int, list[int]]:
    client = Queued()
    came = [p async for p in _generation(client, Deadline(timeout_s, queue_s)).pieces()]
    return len(came), client.cancelled


@pytest.mark.usefixtures("_clock")
def test_the_queues_time_ends_when_the_engine_begins() -> None:
    assert leap(_wait_in_queue(None, 0.25)) == (1, [])
    with pytest.raises(QueuedTooLong, match=r"more than 0\.05 s in the queue; retry"):
        leap(_wait_in_queue(None, 0.05))
    with pytest.raises(QueuedTooLong):
        leap(_wait_in_queue(0.3, 0.05))
    with pytest.raises(TimedOut):
        leap(_wait_in_queue(0.05, 0.25))
    with pytest.raises(TimedOut):
        leap(_wait_in_queue(0.3, 0.25))


async def test_a_request_that_cannot_be_sent_leaves_nothing() -> None:
    client = EngineClient(())
    requests = [Request((1,)), Request((1,), priority=10**20 - 1)]
    with pytest.raises(OverflowError):
        client.submit(requests, asyncio.Queue(), 4)
    assert client.in_flight == 0
    await client.close()
