"""Whole loads reckoned from what launches take: what a policy or another set of buckets comes to.

The real scheduler plans every step; only the launches are reckoned, with one step of run-ahead as
on a GPU: from the rows that `benchmarks.launch_costs --out` measured, or from an engine's manifest.
`python -m benchmarks.pacing ROWS.json|ENGINE` prints the mixed load, a long prompt beside 64 who
decode, and short arrivals, for each policy and model; `--buckets 256,1024,4096` leaves all other
prefill buckets out, `--decode` likewise, `--faster 1.3` reckons a prefill as much faster.
"""

from __future__ import annotations

import argparse
import json
from collections import deque
from collections.abc import Sequence as Several
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import loads
from spark_engine.engine_file import read_manifest
from spark_engine.interface import DECODE, PREFILL, PREFILL_TILE
from spark_engine.runtime.engine.plan import Batch, StepPlan
from spark_engine.runtime.engine.policy.pacing import Pace, PrefillPolicy
from spark_engine.runtime.engine.request import FinishReason, Request, SamplingParams, Status
from spark_engine.runtime.engine.scheduler import Scheduler, Sizes
from spark_engine.runtime.engine.sequence import Sequence

HOST = 60e-6  # seconds of the host in a step, most of them beside the device's
FAR = 16_384  # the context of the rows' second time
PAGE = 64


@dataclass(frozen=True)
class Launches:
    """What launches take, by the measured rows. `faster` divides prefill's."""

    rows: tuple[dict[str, Any], ...]
    faster: float = 1.0

    def seconds(self, batch: Batch) -> float:
        """Of one batch: between half full and full, and by how far its sequences are."""
        row = next(r for r in self.rows if (r["family"], r["rows"]) == (batch.family, batch.bucket))
        full = float(row["us"])
        half = float(row.get("half_us", full))
        live = batch.live / batch.bucket
        found = full - (full - half) * 2 * (1 - live)
        if batch.family == PREFILL:
            far = float(row.get(f"us_at_{FAR}", full)) - full
            found += far / FAR * live * sum(batch.starts) / batch.live
            found /= self.faster
        return max(found, 0.0) / 1e6

    def buckets(self, family: str) -> tuple[int, ...]:
        """Rows of the family's buckets."""
        return tuple(sorted(r["rows"] for r in self.rows if r["family"] == family))

    def table(self) -> dict[tuple[str, int], float]:
        """As a build would tell them."""
        speed = {PREFILL: self.faster, DECODE: 1.0}
        return {(r["family"], r["rows"]): r["built_us"] / speed[r["family"]] for r in self.rows}


class Reckoned:
    """A server whose device is a clock."""

    def __init__(self, launches: Launches, policy: PrefillPolicy, slots: int = 128) -> None:
        self.launches, self._now, self._free = launches, 0.0, 0.0
        sizes = Sizes(
            slots=slots, pages=1 << 16, page_size=PAGE, decode=launches.buckets(DECODE),
            prefill=launches.buckets(PREFILL), tile=PREFILL_TILE, slot_bytes=1, page_bytes=1,
            swap_bytes=0, max_waiting=1 << 20,
        )  # fmt: skip
        self.scheduler = Scheduler(sizes, policy, launches.table())
        self._asked = self._room = self._next = 0
        self._flying: deque[tuple[StepPlan, float, float]] = deque()  # and its start and end

    def submit(self, prompt: int, out: int) -> int:
        """Queues a request."""
        request = Request((0,) * prompt, SamplingParams())
        self.scheduler.add(Sequence(self._next, request, prompt + out, frozenset(), seed=0))
        self._next += 1
        return self._next - 1

    def end(self, number: int) -> None:
        """Ends a request."""
        everybody = (*self.scheduler.running, *self.scheduler.waiting)
        seq = next(s for s in everybody if s.id == number)
        self.scheduler.finish(seq, FinishReason.CANCELLED)

    def now(self) -> float:
        """Seconds on the reckoned clock."""
        return self._now

    def computed(self) -> tuple[int, int]:
        """Tokens asked for, and room of the launches."""
        return self._asked, self._room

    def step(self) -> list[int]:
        """One step, as the engine's loop takes it."""
        plan = self.scheduler.schedule(len(self._flying))
        self._now += HOST
        start = max(self._now, self._free)
        self._free = start + sum(map(self.launches.seconds, plan.batches))
        for batch in plan.batches:
            if batch.family == PREFILL:
                self._asked += sum(batch.counts)
                self._room += batch.bucket * PREFILL_TILE
        self._flying.append((plan, start, self._free))
        keep, came = int(bool(plan.batches) and not plan.drain), []
        while len(self._flying) > keep:
            ended, began, end = self._flying.popleft()
            self._now = max(self._now, end)
            self.scheduler.collected(ended.step)
            self.scheduler.measured(ended.batches, (end - began) * 1e6)
            came += [n for batch in ended.batches for n in self._sampled(batch)]
        return came

    def _sampled(self, batch: Batch) -> list[int]:
        found = []
        for seq, emit in zip(batch.seqs, batch.emits, strict=True):
            if emit and seq.status is not Status.FINISHED:
                seq.tokens.append(0)
                found.append(seq.id)
                if len(seq.tokens) >= seq.limit:
                    self.scheduler.finish(seq, FinishReason.LENGTH)
        return found


