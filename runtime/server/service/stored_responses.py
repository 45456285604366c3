"""Responses of /v1/responses that are stored for an hour (`store: true`), for their owner only.

Knows their ids, owners, ages and sizes, and nothing else of their JSON. All methods run in one
event loop, and none of them decodes what is stored.

Finished responses share MOST_BYTES: above it, the owner with the most bytes loses its oldest ones,
and no other owner loses any. Running responses are never dropped. A new one is refused where its
owner would exceed a fair share of MOST_RUNNING or MOST_RUNNING_BYTES (one share stays free for
another owner), or all together would exceed them.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from spark_engine.runtime.server.api.answers import Json
from spark_engine.runtime.server.api.fields import BadField
from spark_engine.runtime.server.api.stored_items import StoredItems
from spark_engine.runtime.server.engine_client.client import Busy

KEPT_S = 3600.0  # after its last use
MOST_BYTES = 64 << 20  # of all finished ones
MOST_RUNNING_BYTES = 128 << 20  # of all running ones
MOST_RUNNING = 4096
MOST_ONE = 32 << 20  # bytes of the conversation before a response
OVERHEAD = 1 << 10  # bytes of a response in addition to its JSON


class UnknownResponse(BadField):
    """No response is stored under this id."""

    status = 404


@dataclass
class StoredResponse:
    """One response, as JSON. `before` are the items of the conversation that it answers.

    `owner`: the name of its request's key; empty without keys. `stop` ends it while it runs;
    `task` runs it in the background.
    """

    ident: str
    owner: str
    before: StoredItems
    data: bytes
    stop: Callable[[], None] | None
    task: asyncio.Task[None] | None = None
    at: float = field(default_factory=time.monotonic)

    @property
    def size(self) -> int:
        """Bytes. A running one has its answer twice."""
        times = 1 if self.stop is None else 2
        return self.before.size + times * len(self.data) + OVERHEAD


@dataclass
class _Owner:
    """One owner's finished responses, the least recent first, and running ones; sizes in bytes."""

    ended: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    runs: dict[str, StoredResponse] = field(default_factory=dict)
    ended_bytes: int = 0
    run_bytes: int = 0

    def add(self, entry: StoredResponse) -> None:
        if entry.stop is None:
            self.ended[entry.ident] = entry
            self.ended_bytes += entry.size
        else:
            self.runs[entry.ident] = entry
            self.run_bytes += entry.size

    def remove(self, ident: str) -> StoredResponse | None:
        """Removes the response of this id; its size must be the same as when it was added."""
        if (entry := self.ended.pop(ident, None)) is not None:
            self.ended_bytes -= entry.size
        elif (entry := self.runs.pop(ident, None)) is not None:
            self.run_bytes -= entry.size
        return entry

    def get(self, ident: str) -> StoredResponse | None:
        return self.ended.get(ident) or self.runs.get(ident)


class ResponseStore:
    """The responses, each visible to its owner only. `clock` is in seconds."""

    def __init__(
        self, most_bytes: int = MOST_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._owners: dict[str, _Owner] = {}
        self._most = most_bytes
        self._clock = clock

    @property
    def bytes(self) -> int:
        """The size of the finished responses, in bytes."""
        return sum(owner.ended_bytes for owner in self._owners.values())

    def check(self, before: StoredItems, owner: str = "") -> None:
        """Raises what `put` would raise."""
        if before.size > MOST_ONE:
            words = f"the conversation has {before.size} bytes as it is stored, at most {MOST_ONE}"
            raise BadField(f"{words} are stored: send store: false", "store")
        running = [one for one in self._owners.values() if one.runs]
        mine = self._owners.get(owner) or _Owner()
        shares = len(running) + (not mine.runs) + 1
        size, count = before.size + OVERHEAD, sum(len(one.runs) for one in running)
        full = count >= MOST_RUNNING or (len(mine.runs) + 1) * shares > MOST_RUNNING
        full |= sum(one.run_bytes for one in running) + size > MOST_RUNNING_BYTES
        full |= bool(mine.runs) and (mine.run_bytes + size) * shares > MOST_RUNNING_BYTES
        if full:
            raise Busy(
                "too many responses that are stored are running; retry, or send store: false"
            )

    def put(
        self, response: Json, before: StoredItems, owner: str, stop: Callable[[], None]
    ) -> StoredResponse:
        """Stores a running response; `stop` ends it. Raises BadField where it is too long to be
        stored, Busy where too many run."""
        self.check(before, owner)
        data = msgspec.json.encode(response)
        entry = StoredResponse(response["id"], owner, before, data, stop, at=self._clock())
        self._owners.setdefault(owner, _Owner()).add(entry)
        self._forget()
        return entry

    def update(
        self, entry: StoredResponse, response: Json, stop: Callable[[], None] | None
    ) -> None:
        """Stores a changed answer; with `stop` None it has ended. Does not store one that was
        dropped."""
        mine = self._owners.get(entry.owner) or _Owner()
        if mine.get(entry.ident) is not entry:
            entry.stop = stop
            return
        mine.remove(entry.ident)
        entry.data, entry.stop, entry.at = msgspec.json.encode(response), stop, self._clock()
        mine.add(entry)
        self._forget()

    def find(self, ident: str, owner: str = "") -> StoredResponse:
        """Raises UnknownResponse, also for another owner's."""
        self._forget()
        mine = self._owners.get(owner) or _Owner()
        entry = mine.get(ident)
        if entry is None:
            words = f"no response {ident[:80]!r} is kept: they are for {KEPT_S / 60:.0f} minutes,"
            raise UnknownResponse(f"{words} and only with store: true", "response_id", "not_found")
        entry.at = self._clock()
        if entry.stop is None:
            mine.ended.move_to_end(ident)
        return entry

    def drop(self, ident: str, owner: str = "") -> None:
        """Deletes a response, and ends it if it runs. Raises UnknownResponse."""
        entry = self.find(ident, owner)
        self._owners[owner].remove(ident)
        if entry.stop is not None:
            entry.stop()

    def ended(self, ident: str, owner: str = "") -> StoredResponse:
        """One to continue from. Raises UnknownResponse, and BadField where it has not ended."""
        entry = self.find(ident, owner)
        if entry.stop is not None:
            words = f"response {ident!r} has not ended: wait for it, or cancel it"
            raise BadField(words, "previous_response_id")
        return entry

    def _forget(self) -> None:
        """Drops expired responses, then the oldest of the largest owner while there are too many
        bytes; never a running one."""
        oldest = self._clock() - KEPT_S
        for name, owner in list(self._owners.items()):
            while owner.ended and next(iter(owner.ended.values())).at < oldest:
                owner.remove(next(iter(owner.ended)))
            if not owner.ended and not owner.runs:
                del self._owners[name]
        while self.bytes > self._most:
            most = max(self._owners.values(), key=lambda owner: owner.ended_bytes)
            most.remove(next(iter(most.ended)))
