"""Replicas of the embedded model on the CPU, placed by Ray, under load: faults, and an update.

    python -m tests.soak.replicas [N] [--engine FOLDER] [--out FILE]     4 by default; exit code 1
                                              where something is wrong; FILE gets the figures

Conversations of streams and whole answers go through the front of `spark-replicas run`. A second
`run` is refused; the directory of the replicas is killed; a server is killed with its engine;
another is stopped (SIGSTOP); an update to an engine that does not load fails, and replaces not all;
then `update` replaces all by a copy of the engine folder. Each request must end whole, or in an
error that says why, and such errors only after a server was killed or stopped: neither the
directory nor an update excuses any. Nothing may be left running.
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx

from spark_engine.manifest import WEIGHTS
from spark_engine.runtime.offline.embedded import cache_folder, embedded_engine
from tests.ports import free_port
from tests.soak.attacks.processes import family

COMMAND = (sys.executable, "-m", "spark_engine.runtime.cli.spark_replicas")
START_S, ENDS_S, EXCUSED_S = 600.0, 120.0, 45.0
CLIENTS, QUIET_S = 8, 10.0


class Soak:
    def __init__(self, folder: Path, replicas: int) -> None:
        self.folder, self.replicas = folder, replicas
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.excused_until = 0.0
        self.front_away = False
        self.stop = False
        self.process: subprocess.Popen[bytes]
        self.took: dict[str, float] = {}  # seconds

    def begin(self, engine: Path) -> subprocess.Popen[bytes]:
        options = ("--replicas", str(self.replicas), "--cpus", "0.2", "--port", str(self.port))
        options += ("--drain-timeout", "60", "--served-model-name", "tiny")
        words = (*COMMAND, "run", str(engine), *options)
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)

    def rows(self) -> list[dict[str, str]]:
        found: list[dict[str, str]] = httpx.get(f"{self.url}/replicas").json()["replicas"]
        return found

    async def until(self, names: int, limit_s: float, without: set[str]) -> None:
        """So many replicas are up, none of those named."""
        end = time.monotonic() + limit_s
        while time.monotonic() < end and self.process.poll() is None:
            try:
                up = {row["name"] for row in self.rows() if row["up"]}
            except httpx.HTTPError:
                up = set()
            if len(up) == names and not up & without:
                return
            await asyncio.sleep(0.5)
        over = (
            f"it ended with {code}" if (code := self.process.poll()) is not None else "it is late"
        )
        raise SystemExit(f"there are not {names} replicas, {over}: see the log")

    async def client(self, number: int, http: httpx.AsyncClient) -> None:
        messages: list[dict[str, str]] = []
        while not self.stop:
            if len(messages) > 6:
                messages = []
            messages.append({"role": "user", "content": f"{number}: what is 3 plus {number}?"})
            body = {"model": "tiny", "messages": messages, "max_tokens": 24}
            started = time.monotonic()
            said = await self._ask(http, {**body, "stream": bool(number % 2)})
            excused = started < self.excused_until
            outcome = said if said == "whole" else f"{said}, {'' if excused else 'un'}excused"
            self.outcomes[outcome] += 1
            if said != "whole" and not excused:
                self.wrong.append(f"client {number}: {said}")
            messages.append({"role": "assistant", "content": "6"})

    async def _ask(self, http: httpx.AsyncClient, body: dict[str, object]) -> str:
        """How it ended: whole, or in which words; never half, never without words."""
        try:
            answer = await http.post(f"{self.url}/v1/chat/completions", json=body)
        except httpx.HTTPError as error:
            if self.front_away:
                await asyncio.sleep(0.5)
                return "no front"
            self.wrong.append(f"no answer at all: {type(error).__name__}")
            return "nothing"
        if answer.status_code != 200:
            return str(answer.status_code) if "error" in answer.json() else "no words"
        if not body["stream"]:
            return "whole" if answer.json()["choices"][0]["finish_reason"] else "half"
        events = answer.text.split("\n\n")
        data = [row.removeprefix("data: ") for row in events if row]
        if not data or data[-1] != "[DONE]":
            return "half a stream"
        last = [json.loads(row) for row in data[:-1]]
        return "error in the stream" if any("error" in row for row in last) else "whole"

    async def command(self, *words: str) -> tuple[int, str]:
        """(exit code, what it said) of spark-replicas."""
        pipe = asyncio.subprocess.PIPE
        said = asyncio.subprocess.STDOUT
        process = await asyncio.create_subprocess_exec(*COMMAND, *words, stdout=pipe, stderr=said)
        text, _ = await process.communicate()
        return process.returncode or 0, text.decode()

    async def directory(self, engine: Path) -> None:
        """A second run, and the directory's death: neither is felt by a request."""
        code, text = await self.command("run", str(engine), "--ray", "auto", "--port", "0")
        if code != 2 or "already" not in text:
            self.wrong.append(f"a second run ended with {code}: {text[-300:]}")
        (directory,) = children(b"ray::Directory", self.process.pid)
        os.kill(directory, signal.SIGKILL)
        started = time.monotonic()
        while True:
            code, text = await self.command("status")
            found = json.loads(text[text.index("{") :]) if code == 0 else {}
            whole = len(found.get("replicas", ())) == self.replicas
            if whole or time.monotonic() - started > EXCUSED_S:
                break
        if not whole or found["engine"] != str(engine):
            self.wrong.append(f"the new directory knows {found or text[-300:]}")
        await asyncio.sleep(QUIET_S)
        print("another directory:", dict(self.outcomes), flush=True)

    async def updates(self, engine: Path) -> None:
        """One that fails, and one that does not."""
        before = {row["name"] for row in self.rows()}
        broken = Path(shutil.copytree(engine, self.folder / "broken"))
        (broken / WEIGHTS).unlink()
        code, text = await self.command("update", str(broken))
        if code != 2 or "is placed as before" not in text:
            self.wrong.append(f"a broken update ended with {code}: {text[-300:]}")
        await self.until(self.replicas, START_S, set())
        if self.replicas > 1 and not before & {row["name"] for row in self.rows()}:
            self.wrong.append("an update that failed replaced all replicas")
        print("not replaced:", dict(self.outcomes), flush=True)
        before, started = {row["name"] for row in self.rows()}, time.monotonic()
        copy = str(shutil.copytree(engine, self.folder / "tiny"))
        code, text = await self.command("update", copy)
        if code:
            self.wrong.append(f"spark-replicas update failed: {text[-300:]}")
        await self.until(self.replicas, START_S, before)
        self.took["update_s"] = time.monotonic() - started
        print("replaced:", dict(self.outcomes), flush=True)
        await asyncio.sleep(QUIET_S)

    async def faults(self, engine: Path) -> None:
        await asyncio.sleep(QUIET_S)
        await self.directory(engine)
        first, second, *_ = self.rows()
        self.excused_until = time.monotonic() + EXCUSED_S
        os.kill(listener(first["url"]), signal.SIGKILL)
        print("killed", first["name"], flush=True)
        started = time.monotonic()
        await self.until(self.replicas, START_S, {first["name"]})
        self.took["killed_s"] = time.monotonic() - started
        print("another is there:", dict(self.outcomes), flush=True)
        await asyncio.sleep(QUIET_S)
        if self.replicas > 1:
            self.excused_until = time.monotonic() + EXCUSED_S
            os.kill(stopped := listener(second["url"]), signal.SIGSTOP)
            print("stopped", second["name"], flush=True)
            await self.until(self.replicas, START_S, {second["name"]})
            print("another is there:", dict(self.outcomes), flush=True)
            if Path(f"/proc/{stopped}").exists():
                os.kill(stopped, signal.SIGCONT)
            await asyncio.sleep(max(QUIET_S, self.excused_until - time.monotonic()))
        await self.updates(engine)

    @asynccontextmanager
    async def conversations(self) -> AsyncIterator[None]:
        """Of all clients, during the block; each request ends behind it."""
        async with httpx.AsyncClient(timeout=ENDS_S) as http:
            clients = [asyncio.create_task(self.client(n, http)) for n in range(CLIENTS)]
            try:
                yield
            finally:
                self.stop = True
                await asyncio.gather(*clients)

    async def load(self, engine: Path) -> None:
        async with self.conversations():
            await self.faults(engine)

    def run(self, engine: Path) -> None:
        started = time.monotonic()
        urls: list[str] = []
        process = self.process = self.begin(engine)
        try:
            asyncio.run(self.until(self.replicas, START_S, set()))
            self.took["start_s"] = time.monotonic() - started
            print(f"{self.replicas} replicas after {self.took['start_s']:.0f} s", flush=True)
            urls += [row["url"] for row in self.rows()]
            asyncio.run(self.load(engine))
            text = httpx.get(f"{self.url}/metrics").text
            print(*(row for row in text.splitlines() if row.startswith("spark_front_")), sep="\n")
            urls += [row["url"] for row in self.rows()]
        except SystemExit as problem:
            self.wrong.append(str(problem))
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(ENDS_S)
            shutil.copy(self.folder / "log", Path(tempfile.gettempdir()) / "replicas.log")
        if code:
            self.wrong.append(f"spark-replicas ended with {code}")
        self.took["all_s"] = time.monotonic() - started
        self.wrong += [f"{url} still listens" for url in urls if listener(url)]


