"""What is refused early, what runs outside the event loop, what is counted."""

import asyncio
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from spark_engine.runtime.engine.request import Event, FinishReason
from spark_engine.runtime.server.api.fields import BadField
from spark_engine.runtime.server.engine_client.client import Busy
from spark_engine.runtime.server.http.endpoints import Endpoints
from spark_engine.runtime.server.prompts.contract import Blobs, JobKind
from spark_engine.runtime.server.replies import chat, completions
from spark_engine.runtime.server.service import service as module
from spark_engine.runtime.server.service.generation import TimedOut
from spark_engine.runtime.server.service.service import ReadingFailed
from spark_engine.runtime.text.chat import ChatTemplate
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.patient import until
from tests.runtime import small_tokenizer
from tests.runtime.fake_client import FakeClient, Inline, Served, inline, service
from tests.runtime.server.api.api_client import USER

TEMPLATE = ChatTemplate(small_tokenizer.TEMPLATE)
ANSWER = (Event(0, 40), Event(0, 41, finish=FinishReason.LENGTH))


class Counting(Tokenizer):
    """Remembers how long the texts were."""

    lengths: list[int]

    def encode(self, text: str) -> list[int]:
        self.lengths.append(len(text))
        return super().encode(text)


class Gated:
    """A pool that takes until `gate` is set over each job."""

    def __init__(self, inner: Inline) -> None:
        self.inner, self.gate, self.taken = inner, asyncio.Event(), 0
        self.owners: list[str] = []

    async def run(
        self, kind: JobKind, blobs: Sequence[Blobs], owner: str = "", fetched: Any = ()
    ) -> Any:
        self.taken += 1
        self.owners.append(owner)
        await self.gate.wait()
        return await self.inner.run(kind, blobs, owner)

    def refuse_one(self, owner: str) -> bool:
        return False

    def unhealthy_reason(self) -> str | None:
        return "stuck"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Counting:
    found = Counting.load(small_tokenizer.write(tmp_path))
    assert isinstance(found, Counting)
    found.lengths = []
    return found


def _gated(client: FakeClient, tokenizer: Tokenizer, **options: Any) -> tuple[Served, Gated]:
    pool = Gated(inline(client, service(client, tokenizer).info, tokenizer, TEMPLATE))
    return service(client, tokenizer, template=TEMPLATE, pool=pool, **options), pool


def _body(**fields: Any) -> bytes:
    return json.dumps({"max_tokens": 2, **fields}).encode()


async def test_a_priority_needs_the_servers_leave(tokenizer: Counting) -> None:
    async def ask(allowed: bool, priority: int) -> int:
        client = FakeClient()
        taken = service(client, tokenizer, allow_priority=allowed)
        await taken.complete(_body(prompt="a", priority=priority))
        return client.submitted[0].priority

    assert await ask(False, 0) == 0
    for priority in (7, -7, 2**31 - 1):
        assert await ask(True, priority) == priority
        with pytest.raises(BadField, match=f"priority is {priority};.*--allow-priority") as caught:
            await ask(False, priority)
        assert caught.value.param == "priority"
    for priority, allowed in itertools.product((10**20 - 1, -(10**20), 2**31), (False, True)):
        with pytest.raises(BadField, match=f"priority is {priority}; it must be from"):
            await ask(allowed, priority)


@pytest.mark.parametrize(("count", "n"), [(200_000, 512), (513, 1), (9, 1), (5, 2)])
async def test_too_many_answers_are_refused_before_a_prompt_is_read(
    tokenizer: Counting, count: int, n: int
) -> None:
    """More than ever fit: a 503 with `retry` would never come true."""
    words = f"{count} prompts with n = {n} are {count * n} answers; at most 8"
    with pytest.raises(BadField, match=words):
        await service(FakeClient(), tokenizer).complete(_body(prompt=["a"] * count, n=n))
    assert tokenizer.lengths == []


async def test_as_many_answers_as_may_be_are_taken(tokenizer: Counting) -> None:
    client = FakeClient()
    client.max_queue = 508  # and four slots
    await service(client, tokenizer).complete(_body(prompt=["a"] * 256, n=2, seed=5))
    assert len(client.submitted) == 512 and len(tokenizer.lengths) == 256
    assert [r.params.seed for r in client.submitted[:4]] == [5, 6, 5, 6]
    assert client.submitted[0].prompt is client.submitted[1].prompt  # n choices share it


