"""The clients of the soak: what they ask, how they leave, and which answers they accept.

Knows HTTP and the API; knows no process. A session ends with a name that is counted, or with
what was wrong with its end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx

CLIENTS = 64
PATIENCE_S = 110.0  # for a request: longer than the server lets one take
TURNS = 2  # requests of a conversation, one after the other
PAUSE_S = 4.0  # mean time between two sessions of a client
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
WORDS = "once upon a time a small bear went to the river and saw that the fish was gone".split()
BAD: list[tuple[bytes, int]] = [
    (b"{", 400),
    (b"", 400),
    (b'{"prompt": "a", "max_tokens": "many"}', 400),
    (b'{"prompt": "a", "temperature": -1}', 400),
    (b'{"prompt": "a", "n": 100000}', 400),
    (b'{"prompt": [99999999]}', 400),
    (b'{"prompt": "a", "model": "another"}', 404),
    (b"\xff\xfe\x00", 400),
    (json.dumps({"prompt": "a b " * 50_000}).encode(), 400),
]
CLEAR = {"queue_full", "engine_restarting", "engine_error", "timeout", "too_many_connections"}
ALWAYS = {"queue_full", "too_many_connections"}  # clear without any fault
ENDS = {"stop", "length"}


class Wrong(Exception):
    """An end that no client should see."""


class Clients:
    """All clients of the server at `url`, and the counts of how their sessions ended."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._excused = 0.0
        self._open = asyncio.Event()
        self._open.set()
        self._now: dict[int, str] = {}

    def excuse(self, seconds: float) -> None:
        """For so long, from now on, a fault may be what a session ends with."""
        self._excused = time.monotonic() + seconds

    def pause(self) -> None:
        self._open.clear()

    def reopen(self) -> None:
        self._open.set()

    async def gone(self) -> None:
        while self._now:
            await asyncio.sleep(0.05)

    def busy(self) -> dict[int, str]:
        """What each client that is here does."""
        return dict(self._now)

    async def opened(self) -> None:
        """Returns when new sessions may begin."""
        await self._open.wait()

    @contextlib.contextmanager
    def here(self, number: int, what: str) -> Iterator[None]:
        self._now[number] = what
        try:
            yield
        finally:
            self._now.pop(number, None)

    async def live(self, number: int) -> None:
        rng = random.Random(number)
        while True:
            await asyncio.sleep(rng.expovariate(1 / PAUSE_S))
            await self.opened()
            session = rng.choices(SESSIONS, WEIGHTS)[0]
            with self.here(number, session.__name__):
                self.counts[await self._end(session, rng)] += 1

    async def _end(self, session: ClientSession, rng: random.Random) -> str:
        begin = time.monotonic()
        try:
            return await asyncio.wait_for(session(self, rng), TURNS * PATIENCE_S)
        except (TimeoutError, httpx.TimeoutException):
            took = time.monotonic() - begin
            return self.judge(session.__name__, f"no end after {took:.0f} s", begin)
        except (httpx.HTTPError, OSError, Wrong) as error:
            return self.judge(session.__name__, f"{type(error).__name__}: {error}", begin)

    def judge(self, session: str, words: str, begin: float) -> str:
        """The name of an end that is wrong, unless a fault since `begin` excuses it."""
        if begin <= self._excused and "no end" not in words:
            return f"{session}: excused by a fault"
        self.wrong.append(f"{session}: {words[:300]}")
        return f"{session}: WRONG"

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, verify=False, timeout=PATIENCE_S)

    def error(self, answer: httpx.Response) -> str:
        """The name of an error that is clear; raises Wrong for another."""
        try:
            code = str(answer.json()["error"]["code"])
        except (ValueError, KeyError, TypeError):
            raise Wrong(f"{answer.status_code} {answer.text[:200]}") from None
        return self._named(code, answer.text)

    def _named(self, code: str, text: str) -> str:
        if code in ALWAYS or (code in CLEAR and time.monotonic() <= self._excused):
            return code
        raise Wrong(text[:300])

    def end_of(self, lines: list[str]) -> str:
        """How a stream ended, by its events."""
        if not lines or lines[-1] != "data: [DONE]":
            raise Wrong(f"a stream was cut after {lines[-1:]}")
        rows = [json.loads(line[6:]) for line in lines[:-1] if line.startswith("data: ")]
        for row in rows:
            if "error" in row:
                return self._named(str(row["error"]["code"]), str(row))
        ends = [c["finish_reason"] for row in rows for c in row["choices"] if c["finish_reason"]]
        return self._finished(ends)

    def _finished(self, ends: list[str]) -> str:
        if ends and set(ends) <= ENDS:
            return "answered"
        if ends and time.monotonic() <= self._excused and set(ends) <= {*ENDS, "abort"}:
            return "aborted by a drain"
        raise Wrong(f"it ended with {ends}")

    def whole(self, answer: httpx.Response, tokens: int, choices: int) -> str:
        """How an answer in one piece ended."""
        if not answer.is_success:
            return self.error(answer)
        body = answer.json()
        if len(body["choices"]) != choices or body["usage"]["completion_tokens"] > tokens * choices:
            raise Wrong(answer.text[:300])
        return self._finished([c["finish_reason"] for c in body["choices"]])


