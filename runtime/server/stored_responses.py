"""Responses of /v1/responses that are stored for an hour (`store: true`), for their owner alone.

Knows their ids, owners, ages and sizes; knows no API's form beyond that. All methods belong to one
event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
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
class StoredResponse:
    """One answer, as JSON. `before` are the items of the conversation that it answers, as JSON.

    `owner`: the name of the key that it was asked for with; empty where there are no keys. `stop`
    ends it while it runs; `task` is what runs it where nobody waits for it.
    """

    ident: str
    owner: str
    before: bytes
    data: bytes = b""
    stop: Callable[[], None] | None = None
    task: asyncio.Task[None] | None = None
    at: float = field(default_factory=time.monotonic)

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.before) + len(self.data)

    @property
    def response(self) -> Json:
        """The answer."""
        found: Json = msgspec.json.decode(self.data)
        return found

    def items(self) -> list[Json]:
        """The whole conversation up to the end of the answer. May take a while."""
        before: list[Json] = msgspec.json.decode(self.before)
        return before + list(self.response["output"])


class ResponseStore:
    """The responses, each found by its owner alone. `clock` is in seconds."""

    def __init__(
        self, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()  # least recent first
        self._most = most_bytes
        self._clock = clock
        self.bytes = 0

    def put(self, response: Json, before: bytes, owner: str = "") -> StoredResponse:
        """Keeps an answer, whether it has ended or not; `before` as `StoredResponse` says."""
        entry = StoredResponse(response["id"], owner, before)
        self._entries[entry.ident] = entry
        self.bytes += entry.size
        self.update(entry, response)
        return entry

    def update(self, entry: StoredResponse, response: Json) -> None:
        """Its answer has changed. Nothing happens to one that was forgotten."""
        if self._entries.get(entry.ident) is not entry:
            return
        self.bytes -= entry.size
        entry.data = msgspec.json.encode(response)
        self.bytes += entry.size
        entry.at = self._clock()
        self._entries.move_to_end(entry.ident)
        self._forget()

    def find(self, ident: str, owner: str = "") -> StoredResponse:
        """Raises UnknownResponse, also for another owner's."""
        self._forget()
        entry = self._entries.get(ident)
        if entry is None or entry.owner != owner:
            words = f"no response {ident[:80]!r} is kept: they are for {KEPT_S / 60:.0f} minutes,"
            raise UnknownResponse(f"{words} and only with store: true", "response_id", "not_found")
        entry.at = self._clock()
        self._entries.move_to_end(ident)
        return entry

    def drop(self, ident: str, owner: str = "") -> None:
        """Forgets an answer, and ends it where it runs. Raises UnknownResponse."""
        entry = self.find(ident, owner)
        del self._entries[ident]
        self.bytes -= entry.size
        if entry.stop is not None:
            entry.stop()

    def ended(self, ident: str, owner: str = "") -> StoredResponse:
        """One to go on from. Raises UnknownResponse, and BadField where it has not ended."""
        entry = self.find(ident, owner)
        if entry.stop is not None:
            words = f"response {ident!r} has not ended: wait for it, or cancel it"
            raise BadField(words, "previous_response_id")
        return entry

    def _forget(self) -> None:
        """What is too old, and the oldest of what is too much; never one that runs."""
        now = self._clock()
        for ident, entry in list(self._entries.items()):
            if now - entry.at <= KEPT_S and self.bytes <= self._most:
                return
            if entry.stop is None:
                del self._entries[ident]
                self.bytes -= entry.size
