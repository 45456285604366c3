"""Service discovery: replicas register by heartbeat; the directory keeps no state on disk.

Every replica tells its name, and the newest plan that it has heard of, again and again, so that a
directory that was started anew knows both within seconds. Knows names, addresses and times; knows
no library that places.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from spark_engine.runtime.replicas.fleet import Address

LEASE_S = 15.0  # after which a replica that was not heard of is no longer named
ASK_S = 1.0  # for its answer: nobody's health is asked for meanwhile
Noted = tuple[int, bytes]  # a plan, and when it was made, in ns; without bytes nothing is placed
Rows = Sequence[tuple[str, str]]  # (name, URL)
NOTHING: Noted = (0, b"")


class Directory:
    """The one that keeps it. `now` in seconds, from any beginning."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._born = now, now()
        self._heard: dict[str, tuple[str, float]] = {}
        self._plan = NOTHING

    def hear(self, name: str, url: str, plan: Noted) -> Noted:
        """The replica lives, and knows this plan. The newest plan that anybody knows."""
        self._heard[name] = (url, self._now())
        self._plan = max(self._plan, plan, key=lambda noted: noted[0])
        return self._plan

    def drop(self, name: str) -> None:
        """It is on its way down."""
        self._heard.pop(name, None)

    def names(self) -> tuple[Rows, bool]:
        """(those that were heard of, whether some may not have been heard of yet)."""
        now = self._now()
        self._heard = {k: v for k, v in self._heard.items() if now - v[1] < LEASE_S}
        rows = [(name, url) for name, (url, _) in self._heard.items()]
        return rows, now - self._born < LEASE_S

    def plan(self) -> bytes:
        """What is placed; empty where nothing is, or nobody told it yet."""
        return self._plan[1]

    def note(self, plan: bytes) -> None:
        """This is placed from now on; empty: nothing is."""
        self._plan = (max(time.time_ns(), self._plan[0] + 1), plan)


class Members:
    """The replicas that a directory names, for a front. `ask` blocks; one thread does it."""

    def __init__(self, ask: Callable[[], tuple[Rows, bool]]) -> None:
        self._ask, self._thread = ask, ThreadPoolExecutor(1, "members")
        self._asked: asyncio.Future[tuple[Rows, bool]] | None = None
        self._last: dict[str, Address] = {}

    async def __call__(self) -> Sequence[Address]:
        """Those that live. A young directory does not know all of them yet: those that the one
        before it named stay. An answer that comes late is that of the next call. Raises what `ask`
        does, and TimeoutError."""
        if self._asked is None:
            self._asked = asyncio.get_running_loop().run_in_executor(self._thread, self._ask)
            self._asked.add_done_callback(_seen)
        asked = self._asked
        if not (await asyncio.wait([asked], timeout=ASK_S))[0]:
            raise TimeoutError(f"no answer within {ASK_S:g} s")
        self._asked = None
        rows, young = asked.result()
        found = {name: Address(name, url) for name, url in rows}
        self._last = self._last | found if young else found
        return list(self._last.values())


def _seen(asked: asyncio.Future[tuple[Rows, bool]]) -> None:
    """Nobody may come for a failure any more, and asyncio would log it."""
    if not asked.cancelled():
        asked.exception()


class Heartbeat:
    """A thread that tells a directory again and again that a replica lives.

    `tell` blocks; it gets the newest plan that was heard of, and returns the directory's. What it
    raises is passed over: a directory that is away makes nobody ill.
    """

    def __init__(self, tell: Callable[[Noted], Noted], every_s: float) -> None:
        self._tell, self._every_s = tell, every_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telling", daemon=True)
        self._thread.start()

    def stop(self, limit_s: float) -> None:
        """Nothing is told any more, unless that takes longer than `limit_s`."""
        self._end.set()
        self._thread.join(limit_s)

    def _run(self) -> None:
        plan = NOTHING
        while not self._end.is_set():
            with contextlib.suppress(Exception):
                plan = self._tell(plan)
            self._end.wait(self._every_s)
