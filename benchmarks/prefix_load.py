"""What the prefix cache saves and costs: first tokens of warm and cold prompts on a real engine.

`python -m benchmarks.prefix_load ENGINE [--context 16384] [--new 200] [--out FILE]` runs, in
process and without HTTP, over random ids, what is loaded being out of the garbage collector's way
as in a server:

    short   a prompt of `--new` tokens, nothing cached
    cold    a conversation of `--context` tokens, nothing cached; and again without a cache, so that
            the difference is what taking snapshots costs
    warm    the same conversation with its answer and `--new` tokens more
    fork    32 prompts with a beginning of 4,096 tokens in common, at once; and one of them alone

Times are to the first token, the median of `--repeat` runs; "computed" counts prefilled tokens.
Then where the time of short and warm goes (`ttft_parts`), and the tactics of attention, which
`--no-parts` leaves out.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ttft_parts
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Request, SamplingParams

FORKS, COMMON, OWN = 32, 4096, 64
REPEATS = 5  # of prompts whose parts are told
ANSWER = 64  # tokens that a conversation's last turn generated


@dataclass
class Run:
    """One batch of prompts: seconds to the last first token, tokens prefilled, what was said."""

    seconds: float
    computed: int
    tokens: list[list[int]]


def run(engine: Engine, prompts: list[tuple[int, ...]], answer: int) -> Run:
    """All prompts at once, each to `answer` greedy tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    before, start = int(str(engine.stats()["prefilled"])), time.perf_counter()
    said: dict[int, list[int]] = {engine.submit(Request(p, params)): [] for p in prompts}
    first = 0.0
    while not engine.idle:
        for event in engine.step():
            if event.finish and event.message:
                raise SystemExit(f"a request failed: {event.message}")
            if event.token is None:
                continue
            if not said[event.request_id]:
                first = time.perf_counter() - start
            said[event.request_id].append(event.token)
    return Run(first, int(str(engine.stats()["prefilled"])) - before, list(said.values()))


class Prompts:
    """Random ids; no two prompts begin alike."""

    def __init__(self, vocab: int) -> None:
        self._rng, self._vocab = np.random.default_rng(11), vocab

    def draw(self, size: int) -> tuple[int, ...]:
        """A prompt of `size` tokens."""
        return tuple(self._rng.integers(0, self._vocab, size).tolist())


def median(repeat: int, once: Callable[[], Run]) -> Run:
    """The run in the middle of `repeat`, after one to warm up."""
    once()
    return sorted((once() for _ in range(repeat)), key=lambda r: r.seconds)[repeat // 2]


def opened(folder: Path, options: EngineOptions) -> Engine:
    """An engine as a server has it."""
    engine = Engine.open(folder, options)
    gc.collect()
    gc.freeze()
    return engine


def parts(engine: Engine, folder: Path, prompts: Prompts, context: int, new: int) -> dict[str, Any]:
    """Of a short and a warm prompt: the host's calls, the middle one of some, and the launches."""
    told, found = dict[str, ttft_parts.Told](), dict[str, Any]()
    for name in ("short", "warm"):
        runs = []
        for _ in range(REPEATS):
            before = tuple[int, ...]()
            if name == "warm":
                before = prompts.draw(context)
                before += tuple(run(engine, [before], ANSWER).tokens[0])
            runs.append(ttft_parts.first_token(engine, before + prompts.draw(new)))
        told[name] = sorted(runs, key=lambda one: one.all)[REPEATS // 2]
        device = ttft_parts.measured(engine, folder, runs[-1])
        print(*ttft_parts.lines(name, told[name], device), sep="\n", flush=True)
        one = told[name]
        found[name] = {"submit_ms": one.submit, "step_ms": one.steps, "device": device}
    for row in ttft_parts.attention_tactics(folder):
        print(row["bucket"], row["chosen"], json.dumps(row["microseconds_at"]))
    return found


def measure(
    folder: Path, context: int, new: int, repeat: int, split: bool = False
) -> dict[str, Any]:
    """All rows, by name."""
    engine = opened(folder, EngineOptions())
    prompts = Prompts(engine.loaded.limits.vocab - 1)
    rows: dict[str, Run] = {}
    rows["short"] = median(repeat, lambda: run(engine, [prompts.draw(new)], 1))
    rows["cold"] = median(repeat, lambda: run(engine, [prompts.draw(context)], 1))

    def warm() -> Run:
        asked = prompts.draw(context)
        answer = run(engine, [asked], ANSWER).tokens[0]
        return run(engine, [asked + tuple(answer) + prompts.draw(new)], 1)

    rows["warm"] = median(repeat, warm)

    def fork() -> Run:
        common = prompts.draw(COMMON)
        return run(engine, [common + prompts.draw(OWN) for _ in range(FORKS)], 1)

    rows["fork"] = median(repeat, fork)
    rows["alone"] = median(repeat, lambda: run(engine, [prompts.draw(COMMON + OWN)], 1))
    stats = engine.stats()
    more = {"parts": parts(engine, folder, prompts, context, new)} if split else {}
    engine.close()
    plain = opened(folder, EngineOptions(cache_bytes=0))
    rows["uncached"] = median(repeat, lambda: run(plain, [prompts.draw(context)], 1))
    plain.close()
    seconds = {name: round(r.seconds * 1e3, 2) for name, r in rows.items()}
    kept = {
        k: v for k, v in stats.items() if k.startswith(("prefix", "snapshot", "cache", "evict"))
    }
    return {
        "ms": seconds,
        "computed": {name: r.computed for name, r in rows.items()},
        "warm_over_short": round(rows["warm"].seconds / rows["short"].seconds, 3),
        "snapshots_cost": round(rows["cold"].seconds / rows["uncached"].seconds - 1, 4),
        "fork_over_alone": round(rows["fork"].seconds / rows["alone"].seconds, 3),
        "stats": kept,
        **more,
    }


def main() -> None:
    """Reads the command line and prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("engine", type=Path)
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--new", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-parts", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found = measure(args.engine, args.context, args.new, args.repeat, not args.no_parts)
    for name, ms in found["ms"].items():
        print(f"{name:9} {ms:10.2f} ms to the first token, {found['computed'][name]} computed")
    print(f"warm {found['warm_over_short']} of short (aim 1.2)")
    print(f"snapshots cost {100 * found['snapshots_cost']:.2f} % of a cold prefill (aim 2)")
    print(f"32 forks take {found['fork_over_alone']} of one alone")
    print(json.dumps(found["stats"]))
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