def children(words: bytes, above: int = 0) -> dict[int, str]:
    """The processes below that one (0: all) with these words in their command line: {pid: line}."""
    all_ = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    found = {}
    for process in family(above)[1:] if above else all_:
        with suppress(OSError):
            line = Path(f"/proc/{process}/cmdline").read_bytes()
            if words in line:
                found[process] = line.replace(b"\0", b" ").decode("utf-8", "replace")[:99]
    return found


def listener(url: str) -> int:
    """The process that listens there; 0 where none does."""
    port = int(url.rpartition(":")[2])
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    nodes = {f"socket:[{r[9]}]" for r in rows if r[3] == "0A" and int(r[1][-4:], 16) == port}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(os.readlink(fd) in nodes for fd in (process / "fd").iterdir()):
                return int(process.name)
        except OSError:
            continue
    return 0


def command_line(doc: str | None, replicas: int, live: Callable[[Path, Path, int], Soak]) -> int:
    """Runs `live` (a folder, the engine, how many replicas) as the command asks; the exit code."""
    parser = argparse.ArgumentParser(description=(doc or "").split("\n\n", 1)[0])
    parser.add_argument("replicas", type=int, nargs="?", default=replicas)
    parser.add_argument("--engine", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    engine = (args.engine or embedded_engine(cache_folder(os.environ), print)).resolve()
    with tempfile.TemporaryDirectory() as made:
        soak = live(Path(made), engine, args.replicas)
    print(dict(soak.outcomes), *soak.wrong, sep="\n", flush=True)
    took = {name: round(seconds, 1) for name, seconds in soak.took.items()}
    row = {"replicas": args.replicas, "cores": os.cpu_count(), "clients": CLIENTS}
    row |= {"requests": dict(soak.outcomes), "wrong": soak.wrong, **took}
    if args.out:
        args.out.write_text(json.dumps(row, indent=1) + "\n")
    return 1 if soak.wrong or not soak.outcomes["whole"] else 0


def _live(folder: Path, engine: Path, replicas: int) -> Soak:
    soak = Soak(folder, replicas)
    soak.run(engine)
    return soak


if __name__ == "__main__":
    sys.exit(command_line(__doc__, 4, _live))
