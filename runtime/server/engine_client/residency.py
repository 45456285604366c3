"""`Residency`: which of several engines are loaded.

Knows the planned bytes of each engine and the memory for all; knows no HTTP and no manifest.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass

from spark_engine.errors import CapacityError, SparkError
from spark_engine.runtime.server.engine_client.on_demand import OnDemandClient

TURN_S = 10.0  # of an engine that always has work, while requests wait for another's memory
LOOK_S = 0.25  # interval of looking for an idle engine meanwhile
log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Resident:
    """An engine, the bytes that it plans, the memory that they are of, and its requests that have
    not ended, those that are still being read included."""

    client: OnDemandClient
    needs: int
    memory: str
    open: Callable[[], int]


class Residency:
    """Loads engines for which requests wait, in the order in which these came.

    Where the memory is used up, it first unloads engines without requests, the least recently used
    one first. If that is not enough, an engine with requests gets no new ones once it has been
    loaded for `turn_s` seconds, and is unloaded when the last one has ended. Such a switch is
    completed even if those that waited have left: requests that wait for a shorter time than others
    take would otherwise never be answered. `budgets`: bytes by memory; None: as many as there are.
    `idle_s`: an engine without requests is unloaded after so many seconds; None: never. All methods
    run in one event loop.
    """

    def __init__(
        self,
        rows: Sequence[Resident],
        budgets: Mapping[str, int | None],
        idle_s: float | None = None,
        turn_s: float = TURN_S,
    ) -> None:
        self._rows, self._budgets, self._idle_s, self._turn_s = tuple(rows), budgets, idle_s, turn_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._context = copy_context()  # not that of the request which is the reason for a load
        for row in self._rows:
            row.client.changed = self._wake

    def taken(self, memory: str) -> int:
        """Planned bytes of the engines that are loaded, or are being loaded or unloaded."""
        return sum(r.needs for r in self._rows if r.memory == memory and r.client.resident)

    async def begin(self) -> None:
        """Loads as many as fit, in their order.

        Raises EngineError or EngineDied for an engine that cannot be loaded, and CapacityError
        where none finds the memory that it plans.
        """
        lacking: list[CapacityError] = []
        for row in self._rows:
            if not self._fits(row):
                continue
            try:
                await row.client.load()
            except CapacityError as error:  # less memory is free than it was before
                lacking.append(error)
        if lacking and not any(row.client.running for row in self._rows):
            raise lacking[0]
        self._wake()

    async def close(self) -> None:
        self._closed = True
        for handle in (self._soon, self._timer):
            if handle is not None:
                handle.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _wake(self) -> None:
        if self._soon is None and not self._closed:
            loop = asyncio.get_running_loop()
            self._soon = loop.call_soon(self._decide, context=self._context)

    def _decide(self) -> None:
        self._soon = None
        if self._closed:
            return
        blocked: set[str] = set()
        paused: set[Resident] = set()
        waiting = [row for row in self._rows if row.client.waits]
        for row in sorted(waiting, key=lambda row: row.client.wanted):
            if row.memory in blocked:  # a smaller engine does not overtake
                continue
            if self._fits(row):
                self._run(row.client.load())
                continue
            blocked.add(row.memory)
            ending = self._free_for(row)
            row.client.must_load |= bool(ending)
            paused |= ending
        for row in self._rows:
            if not row.client.leaving:
                row.client.pause(row in paused)
        self._look_again(LOOK_S if blocked else None, self._unload_idle())

    def _fits(self, row: Resident) -> bool:
        budget = self._budgets[row.memory]
        return budget is None or self.taken(row.memory) + row.needs <= budget

    def _free_for(self, wanted: Resident) -> set[Resident]:
        """Unloads engines for this one; returns those that must end their requests first."""
        now, paused = asyncio.get_running_loop().time(), set()
        rows = [row for row in self._rows if row.memory == wanted.memory]
        lacks = self.taken(wanted.memory) + wanted.needs - (self._budgets[wanted.memory] or 0)
        lacks -= sum(row.needs for row in rows if row.client.leaving)
        loaded = [row for row in rows if row.client.may_leave]
        idle = sorted((r for r in loaded if not r.open()), key=lambda r: r.client.used)
        busy = sorted((r for r in loaded if r.open()), key=lambda r: r.client.since)
        for row in (*idle, *busy):
            if lacks <= 0:
                break
            lacks -= row.needs
            over = now - row.client.since >= self._turn_s
            if (over and not row.client.sent) or not (row.open() or row.client.must_load):
                self._run(row.client.unload())
            elif over:
                paused.add(row)
        return paused

    def _unload_idle(self) -> float | None:
        """Unloads engines that were not used for long; seconds until the next one may be."""
        if self._idle_s is None:
            return None
        waits = []
        for row in self._rows:
            if not row.client.may_leave or row.open():
                continue
            rest = row.client.used + self._idle_s - asyncio.get_running_loop().time()
            if rest <= 0:
                self._run(row.client.unload())
            else:
                waits.append(rest)
        return min(waits, default=None)

    def _look_again(self, *seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        given = [s for s in seconds if s is not None]
        loop = asyncio.get_running_loop()
        decide, own = self._decide, self._context
        self._timer = loop.call_later(min(given), decide, context=own) if given else None

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(self._done(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _done(self, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except SparkError:
            pass  # its client has logged it, and ended the requests that waited
        except Exception:
            log.exception("an engine could not be loaded or unloaded")
        finally:
            self._wake()
