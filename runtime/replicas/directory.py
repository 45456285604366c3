"""Service discovery: replicas register by heartbeat; the directory keeps no state on disk.

Every replica repeatedly reports its name and the newest plan that it knows, so that a restarted
directory knows both within seconds. Knows names, addresses and times; knows no placement library.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from spark_engine.runtime.replicas.fleet import Address

LEASE_S = 15.0  # time without a heartbeat after which a replica is no longer listed
ASK_S = 1.0  # time limit of the directory's answer; health checks wait for it
Noted = tuple[int, bytes]  # creation time of a plan in ns, its bytes; none: no replicas
Rows = Sequence[tuple[str, str]]  # (name, URL)
NOTHING: Noted = (0, b"")


class Directory:
    """The directory's state. `now`: a clock in seconds with any zero."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._started = now, now()
        self._replicas: dict[str, tuple[str, float]] = {}
        self._plan = NOTHING

    def register(self, name: str, url: str, plan: Noted) -> Noted:
        """Records a heartbeat and the replica's plan; returns the newest known plan."""
        self._replicas[name] = (url, self._now())
        self._plan = max(self._plan, plan, key=lambda noted: noted[0])
        return self._plan

    def drop(self, name: str) -> None:
        self._replicas.pop(name, None)

    def names(self) -> tuple[Rows, bool]:
        """(live replicas, whether a new directory may still lack some)."""
        now = self._now()
        self._replicas = {k: v for k, v in self._replicas.items() if now - v[1] < LEASE_S}
        rows = [(name, url) for name, (url, _) in self._replicas.items()]
        return rows, now - self._started < LEASE_S

    def plan(self) -> bytes:
        """The current plan's bytes; empty if none is placed or known yet."""
        return self._plan[1]

    def note(self, plan: bytes) -> None:
        self._plan = (max(time.time_ns(), self._plan[0] + 1), plan)


class Members:
    """The replicas that a directory lists, for a front. `ask` blocks and runs in one thread."""

    def __init__(self, ask: Callable[[], tuple[Rows, bool]]) -> None:
        self._ask, self._thread = ask, ThreadPoolExecutor(1, "members")
        self._asked: asyncio.Future[tuple[Rows, bool]] | None = None
        self._last: dict[str, Address] = {}

    async def __call__(self) -> Sequence[Address]:
        """The live replicas. While a new directory may lack some, those that the previous one
        listed stay. A late answer is the result of the next call. Raises the exceptions of `ask`,
        and TimeoutError."""
        if self._asked is None:
            self._asked = asyncio.get_running_loop().run_in_executor(self._thread, self._ask)
            self._asked.add_done_callback(_seen)
        asked = self._asked
        if not (await asyncio.wait([asked], timeout=ASK_S))[0]:
            raise TimeoutError(f"no answer within {ASK_S:g} s")
        self._asked = None
        rows, incomplete = asked.result()
        found = {name: Address(name, url) for name, url in rows}
        self._last = self._last | found if incomplete else found
        return list(self._last.values())


def _seen(asked: asyncio.Future[tuple[Rows, bool]]) -> None:
    """Retrieves the exception of an abandoned future, which asyncio would log otherwise."""
    if not asked.cancelled():
        asked.exception()


class Heartbeat:
    """A thread that reports to a directory at intervals that a replica is alive.

    `tell` blocks; it receives the newest known plan, and returns the directory's. Its exceptions
    are ignored: a replica serves without a directory.
    """

    def __init__(self, tell: Callable[[Noted], Noted], every_s: float) -> None:
        self._tell, self._every_s = tell, every_s
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telling", daemon=True)
        self._thread.start()

    def stop(self, limit_s: float) -> None:
        """Ends the reports; waits up to `limit_s` for a running one."""
        self._end.set()
        self._thread.join(limit_s)

    def _run(self) -> None:
        plan = NOTHING
        while not self._end.is_set():
            with contextlib.suppress(Exception):
                plan = self._tell(plan)
            self._end.wait(self._every_s)
