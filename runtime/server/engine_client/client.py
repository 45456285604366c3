"""`EngineClient`: sends the HTTP process's requests to the engine process and delivers events.

Knows requests and their mailboxes, also while no engine process runs; knows no HTTP, no text and
no process (`supervisor.py`).
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from spark_engine.errors import CapacityError
from spark_engine.runtime.engine.request import Event, FinishReason, Request
from spark_engine.runtime.engine.trace import NoTrace
from spark_engine.runtime.server.engine_client.ipc import (
    Cancel,
    Refused,
    StepReport,
    encode,
    submitted,
)
from spark_engine.runtime.server.engine_client.supervisor import EngineDied, Supervision, Supervisor

__all__ = ["Answer", "Busy", "ClientTooSlow", "EngineClient", "EngineDied", "Mailbox", "Restarting"]
MEMORY_SHORT = "memory_short: the machine's memory is nearly used up, and new requests wait for it"
SENDS = 2  # a request without a token so far is sent to at most two engine processes
MOST_PIXELS = 1 << 30  # bytes of the images of all requests that have not ended
UNREAD = 4096  # rounds of a choice that may wait in its mailbox


class Busy(CapacityError):
    """The queue is full; come back later."""

    code = "queue_full"


class Restarting(Busy):
    """The engine is being started again, and that took too long for this request."""

    code = "engine_restarting"


class MemoryShort(Busy):
    """So little of the host's memory is left that no new request is taken."""

    code = "memory_short"


class ClientTooSlow(CapacityError):
    """The client reads too slowly: its request was cancelled."""


class Started(NamedTuple):
    """The engine started or resumed a request at `at` (`time.monotonic`)."""

    request_id: int
    at: float


# a request's events of one step, in their order, or what happened to it instead
Answer = list[Event] | Started | Busy | EngineDied | ClientTooSlow
Mailbox = asyncio.Queue[Answer]


def _pixels(requests: Iterable[Request]) -> int:
    """Bytes of their images."""
    return sum(len(image.pixels) for request in requests for image in request.images)


@dataclass(slots=True)
class _Open:
    """A request that has not ended.

    Attributes:
        timer: runs while it waits for an engine process; None: an engine process has it.
    """

    request: Request
    box: Mailbox
    unread: int  # answers that its mailbox may hold
    sends: int = 0  # how often it went to an engine process
    received: bool = False  # a token of it was received
    cancelled: bool = False  # it was cancelled
    timer: asyncio.TimerHandle | None = None


