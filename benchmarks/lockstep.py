"""An open engine all of whose sequences decode in lockstep: what a step and a prefill of it take.

Knows the engine, the waits of its executors, and what its launches take one by one; knows no file
of results and no floor (`bench_decode` and its like do).
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import forced_rank, kernel_split
from spark_engine.engine_file import read_manifest
from spark_engine.interface import PREFILL_TILE
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import load
from spark_engine.runtime.engine.policy.pacing import THROUGHPUT
from spark_engine.runtime.engine.request import Event, FinishReason, Request, SamplingParams

WARM = 8  # steps
SPARE = 16  # tokens a request may make beyond those counted
IDS = 200_000  # prompts are drawn from the ids below
Row = dict[str, Any]


class Watched:
    """An executor that counts the seconds its caller is blocked in its waits; `before`, where set,
    is called with the family ahead of every launch."""

    def __init__(self, inner: Any, family: str) -> None:
        self.inner, self.family, self.blocked = inner, family, 0.0
        self.before: Callable[[str], None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, buffers: Any) -> Any:
        """Launches; the wait is timed."""
        if self.before is not None:
            self.before(self.family)
        inner = self.inner.launch(buffers)

        def wait() -> None:
            start = time.perf_counter()
            inner()
            self.blocked += time.perf_counter() - start

        return wait


class Bench:
    """One open engine and what is measured on it.

    `before`: seconds that the process took for something else before it was opened; `drafts`: most
    of a round, 0 where every step is to bring one token.
    """

    def __init__(self, folder: Path, before: float = 0.0, drafts: int | None = 0) -> None:
        # Largest launches: no more of them than `early` counts.
        options = EngineOptions(policy=THROUGHPUT, depth=1, swap_bytes=0, drafts=drafts)
        if drafts is None and read_manifest(folder).ranks > 1:
            forced_rank.use()
        loaded = load(folder, 0, 1)
        self.executors = {key: Watched(e, key[0]) for key, e in loaded.executors.items()}
        self.engine = Engine(replace(loaded, executors=self.executors), options)
        self.ready = seconds_since_start() - before
        self.folder = loaded.folder
        self.rng = np.random.default_rng(0)

    def run(self, npl: int, ctx: int, steps: int) -> Row:
        """One concurrency: prefill, warm-up, `steps` timed steps; the sequences stay alive."""
        most_id = min(IDS, self.engine.loaded.limits.vocab)
        prompts = self.rng.integers(0, most_id, (npl, ctx)).tolist()
        # The first sequences decode while the last ones prefill.
        early = -(-npl * ctx // (PREFILL_TILE * self.engine.loaded.rows("prefill")[-1]))
        most = early + WARM + steps + SPARE
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        start = time.perf_counter()
        waiting = {self.engine.submit(Request(tuple(p), params)) for p in prompts}
        while waiting:
            waiting -= {e.request_id for e in checked(self.engine.step())}
        prefill = npl * ctx / (time.perf_counter() - start)
        for _ in range(WARM):
            self.step(npl)
        rows = [self.step(npl) for _ in range(steps)]
        times = [wall for wall, _, _ in rows]
        tokens = [token for _, _, made in rows for token in made]
        median = statistics.median(times)
        return {
            "npl": npl,
            "bucket": self.bucket("decode", npl),
            "ctx": ctx,
            "step_ms": round(median * 1e3, 3),
            "decode_tok_s": round(npl / median, 1),
            "mean_ms": round(statistics.mean(times) * 1e3, 3),
            "prefill_tok_s": round(prefill, 1),
            "host_ms": round(statistics.median(wall - b for wall, b, _ in rows) * 1e3, 3),
            # Near one: sequences differ, so that a mixture's tokens choose different experts.
            "distinct_tokens": round(len(set(tokens)) / len(tokens), 3),
        }

    def step(self, npl: int) -> tuple[float, float, list[int]]:
        """Wall and blocked seconds of one step, and its tokens: one of every sequence."""
        before = sum(e.blocked for e in self.executors.values())
        start = time.perf_counter()
        events = self.engine.step()
        wall = time.perf_counter() - start
        made = [e.token for e in checked(events) if e.token is not None]
        if len(made) != npl:
            raise RuntimeError(f"a step made {len(made)} tokens for {npl} sequences")
        return wall, sum(e.blocked for e in self.executors.values()) - before, made

    def finish(self) -> None:
        """Runs every sequence to its end."""
        while not self.engine.idle:
            checked(self.engine.step())
        self.engine.check_idle()

    def bucket(self, family: str, rows: int) -> int:
        """Rows of the bucket that holds so many."""
        return next(r for r in self.engine.loaded.rows(family) if r >= rows)

    def pave(self) -> None:
        """Gives every slot pages for all positions, if only the scratch page: launches that are
        timed one by one go on where no page was taken."""
        memory, pages = self.engine.memory, self.engine.loaded.limits.pages
        table = memory.tables["page_table"]
        table[table < 0] = pages
        for slot in range(len(table)):
            memory.mark(slot)
        memory.flush()

    def split(self, family: str, rows: int, step_ms: float = math.inf) -> Row:
        """Launches and their times by part, of the bucket that holds `rows`.

        One by one launches take longer than in a graph: where that takes `step_ms`, the
        difference is taken off every launch alike (`gap_us`).
        """
        assert self.folder is not None
        held = self.bucket(family, rows)
        file = next(b for b in self.folder.manifest.buckets if (b.family, b.rows) == (family, held))
        payload = self.folder.engine(file).payload
        timed = kernel_split.time_launches(self.executors[family, held].inner, payload)
        alone = sum(t.microseconds for t in timed) / 1e3
        gap = max(alone - step_ms, 0) / len(timed) * 1e3
        return {
            "launches": len(timed),
            "launches_per_layer": round(len(timed) / self.folder.manifest.model.layers, 1),
            "alone_ms": round(alone, 3),
            "gap_us": round(gap, 2),
            "parts_ms": kernel_split.by_part(timed, gap),
            "parts_launches": kernel_split.counts(timed),
        }


def checked(events: list[Event]) -> list[Event]:
    """The events. Raises RuntimeError for one that says that a sequence failed."""
    failed = next((e for e in events if e.finish is FinishReason.ERROR), None)
    if failed is not None:
        raise RuntimeError(f"request {failed.request_id}: {failed.message}")
    return events


def seconds_since_start() -> float:
    """Seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    now = time.clock_gettime(time.CLOCK_BOOTTIME)
    return now - ticks / os.sysconf("SC_CLK_TCK")


def card() -> Row:
    """The GPU, its driver and the memory that is taken."""
    from cuda.bindings import driver  # nothing else here needs the extra `cuda`

    device = driver.cuDeviceGet(0)[1]
    name = driver.cuDeviceGetName(64, device)[1].decode().rstrip("\0")
    version = Path("/proc/driver/nvidia/version")
    words = version.read_text().split("\n")[0].split() if version.is_file() else []
    number = next((w for w in words if w[0].isdigit() and "." in w), "unknown")
    _, free, total = driver.cuMemGetInfo()
    taken = round((total - free) / 2**30, 2)
    return {"card": name, "driver": number, "gpu_memory_gib": taken}
