"""Generates all choices of one HTTP request.

Knows the engine client and text streams. Knows no HTTP and no JSON. However the request ends (an
error, a disconnect, a deadline), nothing of it stays in the engine.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from spark_engine.errors import CapacityError, InternalError
from spark_engine.runtime.engine.request import SLOW_GRAMMAR, FinishReason, Request
from spark_engine.runtime.engine.trace import REQUESTS
from spark_engine.runtime.server.engine_client.client import (
    Answer,
    Busy,
    EngineClient,
    Mailbox,
    Started,
)
from spark_engine.runtime.server.operation.http_request import EngineUse, current
from spark_engine.runtime.server.operation.metrics import Metrics, Stopwatch
from spark_engine.runtime.text.text_stream import Piece, TextStream


class TimedOut(CapacityError):
    """The request took longer than the server allows."""


class QueuedTooLong(Busy):
    """The engine did not start the request in time."""

    code = "queue_timeout"


class Deadline:
    """`timeout_s` seconds from now for the whole request, `queue_s` until the engine starts it;
    None for no limit."""

    def __init__(self, timeout_s: float | None, queue_s: float | None = None) -> None:
        self.timeout_s, self.queue_s = timeout_s, queue_s
        self._start = time.monotonic()

    @contextlib.asynccontextmanager
    async def enforced(self, queued: bool = False) -> AsyncIterator[None]:
        """Cancels the block at the deadline and raises TimedOut; `queued`: the engine has not
        started, so that the other deadline may come first and raise QueuedTooLong."""
        in_queue = self.queue_s if queued else None
        if in_queue is not None and self.timeout_s is not None and self.timeout_s < in_queue:
            in_queue = None
        most = self.timeout_s if in_queue is None else in_queue
        try:
            left = None if most is None else self._start + most - time.monotonic()
            async with asyncio.timeout(left):
                yield
        except TimeoutError:
            if in_queue is not None:
                words = f"the request waited for more than {in_queue:g} s in the queue; retry"
                raise QueuedTooLong(words) from None
            words = f"the request took more than {self.timeout_s:g} s; send a shorter prompt"
            raise TimedOut(f"{words} or ask for fewer tokens") from None


class GenerationFailed(InternalError):
    """The engine aborted a request, for instance because its logits were not finite."""


class MaskTooSlow(GenerationFailed):
    """Its grammar took too long, by itself or because of load."""

    status, code = 503, "grammar_too_slow"


@dataclass(frozen=True)
class CompletionChoice:
    """One answer: its request to the engine, and its text.

    `ended` returns, after each piece, whether the rest would not be part of the answer.
    """

    request: Request
    stream: TextStream
    ended: Callable[[], bool] = lambda: False

    @property
    def forced(self) -> tuple[int, ...]:
        """Tokens of the prompt that are generated as the answer's first, to be scored."""
        bound = self.request.constraint
        return () if bound is None else bound.forced

    @property
    def prompt(self) -> tuple[int, ...]:
        return tuple(self.request.prompt) + self.forced

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt) + len(self.forced)


