"""Engines at one address, not all of which fit: seconds of a switch, GPU memory against the plan.

`python -m benchmarks.served.switch ENGINE ENGINE... [--rounds N] [--load S] [--models-gib G]`
serves them. Idle first: in each round every model gets two requests of 64 random tokens for one
more; the first has to load it, and the second not. Then for S seconds eight clients ask all of them
at random, 32 tokens each; each must be answered. Meanwhile nvidia-smi samples the memory that is
taken, which may never exceed that of the largest set of engines that the plan lets in; without a
GPU it is not measured. Exit code 1 where a request failed, a switch took longer than 6 s, none was
needed, or memory exceeded the plan.
"""

import argparse
import itertools
import json
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spark_engine.bench.target import started
from spark_engine.runtime.server.process.models import plan_models
from spark_engine.runtime.server.process.options import ServerOptions

LIMIT_S, CLIENTS, WAIT_S, GIB = 6.0, 8, 600.0, 1 << 30
_LOADED = re.compile(r"loaded in ([\d.]+) s")


class Memory:
    """Samples the first GPU's taken bytes, from before the server to its end."""

    def __init__(self) -> None:
        query = [
            "nvidia-smi",
            "-i",
            "0",
            "--query-gpu=memory.used",
            "--format=csv,noheader,nounits",
        ]
        self.most, self.first = 0, None
        try:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen([*query, "-lms", "50"], stdout=pipe, text=True)
        except OSError:
            return
        self.first = self._next()
        threading.Thread(target=self._read, daemon=True).start()

    def _next(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline()) << 20

    def _read(self) -> None:
        assert self.first is not None
        while True:
            self.most = max(self.most, self._next() - self.first)


class Asked:
    """Requests to a server, and how they ended."""

    def __init__(self, url: str, names: list[str]) -> None:
        self.address, self.names = urlsplit(url).netloc, names
        self.ended, self.random = Counter[str](), random.Random(1)

    def post(self, name: str, count: int, output: int) -> float:
        """The seconds of a whole answer."""
        prompt = [self.random.randrange(5, 1000) for _ in range(count)]
        body = {"model": name, "prompt": prompt, "max_tokens": output, "ignore_eos": True}
        start = time.perf_counter()
        status = self._send("POST", "/v1/completions", json.dumps(body))[0]
        self.ended[f"{name} {status}"] += 1
        return time.perf_counter() - start

    def states(self) -> dict[str, str]:
        rows = json.loads(self._send("GET", "/v1/models")[1])["data"]
        return {row["id"]: row["state"] for row in rows}

    def _send(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = HTTPConnection(self.address, timeout=WAIT_S)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


def idle(asked: Asked, rounds: int) -> list[float]:
    """Seconds of switches: those of a request that loads its model, less those of the next one."""
    found = []
    for _, name in itertools.product(range(rounds), asked.names):
        before = asked.states()[name]
        first, second = asked.post(name, 64, 1), asked.post(name, 64, 1)
        print(f"{name:12s} {before:9s} {first:7.3f} s, then {second:7.3f} s", flush=True)
        found += [first - second] if before != "loaded" else []
    return found


def load(asked: Asked, seconds: float) -> None:
    """Clients that ask at random; prints the times of their answers."""
    end, took = time.monotonic() + seconds, {name: list[float]() for name in asked.names}

    def client(number: int) -> None:
        draws = random.Random(number)
        while time.monotonic() < end:
            name = draws.choice(asked.names)
            took[name].append(asked.post(name, 256, 32))

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    for name, row in took.items():
        print(f"{name:12s} {len(row)} answers under load, the slowest {max(row, default=0):.1f} s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engines", type=Path, nargs="+")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", type=float, default=60.0)
    parser.add_argument("--models-gib", type=float)
    given = parser.parse_args()
    more: list[Any] = ["--restart-wait", "300"]
    more += [] if given.models_gib is None else ["--models-gib", str(given.models_gib)]
    most = None if given.models_gib is None else int(given.models_gib * GIB)
    folders = {folder.name: folder for folder in given.engines}
    if len(folders) < len(given.engines):
        parser.error(f"models are named by their folders, of which some are equal: {[*folders]}")
    rows, budgets = plan_models(folders, ServerOptions(models_bytes=most))
    needs, budget = (
        [row.needs for row in rows],
        budgets[rows[0].memory] or sum(r.needs for r in rows),
    )
    sets = itertools.chain.from_iterable(
        itertools.combinations(needs, n) for n in range(len(rows) + 1)
    )
    planned = max(total for total in map(sum, sets) if total <= budget)
    print(
        f"plans {', '.join(f'{n / GIB:.1f}' for n in needs)} of {budget / GIB:.1f} GiB", flush=True
    )
    memory, said = Memory(), list[str]()
    first, *others = (f"{name}={folder}" for name, folder in folders.items())
    with started(Path(first), [*others, *more], said.append) as url:
        asked = Asked(url, list(folders))
        switches = idle(asked, given.rounds)
        load(asked, given.load)
    loads = [float(found[1]) for line in said if (found := _LOADED.search(line))]
    slowest = max(switches, default=0.0)
    failed = {end: n for end, n in asked.ended.items() if not end.endswith(" 200")}
    words = f"{len(switches)} switches, the slowest {slowest:.2f} s, wanted {LIMIT_S:g}"
    print(f"{words}; {len(loads)} loads, the slowest {max(loads, default=0):.2f} s")
    if memory.first is not None:
        print(f"memory at most {memory.most / GIB:.1f} GiB, planned {planned / GIB:.1f} GiB")
    print(f"failed: {failed or 'none'}")
    return int(bool(failed) or not switches or slowest > LIMIT_S or memory.most > planned)


if __name__ == "__main__":
    sys.exit(main())
