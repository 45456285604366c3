"""Answers of /v1/responses that are kept for a while, so that others can go on from them.

Knows their ids, ages and sizes; knows no API's form beyond that. All methods belong to one event
loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from spark_engine.runtime.server.api.answers import Json
from spark_engine.runtime.server.api.fields import BadField

KEPT_S = 3600.0  # after it was last asked for
MOST_BYTES = 64 << 20  # of all together, as JSON


class UnknownResponse(BadField):
    """No answer is kept under this id."""

    status = 404


@dataclass
class Entry:
    """One answer. `before` are the items of the conversation that it answers, as JSON.

    `stop` ends it while it runs; `task` is what runs it where nobody waits for it.
    """

    response: Json
    before: bytes
    stop: Callable[[], None] | None = None
    task: asyncio.Task[None] | None = None
    size: int = 0
    at: float = field(default_factory=time.monotonic)


class Kept:
    """The answers. `clock` is in seconds."""

    def __init__(
        self, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._entries: OrderedDict[str, Entry] = OrderedDict()  # the longest unasked for first
        self._most = most_bytes
        self._clock = clock
        self.bytes = 0

    def put(self, response: Json, before: Sequence[Json]) -> Entry:
        """Keeps an answer, whether it has ended or not."""
        entry = Entry(response, msgspec.json.encode(before))
        self._entries[response["id"]] = entry
        self.update(entry)
        return entry

    def update(self, entry: Entry) -> None:
        """Its answer has changed. Nothing happens to one that was forgotten."""
        ident = entry.response["id"]
        if self._entries.get(ident) is not entry:
            return
        self.bytes -= entry.size
        entry.size = len(entry.before) + len(msgspec.json.encode(entry.response))
        self.bytes += entry.size
        entry.at = self._clock()
        self._entries.move_to_end(ident)
        self._forget()

    def find(self, ident: str) -> Entry:
        """Raises UnknownResponse."""
        self._forget()
        entry = self._entries.get(ident)
        if entry is None:
            words = f"no response {ident[:80]!r} is kept: they are for {KEPT_S / 60:.0f} minutes,"
            raise UnknownResponse(f"{words} and only with store: true", "response_id", "not_found")
        entry.at = self._clock()
        self._entries.move_to_end(ident)
        return entry

    def drop(self, ident: str) -> None:
        """Forgets an answer, and ends it where it runs. Raises UnknownResponse."""
        entry = self.find(ident)
        del self._entries[ident]
        self.bytes -= entry.size
        if entry.stop is not None:
            entry.stop()

    def items(self, ident: str) -> list[Json]:
        """The whole conversation up to the end of an answer. Raises UnknownResponse, and BadField
        where it has not ended."""
        entry = self.find(ident)
        if entry.stop is not None:
            words = f"response {ident!r} has not ended: wait for it, or cancel it"
            raise BadField(words, "previous_response_id")
        before: list[Json] = msgspec.json.decode(entry.before)
        return before + list(entry.response["output"])

    def _forget(self) -> None:
        """What is too old, and the oldest of what is too much; never one that runs."""
        now = self._clock()
        for ident, entry in list(self._entries.items()):
            if now - entry.at <= KEPT_S and self.bytes <= self._most:
                return
            if entry.stop is None:
                del self._entries[ident]
                self.bytes -= entry.size
