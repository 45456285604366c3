"""Abuse of a real `spark-run --serve` of the embedded model, over the loopback, in under 3 minutes.

    python -m tests.soak.abuse          a table; exit code 1 where a row fails

Two servers: a plain one, and one that may open 64 files only. While each abuse lasts, good
requests and /health are asked again and again; each must be answered well and in time.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

START_S = 300  # the first start builds the embedded engine
GOOD_S = 5.0  # what a good answer may take
READ_S = 5  # --read-timeout of the servers
PEAK_MB, KEPT_MB, LOG_BYTES = 300, 60, 1_000_000
SETTLE_S = 10.0  # of ordinary requests, until what was taken is given back
COMPLETIONS = "/v1/completions"
GOOD = {"prompt": "Once upon a time", "max_tokens": 4}


@dataclass
class Witness:
    """Asks for good answers and for /health until it is told to stop."""

    url: str
    answers: int = 0
    slowest_s: float = 0.0
    wrong: list[str] = field(default_factory=list)
    _done: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        while not self._done.is_set():
            start = time.monotonic()
            try:
                with httpx.Client(base_url=self.url, timeout=GOOD_S, verify=False) as client:
                    found = [client.get("/health"), client.post(COMPLETIONS, json=GOOD)]
                self.wrong += [f"{a.status_code} {a.text[:80]}" for a in found if not a.is_success]
                self.answers += 1
            except httpx.HTTPError as error:
                self.wrong.append(repr(error))
            self.slowest_s = max(self.slowest_s, time.monotonic() - start)
            self._done.wait(0.1)

    def stop(self) -> None:
        self._done.set()


class Server:
    """A server process and what is known of it."""

    def __init__(self, log: Path, shell: str) -> None:
        with closing(socket.socket()) as s:
            s.bind(("127.0.0.1", 0))
            self.address = ("127.0.0.1", int(s.getsockname()[1]))
        self.url = "http://{}:{}".format(*self.address)
        self.log = log
        options = ["--serve", "--port", str(self.address[1]), "--read-timeout", str(READ_S)]
        command = [sys.executable, "-P", "-m", "spark_engine.runtime.cli", *options]
        with log.open("wb") as target:
            self.process = subprocess.Popen(
                ["sh", "-c", f'{shell}\nexec "$@"', "sh", *command],
                cwd=log.parent,
                stdout=target,
                stderr=target,
            )

    def wait(self) -> None:
        end = time.monotonic() + START_S
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if httpx.get(self.url + "/health", verify=False).is_success:
                    return
            except httpx.HTTPError:
                time.sleep(0.2)
        raise SystemExit(f"the server did not start:\n{self.log.read_text()[-2000:]}")

    def memory_mb(self, row: str = "VmRSS") -> float:
        """VmRSS: now; VmHWM: at most since `forget_peak`."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(row))

    def forget_peak(self) -> None:
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")


@contextmanager
def _server(log: Path, shell: str = "") -> Iterator[Server]:
    server = Server(log, shell)
    try:
        server.wait()
        yield server
    finally:
        server.process.terminate()
        try:
            server.process.wait(20)
        except subprocess.TimeoutExpired:
            server.process.kill()


def _post(server: Server, content: bytes) -> int:
    with httpx.Client(base_url=server.url, timeout=30, verify=False) as client:
        return client.post(COMPLETIONS, content=content).status_code


def priorities(server: Server) -> str | None:
    """320 requests with a priority of 10^20 - 1: each refused, none left behind."""
    body = json.dumps({**GOOD, "priority": 10**20 - 1}).encode()
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: _post(server, body), range(320)))
    return None if found == {400} else f"answered by {found}"


def many_prompts(server: Server) -> str | None:
    """A body of 200,000 prompts with n = 512."""
    body = json.dumps({"prompt": ["a"] * 200_000, "n": 512}).encode()
    return _refused(server, body, 2.0)