async def test_a_text_that_is_only_counted_is_bounded_too(tokenizer: Counting) -> None:
    with pytest.raises(BadField, match="at most 4194304 are tokenised"):
        await service(FakeClient(), tokenizer).tokenize(_body(prompt="a" * (4 * 2**20 + 1)))
    assert tokenizer.lengths == []


async def test_a_prompt_that_cannot_fit_is_refused_unread(tokenizer: Counting) -> None:
    served = service(FakeClient(), tokenizer, template=TEMPLATE)
    longest = max(len(tokenizer.token_bytes(i)) for i in range(len(tokenizer)))
    surely = 64 * longest * 4 + 1  # bytes; NFC may make one of four
    for text in ("a" * surely, "é" * (surely // 2 + 1), "\ud800" * surely):
        data = json.dumps({"prompt": text}, ensure_ascii=False).encode(errors="surrogatepass")
        with pytest.raises(BadField) as caught:
            await served.complete(data)
        assert text[0] == "\ud800" or caught.value.code == "context_length_exceeded"
    with pytest.raises(BadField, match="bytes.* maximum context length is 64 tokens"):
        await served.chat(_body(messages=[{"role": "user", "content": "a" * surely}]))
    with pytest.raises(BadField, match="too long: 65 messages; .* length is 64 tokens"):
        await served.chat(_body(messages=USER * 65))
    assert tokenizer.lengths == []
    with pytest.raises(BadField, match=r"first 512 of 2000 characters .* over 64 tokens"):
        await served.complete(_body(prompt="a.b!" * 500))
    assert tokenizer.lengths == [512]  # the head alone
    with pytest.raises(BadField, match="too long: .* tokens > 63 maximum"):
        await served.complete(_body(prompt="a.b!" * 50))


async def test_the_time_of_a_request_counts_its_tokenising(tokenizer: Counting) -> None:
    client = FakeClient(ANSWER)
    served, pool = _gated(client, tokenizer, timeout_s=0.05)
    for start, body in (
        (served.complete, _body(prompt="a")),
        (served.chat, _body(messages=USER)),
        (served.tokenize, _body(prompt="a")),
    ):
        with pytest.raises(TimedOut, match="more than 0.05 s; send a shorter prompt or"):
            await asyncio.wait_for(start(body), 60)  # or it would hang
    assert client.submitted == [] and pool.taken == 3 and served.open == 0


async def test_prompts_that_are_being_read_count_as_waiting(tokenizer: Counting) -> None:
    client = FakeClient(ANSWER)
    served, pool = _gated(client, tokenizer)
    client.in_flight = 6  # of 4 that run and 4 that wait
    jobs = [served.complete(_body(prompt="a")) for _ in range(5)]
    waiting = asyncio.gather(*jobs, return_exceptions=True)
    await until(lambda: pool.taken == 2)
    assert served.open == 6 + 2
    pool.gate.set()
    assert sum(isinstance(answer, Busy) for answer in await waiting) == 3
    assert served.open == 6
    text = served.metrics.render().decode()
    assert 'spark:admission_rejections_total{model_name="fake"} 3.0' in text


async def test_what_needs_no_engine_is_bounded_as_well(tokenizer: Counting) -> None:
    client = FakeClient()
    served, pool = _gated(client, tokenizer)
    jobs = [served.tokenize(_body(prompt="a")) for _ in range(client.max_queue + 2)]
    waiting = asyncio.gather(*jobs, return_exceptions=True)
    await until(lambda: pool.taken == client.max_queue)
    pool.gate.set()
    assert sum(isinstance(answer, Busy) for answer in await waiting) == 2


async def test_a_caller_that_leaves_takes_its_prompt_back(tokenizer: Counting) -> None:
    served, pool = _gated(FakeClient(), tokenizer)
    job = asyncio.ensure_future(served.complete(_body(prompt="a")))
    await until(lambda: pool.taken)
    job.cancel()
    await asyncio.gather(job, return_exceptions=True)
    assert served.open == 0


def test_a_stuck_pool_is_a_reason(tokenizer: Counting) -> None:
    endpoints = Endpoints(_gated(FakeClient(), tokenizer)[0])
    assert endpoints.health().status_code == endpoints.ready().status_code == 503


async def test_a_bug_in_reading_is_reported_as_one(tokenizer: Counting) -> None:
    served = service(FakeClient(), tokenizer, template=TEMPLATE)
    pool = served._pool
    assert isinstance(pool, Inline)
    pool.handler.preparer.check = None  # type: ignore[method-assign,assignment]
    with pytest.raises(ReadingFailed, match="Traceback"):
        await served.complete(_body(prompt="a"))


@pytest.mark.parametrize(
    ("place", "name"),
    [(chat, "ChatFormat"), (completions, "CompletionFormat"), (module, "TextStream")],
)
async def test_a_form_that_raises_leaves_no_request_behind(
    tokenizer: Counting, monkeypatch: pytest.MonkeyPatch, place: Any, name: str
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no form")

    monkeypatch.setattr(place, name, broken)
    client = FakeClient()
    served = service(client, tokenizer, template=TEMPLATE)
    with pytest.raises(RuntimeError, match="no form"):
        if place is chat:
            await served.chat(_body(messages=USER, n=2))
        await served.complete(_body(prompt="a", n=2))
    assert client.submitted == []


async def _usage(client: FakeClient, tokenizer: Tokenizer, **fields: Any) -> Any:
    reply = await service(client, tokenizer).complete(_body(**fields))
    return (await reply.whole())["usage"]


async def test_the_tokens_of_a_prompt_count_once(tokenizer: Counting) -> None:
    length, count = len(tokenizer.encode("a bear")), len(tokenizer.encode("a"))
    none: Any = {"prompt_tokens": length, "prompt_tokens_details": {"cached_tokens": 0}}
    for n in (1, 3):  # no word of drafts: it makes none
        usage = await _usage(FakeClient(ANSWER), tokenizer, prompt="a bear", n=n)
        assert usage == {**none, "completion_tokens": 2 * n, "total_tokens": length + 2 * n}
    two = await _usage(FakeClient(ANSWER), tokenizer, prompt=["a bear", "a"], n=2)
    assert two["prompt_tokens"] == length + count


async def test_every_request_tells_where_its_turns_begin(tokenizer: Counting) -> None:
    client = FakeClient()
    served = service(client, tokenizer, template=TEMPLATE)
    messages = [{"role": "system", "content": "a"}, *USER]
    await served.chat(_body(messages=messages, n=2))
    await served.complete(_body(prompt=TEMPLATE.render(messages)))
    await served.complete(_body(prompt=list(client.submitted[0].prompt)))
    await served.complete(_body(prompt="a bear"))
    await service(client, None).complete(_body(prompt=[3, 4]))
    first, second = client.submitted[0].marks
    assert tokenizer.decode(client.submitted[0].prompt[first:second]) == "user\nhi\n"
    marks = [request.marks for request in client.submitted]
    assert marks == [(first, second)] * 4 + [()] * 2


class Forked(FakeClient):
    """The i-th request has i + 1 cached tokens, reported with its first token."""

    def submit(self, requests: Any, box: Any, slots: int) -> list[int]:
        first = len(self.submitted)
        self.submitted += requests
        for number in range(first, len(self.submitted)):
            box.put_nowait([Event(number, 40, cached=number + 1)])
            box.put_nowait([Event(number, 41, finish=FinishReason.LENGTH)])
        return list(range(first, len(self.submitted)))


@pytest.mark.parametrize(
    ("prompt", "n", "cached"),
    [
        ("a bear", 1, 1),
        ("a bear", 3, 1),
        (["a bear", "a bear"], 3, 1 + 4),
        (["a", "a", "a"], 1, 1 + 2 + 3),
    ],
)
async def test_cached_tokens_count_once_a_prompt(
    tokenizer: Counting, prompt: Any, n: int, cached: int
) -> None:
    """Those of the first choice: the others find its pages."""
    usage = await _usage(Forked(), tokenizer, prompt=prompt, n=n)
    assert usage["prompt_tokens_details"] == {"cached_tokens": cached}
