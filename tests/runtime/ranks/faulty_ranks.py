"""An engine process, rank 0 of its group, that kills or stops ranks at points that a test names.

    python faulty_ranks.py FOLDER ENGINE OPTIONS ADDRESS

The real worker over a real engine. A file in FOLDER lists the faults in order. The first one is
removed and executed when its point has been reached `count` times; a second file records executed
faults.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from spark_engine.interface import DECODE, PREFILL, VERIFY
from spark_engine.runtime.engine import load
from spark_engine.runtime.engine.engine import EngineOptions
from spark_engine.runtime.engine.scheduler import Scheduler
from spark_engine.runtime.engine.trace import NoTrace
from spark_engine.runtime.ranks import spawn
from spark_engine.runtime.ranks.group import RankGroup
from spark_engine.runtime.ranks.leader import Orders
from spark_engine.runtime.ranks.links import Links
from spark_engine.runtime.ranks.messages import LaunchBucket, Order, Restore, Save
from spark_engine.runtime.server.engine_client import worker

LIMIT_S = 8.0  # of a call between ranks; on a busy machine one may wait for some seconds
OPENING = ("started", "opening", "open")  # processes run, are asked to open, are almost open
SERVING = ("sum", "decode", "prefill", "prefix", "round", "save", "restore")


class Fault(msgspec.Struct, frozen=True):
    """`signal` for all `ranks` at once; rank 0 is number 0.

    At the `count`th packet of this point (or `sum`, the call between ranks), before it is sent, or
    after it with `after`. `hosts`: processes that restart ranks of other hosts.
    """

    point: str
    ranks: tuple[int, ...]
    signal: int
    count: int = 1
    after: bool = True
    hosts: dict[int, int] = {}


class Done(msgspec.Struct, frozen=True):
    """An executed fault: its `time.monotonic` and the processes."""

    fault: Fault
    at: float
    pids: list[int]


class Faults:
    def __init__(self, folder: Path) -> None:
        self._next, self._done = folder / "faults", folder / "done"
        self._seen: tuple[Fault, int] | None = None
        self.group: RankGroup | None = None
        self.cached = False  # the next packet starts a sequence from the prefix cache

    def order(self, faults: list[Fault]) -> None:
        """Called by a test: the faults to execute."""
        self._write(self._next, faults)

    def done(self) -> list[Done]:
        known = self._done.exists()
        return msgspec.json.decode(self._done.read_bytes(), type=list[Done]) if known else []

    def at(self, point: str, after: bool) -> None:
        """Executes the next fault, if it is for this point and its count is reached."""
        if not self._next.exists():
            return
        faults = msgspec.json.decode(self._next.read_bytes(), type=list[Fault])
        if not faults or (faults[0].point, faults[0].after) != (point, after):
            return
        first = faults[0]
        times = self._seen[1] if self._seen is not None and self._seen[0] == first else 0
        self._seen = first, times + 1
        if times + 1 < first.count:
            return
        pids = [self._pid(first, rank) for rank in first.ranks]
        self._write(self._next, faults[1:])
        self._write(self._done, [*self.done(), Done(first, time.monotonic(), pids)])
        for pid in sorted(pids, key=lambda pid: pid == os.getpid()):
            os.kill(pid, first.signal)

    def _pid(self, fault: Fault, rank: int) -> int:
        if rank == 0:
            return os.getpid()
        if rank not in fault.hosts:
            assert self.group is not None
            return self.group.pids[rank]
        host = fault.hosts[rank]
        (pid,) = Path(f"/proc/{host}/task/{host}/children").read_text().split()
        return int(pid)

    def _write(self, path: Path, rows: Any) -> None:
        part = path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(rows))
        part.replace(path)


def points(orders: list[Order], cached: bool) -> set[str]:
    """The points that a packet is at."""
    found = set()
    for order in orders:
        if isinstance(order, LaunchBucket):
            names = {DECODE: "decode", PREFILL: "prefix" if cached else "prefill"}
            found.add("round" if order.family.startswith(VERIFY) else names[order.family])
        elif isinstance(order, Save | Restore):
            found.add("save" if isinstance(order, Save) else "restore")
    return found


def around(faults: Faults, point: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """The call between two checks of its point."""

    def wrapped(group: RankGroup, *given: Any) -> Any:
        faults.group = group
        faults.at(point, after=False)
        found = call(group, *given)
        faults.at(point, after=True)
        return found

    return wrapped


def put_in(faults: Faults) -> None:
    send, schedule, gather = Orders.send, Scheduler.schedule, load.gather_ranks
    exchange = Links.exchange

    def sent(orders: Orders) -> None:
        found = points(orders._orders, faults.cached)
        for after in (False, True):
            if after:
                send(orders)
            for point in sorted(found):
                faults.at(point, after)

    def scheduled(scheduler: Scheduler, *given: Any) -> Any:
        plan = schedule(scheduler, *given)
        faults.cached = any(seq.cached for seq in plan.admitted)
        return plan

    def gathered(*given: Any) -> RankGroup:
        faults.group = gather(*given)
        for after in (False, True):
            faults.at("started", after)
        return faults.group

    def summed(links: Links, *given: Any) -> Any:
        faults.at("sum", after=False)
        found = exchange(links, *given)
        faults.at("sum", after=True)
        return found

    patches: Mapping[tuple[Any, str], Any] = {
        (Orders, "send"): sent,
        (Scheduler, "schedule"): scheduled,
        (Links, "exchange"): summed,
        (load, "gather_ranks"): gathered,
        (RankGroup, "begin"): around(faults, "opening", RankGroup.begin),
        (RankGroup, "all_open"): around(faults, "open", RankGroup.all_open),
        (spawn, "CPU_LIMIT_S"): LIMIT_S,
    }
    for (owner, name), value in patches.items():
        setattr(owner, name, value)


def main(folder: str, engine: str, given: str, address: str) -> int:
    put_in(Faults(Path(folder)))
    options = msgspec.json.decode(given, type=EngineOptions)
    return worker.serve(address, lambda: worker.open_engine(Path(engine), options, NoTrace()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
