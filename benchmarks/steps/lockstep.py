"""Sequences of an open engine in lockstep: what a step, a round of drafts and a prefill take.

Knows the engine and the waits of its executors; knows no file of results and no floor.
"""

import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.steps import rank_follower
from spark_engine.engine_file import read_manifest
from spark_engine.interface import DECODE, PREFILL_TILE, Limits, verify_family
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import load
from spark_engine.runtime.engine.policy.pacing import THROUGHPUT
from spark_engine.runtime.engine.request import (
    Event,
    FinishReason,
    Request,
    SamplingParams,
    capacity,
)
from spark_engine.runtime.engine.trace import NoTrace, Trace
from tests.runtime.engine.invariants import check_idle

WARM = 8  # steps
SPARE = 32  # tokens a request may make beyond those counted
IDS = 200_000  # prompts are drawn from the ids below
Row = dict[str, Any]


class Watched:
    """An executor that counts the seconds its caller is blocked in its waits."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.blocked = inner, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, buffers: Any) -> Any:
        inner = self.inner.launch(buffers)

        def wait() -> None:
            start = time.perf_counter()
            inner()
            self.blocked += time.perf_counter() - start

        return wait


class Bench:
    """One open engine and what is measured on it.

    `before`: seconds that the process spent on something else before; `drafts`: rounds may have
    drafts; `graphs`, `traced`: of `EngineOptions`, and whether the loop's parts are timed, too.
    """

    def __init__(
        self,
        folder: Path,
        before: float = 0.0,
        drafts: bool = False,
        graphs: bool = True,
        traced: bool = False,
    ) -> None:
        if read_manifest(folder).ranks > 1:
            rank_follower.use()
        # Largest launches: no more of them than `early` counts.
        options = EngineOptions(
            policy=THROUGHPUT, depth=1, swap_bytes=0, drafts=None if drafts else 0, graphs=graphs
        )
        loaded = load(folder, 0, 1, graphs=graphs)
        assert loaded.folder is not None
        self.folder, self.drafts = loaded.folder, drafts
        self.executors = {key: Watched(e) for key, e in loaded.executors.items()}
        self.trace = Trace("engine", Path(os.devnull)) if traced else None  # it is never saved
        own = replace(loaded, executors=self.executors)
        self.engine = Engine(own, options, self.trace or NoTrace())
        self.ready = seconds_since_start() - before
        self.rng = np.random.default_rng(0)
        self._live: set[int] = set()

    @property
    def largest_prefill(self) -> int:
        """Tokens of the largest prefill bucket."""
        return PREFILL_TILE * int(self.engine.loaded.rows("prefill")[-1])

    def run(self, npl: int, ctx: int, steps: int, k: int = 0) -> Row:
        """One concurrency: prefill, warm-up, `steps` timed steps, or rounds of `k` drafts as the
        draft head makes them; the sequences stay alive."""
        most_id = min(IDS, self.engine.loaded.limits.vocab)
        prompts = self.rng.integers(0, most_id, (npl, ctx)).tolist()
        most = tokens_made(npl, ctx, steps, k, self.largest_prefill)
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        self.hold(0)
        start = time.perf_counter()
        self._live = {self.engine.submit(Request(tuple(p), params)) for p in prompts}
        waiting = set(self._live)
        while waiting:
            waiting -= {e.request_id for e in checked(self.engine.step())}
        prefill = npl * ctx / (time.perf_counter() - start)
        self.hold(k)
        for _ in range(WARM):
            self.step(npl, k)
        before = self.trace.shares() if self.trace else {}
        rows = [self.step(npl, k) for _ in range(steps)]
        row = self._row(rows, npl, k) | {"ctx": ctx, "prefill_tok_s": round(prefill, 1)}
        return row | (host_parts(before, self.trace.shares(), steps) if self.trace else {})

    def _row(self, rows: Sequence[tuple[float, float, list[int]]], npl: int, k: int) -> Row:
        times = [wall for wall, _, _ in rows]
        tokens = [token for _, _, made in rows for token in made]
        median, family = statistics.median(times), verify_family(k) if k else DECODE
        return {
            "npl": npl,
            "k": k,
            "bucket": self.bucket(family, npl),
            "step_ms": round(median * 1e3, 3),
            "decode_tok_s": round(len(tokens) / len(rows) / median, 1),
            "mean_ms": round(statistics.mean(times) * 1e3, 3),
            "host_ms": round(statistics.median(wall - b for wall, b, _ in rows) * 1e3, 3),
            # Near one: sequences differ, so that a mixture's tokens choose different experts.
            "distinct_tokens": round(len(set(tokens)) / len(tokens), 3),
        }

    def step(self, npl: int, k: int = 0) -> tuple[float, float, list[int]]:
        """Wall and blocked seconds of one step, and its tokens: of every sequence one, and at most
        one more for each of `k` drafts."""
        before = sum(e.blocked for e in self.executors.values())
        start = time.perf_counter()
        events = self.engine.step()
        wall = time.perf_counter() - start
        made = [e.token for e in checked(events) if e.token is not None]
        if not npl <= len(made) <= npl * (1 + k):
            raise RuntimeError(f"a step made {len(made)} tokens for {npl} sequences")
        return wall, sum(e.blocked for e in self.executors.values()) - before, made

    def hold(self, k: int) -> None:
        """Every round has k drafts from here on, where rounds may have drafts."""
        depth: Any = self.engine.scheduler.depth
        if self.drafts:
            depth.choose = lambda requests, brisk=False: k

    def finish(self) -> None:
        self.hold(0)
        for number in self._live:
            self.engine.cancel(number, FinishReason.LENGTH)
        while not self.engine.idle:
            self.engine.step()
        check_idle(self.engine)

    def bucket(self, family: str, rows: int) -> int:
        """Rows of the bucket that holds so many; 0 where none does."""
        return next((r for r in self.engine.loaded.buckets(family) if r >= rows), 0)

    def pave(self) -> None:
        """Gives every slot pages for all positions, if only the scratch page: launches that are
        timed one by one advance into positions without a page."""
        memory, pages = self.engine.memory, self.engine.loaded.limits.pages
        table = memory.tables["page_table"]
        table[table < 0] = pages
        for slot in range(len(table)):
            memory.mark(slot)
        memory.flush()


def tokens_made(npl: int, ctx: int, steps: int, k: int, largest_prefill: int) -> int:
    """Tokens that a sequence makes at most until its last timed step or round of k drafts: the
    first sequences decode while the last ones prefill."""
    early = -(-npl * ctx // largest_prefill)
    return early + (1 + k) * (WARM + steps) + SPARE


def check_held(limits: Limits, npl: int, ctx: int, more: int, paged: bool = True) -> None:
    """Raises SystemExit where an engine does not hold so many sequences of `ctx` + `more` tokens;
    `paged`: at once, each on separate pages."""
    whole, page = ctx + more, limits.page_size
    pages, most = npl * -(-whole // page), capacity(limits)
    if npl > limits.max_seqs:
        raise SystemExit(
            f"{npl} sequences: this engine holds {limits.max_seqs}; give at most that in --rows, "
            f"or build with --max-seqs {npl}"
        )
    if whole > most:
        raise SystemExit(
            f"{ctx} tokens of context, and {more} more: this engine holds {most}; give at most "
            f"{most - more}, or build with --max-context {whole}"
        )
    if paged and pages > limits.pages:
        raise SystemExit(
            f"{npl} sequences of {whole} tokens: the KV pages of this engine hold "
            f"{limits.pages * page}; build with --kv-tokens {pages * page}"
        )


def host_parts(before: Row, after: Row, steps: int) -> Row:
    """Of a traced engine: microseconds of a step by the loop's part, and the share in which
    launches ran."""
    wall = after["wall_s"] - before["wall_s"]
    busy = after["seconds"]["busy"] - before["seconds"]["busy"]
    parts = {
        name: round((s - before["parts_s"].get(name, 0.0)) * 1e6 / steps, 1)
        for name, s in after["parts_s"].items()
    }
    host = sum(us for name, us in parts.items() if name not in ("wait", "idle"))
    return {"busy": round(min(busy / wall, 1.0), 4), "host_us": round(host, 1), "parts_us": parts}


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
    """The GPU, its driver and the memory that is taken; nothing where no GPU is used."""
    try:
        from cuda.bindings import driver

        found = driver.cuDeviceGet(0)
    except (ImportError, RuntimeError):  # without the extra `cuda`; without the driver
        return {}
    if int(found[0]):  # the driver was never initialised
        return {}
    name = driver.cuDeviceGetName(64, found[1])[1].decode().rstrip("\0")
    version = Path("/proc/driver/nvidia/version")
    words = version.read_text().split("\n")[0].split() if version.is_file() else []
    number = next((w for w in words if w[0].isdigit() and "." in w), "unknown")
    _, free, total = driver.cuMemGetInfo()
    taken = round((total - free) / 2**30, 2)
    return {"card": name, "driver": number, "gpu_memory_gib": taken}
