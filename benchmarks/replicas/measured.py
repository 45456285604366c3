"""Replicas on this machine's CPU, measured: tokens a second of 1, 2, 4 behind one front.

`python -m benchmarks.replicas.measured [--replicas 1,2,4] [--cores-each 2] [--out FILE]` serves the
embedded model (or `--engine`) by so many servers, each bound to separate cores, and the front
before them; `--clients` conversations for each replica ask for streams, as fast as they are
answered, for `--seconds`. Ray places replicas and carries no request, so it is left out. Front and
clients get the cores that are left; a number of replicas for which there are not enough cores is
left out, and where nothing is left for the front the row says so: then its rate is too low.
"""

import argparse
import asyncio
import contextlib
import json
import math
import os
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from spark_engine.runtime.offline.embedded import cache_folder, embedded_engine
from spark_engine.runtime.replicas.server_process import ServerProcess
from spark_engine.runtime.server.process.options import ServerOptions

HOST, MODEL = "127.0.0.1", "tiny"
START_S, WARM_S = 600.0, 5.0
FRONT = (sys.executable, "-m", "spark_engine.runtime.cli.spark_replicas", "front")


@contextlib.contextmanager
def bound(cores: Sequence[int]) -> Iterator[None]:
    """What is started in the block stays on these cores; none: on those of this process."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True)
class Cores:
    """The cores of each replica, of the front and of the clients."""

    replicas: tuple[tuple[int, ...], ...]
    front: tuple[int, ...]  # and the clients; none where nothing is left


def share(cores: Sequence[int], replicas: int, each: int) -> Cores | None:
    """The cores of so many replicas, as far apart as they go: neighbours may be one core's two
    threads. None where there are too few."""
    if replicas * each > len(cores):
        return None
    wide = max(each, len(cores) // (replicas + 1))
    starts = [i * (wide if replicas * wide <= len(cores) else each) for i in range(replicas)]
    own = tuple(tuple(cores[at : at + each]) for at in starts)
    taken = {core for row in own for core in row}
    return Cores(own, tuple(core for core in cores if core not in taken))


@dataclass
class Load:
    """What the clients saw; `firsts` are seconds to a request's first event."""

    events: int = 0
    whole: int = 0
    failed: int = 0
    firsts: list[float] = field(default_factory=list)


async def converse(url: str, number: int, tokens: int, load: Load, end: float) -> None:
    """One client: conversations of four turns, one after another."""
    async with aiohttp.ClientSession() as http:
        turn, messages = 0, []
        while time.monotonic() < end:
            if turn % 4 == 0:
                messages = []
            turn += 1
            messages.append({"role": "user", "content": f"{number}.{turn}: tell me a story."})
            body = {"model": MODEL, "messages": messages, "max_tokens": tokens}
            body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": False}}
            started, said, bad = time.monotonic(), 0, False
            async with http.post(f"{url}/v1/chat/completions", json=body) as answer:
                async for line in answer.content:
                    if not line.startswith(b"data: {"):
                        continue
                    bad = bad or b'"error"' in line
                    if not said:
                        load.firsts.append(time.monotonic() - started)
                    said += 1
                    load.events += 1
                done = answer.status == 200 and said > 1 and not bad
            load.whole += done
            load.failed += not done
            messages.append({"role": "assistant", "content": "Once upon a time."})


async def measure(url: str, clients: int, tokens: int, seconds: float) -> tuple[Load, float]:
    """(what was seen after the first seconds, how many seconds)."""
    load, end = Load(), time.monotonic() + WARM_S + seconds
    tasks = [asyncio.ensure_future(converse(url, n, tokens, load, end)) for n in range(clients)]
    await asyncio.sleep(WARM_S)
    load.events = load.whole = load.failed = 0
    load.firsts.clear()
    started = time.monotonic()
    await asyncio.sleep(max(0.0, end - started))
    found = Load(load.events, load.whole, load.failed, list(load.firsts))
    took = time.monotonic() - started
    await asyncio.gather(*tasks)
    return found, took


@contextlib.contextmanager
def served(engine: Path, cores: Cores) -> Iterator[tuple[str, int]]:
    children: list[ServerProcess] = []
    front: subprocess.Popen[bytes] | None = None
    try:
        for own in cores.replicas:
            with bound(own):
                children.append(
                    ServerProcess(str(engine), ServerOptions(host=HOST, names=(MODEL,)))
                )
        for child in children:
            child.wait(START_S)
        with socket.socket() as found:
            found.bind((HOST, 0))
            port = found.getsockname()[1]
        with bound(cores.front):
            words = [*FRONT, *(child.url for child in children), "--port", str(port)]
            front = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        _until_all(f"http://{HOST}:{port}", len(children))
        yield f"http://{HOST}:{port}", front.pid
    finally:
        if front is not None:
            front.terminate()
            front.wait()
        for child in children:
            child.stop(5.0)


def _until_all(url: str, count: int) -> None:
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        with contextlib.suppress(OSError, urllib.error.URLError):
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if json.load(answer)["up"] == count:
                    return
        time.sleep(0.2)
    raise SystemExit(f"the front does not find {count} replicas")


def spent(process: int) -> float:
    """Seconds of CPU time that a process has had."""
    stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def run(engine: Path, count: int, cores: Cores, args: argparse.Namespace) -> dict[str, Any]:
    with served(engine, cores) as (url, front), bound(cores.front):
        before = spent(front)
        load, took = asyncio.run(measure(url, count * args.clients, args.tokens, args.seconds))
        busy = spent(front) - before
    firsts = sorted(load.firsts) or [float("nan")]
    return {
        "replicas": count,
        "events_per_s": round(load.events / took, 1),
        "whole": load.whole,
        "failed": load.failed,
        "first_ms": round(1e3 * statistics.median(firsts), 1),
        "first_p99_ms": round(1e3 * firsts[math.ceil(0.99 * len(firsts)) - 1], 1),
        "front_cpu": round(busy / (took + WARM_S), 3),
        "front_has_its_own_cores": bool(cores.front),
    }


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", 1)[0])
    parser.add_argument("--replicas", default="1,2,4")
    parser.add_argument("--cores-each", type=int, default=1, help="an engine computes on one")
    parser.add_argument("--clients", type=int, default=8, help="for each replica")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--engine", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    engine = args.engine or embedded_engine(cache_folder(os.environ), print)
    there = sorted(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    for count in (int(n) for n in args.replicas.split(",")):
        cores = share(there, count, args.cores_each)
        if cores is None:
            print(f"{count:4} replicas need {count * args.cores_each} cores; {len(there)} are here")
            continue
        row = run(engine, count, cores, args)
        if not row["whole"]:
            raise SystemExit(f"of {row['failed']} requests to {count} replicas none was answered")
        rows.append(row)
        alone = rows[0]["events_per_s"] / rows[0]["replicas"]
        row["of_n"] = round(row["events_per_s"] / (alone * count), 3)
        note = "" if cores.front else ", front and clients on the replicas' cores"
        print(
            f"{count:4} replicas {row['events_per_s']:9,.1f} tokens/s ({row['of_n']:.3f} x N), "
            f"first {row['first_ms']:.0f} / {row['first_p99_ms']:.0f} ms, {row['failed']} failed, "
            f"front {row['front_cpu']:.0%} of a core{note}",
            flush=True,
        )
    if args.out:
        given = {k: v for k, v in vars(args).items() if k not in ("out", "engine")}
        found = {"options": given, "cores": len(there), "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
