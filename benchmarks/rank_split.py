"""Where the step of one rank goes: every kind of launch of an engine of several ranks.

`python -m benchmarks.rank_split ENGINE CONFIG --rows 1,128 --out FILE` runs what `bench_decode`
runs, and then queues the launches of the last step one by one on all ranks at once, since sums wait
for their peers, with an event between them. A line for each kind: launches, microseconds of one,
milliseconds of a step, and those that the bytes it moves take (`benchmarks.node_work`). One by one
launches take longer than in a graph: the difference is taken off every launch alike.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.floors import H200_BANDWIDTH
from benchmarks.kernel_split import Timed, time_launches
from benchmarks.launch_times import numbers, wanted_options
from benchmarks.lockstep import Bench
from benchmarks.rank_split_follower import MODULE, SPLIT
from benchmarks.weightless_plan import Bucket, label_of, plan_of
from spark_engine.builder.native.launches import Launched, launches
from spark_engine.builder.plan.options import Options
from spark_engine.interface import DECODE
from spark_engine.runtime.ranks import spawn
from spark_engine.runtime.ranks.messages import Table, Tables

L2 = 50e6  # bytes
Row = dict[str, Any]


def use() -> None:
    """Ranks that this process starts from here on time their launches when rank 0 does."""
    root = str(Path(__file__).parents[1])
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = root if known is None else os.pathsep.join([known, root])
    spawn.MODULE = MODULE


def time_all(bench: Bench, family: str, rows: int) -> tuple[tuple[Launched, ...], list[Timed]]:
    """The launches of a bucket, timed by rank 0 while every other rank queues the same."""
    assert bench.folder is not None
    file = next(b for b in bench.folder.manifest.buckets if (b.family, b.rows) == (family, rows))
    payload = bench.folder.engine(file).payload
    store: Any = bench.engine.loaded.device_states
    store._orders.add(Tables([Table(SPLIT, [rows], family.encode())]))
    store._orders.send()
    lead: Any = bench.executors[family, rows].inner
    return launches(payload), time_launches(lead.inner, payload)


def floors_of(plan: Bucket) -> dict[str, float]:
    """Microseconds that a node's bytes take, by label."""
    return {n.label: n.amounts.dram(L2) / H200_BANDWIDTH * 1e6 for n in plan.nodes}


def kinds(
    found: Sequence[Launched], timed: Sequence[Timed], gap: float, floors: dict[str, float]
) -> list[Row]:
    """Equal launches together, most time first; `gap` microseconds are taken off each. The bytes of
    a node of several launches are counted with its first."""
    times: dict[tuple[str, ...], list[float]] = defaultdict(list)
    blocks: dict[tuple[str, ...], tuple[int, int]] = {}
    least: dict[tuple[str, ...], float] = {}
    seen = ""
    for one, row in zip(found, timed, strict=True):
        label = label_of(one.node)
        kind = (label, one.op, one.tactic, one.symbol)
        times[kind].append(max(row.microseconds - gap, 0.0))
        grid = one.grid[0] * one.grid[1] * one.grid[2]
        blocks[kind] = (grid, one.block[0] * one.block[1] * one.block[2])
        least.setdefault(kind, 0.0 if one.node == seen else floors.get(label, 0.0))
        seen = one.node
    rows: list[Row] = []
    for kind, us in times.items():
        count = len(us)
        row: Row = dict(zip(("node", "op", "tactic", "symbol"), kind, strict=True))
        row |= {"launches": count, "us": round(sum(us) / count, 2), "ms": round(sum(us) / 1e3, 4)}
        row |= {"floor_ms": round(least[kind] * count / 1e3, 4), "blocks": blocks[kind]}
        rows.append(row)
    return sorted(rows, key=lambda r: -r["ms"])


def told(rows: Sequence[Row]) -> str:
    """The table, a line for each kind."""
    lines = [f"{'node':38} {'tactic':18} {'kernel':20} {'n':>4} {'us':>8} {'ms':>8} {'floor':>8}"]
    for r in rows:
        lines.append(
            f"{r['node']:38} {r['tactic'][:18]:18} {r['symbol'][:20]:20} {r['launches']:4} "
            f"{r['us']:8.2f} {r['ms']:8.3f} {r['floor_ms']:8.3f}  {r['blocks'][0]} x "
            f"{r['blocks'][1]}"
        )
    ms, floor = (sum(r[name] for r in rows) for name in ("ms", "floor_ms"))
    count = sum(r["launches"] for r in rows)
    return "\n".join([*lines, f"{'all':78} {count:4} {'':8} {ms:8.3f} {floor:8.3f}"])


def main(words: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, help="engine folder")
    parser.add_argument("config", type=Path, help="the folder of configs it was built from")
    parser.add_argument("--rows", type=numbers, default=(1, 128), help="sequences")
    parser.add_argument("--ctx", type=int, default=1024, help="tokens of each sequence")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of each width")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(words)
    use()
    bench = Bench(args.engine)
    assert bench.folder is not None
    manifest = bench.folder.manifest
    wishes = {**wanted_options(manifest), "tp": manifest.ranks, "prefill": (1024,)}
    wishes["decode"] = bench.engine.loaded.rows(DECODE)
    plans = plan_of(args.config, Options(manifest.target, **wishes), args.ctx)
    made: list[Row] = []
    bench.run(1, args.ctx, 8)  # a first pass: lazy loading, clocks
    bench.finish()
    for npl in args.rows:
        ran = bench.run(npl, args.ctx, args.steps)
        step_ms = ran["step_ms"]
        bench.pave()
        held = bench.bucket(DECODE, npl)
        found, timed = time_all(bench, DECODE, held)
        alone = sum(t.microseconds for t in timed) / 1e3
        gap = max(alone - step_ms, 0) / len(timed) * 1e3
        rows = kinds(found, timed, gap, floors_of(plans[DECODE, held]))
        bench.finish()
        print(f"{args.config.name}, {manifest.ranks} ranks, {npl} rows: {step_ms:.3f} ms a step "
              f"(mean {ran['mean_ms']:.3f}, prefill {ran['prefill_tok_s']:.0f} tokens/s); "
              f"one by one {alone:.3f}, so {gap:.2f} us a launch are taken off")  # fmt: skip
        print(told(rows), flush=True)
        made.append(ran | {"gap_us": round(gap, 2), "kinds": rows})
        if args.out:
            model = {"model": args.config.name, "ranks": manifest.ranks}
            args.out.write_text(json.dumps({**model, "buckets": made}, indent=1) + "\n")
    bench.engine.close()


if __name__ == "__main__":
    main()
