"""Answers bodies over a `Service`, a bounded number at a time; waits where a server would refuse.

Knows what may be tried again; knows no thread and no file. All methods run in one event loop.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from spark_engine.runtime.engine.request import Event
from spark_engine.runtime.offline.results import (
    Completion,
    CompletionChunk,
    TokenLogprob,
    TokenUsage,
)
from spark_engine.runtime.server.api.answers import FINISH
from spark_engine.runtime.server.engine_client.client import Busy, EngineDied
from spark_engine.runtime.server.prompts.contract import JobKind
from spark_engine.runtime.server.replies.chat import ChatFormat
from spark_engine.runtime.server.service.generation import CompletionChoice, GenerationFailed
from spark_engine.runtime.server.service.service import Service

AHEAD = 2  # requests in flight for each slot, so that the engine never waits for one
PAUSE_S = 0.05  # before a request that found the queue full is tried again
ALONE_S = 60.0  # how long it is tried while no other request is in flight
TRIES = 3  # of a request with which the engine process ended
T = TypeVar("T")
Take = Callable[[CompletionChunk], None]


class Answering:
    def __init__(self, service: Service) -> None:
        self.service = service
        slots = service.info.limits.max_seqs
        self.most = min(AHEAD * slots, slots + service.client.max_queue)  # in flight
        self._free = asyncio.Semaphore(self.most)

    async def patiently(self, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, which is repeated while the queue is full or the engine restarts.

        Raises what it raises otherwise; EngineDied where the engine is not restarted, or has ended
        with this request TRIES times.
        """
        client, ends, since = self.service.client, 0, time.monotonic()
        async with self._free:
            while True:
                try:
                    return await work()
                except Busy:
                    if client.in_flight:
                        since = time.monotonic()
                    elif time.monotonic() - since > ALONE_S:
                        raise
                except EngineDied:
                    ends += 1
                    if ends == TRIES or client.died.is_set():
                        raise
                await asyncio.sleep(PAUSE_S)

    async def answer(self, kind: JobKind, body: bytes, take: Take | None = None) -> Completion:
        """The answer to one body of one choice; `take` gets its parts. Raises RequestError and what
        `patiently` raises; GenerationFailed where the engine ended after a part was taken."""
        return await self.patiently(lambda: self._answer(kind, body, take))

    async def _answer(self, kind: JobKind, body: bytes, take: Take | None) -> Completion:
        service = self.service
        deadline = service.deadline()
        found = await service.prepare(kind, [body], deadline)
        asked, (parser,), (choice,) = found.asked, found.parsers, found.choices
        form = None
        if kind is JobKind.CHAT:
            form = ChatFormat(parser, None, None, asked.shown, custom=asked.custom)
        running = service.submit(found, deadline)
        text, events, last = "", list[Event](), None
        try:
            async for _, piece in running.generation.pieces():
                delta = {"content": piece.text} if form is None else form.push(piece)["delta"]
                new = delta.get("content", "")
                text += new
                events += piece.tokens
                if (reason := piece.finish) is not None:
                    finish = FINISH[reason] if form is None else form.finish(reason)
                    message = None if form is None else form.whole()["message"]
                    last = _completion(choice, text, events, finish, message)
                if take is not None:
                    thought = delta.get("reasoning_content", "")
                    take(CompletionChunk(new, thought, _ids(piece.tokens), last))
        except EngineDied as error:
            if events and take is not None:
                raise GenerationFailed(str(error)) from None
            raise
        finally:
            running.generation.close()
        assert last is not None
        return last


def _completion(
    choice: CompletionChoice, text: str, events: list[Event], finish: str, message: object
) -> Completion:
    logprobs = None
    if choice.request.params.logprobs is not None:
        logprobs = tuple(TokenLogprob(e.token or 0, e.logprob or 0.0, e.top) for e in events)
    counts = TokenUsage(choice.prompt_tokens, len(events), choice.stream.cached)
    fields = dict(message) if isinstance(message, dict) else None
    return Completion(text, _ids(events), finish, counts, logprobs, fields)


def _ids(events: Sequence[Event]) -> tuple[int, ...]:
    return tuple(event.token for event in events if event.token is not None)
