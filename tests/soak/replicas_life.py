"""A cluster's replicas under load, while the processes that manage them are killed.

    python -m tests.soak.replicas_life [N] [--engine FOLDER] [--out FILE]     2 by default; exit
                                                         code 1 where something is wrong

Starts a Ray cluster and its replicas by `spark-replicas run --ray`. Then, while conversations run:
one more and one less; the command of an update is killed in the middle, and Ray completes the
update; an update is noted and never started, and another returns to the engine before; Ray's
controller is killed; the front is killed, a second `run` is refused, and `spark-replicas front
--ray` finds the same replicas; `remove` ends them. Last a `run` without a cluster is killed:
nothing of it may stay. A request may only fail while there is no front.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.soak.attacks.processes import is_running
from tests.soak.replicas import COMMAND, ENDS_S, START_S, Soak, children, command_line, listener

GONE_S = 60.0  # in which what a killed `run` had started has ended
NOTE = """
import sys
from dataclasses import replace
from spark_engine.runtime.replicas import ray_serve as placing
with placing.cluster(sys.argv[1]):
    placing._note(replace(placing.placed(), folder=sys.argv[2]))
"""


def free() -> int:
    """A port. Ray may bind without SO_REUSEADDR, so `tests.ports` cannot hold it."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, str]]:
    """A Ray cluster of one machine; its address, and that for those outside."""
    port, outside = free(), free()
    ray = (sys.executable, "-c", "from ray.scripts.scripts import main; main()")
    words = (*ray, "start", "--head", "--block", "--port", str(port), "--num-cpus", "8")
    words += ("--include-dashboard=false", "--disable-usage-stats", "--node-ip-address=127.0.0.1")
    words += ("--ray-client-server-port", str(outside))
    for name in ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent"):
        words += (f"--{name}-port", str(free()))  # Ray waits 15 s for those that it chooses itself
    os.environ["RAY_AUTH_MODE"] = "disabled"  # an explicit address takes no token by itself
    with (folder / "ray").open("wb") as log:
        head = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield f"127.0.0.1:{port}", f"ray://127.0.0.1:{outside}"
    finally:
        head.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(ENDS_S)
        head.kill()