def reckon(launches: Launches, policy: PrefillPolicy) -> list[str]:
    """The lines of one policy."""
    name = policy.pace.value if policy.itl_ms is None else f"{policy.itl_ms:g} ms"
    run = loads.Run(Reckoned(launches, policy))
    live = run.live(loads.WIDTH)
    long = loads.arrival(run, live, loads.LONG_PROMPT)
    short = loads.arrival(run, live, loads.SHORT_PROMPT)
    run.end()
    return [
        loads.line_of_mixed(name, loads.mixed(Reckoned(launches, policy))),
        loads.line_of_arrival(f"  {loads.LONG_PROMPT} tokens", long),
        loads.line_of_arrival(f"  {loads.SHORT_PROMPT} tokens", short),
    ]


def stored(path: Path, sizes: dict[str, Several[int]]) -> dict[str, tuple[dict[str, Any], ...]]:
    """The rows by model, those left out of which `sizes` names others in their family."""
    if path.is_dir():
        manifest = read_manifest(path)
        told = [(b, {"us": b.cost_us, "built_us": b.cost_us}) for b in manifest.buckets]
        rows = [{"model": manifest.name, "family": b.family, "rows": b.rows} | c for b, c in told]
    else:
        rows = json.loads(path.read_text())["rows"]
    kept = [r for r in rows if r["rows"] in sizes.get(r["family"], (r["rows"],))]
    models = dict.fromkeys(r["model"] for r in kept)
    return {model: tuple(r for r in kept if r["model"] == model) for model in models}


def main(words: Several[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("costs", type=Path, help="rows of launch_costs, or an engine folder")
    parser.add_argument("--buckets", help="tokens of the prefill buckets to keep")
    parser.add_argument("--decode", help="rows of the decode buckets to keep")
    parser.add_argument("--itl-ms", type=float, action="append", default=[])
    parser.add_argument("--faster", type=float, default=1.0)
    args = parser.parse_args(words)
    sizes: dict[str, Several[int]] = {}
    if args.buckets:
        sizes[PREFILL] = [int(t) // PREFILL_TILE for t in args.buckets.split(",")]
    if args.decode:
        sizes[DECODE] = [int(r) for r in args.decode.split(",")]
    policies = [PrefillPolicy(pace) for pace in Pace]
    policies += [PrefillPolicy(Pace.THROUGHPUT, ms) for ms in args.itl_ms]
    for model, rows in stored(args.costs, sizes).items():
        launches = Launches(rows, args.faster)
        print(model, "prefill", *(b * PREFILL_TILE for b in launches.buckets(PREFILL)))
        for policy in policies:
            print(*reckon(launches, policy), sep="\n", flush=True)


if __name__ == "__main__":
    main()
