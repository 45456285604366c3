"""One row: an attack while an honest client asks, and what both must show.

Knows processes and figures; knows no attack.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tests.soak.attacks.attack import Attack, Attacker
from tests.soak.attacks.processes import HERE, Server

CALM, CALM_S = 5, 60.0  # honest requests before an attack, and what they may take
TTFT_S, TIMES = 2.0, 2.0  # an honest time to first token: this, and so many times the calm one
KEPT_MB, SETTLE_S = 100.0, 20.0
CALLBACK_S = 0.05
LOG_BYTES = 2_000_000
AFTER_S = 1.0  # honest requests continue after an attack


class Honest:
    """The honest client's process, and its rows."""

    def __init__(self, server: Server) -> None:
        key = [server.how.key] if server.how.key else []
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(HERE / "honest.py"), server.url, *key],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.rows: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.rows.append(json.loads(line))

    def stop(self) -> None:
        """Ends it once its last request has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._thread.join()

    def wait(self, count: int, seconds: float) -> None:
        """Until it has so many answers."""
        end = time.monotonic() + seconds
        while len(self.rows) < count and time.monotonic() < end:
            time.sleep(0.05)


class Memory:
    """The most that a server's processes take while the block runs, looked at now and then."""

    def __init__(self, server: Server) -> None:
        self._server, self.peak = server, server.memory_mb()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._done.wait(0.25):
            self.peak = max(self.peak, self._server.memory_mb())


@dataclass
class Row:
    """What was measured. Times in seconds, memory in MiB."""

    attack: str
    statuses: Mapping[str, object]
    seconds: float
    calm: list[float]
    attacked: list[float]
    lost: list[str]
    peak: float = 0.0
    kept: float = 0.0
    callback: tuple[float, str] = (0.0, "")
    wrong: list[str] = field(default_factory=list)

    def line(self) -> str:
        statuses = " ".join(f"{name}:{count}" for name, count in sorted(self.statuses.items()))
        times = [_middle(self.calm), _middle(self.attacked), max(self.attacked, default=0.0)]
        return (
            f"{self.attack:35} {self.seconds:5.0f} {len(self.attacked):5}"
            f" {times[0]:5.2f} {times[1]:6.2f} {times[2]:6.2f} {len(self.lost):4}"
            f" {self.peak:6.0f} {self.kept:5.0f} {self.callback[0] * 1e3:5.0f}  {statuses[:60]:40}"
            f" {'ok' if not self.wrong else 'WRONG: ' + '; '.join(self.wrong[:4])[:600]}"
        )


HEAD = (
    f"{'':35} {'takes':>5} {'good':>5} {'calm':>5} {'median':>6} {'max':>6} {'lost':>4}"
    f" {'peak':>6} {'kept':>5} {'loop':>5}\n"
    f"{'':35} {'s':>5} {'':>5} {'TTFT':>5} {'TTFT':>6} {'TTFT':>6} {'':>4}"
    f" {'MiB':>6} {'MiB':>5} {'ms':>5}  attackers' answers"
)


def _middle(times: Sequence[float]) -> float:
    return median(times) if times else 0.0


def trial(server: Server, attack: Attack, last: bool = False) -> Row:
    """Makes the attack. `last`: the server has ended after it."""
    honest, at = Honest(server), Attacker.of(server, attack.key)
    honest.wait(CALM, CALM_S)
    before, log, since = server.held_mb(), server.log.stat().st_size, time.time()
    begin = time.monotonic()
    with Memory(server) as memory:
        try:
            attack.run(at)
        except Exception as error:
            at.expect(False, f"the attack itself failed: {error!r}")
        seconds = time.monotonic() - begin
        time.sleep(AFTER_S)
        honest.stop()
    calm = [row for row in honest.rows if row["until"] < since]
    rows = honest.rows[len(calm) :]
    row = Row(attack.name, dict(at.statuses), seconds, _times(calm), _times(rows), [])
    row.lost = [r["wrong"] for r in rows if r["wrong"] and not (attack.faults and r["clear"])]
    row.peak, row.callback = memory.peak, server.worst_callback(since)
    row.wrong = list(dict.fromkeys(at.wrong))
    if last:
        row.lost = []  # requests to a server that ends
        return row
    row.kept = kept(server, before)
    _judge(row, attack)
    grown = server.log.stat().st_size - log
    row.wrong += [f"{grown} bytes of log"] if grown > LOG_BYTES else []
    text = server.log.read_bytes()[log:]
    row.wrong += ["a traceback in the log"] if b"Traceback" in text else []
    return row


def _times(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [row["ttft"] for row in rows if row["ttft"] is not None]


def kept(server: Server, before: float) -> float:
    """What stays in memory once only ordinary requests run."""
    end = time.monotonic() + SETTLE_S
    while (found := server.held_mb() - before) >= KEPT_MB and time.monotonic() < end:
        server.is_healthy()
        time.sleep(0.5)
    return found


def _judge(row: Row, attack: Attack) -> None:
    most = TTFT_S + TIMES * _middle(row.calm)
    worst = max(row.attacked, default=0.0)
    row.wrong += ["no honest request was answered"] if not row.attacked else []
    if worst >= most and not attack.faults:
        row.wrong.append(f"an honest TTFT of {worst:.2f} s; {most:.2f} allowed")
    row.wrong += [f"lost: {row.lost[0]}"] if row.lost else []
    row.wrong += [f"{row.kept:.0f} MiB kept"] if row.kept >= KEPT_MB else []
    if row.callback[0] > CALLBACK_S:
        row.wrong.append(f"a callback of {row.callback[0] * 1e3:.0f} ms: {row.callback[1][:200]}")
