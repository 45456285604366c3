"""Decode and prefill rates of an engine, beside the byte floor and vLLM on the same card.

The protocol of `baselines/vllm_0.23_h200.json`: npl sequences of 1,024 random prompt tokens each,
all decoding in lockstep, greedily, through the real `Engine` with one step of run-ahead. A step's
time is the median wall time of `--steps` steps after 8 to warm up, and its mean beside it: steps
may differ, since states behind a replay ring are rewritten in turns. `floor_ms` reads and writes
every state in each step, as vLLM does; `ring_floor_ms` counts what the engine's ring saves. Prefill
is npl · 1,024 tokens over the time to the last first token. Ready is when the engine is open,
counted from the start of the process. Engines come from `spark-build benchmarks/configs/MODEL -o
engines/MODEL --target sm_90a --decode 1,8,32,64,128 --prefill 1024,2048,8192 --max-context 1536
--kv-tokens 163840`. With `--default-build` the engine is first built as who gives no option gets
it, and measured between its buckets too; such rows are kept beside the others. With `--built-in
SECONDS` it was built so before, in that time.

With `--drafts 1,2,3,auto` it measures rounds of drafts instead, which are right as often as each
`--acceptance` says, place by place (see `draft_rounds`): `python -m benchmarks.bench_decode
engines/MODEL benchmarks/configs/MODEL --drafts 1,2,3,auto --rows 1,8,32,64,128 --out
benchmarks/results/drafts_h200.json`. Of an engine of several ranks the floor is still one GPU's,
and there is no split by part (`benchmarks.rank_split` has one).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.draft_rounds import AUTO, RoundFloor, Rounds, Trial, family_of
from benchmarks.draft_rounds import line as line_of_round
from benchmarks.floors import H200_BANDWIDTH, Floor, Work
from benchmarks.forced_drafts import Forced
from benchmarks.lockstep import IDS, WARM, Bench, Row, card
from spark_engine.interface import PREFILL_TILE
from spark_engine.models.open_model import open_model

HERE = Path(__file__).parent
VLLM = HERE / "baselines" / "vllm_0.23_h200.json"
ACCEPTANCES = ("0.55,0.5,0.45", "0.8,0.75,0.7", "0.92,0.88,0.84")
NPLS, DEFAULT_NPLS = "1,8,32,64,128", "1,8,32,64,65,96,128"


def baseline(model: str, npl: int, state: str) -> Row:
    """vLLM's row for the same work; {} where none was measured."""
    recorded = json.loads(VLLM.read_text())
    rows = [*recorded["rows"], *recorded["rows_bf16_state"]]
    key = (model, npl, {"f32": "fp32"}.get(state, state))
    return next((r for r in rows if (r["model"], r["npl"], r["gdn_state"]) == key), {})