class EngineClient(Supervisor):
    """Requests to one engine. Its process may end and be restarted.

    When it ends, a request with a token ends with EngineDied; the others are sent to the next
    process, once, and so are requests that arrive before it runs. They wait for `how.wait_s` at
    most and then end with Restarting. All methods run in one event loop. `command` starts the
    process; the socket's address is appended. At most `max_queue` requests beyond the engine's
    slots are accepted. `trace` records what is done here.
    """

    def __init__(
        self,
        command: Sequence[str],
        max_queue: int = 256,
        how: Supervision | None = None,
        trace: NoTrace | None = None,
    ) -> None:
        super().__init__(command, how or Supervision(), trace or NoTrace())
        self.max_queue = max_queue
        self.loads = 0  # processes that were started on demand
        self._open: dict[int, _Open] = {}
        self._held = 0
        self._next_id = 0

    @property
    def in_flight(self) -> int:
        """Requests that have not ended."""
        return len(self._open)

    @property
    def state(self) -> str | None:
        """Of an engine that is loaded on demand; else None."""
        return None

    @property
    def accepting(self) -> bool:
        """Whether a new request is sent at once, and does not wait for a process."""
        return self.running

    @property
    def sent(self) -> int:
        return len(self._open) - self._held

    @property
    def step_age(self) -> float:
        """Seconds since the last sign that a step had ended; 0 while nothing is in flight."""
        return super().step_age if self._open else 0.0

    def unhealthy_reason(self) -> str | None:
        short = MEMORY_SHORT if self._stats.memory_short else None
        return super().unhealthy_reason() or short

    def submit(self, requests: Sequence[Request], box: Mailbox, slots: int) -> list[int]:
        """Sends checked requests; their events are put into `box` under the returned ids.

        `slots` is the engine's max_seqs. Raises Busy when the queue is full or memory
        is short, RequestError for one that is too large, EngineDied when the engine
        has ended and is not restarted.
        """
        if self.running and self._stats.memory_short:
            raise MemoryShort(f"{MEMORY_SHORT}; retry")
        if self.died.is_set():
            raise EngineDied(self.words)
        ahead = self.in_flight - slots
        if ahead + len(requests) > self.max_queue:
            raise Busy(f"{max(ahead, 0)} requests are waiting (at most {self.max_queue}); retry")
        pixels = _pixels(requests)
        if pixels and pixels + _pixels(one.request for one in self._open.values()) > MOST_PIXELS:
            raise Busy(f"the images of other requests take {MOST_PIXELS >> 20} MiB already; retry")
        ids = list(range(self._next_id, self._next_id + len(requests)))
        # if one cannot be encoded, none is sent
        messages = [submitted(number, r) for number, r in zip(ids, requests, strict=True)]
        self._next_id += len(requests)
        for number, request, message in zip(ids, requests, messages, strict=True):
            one = self._open[number] = _Open(request, box, UNREAD * len(requests))
            if self.accepting:
                one.sends = 1
                self.send(*message)
            else:
                self._hold(number, one)
        return ids

    def cancel(self, number: int) -> None:
        """Cancels a request; its last event still arrives. Unknown ids are ignored."""
        if (one := self._open.get(number)) is None:
            return
        one.cancelled = True
        if one.timer is not None:
            self._deliver(number, [Event(number, finish=FinishReason.CANCELLED)], last=True)
        else:
            self.send(encode(Cancel(number)))

    def cancel_all(self) -> None:
        for number in list(self._open):
            self.cancel(number)

    def on_engine_ready(self) -> None:
        """A process accepts requests: sends those that waited for it, in order."""
        for number in sorted(self._open):
            one = self._open[number]
            if one.timer is not None:
                self._release(one)
                one.sends += 1
                self.send(*submitted(number, one.request))

    def on_engine_lost(self, words: str, for_good: bool) -> None:
        for number, one in list(self._open.items()):
            if one.cancelled:
                self._deliver(number, [Event(number, finish=FinishReason.CANCELLED)], last=True)
            elif for_good or one.received or one.sends >= SENDS:
                self._deliver(number, EngineDied(words), last=True)
            elif one.timer is None:
                self._hold(number, one)

    def on_step(self, report: StepReport) -> None:
        for number, at in report.started:
            if (one := self._open.get(number)) is not None:
                one.box.put_nowait(Started(number, at))
        rounds: dict[int, list[Event]] = {}
        for event in report.events:
            rounds.setdefault(event.request_id, []).append(event)
        for number, events in rounds.items():
            self._deliver(number, events, last=events[-1].finish is not None)

    def on_refused(self, report: Refused) -> None:
        self._deliver(report.id, Busy(report.message), last=True)

    def describe(self) -> object:
        rows = [
            {
                "id": number,
                "prompt_tokens": len(one.request.prompt),
                "sends": one.sends,
                "received": one.received,
                "cancelled": one.cancelled,
                "held": one.timer is not None,
                "unread": one.box.qsize(),
            }
            for number, one in self._open.items()
        ]
        return {"in_flight": self.in_flight, "held": self._held, "requests": rows}

    def _deliver(self, number: int, answer: Answer, last: bool) -> None:
        one = self._open.get(number)
        if one is None:
            return
        if last:
            self._forget(number, one)
        one.received = True
        one.box.put_nowait(answer)
        if one.box.qsize() >= one.unread and not last:
            self._end_unread(one.box)

    def _end_unread(self, box: Mailbox) -> None:
        """The mailbox is not read: cancels its requests and keeps its contents."""
        for number, one in [item for item in self._open.items() if item[1].box is box]:
            self.cancel(number)
            self._forget(number, one)
        words = f"{box.qsize()} parts of the answer were not read; read faster, or ask for less"
        box.put_nowait(ClientTooSlow(words))

    def _hold(self, number: int, one: _Open) -> None:
        loop = asyncio.get_running_loop()
        one.timer = loop.call_later(self._how.wait_s, self._on_long_wait, number)
        self._held += 1

    def _release(self, one: _Open) -> None:
        if one.timer is not None:
            one.timer.cancel()
            one.timer = None
            self._held -= 1

    def _forget(self, number: int, one: _Open) -> None:
        self._release(one)
        self._open.pop(number, None)

    def _on_long_wait(self, number: int) -> None:
        words = f"the engine stopped, and has been starting again for {self._how.wait_s:g} s"
        self._deliver(number, Restarting(f"{words}; retry"), last=True)
