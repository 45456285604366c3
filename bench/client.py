"""One client process: sends its share of a load and records the time of every event.

Knows HTTP, server-sent events and OpenAI's bodies; knows no statistics. Times are seconds of
`time.perf_counter`, which on Linux is one clock for all processes.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress

import aiohttp
import msgspec

from spark_engine.bench.load import Content, Json, Load, Script, Turn
from spark_engine.bench.timings import ClientShare, RequestTiming, Server

TICK_S = 0.01  # seconds between checks of the event loop's lateness
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
Next = Callable[[], int]  # the number of the next script that no process has started


class Details(msgspec.Struct):
    """Details of the prompt's tokens."""

    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """Generated tokens so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: Details | None = None


class EventDelta(msgspec.Struct):
    """The delta of a chat's event."""

    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Json] | None = None


class EventChoice(msgspec.Struct):
    text: str | None = None
    delta: EventDelta | None = None
    token_ids: list[int] | None = None


class Chunk(msgspec.Struct):
    choices: list[EventChoice] = []
    usage: Usage | None = None
    error: Json | None = None


_CHUNKS = msgspec.json.Decoder(Chunk)


class LoadConversation:
    """A conversation: its messages so far, and the answer that is being received."""

    def __init__(self, script: Script, url: str) -> None:
        self._url, self._more = url, script.more
        first = script.turns[0].new
        self._chat = not isinstance(first, str) and isinstance(first[0], dict)
        self._ids = not isinstance(first, str) and not self._chat
        self._content: Content = first[:0]
        self._text, self._thought = "", ""
        self._tokens: list[int] = []
        self._calls: list[Json] = []

    @property
    def url(self) -> str:
        """The path of the endpoint; the server's URL may itself have a path."""
        return self._url + (CHAT if self._chat else COMPLETIONS)

    def body(self, turn: Turn, model: str) -> Json:
        """The request of the next turn."""
        self._content = self._content + turn.new  # type: ignore[operator]
        self._text, self._thought, self._tokens, self._calls = "", "", [], []
        stream = {"include_usage": True, "continuous_usage_stats": True}
        return {
            "model": model,
            "messages" if self._chat else "prompt": self._content,
            "max_tokens": turn.most,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": stream,
            **({"return_token_ids": True} if self._ids else {}),
            **self._more,
        }

    def add(self, choice: EventChoice) -> bool:
        """Adds an event's content; returns whether it has any."""
        delta = choice.delta or EventDelta()
        text = choice.text or delta.content or ""
        self._text += text
        self._thought += delta.reasoning_content or ""
        self._calls += delta.tool_calls or []
        self._tokens += choice.token_ids or []
        return bool(text or delta.reasoning_content or delta.tool_calls or choice.token_ids)

    def answered(self, turn: Turn) -> None:
        """Ends the turn: appends the answer, or the answer that the script prescribes, to the
        conversation."""
        answer: Content = self._tokens if self._ids else self._text
        if self._chat:
            message: Json = {"role": "assistant", "content": self._text}
            if self._thought:
                message["reasoning_content"] = self._thought
            if self._calls:
                message["tool_calls"] = self._calls
            answer = [message]
        self._content = self._content + (turn.answer or answer)  # type: ignore[operator]


async def run(server: Server, load: Load, following: Next, width: int, start: float) -> ClientShare:
    """Runs this process's share from `start` on: `width` scripts at a time, or each at its time.

    `following` gives the number of the next script; a number beyond the last ends the work.
    """
    took: list[RequestTiming] = []
    late: list[float] = []
    headers = {} if server.api_key is None else {"Authorization": f"Bearer {server.api_key}"}
    timeout = aiohttp.ClientTimeout(total=None, sock_read=server.timeout_s)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, headers=headers, timeout=timeout
    ) as session:
        await _sleep_until(start)
        ticking = asyncio.create_task(_tick(late))
        started = time.process_time()
        asked = (_ask(session, server, load, following, start, took) for _ in range(width))
        await asyncio.gather(*asked)
        spent = time.process_time() - started
        ticking.cancel()
        with suppress(asyncio.CancelledError):
            await ticking
    return ClientShare(took, spent, late)