def long_prompt(server: Server) -> str | None:
    """A prompt of 24 MB, three times, of words and of one letter."""
    for text in ("once upon a time ", "a", "é"):
        prompt = text * (24_000_000 // len(text.encode()))
        body = json.dumps({"prompt": prompt}, ensure_ascii=False).encode()
        if (words := _refused(server, body, 3.0)) is not None:
            return words
    return None


def idle_sockets(server: Server) -> str | None:
    """100 sockets that say nothing, for 8 s."""
    return _hold(server, 100, lambda i: b"")


def half_open(server: Server) -> str | None:
    """300 requests that never end: half of them in their head, half in their body."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    return _hold(server, 300, lambda i: head + (b"content-length: 9\r\n\r\n{" if i % 2 else b""))


def _refused(server: Server, body: bytes, seconds: float) -> str | None:
    start = time.monotonic()
    status = _post(server, body)
    took = time.monotonic() - start
    return None if status in (400, 413) and took < seconds else f"{status} after {took:.1f} s"


def _hold(server: Server, count: int, data: Callable[[int], bytes]) -> str | None:
    """Opens connections, and wants each closed by the server within its time."""
    with ExitStack() as opened:
        sockets = []
        for i in range(count):
            sockets.append(opened.enter_context(closing(socket.create_connection(server.address))))
            sockets[-1].sendall(data(i))
        time.sleep(READ_S + 3)
        return _still_open(sockets)


def _still_open(sockets: list[socket.socket]) -> str | None:
    still = 0
    for s in sockets:
        s.setblocking(False)
        try:
            while s.recv(4096):
                pass
        except BlockingIOError:
            still += 1
        except OSError:
            pass
    return f"{still} of {len(sockets)} are still open" if still else None


def _kept_mb(server: Server, before: float) -> float:
    """What stays in memory once ordinary requests go on: a body whose request is part of a cycle of
    references stays until Python collects cycles, which it does after so many allocations."""
    end = time.monotonic() + SETTLE_S
    with httpx.Client(base_url=server.url, timeout=GOOD_S, verify=False) as client:
        while (kept := server.memory_mb() - before) >= KEPT_MB and time.monotonic() < end:
            client.get("/health")
    return kept


def _trial(server: Server, name: str, abuse: Callable[[Server], str | None]) -> bool:
    """One row of the table; whether all is well."""
    server.forget_peak()
    before, witness = server.memory_mb(), Witness(server.url)
    watching = threading.Thread(target=witness.watch)
    watching.start()
    try:
        failure = abuse(server)
    finally:
        time.sleep(1)
        witness.stop()
        watching.join()
    peak, kept, log = server.memory_mb("VmHWM"), _kept_mb(server, before), server.log.stat()
    wrong = [failure] if failure else []
    wrong += [f"good requests: {len(witness.wrong)}, {witness.wrong[0]}"] if witness.wrong else []
    wrong += ["no good request was answered"] if not witness.answers else []
    wrong += [f"peak {peak:.0f} MB"] if peak >= PEAK_MB else []
    wrong += [f"{kept:.0f} MB kept"] if kept >= KEPT_MB else []
    wrong += [f"{log.st_size} bytes of log"] if log.st_size >= LOG_BYTES else []
    print(
        f"{name:34} {witness.answers:5} {witness.slowest_s:8.2f} {peak:8.0f} {kept:8.0f}"
        f" {log.st_size:8}  {'; '.join(wrong) or 'ok'}",
        flush=True,
    )
    return not wrong


def main() -> int:
    """Runs all trials."""
    print(f"{'':34} {'good':>5} {'slowest':>8} {'peak':>8} {'kept':>8} {'log':>8}")
    print(f"{'':34} {'':>5} {'s':>8} {'MB':>8} {'MB':>8} {'bytes':>8}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        with _server(Path(folder) / "plain.log") as server:
            well = [
                _trial(server, "priority 10^20 - 1, 320 times", priorities),
                _trial(server, "200,000 prompts, n = 512", many_prompts),
                _trial(server, "24 MB prompt, 3 times", long_prompt),
                _trial(server, "300 half-open requests", half_open),
            ]
        with _server(Path(folder) / "few.log", "ulimit -n 64") as server:
            well += [
                _trial(server, "100 idle sockets, 64 descriptors", idle_sockets),
                _trial(server, "300 half-open, 64 descriptors", half_open),
            ]
    return 0 if all(well) else 1


if __name__ == "__main__":
    sys.exit(main())