class Life(Soak):
    def __init__(self, folder: Path, replicas: int, address: str, outside: str) -> None:
        super().__init__(folder, replicas)
        self.address, self.outside = address, outside

    def start(self, *words: str) -> None:
        """`spark-replicas` with these words, on this port, in this cluster."""
        options = ("--port", str(self.port), "--drain-timeout", "20", "--ray", self.address)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen((*COMMAND, *words, *options), stdout=log, stderr=log)

    async def said(self, *words: str) -> str:
        """What spark-replicas said; a fault where it failed."""
        code, text = await self.command(*words, "--ray", self.address)
        if code:
            self.wrong.append(f"{words} ended with {code}: {text[-300:]}")
        return text

    async def known(self) -> str:
        text = await self.said("status")
        return str(json.loads(text[text.index("{") :])["engine"]) if "{" in text else text

    def names(self) -> set[str]:
        return {row["name"] for row in self.rows()}

    def step(self, word: str) -> None:
        print(f"{time.monotonic() - self.started:4.0f} s {word}:", dict(self.outcomes), flush=True)

    async def numbers(self) -> None:
        before = self.names()
        for count in (self.replicas + 1, self.replicas):
            await self.said("scale", str(count))
            await self.until(count, START_S, set())
        if len(before & self.names()) < self.replicas - 1:
            self.wrong.append("scale replaced replicas")
        code, text = await self.command("status", "--ray", self.outside)
        if code or len(json.loads(text[text.index("{") :])["replicas"]) != self.replicas:
            self.wrong.append(f"status from outside ended with {code}: {text[-300:]}")
        self.step("one more, one less")

    async def interrupted(self, engine: Path) -> None:
        """The command of an update is killed: in the middle, and before it asks Ray."""
        before = self.names()
        copy = str(shutil.copytree(engine, self.folder / "first"))
        words = (*COMMAND, "update", copy, "--ray", self.address)
        process = await asyncio.create_subprocess_exec(*words)
        while self.names() <= before and process.returncode is None:
            await asyncio.sleep(0.05)
        if process.returncode is not None:
            self.wrong.append("the update had ended before it was killed")
        else:
            process.kill()
        await process.wait()
        await self.until(self.replicas, START_S, before)
        if (found := await self.known()) != copy:
            self.wrong.append(f"an update that was killed left {found}")
        self.step("update killed in the middle")
        before = self.names()
        second = str(shutil.copytree(engine, self.folder / "second"))
        noting = (sys.executable, "-c", NOTE, self.address, second)
        await (await asyncio.create_subprocess_exec(*noting)).wait()
        if (found := await self.known()) != second:
            self.wrong.append(f"what was noted is {found}")
        await self.said("update", copy)
        await self.until(self.replicas, START_S, set())
        if self.names() != before or await self.known() != copy:
            self.wrong.append("undoing an update that never started replaced replicas")
        self.step("update noted alone, and back")
        await self.said("update", str(engine))
        await self.until(self.replicas, START_S, before)
        self.step("updated")

    async def controller(self) -> None:
        before = self.names()
        for process in children(b"ray::ServeController"):
            os.kill(process, signal.SIGKILL)
        await asyncio.sleep(10)
        await self.said("scale", str(self.replicas + 1))
        await self.until(self.replicas + 1, START_S, set())
        if not before <= self.names():
            self.wrong.append("the controller's death cost replicas")
        await self.said("scale", str(self.replicas))
        await self.until(self.replicas, START_S, set())
        self.step("controller killed")

    async def front(self, engine: Path) -> None:
        before = self.names()
        self.excused_until, self.front_away = float("inf"), True
        self.process.kill()
        self.process.wait()
        code, text = await self.command("run", str(engine), "--ray", self.address, "--port", "0")
        if code != 2 or "already" not in text:
            self.wrong.append(f"a second run ended with {code}: {text[-300:]}")
        self.start("front")
        await self.until(self.replicas, START_S, set())
        self.excused_until, self.front_away = time.monotonic(), False
        if self.names() != before:
            self.wrong.append("the front's death cost replicas")
        await asyncio.sleep(5)
        self.step("front killed, another")

    async def load(self, engine: Path) -> None:
        async with self.conversations():
            await self.numbers()
            await self.interrupted(engine)
            await self.controller()
            await self.front(engine)

    async def removed(self) -> None:
        urls = [row["url"] for row in self.rows()]
        self.process.send_signal(signal.SIGTERM)
        if code := self.process.wait(ENDS_S):
            self.wrong.append(f"the front ended with {code}")
        if any(not listener(url) for url in urls):
            self.wrong.append("the front took replicas with it")
        await self.said("remove")
        self.wrong += [f"{url} still listens" for url in urls if listener(url)]
        code, text = await self.command("status", "--ray", self.address)
        if code != 2 or "this cluster has no replicas" not in text:
            self.wrong.append(f"status of nothing ended with {code}: {text[-300:]}")
        await self.said("remove")
        self.step("removed")

    async def killed(self, engine: Path) -> None:
        """A run without a cluster: all ends with it."""
        options = ("--replicas", "1", "--cpus", "0.2", "--port", str(self.port))
        with (self.folder / "log").open("ab") as log:
            words = (*COMMAND, "run", str(engine), *options)
            process = self.process = subprocess.Popen(words, stdout=log, stderr=log)
        try:
            await self.until(1, START_S, set())
            (url,) = [row["url"] for row in self.rows()]
            below = children(b"", process.pid)
        finally:
            process.kill()
            process.wait()
        end = time.monotonic() + GONE_S
        while time.monotonic() < end and (listener(url) or _alive(below)):
            await asyncio.sleep(0.5)
        if left := _alive(below):
            self.wrong.append(f"of a run that was killed there are {left}")
        self.step("a run without a cluster killed")

    def live(self, engine: Path) -> None:
        self.started = time.monotonic()
        options = ("--replicas", str(self.replicas), "--cpus", "0.2", "--served-model-name", "tiny")
        self.start("run", str(engine), *options)
        try:
            asyncio.run(self.until(self.replicas, START_S, set()))
            self.step("placed")
            asyncio.run(self.load(engine))
            asyncio.run(self.removed())
            asyncio.run(self.killed(engine))
        except SystemExit as problem:
            self.wrong.append(str(problem))
        finally:
            if self.process.poll() is None:
                self.process.terminate()
                self.process.wait(ENDS_S)
            shutil.copy(self.folder / "log", Path(tempfile.gettempdir()) / "replicas_life.log")
            self.took["all_s"] = time.monotonic() - self.started


def _alive(processes: dict[int, str]) -> list[str]:
    return [f"{process} {words}" for process, words in processes.items() if is_running(process)]


def _live(folder: Path, engine: Path, replicas: int) -> Soak:
    with cluster(folder) as addresses:
        life = Life(folder, replicas, *addresses)
        life.live(engine)
    return life


if __name__ == "__main__":
    sys.exit(command_line(__doc__, 2, _live))
