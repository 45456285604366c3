"""Several models at one address under load and faults: a real server, of which one engine fits.

    python -m tests.soak.models [MINUTES]      20 by default; exit code 1 where something is wrong

The embedded model is served three times: its folder, a copy of it, and a copy that is damaged again
and again, until it was refused. Clients ask all three at random, whole and as streams, some leave
early, some name no model that is there. Meanwhile engine processes are killed, also while they
load. Every request must end in the answer of its model (which all three give alike), or in a 503
that says why; only a kill excuses others. At no time may more engine processes run than are
planned. After each repair the copy must answer again in bounded time, under the same load, in which
only the kills pause.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from spark_engine.engine_file import read_manifest
from spark_engine.runtime.offline.embedded import cache_folder, embedded_engine
from spark_engine.runtime.server.engine_client.residency import TURN_S
from spark_engine.runtime.server.engine_client.supervisor import LONGEST_PAUSE_S
from spark_engine.runtime.server.process.models import needed
from spark_engine.runtime.server.process.options import ServerOptions
from tests.soak.attacks.processes import ENGINE, How, children, family, is_running, runs, server

CLIENTS, ANSWER_S = 8, 240.0
KILL_S, DAMAGE_S, LOOK_S = 60.0, 20.0, 0.1
EXCUSED_S = 15.0  # after a kill
DRAIN_S = 10.0  # of the requests that run in an engine
MOST_DESCRIPTORS = 60  # more than at the start: connections of the clients
EXPECTED = ("model_not_loaded", "queue_full", "engine_restarting")
PROMPTS = ("What is 3 plus 4?", "What is 12 plus 30?", "Once upon a time")


class Soak:
    def __init__(self, folder: Path, minutes: float) -> None:
        self.folder, self.seconds, self.end = folder, 60 * minutes, 0.0
        self.log = folder / "log"
        self.wrong, self.ended = list[str](), Counter[str]()
        self.answers = dict[str, str]()
        self.killed, self.repairing = 0.0, False
        self.random = random.Random(1)
        self.damaged = folder / "damaged"

    async def run(self) -> list[str]:
        engine = embedded_engine(cache_folder(os.environ), print)
        for name in ("copy", "damaged"):
            shutil.copytree(engine, self.folder / name)
        gib = 1.5 * needed(read_manifest(engine), ServerOptions()) / (1 << 30)
        words = (str(engine), f"second={self.folder / 'copy'}", str(self.damaged))
        options = ("--models-gib", f"{gib:.3f}", "--idle-unload", "20", "--restart-wait", "120")
        self.names = (engine.name, "second", "damaged")
        with server(self.folder, How((*words, *options))) as found:
            before = found.descriptors()
            async with httpx.AsyncClient(base_url=found.url, timeout=ANSWER_S) as client:
                self.end = time.monotonic() + self.seconds
                faults = [asyncio.create_task(t) for t in self._faults(found.pid)]
                await asyncio.gather(*(self._client(client) for _ in range(CLIENTS)))
                for task in faults:
                    task.cancel()
                await asyncio.gather(*faults, return_exceptions=True)
                await self._books(client)
            more = found.descriptors() - before
            self.note(more <= MOST_DESCRIPTORS, f"{more} descriptors more than at the start")
            all_, code = family(found.pid), found.stop()
            self.note(code == 0, f"SIGTERM: exit code {code}")
            left = [pid for pid in all_ if is_running(pid)]
            self.note(not left, f"processes are left: {left}")
        return self.wrong

    def note(self, ok: bool, words: str) -> bool:
        if not ok:
            self.wrong.append(words)
            print("WRONG:", words, flush=True)
        return ok

    async def _client(self, client: httpx.AsyncClient) -> None:
        while time.monotonic() < self.end:
            name = self.random.choice((*self.names, self.names[0], "unknown"))
            body = {
                "model": name,
                "messages": [{"role": "user", "content": self.random.choice(PROMPTS)}],
                "max_tokens": self.random.choice((4, 24)),
                "temperature": 0,
            }
            kind = self.random.choice((self._whole, self._whole, self._stream, self._leave))
            try:
                await kind(client, body)
            except httpx.HTTPError as error:
                self.note(False, f"{name}: {type(error).__name__}: {error}")
            await asyncio.sleep(self.random.random())

    async def _whole(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        answer = await client.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            self._refused(body["model"], answer.status_code, answer.json())
            return
        found = answer.json()
        self.note(found["model"] == body["model"], f"{body['model']}: {found['model']} answered")
        said = found["choices"][0]["message"]
        self._same(body, (said["reasoning"] or "") + (said["content"] or ""))

    def _same(self, body: dict[str, Any], text: str) -> None:
        """Temperature 0: every model gives the same text, and so does every load of it."""
        key = json.dumps([body["messages"], body["max_tokens"]])
        known = self.answers.setdefault(key, text)
        self.note(known == text, f"{body['model']} says {text!r}, and another said {known!r}")
        self.ended[body["model"]] += 1

    async def _stream(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        text, problem, whole = "", None, False
        request = {"json": body | {"stream": True}}
        async with client.stream("POST", "/v1/chat/completions", **request) as answer:  # type: ignore[arg-type]
            if answer.status_code != 200:
                await answer.aread()
                self._refused(body["model"], answer.status_code, answer.json())
                return
            async for line in answer.aiter_lines():
                whole |= line == "data: [DONE]"
                if line.startswith("data: {"):
                    row = json.loads(line.removeprefix("data: "))
                    problem = row.get("error", problem)
                    for choice in row.get("choices", ()):
                        delta = choice["delta"]
                        text += (delta.get("reasoning") or "") + (delta.get("content") or "")
        if problem is not None:
            self._refused(body["model"], 500, {"error": problem})
            return
        self.note(whole, f"{body['model']}: a stream without an end")
        self._same(body, text)

    async def _leave(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stream(client, body), self.random.random() * 3)

    def _refused(self, name: str, status: int, body: dict[str, Any]) -> None:
        code = body["error"]["code"]
        self.ended[f"{name} {status} {code}"] += 1
        ok = (status, code) == (404, "model_not_found") if name == "unknown" else status == 503
        ok &= name == "unknown" or code in EXPECTED
        ok |= status == 500 and time.monotonic() - self.killed < EXCUSED_S
        self.note(ok, f"{name}: {status} {body}")

    def _faults(self, server: int) -> list[Any]:
        return [self._kill(server), self._damage(), self._watch(server)]

    @staticmethod
    def _engines(server: int) -> list[int]:
        return [pid for pid in children(server) if runs(pid, ENGINE) and is_running(pid)]

    async def _kill(self, server: int) -> None:
        while True:
            await asyncio.sleep(KILL_S * (0.5 + self.random.random()))
            for pid in self._engines(server) if not self.repairing else ():
                self.killed = time.monotonic()
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self.ended["kill"] += 1

    async def _damage(self) -> None:
        file, aside = self.damaged / "manifest.json", self.folder / "aside"
        while True:
            await asyncio.sleep(DAMAGE_S)
            file.rename(aside)
            file.write_text("{}")
            await self._ends("damaged 503 model_not_loaded")
            await asyncio.sleep(DAMAGE_S)
            aside.rename(file)
            self.repairing = True
            await self._ends("damaged")
            self.repairing = False
            self.ended["repair"] += 1

    async def _ends(self, how: str) -> None:
        """Waits until another request ends so, which takes the longest pause between two tries, and
        a turn of each model."""
        before, began, seconds = self.ended[how], time.monotonic(), 0.0
        while self.ended[how] == before and self.note(
            seconds <= LONGEST_PAUSE_S + len(self.names) * (TURN_S + DRAIN_S + self._slowest()),
            f"no {how} for {seconds:.0f} s, and an engine is loaded in {self._slowest():.0f} s",
        ):
            await asyncio.sleep(LOOK_S)
            seconds = time.monotonic() - began
        print(f"{how} after {seconds:.0f} s", flush=True)

    def _slowest(self) -> float:
        """Seconds of the slowest load so far."""
        return max(map(float, re.findall(r"loaded in ([\d.]+) s", self.log.read_text())))

    async def _watch(self, server: int) -> None:
        while True:
            engines = self._engines(server)
            self.note(len(engines) <= 1, f"one engine is planned, and {len(engines)} run")
            await asyncio.sleep(LOOK_S)

    async def _books(self, client: httpx.AsyncClient) -> None:
        """Nothing is left of the requests; every model was loaded often, and answered."""
        load = (await client.get("/load")).json()
        self.note(load["server_load"] == 0, f"after the last answer: {load}")
        text = (await client.get("/metrics")).text
        for name in self.names:
            line = f'spark:engine_loads_total{{model_name="{name}"}} '
            loads = [float(row.removeprefix(line)) for row in text.splitlines() if line in row]
            self.note(bool(loads) and loads[0] >= 1, f"{name} was loaded {loads} times")
            self.note(self.ended[name] > 0, f"{name} answered nothing")
            print(f"{name}: loaded {loads} times")
        self.note(self.ended["repair"] > 0, "nothing was damaged and repaired")
        for name, count in sorted(self.ended.items()):
            print(f"  {count:6} {name}")


def main() -> int:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 20.0
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), minutes)
        wrong = asyncio.run(soak.run())
        if wrong:
            print(soak.log.read_text()[-4000:])
    print(f"{len(wrong)} things are wrong" if wrong else "nothing is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