class Generation:
    """One request in flight. `slots` is the engine's max_seqs.

    The constructor submits: it raises Busy or EngineDied.
    """

    def __init__(
        self,
        client: EngineClient,
        metrics: Metrics,
        choices: Sequence[CompletionChoice],
        slots: int,
        deadline: Deadline,
    ) -> None:
        self._client = client
        self._choices = choices
        self._box: Mailbox = asyncio.Queue()
        self._deadline = deadline
        ids = client.submit([c.request for c in choices], self._box, slots)
        self._trace, self._start = client.trace, client.trace.now()
        self._has_started = False  # the engine has started one of them
        self._first: dict[int, float] = {}  # by choice: its first token, for the trace
        self._open = {number: i for i, number in enumerate(ids)}
        self._metrics = metrics
        self._watches = [Stopwatch(metrics, c.prompt_tokens) for c in choices]
        # choices of one prompt share its tokens, which the engine reads once
        metrics.accepted(sum(c.prompt_tokens for c in choices))
        self._request = current()
        if self._request is not None:
            self._request.begin(sum(group[0][0].prompt_tokens for group in self._by_prompt()))

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(index of the choice, its new piece), until every choice has finished.

        Raises Busy when the engine's queue is full, EngineDied, GenerationFailed, TimedOut.
        """
        try:
            while self._open:
                answer = await self._next()
                if isinstance(answer, Exception):
                    raise answer
                if isinstance(answer, Started):
                    self._begin(answer)
                    continue
                last = answer[-1]
                if last.finish is FinishReason.ERROR:
                    slow = last.message.startswith(SLOW_GRAMMAR)
                    kind = MaskTooSlow if slow else GenerationFailed
                    raise kind(last.message or "the engine aborted the request")
                index = self._open.get(last.request_id)
                if index is None:
                    continue  # it had ended by a stop string before the engine knew
                start = self._trace.now()
                piece = self._choices[index].stream.push(answer)
                self._trace.span("loop", "text", start)
                self._note(index, last.request_id, piece, last.finish is not None)
                yield index, piece
                if piece.finish is None and self._choices[index].ended():
                    piece = Piece("", finish=FinishReason.STOP)
                    self._note(index, last.request_id, piece, False)
                    yield index, piece
        except Exception:
            self._end("error")
            raise
        finally:
            self.close()

    def close(self) -> None:
        """Cancels what has not finished. May be called twice."""
        self._end("cancelled")

    def cancel(self) -> None:
        """Cancels what has not finished; its last pieces are still delivered."""
        for number in self._open:
            self._client.cancel(number)

    def _begin(self, started: Started) -> None:
        index = self._open.get(started.request_id)
        if index is not None and self._watches[index].started is None:
            self._watches[index].started = started.at

    def _note(self, index: int, number: int, piece: Piece, ended: bool) -> None:
        if piece.tokens:
            self._watches[index].tokens(len(piece.tokens))
            if self._request is not None:
                self._request.charge(len(piece.tokens))
            if index not in self._first:
                prompt = self._choices[index].prompt_tokens
                self._trace.span(REQUESTS, "to the first token", self._start, number, prompt)
                self._first[index] = self._trace.now()
        if piece.finish is None:
            return
        self._trace.span(REQUESTS, "further tokens", self._first.get(index, self._start), number)
        self._watches[index].end(piece.finish.value)
        del self._open[number]
        if not ended:
            self._client.cancel(number)
        if not self._open:
            self._sum_up()

    def _end(self, reason: str) -> None:
        for number, index in self._open.items():
            self._client.cancel(number)
            self._watches[index].end(reason)
        if self._open:
            self._open = {}
            self._sum_up()

    def _by_prompt(self) -> list[list[tuple[CompletionChoice, Stopwatch]]]:
        """The choices of each prompt, which follow each other and share its tokens."""
        pairs = zip(self._choices, self._watches, strict=True)
        return [list(group) for _, group in groupby(pairs, key=lambda p: id(p[0].request.prompt))]

    def _sum_up(self) -> None:
        """Everything has ended: counts by prompt, and by request."""
        groups = self._by_prompt()
        for group in groups:
            choice = group[0][0]
            most = choice.request.params.max_tokens
            asked = None if most is None else most - len(choice.forced)
            self._metrics.answered(max(w.count for _, w in group), len(group), asked)
        if self._request is None:
            return
        watches = self._watches
        queued = [w.queued for w in watches if w.queued is not None]
        first = [w.first - w.start for w in watches if w.first is not None]
        use = EngineUse(
            prompt=sum(group[0][1].prompt for group in groups),
            cached=sum(group[0][0].stream.cached for group in groups),
            completion=sum(w.count for w in watches),
            ends=tuple(w.reason for w in watches),
            queued=min(queued, default=None),
            first=min(first, default=None),
            params=self._choices[0].request.params,
        )
        self._request.finish(use)

    async def _next(self) -> Answer:
        deadline = self._deadline
        if deadline.queue_s is not None and not self._has_started:
            async with deadline.enforced(queued=True):
                answer = await self._box.get()
            self._has_started = True
            return answer
        if deadline.timeout_s is None:  # a timeout costs as much as the rest of an event
            return await self._box.get()
        async with deadline.enforced():
            return await self._box.get()