def line(row: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """One printed line of the table."""
    return (
        f"{row['model']:15} {row['npl']:4} of {row['bucket']:4} {row['step_ms']:8.3f} ms, "
        f"mean {row['mean_ms']:.3f}  "
        f"floor {row['floor_ms']:6.2f} ({row['floor_ms'] / row['step_ms']:4.0%})  "
        f"vLLM {theirs.get('step_ms', 0):7.3f} | "
        f"prefill {row['prefill_tok_s']:8.0f} tok/s, vLLM {theirs.get('prefill_tok_s', 0):8.0f} | "
        f"host {row['host_ms']:.2f} ms, {row.get('launches', 0)} launches, "
        f"distinct tokens {row['distinct_tokens']:.0%}"
    )


def key(row: Row) -> tuple[object, ...]:
    """What a row was measured of."""
    work = tuple(row[name] for name in ("model", "npl", "ctx", "gdn_state", "kv"))
    build = row.get("build", ""), row.get("ranks", 1)
    return (*work, *build, row.get("k"), tuple(row.get("acceptance", ())))


def save(path: Path, rows: list[Row]) -> None:
    """Writes the rows; those in the file that were measured of something else are kept."""
    new = {key(r) for r in rows}
    held = json.loads(path.read_text())["rows"] if path.is_file() else []
    kept = [r for r in held if key(r) not in new]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": kept + rows}, indent=1) + "\n")


def build_default(config: Path, engine: Path, run: Callable[..., Any] = subprocess.run) -> float:
    """Builds as `spark-build` does without options, in a process of its own; the seconds taken.

    Raises CalledProcessError when the build fails.
    """
    start = time.perf_counter()
    words = [sys.executable, "-P", "-m", "spark_engine.builder.cli", str(config), "-o", str(engine)]
    run(words, check=True)
    return time.perf_counter() - start


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, help="engine folder")
    parser.add_argument("config", type=Path, help="the folder of configs it was built from")
    usual = f"default {NPLS}; of a default build {DEFAULT_NPLS}"
    parser.add_argument("--npl", "--rows", help=f"sequences; {usual}")
    parser.add_argument("--ctx", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--no-split", action="store_true", help="leave the split by part out")
    parser.add_argument("--default-build", action="store_true", help="build ENGINE first")
    parser.add_argument("--built-in", type=float, help="seconds that its default build took before")
    parser.add_argument("--drafts", help="k of each round, a list; auto: the engine's choice")
    parser.add_argument(
        "--acceptance", action="append", help="A1,A2,…: of the drafts at each place; repeatable"
    )
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--out", type=Path, help="JSON file of rows to add to")
    args = parser.parse_args(words)
    args.default_build = args.default_build or args.built_in is not None
    args.npl = args.npl or (DEFAULT_NPLS if args.default_build else NPLS)
    return args


def main() -> None:
    """Measures every concurrency; writes after each, so that a failure loses nothing."""
    args = arguments()
    build = args.default_build and args.built_in is None
    before = build_default(args.config, args.engine) if build else 0.0
    built = before if args.built_in is None else args.built_in
    bench = Bench(args.engine, before, None if args.drafts else 0)
    assert bench.folder is not None
    print(f"ready after {bench.ready:.2f} s", flush=True)
    if bench.folder.manifest.ranks > 1 and not args.no_split:
        args.no_split = True
        print("without the split by part: launches of one rank alone wait for the others")
    dtypes, model = bench.folder.manifest.dtypes, args.config.name
    floor = Floor(open_model(args.config))
    if args.drafts:
        measure_drafts(bench, args, floor)
        bench.engine.close()
        return
    bench.run(1, args.ctx, 8)  # a first pass: lazy loading, clocks
    bench.finish()
    rows: list[Row] = []
    npls = [int(n) for n in args.npl.split(",")]
    for npl in npls:
        row = {"model": model} | bench.run(npl, args.ctx, args.steps)
        row |= {"build": "default", "build_s": round(built, 1)} if args.default_build else {}
        kv, state = dtypes.kv.itemsize, dtypes.state.itemsize
        work = Work(npl, args.ctx + args.steps // 2 + WARM, state, kv)
        row["floor_ms"] = round(floor.seconds(work, H200_BANDWIDTH) * 1e3, 3)
        row["floor_parts_ms"] = {
            part: round(n / H200_BANDWIDTH * 1e3, 4) for part, n in floor.parts(work).items()
        }
        ring = bench.folder.manifest.limits.gdn_ring
        if ring:
            seconds = floor.seconds(replace(work, ring=ring), H200_BANDWIDTH)
            row |= {"gdn_ring": ring, "ring_floor_ms": round(seconds * 1e3, 3)}
        row |= {"start_to_ready_s": round(bench.ready, 2), "gdn_state": str(dtypes.state)}
        row |= {"kv": str(dtypes.kv), "ranks": bench.folder.manifest.ranks, **card()}
        row |= {"command": command(args), "commit": args.commit, "date": str(date.today())}
        if not args.no_split:
            split(bench, row, npl, npl == npls[-1])
        bench.finish()
        rows.append(row)
        print(line(row, baseline(model, npl, str(dtypes.state))), flush=True)
        if args.out:
            save(args.out, rows)
    bench.engine.close()


def measure_drafts(bench: Bench, args: argparse.Namespace, floor: Floor) -> None:
    """Rounds of every number of sequences, k and acceptance."""
    assert bench.folder is not None
    depths = tuple(w if w == AUTO else int(w) for w in args.drafts.split(","))
    sets = args.acceptance or ACCEPTANCES
    acceptances = tuple(tuple(float(a) for a in words.split(",")) for words in sets)
    forced = Forced(bench.engine)
    for executor in bench.executors.values():
        executor.before = forced.before
    rounds = Rounds(bench.engine, forced, Trial(args.ctx, args.steps, depths, acceptances))
    floors, manifest = RoundFloor(floor, bench.engine), bench.folder.manifest
    known = {"model": args.config.name, "gdn_state": str(manifest.dtypes.state)}
    known |= {"kv": str(manifest.dtypes.kv), "gdn_ring": manifest.limits.gdn_ring}
    known |= {"drafts": manifest.limits.drafts, "ranks": manifest.ranks, **card()}
    known |= {"command": command(args), "commit": args.commit, "date": str(date.today())}
    rows: list[Row] = []
    for npl in (int(n) for n in args.npl.split(",")):
        prompts = bench.rng.integers(0, IDS, (npl, args.ctx)).tolist()
        for found in rounds.rows(prompts):
            row = known | floors.add(found, args.ctx + args.steps)
            last = row["k"] == 0 or tuple(row["acceptance"]) == acceptances[-1]
            if not args.no_split and row["k"] != AUTO and last:  # it leaves garbage in the states
                bench.pave()
                row |= bench.split(family_of(row["k"]), npl, row["round_ms"])
            rows.append(row)
            print(line_of_round(row), flush=True)
            if "parts_ms" in row:
                print(f"  by part, {row['gap_us']} us a launch taken off: {spelled(row)}")
            if args.out:
                save(args.out, rows)


def command(args: argparse.Namespace) -> str:
    """What to type to measure this again."""
    places = f"engines/{args.config.name} benchmarks/configs/{args.config.name}"
    numbers = f"--npl {args.npl} --ctx {args.ctx} --steps {args.steps}"
    built = " --default-build" if args.default_build else ""
    drafts = f" --drafts {args.drafts}" if args.drafts else ""
    drafts += "".join(f" --acceptance {words}" for words in args.acceptance or ())
    return f"python -m benchmarks.bench_decode {places} {numbers}{built}{drafts}"


def split(bench: Bench, row: Row, npl: int, prefill: bool) -> None:
    """Adds the split of the decode bucket, and of the largest prefill bucket if asked."""
    row |= bench.split("decode", npl, row["step_ms"])
    print(f"  decode, {row['gap_us']} us a launch taken off: {spelled(row)}")
    tiles = bench.engine.loaded.rows("prefill")[-1]
    if prefill and npl * row["ctx"] >= tiles * PREFILL_TILE:
        inner = {"tokens": tiles * PREFILL_TILE, **bench.split("prefill", tiles)}
        row["prefill_split"] = inner
        print(f"  prefill of {inner['tokens']}: {inner['alone_ms']} ms: {spelled(inner)}")


def spelled(row: Row) -> str:
    """`part ms (launches x us)` for every part."""
    rows = ((part, ms, row["parts_launches"][part]) for part, ms in row["parts_ms"].items())
    return ", ".join(f"{part} {ms:.3f} ({n} x {ms / n * 1e3:.1f})" for part, ms, n in rows)


if __name__ == "__main__":
    main()