def _prompt(rng: random.Random, most: int = 60) -> str:
    """Some begin alike, so that the prefix cache has something to do."""
    begin = " ".join(WORDS * rng.choice((0, 0, 6, 12)))
    return begin + " " + " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def _body(rng: random.Random, **more: Any) -> dict[str, Any]:
    body: dict[str, Any] = {"max_tokens": rng.randint(1, 24), "temperature": rng.choice((0, 1))}
    if rng.random() < 0.2:
        body |= {"frequency_penalty": 0.5, "top_k": 20}
    return body | more


async def answer(at: Clients, rng: random.Random) -> str:
    """A completion in one piece, of one choice or more."""
    n = rng.choice((1, 1, 1, 3))
    body = _body(rng, prompt=_prompt(rng), n=n, logprobs=rng.choice((None, 3)))
    async with at.client() as client:
        found = await client.post(TEXT, json=body)
    return f"completion: {at.whole(found, body['max_tokens'], n)}"


async def chat(at: Clients, rng: random.Random) -> str:
    """A conversation of two turns; the second continues the first."""
    messages = [{"role": "user", "content": _prompt(rng, 20)}]
    end = ""
    async with at.client() as client:
        for _ in range(TURNS):
            found = await client.post(CHAT, json=_body(rng, messages=messages))
            end = at.whole(found, 24, 1)
            if end != "answered":
                break
            said = found.json()["choices"][0]["message"]["content"] or ""
            messages += [{"role": "assistant", "content": said}]
            messages += [{"role": "user", "content": _prompt(rng, 5)}]
    return f"chat: {end}"


async def stream(at: Clients, rng: random.Random, leave: int = 0, pause_s: float = 0.0) -> str:
    """A stream; read to its end, or left after so many lines."""
    kind = rng.random() < 0.5
    asked = {"prompt": _prompt(rng)} if kind else {"messages": [{"role": "user", "content": "hi"}]}
    body = _body(rng, stream=True, **asked)
    lines: list[str] = []
    async with at.client() as client, client.stream("POST", TEXT if kind else CHAT, json=body) as s:
        if not s.is_success:
            await s.aread()
            return f"stream: {at.error(s)}"
        async for line in s.aiter_lines():
            if line:
                lines.append(line)
            if leave and len(lines) >= leave:
                return "stream: left in the middle"
            await asyncio.sleep(pause_s)
    return f"stream: {at.end_of(lines)}"


async def leave(at: Clients, rng: random.Random) -> str:
    """A stream that is left in its course."""
    return await stream(at, rng, leave=rng.randint(1, 6))


async def slow(at: Clients, rng: random.Random) -> str:
    return await stream(at, rng, pause_s=0.2)


async def vanish(at: Clients, rng: random.Random) -> str:
    """A socket that goes at some point of its request, or right behind it."""
    data = json.dumps(_body(rng, prompt=_prompt(rng), stream=rng.random() < 0.5)).encode()
    where = urlsplit(at.url)
    head = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
    whole = head + data
    _, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(whole[: rng.choice((0, 10, len(head), len(whole) - 1, len(whole)))])
    with contextlib.suppress(ConnectionError):
        await writer.drain()
        await asyncio.sleep(rng.choice((0, 0.05, 0.5)))
    writer.transport.abort()
    return "vanished"


async def malformed(at: Clients, rng: random.Random) -> str:
    """A body that is wrong; the answer must say so."""
    data, status = rng.choice(BAD)
    async with at.client() as client:
        found = await client.post(TEXT, content=data)
    if found.status_code == 503:
        return f"malformed: {at.error(found)}"
    if found.status_code != status or not found.json()["error"]["message"]:
        raise Wrong(f"{data[:60]!r}: {found.status_code} {found.text[:200]}")
    return "malformed: refused"


async def too_long(at: Clients, rng: random.Random) -> str:
    """A body over the limit, and one just below it with a prompt that does not fit."""
    size = rng.choice((8 << 20, 33 << 20))
    data = b'{"prompt": "' + b"a" * size + b'"}'
    async with at.client() as client:
        found = await client.post(TEXT, content=data)
    if found.status_code == 503:
        return f"too long: {at.error(found)}"
    if found.status_code not in (400, 413):
        raise Wrong(f"{size} bytes: {found.status_code} {found.text[:200]}")
    return "too long: refused"


async def watch(at: Clients, rng: random.Random) -> str:
    async with at.client() as client:
        health, metrics = await client.get("/health"), await client.get("/metrics")
    if not metrics.is_success:
        raise Wrong(f"/metrics: {metrics.status_code}")
    if not health.is_success and time.monotonic() > at._excused:
        raise Wrong(f"/health: {health.text}")
    return "watched"


ClientSession = Callable[[Clients, random.Random], Awaitable[str]]
SESSIONS: list[ClientSession] = [
    *(answer, chat, stream, leave, slow, vanish, malformed, too_long, watch)
]
WEIGHTS = [24, 12, 20, 14, 6, 10, 8, 0.3, 3]
