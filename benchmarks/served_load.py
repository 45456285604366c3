"""Loads on a real engine in this process, without HTTP: what pacing gives beside what it should.

`python -m benchmarks.served_load ENGINE` runs, over one opened engine, a prompt of 8,192 tokens and
one of 1,024 beside 64 requests that decode, for `balanced` and `latency`; the mixed load (256
requests, 64 in flight, 512 to 2,048 tokens in, 64 to 256 out) for `balanced` and `throughput`;
64 requests that come one after another beside 64 in lockstep; ten bursts. Prompts are random ids,
outputs greedy and of a given length, one step is launched ahead. `--aims 27b` or `35b` puts what is
asked for beside each line. `--loads beside,mixed` runs some of them. `--out` keeps all as JSON,
beside what the file had of other loads. `--itl-ms` adds a bound of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import loads
from spark_engine.interface import PREFILL, PREFILL_TILE
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import Loaded, load
from spark_engine.runtime.engine.policy.pacing import (
    BALANCED,
    LATENCY,
    THROUGHPUT,
    Pace,
    PrefillPolicy,
)
from spark_engine.runtime.engine.request import FinishReason, Request, SamplingParams

IDS = 200_000  # prompts are drawn from the ids below
# ITL p99 in ms beside 8k of prefill; tokens a second of the mixed load with `throughput`
AIMS = {"27b": (60, 1050), "35b": (20, 3700)}
Row = dict[str, Any]


class Live:
    """An engine as a server of random prompts."""

    def __init__(self, loaded: Loaded, policy: PrefillPolicy) -> None:
        options = EngineOptions(policy=policy, swap_bytes=0)
        self.engine = Engine(loaded, options)
        self._rng = np.random.default_rng(0)
        self._ids = min(IDS, loaded.limits.vocab)

    def submit(self, prompt: int, out: int) -> int:
        """Queues a request."""
        ids = self._rng.integers(0, self._ids, prompt).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)
        return self.engine.submit(Request(tuple(ids), params))

    def step(self) -> list[int]:
        """One step. Raises RuntimeError where a sequence failed."""
        events = self.engine.step()
        failed = next((e for e in events if e.finish is FinishReason.ERROR), None)
        if failed is not None:
            raise RuntimeError(f"request {failed.request_id}: {failed.message}")
        return [e.request_id for e in events if e.token is not None]

    def end(self, number: int) -> None:
        """Ends a request."""
        self.engine.cancel(number)

    def now(self) -> float:
        """Seconds."""
        return time.perf_counter()

    def computed(self) -> tuple[int, int]:
        """Tokens asked for, and room of the launches."""
        stats = self.engine.stats()
        prefilled, buckets = stats["prefilled"], stats["buckets"]
        assert isinstance(prefilled, int) and isinstance(buckets, dict)
        names = ((name.rpartition("_"), n) for name, n in buckets.items())
        tiles = sum(int(rows) * n for (family, _, rows), n in names if family == PREFILL)
        return prefilled, tiles * PREFILL_TILE


def beside(loaded: Loaded, policy: PrefillPolicy, width: int) -> Row:
    """A long prompt and short ones beside those who decode."""
    run = loads.Run(Live(loaded, policy))
    live = run.live(width)
    found = {"long": loads.arrival(run, live, loads.LONG_PROMPT)}
    found |= {f"short {i}": loads.arrival(run, live, loads.SHORT_PROMPT) for i in range(3)}
    run.end()
    for name, one in found.items():
        print(loads.line_of_arrival(f"  {name}", one), flush=True)
    return {name: asdict(one) | {"beyond": one.beyond} for name, one in found.items()}


def besides(loaded: Loaded, args: argparse.Namespace) -> Row:
    """Prompts beside those who decode, for each policy."""
    itl, found = AIMS.get(args.aims, (0, 0))[0], Row()
    bounds = [PrefillPolicy(Pace.BALANCED, ms) for ms in args.itl_ms]
    for policy in (BALANCED, LATENCY, *bounds):
        name = policy.pace.value if policy.itl_ms is None else f"itl {policy.itl_ms:g} ms"
        aim = {BALANCED: f"aim: p99 <= {itl} ms", LATENCY: "aim: <= 2x, or idle + one tile"}
        print(f"{name}, {args.width} decode; {aim.get(policy, 'the bound')}; <= 2 steps beyond")
        found[f"beside, {name}"] = beside(loaded, policy, args.width)
    return found


def mixed(loaded: Loaded, args: argparse.Namespace) -> Row:
    """The mixed load, as it is by default and at most."""
    rate, rates, found = AIMS.get(args.aims, (0, 0))[1], dict[PrefillPolicy, float](), Row()
    for policy, wanted in ((BALANCED, 0.9 * rate), (THROUGHPUT, rate)):
        server = Live(loaded, policy)
        one = loads.mixed(server, args.width, args.requests)
        rates[policy] = one.rate
        name = policy.pace.value
        print(loads.line_of_mixed(f"mixed, {name}", one), f"(aim {wanted:,.0f}, 10 %)")
        print("  launches", server.engine.stats()["buckets"], flush=True)
        whole = asdict(one)
        whole["gaps"] = [loads.share(whole["gaps"], p) for p in (50, 90, 99)]
        found[f"mixed, {name}"] = whole
    print(f"balanced keeps {rates[BALANCED] / rates[THROUGHPUT]:.1%} (aim 90 %)")
    return found


def staggered(loaded: Loaded, args: argparse.Namespace) -> Row:
    """Requests that come one after another, beside lockstep."""
    lockstep, apart = loads.staggered(Live(loaded, BALANCED), args.width)
    print(f"one after another {apart:,.0f} tok/s, lockstep {lockstep:,.0f}: {apart / lockstep:.1%}")
    return {"lockstep": lockstep, "apart": apart}


def bursts(loaded: Loaded, args: argparse.Namespace) -> Row:
    """Bursts of prompts."""
    rates = loads.bursts(Live(loaded, BALANCED), args.burst)
    print(f"bursts {', '.join(f'{b:,.0f}' for b in rates)} tok/s: {rates[-1] / rates[0]:.1%}")
    return {"bursts": rates}


LOADS = {"beside": besides, "mixed": mixed, "staggered": staggered, "bursts": bursts}


def measure(loaded: Loaded, args: argparse.Namespace) -> Row:
    """The loads that are asked for; prints as it goes."""
    loads.mixed(Live(loaded, BALANCED), 8, 8)  # to warm up
    found: Row = {"engine": args.engine.name}
    for name in args.loads:
        found |= LOADS[name](loaded, args)
    return found


def chosen(text: str) -> list[str]:
    """A list of loads. Raises ArgumentTypeError for one that is not known."""
    names = text.split(",")
    if unknown := [name for name in names if name not in LOADS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(LOADS)}")
    return names


def main(words: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, help="engine folder")
    parser.add_argument("--width", type=int, default=loads.WIDTH, help="requests in flight")
    parser.add_argument("--requests", type=int, default=loads.REQUESTS, help="of the mixed load")
    parser.add_argument("--burst", type=int, default=loads.BURST, help="requests of one burst")
    parser.add_argument("--itl-ms", type=float, action="append", default=[])
    parser.add_argument("--aims", choices=AIMS)
    parser.add_argument("--loads", type=chosen, default=[*LOADS], help=f"of {', '.join(LOADS)}")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(words)
    loaded = load(args.engine)
    gc.collect()
    gc.freeze()  # as a server does
    try:
        found = measure(loaded, args)
    finally:
        loaded.close()
    if args.out:
        kept = json.loads(args.out.read_text()) if args.out.is_file() else {}
        args.out.write_text(json.dumps(kept | found, indent=1) + "\n")


if __name__ == "__main__":
    main()
