"""Half an hour of everything against a real `spark-run --serve` of the embedded model, on the CPU.

    python -m tests.soak.server [MINUTES]      30 by default; exit code 1 where something is wrong

64 clients arrive at random: whole answers and streams, conversations, cancels, disconnects, slow
readers, malformed and over-long bodies. Attacks of `tests/soak/attacks/` come one after the other.
Meanwhile the engine process is killed, stopped (the watchdog must see it) and killed again, and in
the middle the server gets SIGTERM and is started again. Every request must end in an answer or in
an error that says why; those that a fault excuses only while it lasts. At quiet points no slot,
page, snapshot, descriptor or process may be missing or too many, and memory must have stopped
growing.
"""

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.ports import free_port
from tests.soak.attacks.processes import START_S, How, Server
from tests.soak.clients import CLIENTS, Clients
from tests.soak.idle_state import Books, check_state, read_dump
from tests.soak.mixing import Attackers

AFTER_S = 20  # what a fault excuses once the server is healthy again
OPTIONS = ("--watchdog-s", "15", "--read-timeout", "10", "--request-timeout", "90")
MORE = ("--drain-timeout", "20", "--max-queue", "40", "--restarts", "20")
EXCUSED_S = 60  # from a fault to the next engine process, the watchdog's time included
QUIET_S = 240  # for what runs to end


class Soak:
    """One run: a server, its clients, and what was found wrong."""

    def __init__(self, folder: Path, minutes: float) -> None:
        self.folder, self.end_s = folder, minutes * 60
        self.how = How((*OPTIONS, *MORE, "--dumps", str(folder)), port=free_port())
        self.clients = Clients(f"http://127.0.0.1:{self.how.port}")
        self.books = Books()
        self.wrong: list[str] = []
        self.begin = time.monotonic()
        self.server: Server

    async def start(self) -> None:
        self.server = Server(self.folder, self.how)
        await self._serving()

    async def _serving(self) -> None:
        await asyncio.to_thread(self.server.wait)
        self.books.begin(self.server.pid, self.server.engine)

    async def stop(self) -> None:
        """SIGTERM in the midst of the load: running requests end well, and the code is 0."""
        self.clients.excuse(START_S)
        code = await asyncio.to_thread(self.server.stop)
        self.note([] if code == 0 else [f"SIGTERM: exit code {code}"])

    async def strike(self, number: signal.Signals) -> None:
        """Hits the engine process; it must be another that serves, and soon."""
        before = self.server.engine
        assert before is not None
        self.clients.excuse(START_S)
        os.kill(before, number)
        end = time.monotonic() + EXCUSED_S
        while self.server.engine in (None, before):
            if time.monotonic() > end:
                self.note([f"after {number.name} no other engine process came"])
                return
            await asyncio.sleep(0.2)
        await self._serving()
        self.clients.excuse(AFTER_S)
        self.say(f"{number.name}: engine {before} -> {self.server.engine}")

    async def look(self) -> None:
        """A quiet point: everybody ends, then the books must balance."""
        self.clients.pause()
        try:
            await asyncio.wait_for(self.clients.gone(), QUIET_S)
        except TimeoutError:
            self.note([f"after {QUIET_S} s requests still run: {self.clients.busy()}"])
        await asyncio.sleep(1.0)
        known, cached_mb = set(self.folder.glob("spark-dump-*")), 0.0
        os.kill(self.server.pid, signal.SIGUSR1)
        for _ in range(100):
            await asyncio.sleep(0.1)
            if new := set(self.folder.glob("spark-dump-*")) - known:
                await asyncio.sleep(0.5)
                engine, http = read_dump(new.pop())
                self.note(check_state(engine, http))
                cached_mb = engine["stats"]["cache_bytes"] / 1e6
                break
        else:
            self.note(["no dump came at SIGUSR1"])
        self.note(self.books.enter(self.server.pid, self.server.engine, cached_mb))
        self.say(self.books.line())
        self.clients.reopen()

    def note(self, wrong: list[str]) -> None:
        for words in wrong:
            self.say(f"WRONG: {words}")
        self.wrong += wrong

    def say(self, words: str) -> None:
        print(f"{(time.monotonic() - self.begin) / 60:5.1f} min  {words}", flush=True)

    async def run(self) -> int:
        """The whole half hour; the exit code."""
        await self.start()
        self.begin = time.monotonic()
        tasks = [asyncio.create_task(self.clients.live(i)) for i in range(CLIENTS)]
        tasks.append(asyncio.create_task(Attackers(self.clients, self.how.port).live()))
        events = [(0.05 + 0.07 * i, self.look) for i in range(14)]
        # then more than half of the time without a fault, in which memory must have settled
        events += [(f, lambda: self.strike(signal.SIGKILL)) for f in (0.09, 0.3)]
        events += [(0.2, lambda: self.strike(signal.SIGSTOP)), (0.4, self._restart)]
        for share, act in sorted(events, key=lambda e: e[0]):
            await asyncio.sleep(max(0.0, self.begin + share * self.end_s - time.monotonic()))
            await act()
        await asyncio.sleep(max(0.0, self.begin + self.end_s - time.monotonic()))
        await self.look()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.stop()
        self.note(self.books.verdict())
        return self._sum_up()

    async def _restart(self) -> None:
        await self.stop()
        self.say("SIGTERM: it ended; starting it again")
        await self.start()
        self.clients.excuse(AFTER_S)

    def _sum_up(self) -> int:
        for name, count in sorted(self.clients.counts.items()):
            print(f"{count:8}  {name}")
        for words, count in Counter(self.clients.wrong).most_common(20):
            print(f"WRONG, {count} times: {words}")
        failed = bool(self.wrong or self.clients.wrong)
        print("not as it should be" if failed else "every request had its end, nothing leaked")
        return int(failed)


def main() -> int:
    """Runs for the minutes that are asked for."""
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    random.seed(12)
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(Path(folder), minutes)
        try:
            code = asyncio.run(soak.run())
        finally:
            soak.server.process.kill()
        log = soak.server.log.read_text()
        print(json.dumps({"log_bytes": len(log), "tracebacks": log.count("Traceback")}))
        if code or "Traceback" in log:
            print(log[-8000:])
    return code


if __name__ == "__main__":
    sys.exit(main())
