"""Where the time to a first token goes, of a short prompt and of a long one that is mostly cached.

Knows one engine in this process. The host's time is told by its calls: what `submit` takes, and the
steps up to the one that gives the token, the first of which launches and the last of which waits.
The device's is told launch by launch, over the inputs that the prompt left in its bucket
(`kernel_split`); that leaves garbage in states and pages, and is for the end of a measurement.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import kernel_split
from spark_engine.engine_file import read_engine, read_manifest
from spark_engine.errors import SparkError
from spark_engine.interface import PREFILL
from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.engine.request import Request, SamplingParams

Row = dict[str, Any]
ATTENTION = "paged_attention"


@dataclass(frozen=True)
class Told:
    """Milliseconds of one first token: of `submit`, and of each step; launches by bucket."""

    submit: float
    steps: list[float]
    launches: Counter[str]

    @property
    def all(self) -> float:
        """Of the first token."""
        return self.submit + sum(self.steps)

    @property
    def host(self) -> float:
        """Of what comes before the last step, which waits for the device."""
        return self.all - self.steps[-1]


def first_token(engine: Engine, prompt: tuple[int, ...]) -> Told:
    """One token of a prompt, by the clock; nothing else runs."""
    buckets = _buckets(engine)
    start = time.perf_counter()
    engine.submit(Request(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)))
    stamps, came = [time.perf_counter()], False
    while not came:
        came = any(event.token is not None for event in engine.step())
        stamps.append(time.perf_counter())
    while not engine.idle:
        engine.step()
    times = [(b - a) * 1e3 for a, b in zip([start, *stamps], stamps, strict=False)]
    return Told(times[0], times[1:], _buckets(engine) - buckets)


def device_parts(engine: Engine, folder: Path, told: Told) -> list[Row]:
    """Of each prefill bucket that the last prompt ran in: launches, and milliseconds by part."""
    rows = list[Row]()
    for bucket in read_manifest(folder).buckets:
        name = f"{bucket.family}_{bucket.rows}"
        if bucket.family != PREFILL or not told.launches[name]:
            continue
        executor: Any = engine.loaded.executors[bucket.family, bucket.rows]
        timed = kernel_split.time_launches(executor, read_engine(folder / bucket.file).payload)
        parts = dict(kernel_split.by_part(timed))
        alone = sum(t.microseconds for t in timed) / 1e3
        rows.append({"bucket": name, "launches": len(timed), "alone_ms": alone, "parts_ms": parts})
    return rows


def attention_tactics(folder: Path) -> list[Row]:
    """What the build chose for attention of prefill, and microseconds of each tactic by context."""
    wanted = [
        t
        for t in read_manifest(folder).tactics
        if t["op"] == ATTENTION and t["bucket"].startswith(PREFILL)
    ]
    return [{k: t.get(k) for k in ("bucket", "chosen", "microseconds_at")} for t in wanted]


def lines(name: str, told: Told, device: list[Row]) -> list[str]:
    """What is printed of one prompt."""
    steps = " + ".join(f"{ms:.2f}" for ms in told.steps)
    ran = ", ".join(f"{bucket} x{n}" for bucket, n in told.launches.items())
    found = [f"{name}: {told.all:.2f} ms = submit {told.submit:.2f} + steps {steps}; {ran}"]
    for row in device:
        parts = ", ".join(f"{part} {ms:.2f}" for part, ms in row["parts_ms"].items())
        found.append(f"  {row['bucket']} launch by launch: {row['alone_ms']:.2f} ms: {parts}")
    return found


def measured(engine: Engine, folder: Path, told: Told) -> list[Row]:
    """`device_parts`, or nothing where there is no room to measure or nothing on a device."""
    try:
        return device_parts(engine, folder, told)
    except (AttributeError, SparkError) as error:
        print(f"not split by launch: {error}")
        return []


def _buckets(engine: Engine) -> Counter[str]:
    buckets = engine.stats()["buckets"]
    assert isinstance(buckets, dict)
    return Counter(buckets)