async def _ask(
    session: aiohttp.ClientSession,
    server: Server,
    load: Load,
    following: Next,
    start: float,
    took: list[RequestTiming],
) -> None:
    """Runs scripts until none is left. A script with a start time does not wait for others."""
    started: list[asyncio.Task[None]] = []
    while (number := following()) < len(load.scripts):
        script = load.scripts[number]
        if script.at_s is None:
            await _converse(session, server, script, number, time.perf_counter(), took)
        else:
            due = start + script.at_s
            await _sleep_until(due)
            task = _converse(session, server, script, number, due, took)
            started.append(asyncio.create_task(task))
    await asyncio.gather(*started)


async def _converse(
    session: aiohttp.ClientSession,
    server: Server,
    script: Script,
    number: int,
    due: float,
    took: list[RequestTiming],
) -> None:
    chat = LoadConversation(script, server.url)
    for i, turn in enumerate(script.turns):
        if turn.pause_s:
            due = time.perf_counter() + turn.pause_s
            await _sleep_until(due)
        one = RequestTiming(number, i, due)
        took.append(one)
        await _request(session, chat, chat.body(turn, server.model), one)
        if one.error:
            return  # later turns need this answer
        chat.answered(turn)
        due = time.perf_counter()


async def _request(
    session: aiohttp.ClientSession, chat: LoadConversation, body: Json, one: RequestTiming
) -> None:
    data = msgspec.json.encode(body)
    kind = {"Content-Type": "application/json"}
    one.start = time.perf_counter()
    try:
        async with session.post(chat.url, data=data, headers=kind) as answer:
            if answer.status != 200:
                one.error = f"{answer.status}: {(await answer.text())[:300]}"
            else:
                await _listen(answer, chat, one)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        one.error = f"{type(error).__name__}: {error}"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        one.error = f"an event is not OpenAI's: {error}"
    one.end = time.perf_counter()
    if not one.error and not one.times:
        one.error = "the answer has no token"


async def _listen(
    answer: aiohttp.ClientResponse, chat: LoadConversation, one: RequestTiming
) -> None:
    """Reads events to the end. Events of one packet have one time."""
    rest, known, ended = b"", 0, False
    async for data in answer.content.iter_any():
        now = time.perf_counter()
        *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            if not event.startswith(b"data:"):
                continue
            if event[5:].strip() == b"[DONE]":
                ended = True
                continue
            chunk = _CHUNKS.decode(event[5:])
            if chunk.error is not None:
                one.error = str(chunk.error.get("message", chunk.error))[:300]
                return
            known = _take(chunk, chat, one, known, now)
    if not ended:
        one.error = "the stream ended before it was done"


def _take(chunk: Chunk, chat: LoadConversation, one: RequestTiming, known: int, now: float) -> int:
    """Records an event; returns the number of tokens so far."""
    has_text = any([chat.add(choice) for choice in chunk.choices])
    usage = chunk.usage
    if usage is not None:
        one.prompt_tokens = usage.prompt_tokens
        if usage.prompt_tokens_details is not None:
            one.cached_tokens = usage.prompt_tokens_details.cached_tokens
        count = usage.completion_tokens - known
    else:  # a server that counts at the end only: one token per event until then
        count = int(has_text)
    if count > 0 and chunk.choices:
        one.times.append(now)
        one.counts.append(count)
    elif count and one.counts:  # the count at the end may differ from the number of events
        one.counts[-1] = max(0, one.counts[-1] + count)
    return known + count


async def _sleep_until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        await asyncio.sleep(left)


async def _tick(late: list[float]) -> None:
    """How late this process's event loop runs, in seconds."""
    while True:
        due = time.perf_counter() + TICK_S
        await asyncio.sleep(TICK_S)
        late.append(time.perf_counter() - due)
