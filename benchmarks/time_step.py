"""How long a decode step, a round of drafts or a prefill takes, next to its byte floor and vLLM.

`python -m benchmarks.time_step ENGINE CONFIG` runs the protocol of `baselines/vllm_0.23_h200.json`:
so many sequences of --ctx random prompt tokens (`--rows`), all decoding in lockstep, greedily,
through the real `Engine` with one step of run-ahead; after them, one of `--prefill` tokens. A
step's time is the median wall time of `--steps` steps after 8 to warm up; its mean is given, too:
states behind a replay ring are rewritten in turns. `floor_ms` reads and writes every state in each
step, as vLLM does; `ring_floor_ms` counts what the engine's ring saves. Prefill is all prompt
tokens over the time to the last first token. Ready: the engine is open, counted from the start of
the process. The parts of a step come from its launches one by one; their extra time there is taken
off each alike.

CONFIG is the folder of configs that ENGINE was built from, `benchmarks/configs/MODEL`, or a layout
such as `27b:int4` (`published.py`); weights are drawn. `--build` builds ENGINE first: `--build ''`
as without options, `--build '--tp 2'` for two ranks. Engines of the published rows: `--build
'--target sm_90a --decode 1,8,32,64,128 --prefill 1024,2048,8192 --max-context 1536 --kv-tokens
163840'`.

`--against '--draft-vocab full'` builds another engine with these options after those of `--build`,
times it too, and prints how much less or more ENGINE takes.

`--drafts 1,3,auto` times rounds of so many drafts instead, which the draft head of drawn weights
makes and the target hardly ever keeps; `--acceptance` says how often drafts are to be right, place
by place, from which the milliseconds of a kept token follow. auto: the k that the engine's table of
costs promises most for. A round that keeps drafts folds them into the states, too: up to 3 % more
(27B, 128 sequences, k = 3, where tokens were set to be right).

`--per-launch` times every launch of these steps and rounds, and of `--prefill` buckets, one by one
and each bucket as one graph, into a file of runs (`steps.launch_times`); with several ranks on all
at once. `--host` also times the parts of the loop on the host; `--no-graphs` queues launches one by
one.
"""

import argparse
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.byte_floors import H200_BANDWIDTH, Floor, Work
from benchmarks.published import folder_of, name_of
from benchmarks.result_files import ROOT, commit_here, read, write
from benchmarks.steps.lockstep import (
    WARM,
    Bench,
    Row,
    card,
    check_held,
    seconds_since_start,
    tokens_made,
)
from spark_engine.engine_file import read_manifest
from spark_engine.errors import UserError
from spark_engine.interface import DECODE, DRAFT_HEAD, PREFILL, PREFILL_TILE, Limits, verify_family
from spark_engine.manifest import NATIVE
from spark_engine.models.open_model import open_model
from spark_engine.runtime.engine.request import capacity
from spark_engine.weights_file import read_index

VLLM = ROOT / "benchmarks" / "baselines" / "vllm_0.23_h200.json"
ACCEPTANCES = ((0.55, 0.5, 0.45), (0.8, 0.75, 0.7), (0.92, 0.88, 0.84))
ROWS, DEFAULT_ROWS = (1, 8, 32, 64, 128), (1, 8, 32, 64, 65, 96, 128)
AUTO = "auto"
TIMED_POSITIONS = 320  # positions after the prompt where launches are timed one by one


def build(config: Path, engine: Path, more: str, run: Callable[..., Any] = subprocess.run) -> float:
    """Builds the engine with these options in a separate process; the seconds taken.

    Raises CalledProcessError when the build fails.
    """
    start = time.perf_counter()
    words = [sys.executable, "-P", "-m", "spark_engine.builder.cli", str(config), "-o", str(engine)]
    run([*words, *shlex.split(more)], check=True)
    return time.perf_counter() - start


def baseline(model: str, npl: int, state: str) -> Row:
    """vLLM's row for the same work; {} where none was measured."""
    recorded = read(VLLM)
    rows = [*recorded["rows"], *recorded["rows_bf16_state"]]
    wanted = (model, npl, {"f32": "fp32"}.get(state, state))
    return next((r for r in rows if (r["model"], r["npl"], r["gdn_state"]) == wanted), {})


def key(row: Row) -> tuple[object, ...]:
    """What a row was measured of."""
    work = tuple(row[name] for name in ("model", "npl", "ctx", "gdn_state", "kv"))
    build = row.get("build", ""), row.get("ranks", 1), row.get("graphs", True)
    return (*work, *build, row.get("k") or 0, tuple(row.get("acceptance", ())))


def save(path: Path, rows: list[Row]) -> None:
    """Writes the rows; those in the file that were measured of something else are kept."""
    new = {key(r) for r in rows}
    held = read(path)["rows"] if path.is_file() else []
    write(path, {"rows": [r for r in held if key(r) not in new] + rows})


def rounds_of(row: Row, acceptances: Sequence[Sequence[float]]) -> Iterator[Row]:
    """The rows of a timed round: what a kept token takes at each acceptance."""
    k = row["k"]
    own = row | {"round_ms": row["step_ms"]}
    for acceptance in acceptances if k else ((),):
        kept = 1 + float(np.cumprod(acceptance[:k]).sum()) if k else 1.0
        own |= {"acceptance": list(acceptance), "tokens_per_round": round(kept, 3)}
        yield own | {"ms_per_token": round(row["mean_ms"] / kept, 3)}


def promised(cost: Sequence[float], acceptance: Sequence[float], known: Sequence[int]) -> int:
    """The k of most tokens for the time, by costs of a round by k."""
    kept = np.cumprod([1.0, *acceptance])
    return max({0, *known}, key=lambda k: float(kept[: k + 1].sum() / cost[k]))


class Floors:
    """Byte floors of one engine's steps and rounds, in milliseconds of an H200's bandwidth."""

    def __init__(self, config: Path, bench: Bench) -> None:
        self._floor, manifest = Floor(open_model(config)), bench.folder.manifest
        self._bytes = manifest.dtypes.state.itemsize, manifest.dtypes.kv.itemsize
        self._ring = manifest.limits.gdn_ring
        index = read_index(bench.folder.weights_path)
        held = {name: entry.spec.nbytes for name, entry in index.items()}
        head = ("lm_head.",) if any(n.startswith("lm_head.") for n in held) else ("embed_tokens.",)
        own = any(name.startswith("mtp.head") for name in held)
        of_head = 0 if own else sum(n for name, n in held.items() if name.startswith(head))
        self._draft = sum(n for name, n in held.items() if name.startswith("mtp.")) + of_head

    def add(self, row: Row, ctx: int) -> Row:
        """The row with its floors."""
        k = row.get("chosen", row["k"])
        work = Work(row["npl"], ctx, *self._bytes)
        if k:
            parts = self._floor.round_parts(replace(work, ring=self._ring), k, self._draft)
        else:
            parts = self._floor.parts(work)
        floors = {part: round(n / H200_BANDWIDTH * 1e3, 4) for part, n in parts.items()}
        row = row | {"floor_ms": round(sum(floors.values()), 3), "floor_parts_ms": floors}
        if self._ring and not k:
            seconds = self._floor.seconds(replace(work, ring=self._ring), H200_BANDWIDTH)
            row |= {"ring_floor_ms": round(seconds * 1e3, 3)}
        return row | ({"gdn_ring": self._ring} if self._ring else {})


def line(row: Row) -> str:
    """One printed line."""
    theirs = baseline(row["model"], row["npl"], row["gdn_state"]) if not row["k"] else {}
    k = f", k {row['k']} {row.get('chosen', '')}".rstrip() if row["k"] else ""
    kept = ""
    if row.get("acceptance"):
        asked = "/".join(f"{a:g}" for a in row["acceptance"])
        kept = f"; drafts right {asked}: {row['ms_per_token']:.3f} ms a kept token"
    vllm = f", vLLM {theirs['step_ms']:.3f}" if theirs else ""
    own = f", host's parts {row['parts_us']}, busy {row['busy']:.1%}" if "parts_us" in row else ""
    return (
        f"{row['model']:15} {row['npl']:4} of {row['bucket']:4}{k} {row['step_ms']:8.3f} ms, "
        f"mean {row['mean_ms']:.3f}, floor {row['floor_ms']:.2f} "
        f"({row['floor_ms'] / row['step_ms']:.0%}){vllm}, {row['decode_tok_s']:.0f} tokens/s; "
        f"prefill {row['prefill_tok_s']:.0f} tokens/s; host {row['host_ms']:.2f} ms, distinct "
        f"tokens {row['distinct_tokens']:.0%}{kept}{own}"
    )


def spelled(row: Mapping[str, Any]) -> str:
    """`part ms (launches x us)` for every part."""
    found = ((part, ms, row["parts_launches"][part]) for part, ms in row["parts_ms"].items())
    return ", ".join(f"{part} {ms:.3f} ({n} x {ms / n * 1e3:.1f})" for part, ms, n in found)


def add_split(bench: Bench, row: Row, last: bool) -> None:
    """Adds a row's parts, and of the last row those of the largest prefill that was run."""
    from benchmarks.steps import launch_times  # needs the extra `cuda`

    layers = bench.folder.manifest.model.layers
    family = verify_family(row["k"]) if row["k"] else DECODE
    bench.pave()
    row |= launch_times.parts(
        launch_times.timed(bench, family, row["bucket"]), layers, row["step_ms"]
    )
    print(f"  by part, {row['gap_us']} us a launch taken off: {spelled(row)}")
    tiles = bench.engine.loaded.rows(PREFILL)[-1]
    tokens = tiles * PREFILL_TILE
    if last and not row["k"] and row["npl"] * row["ctx"] >= tokens:
        found = launch_times.timed(bench, PREFILL, tiles)
        row["prefill_split"] = {"tokens": tokens, **launch_times.parts(found, layers, float("inf"))}
        print(f"  prefill of {tokens}: {spelled(row['prefill_split'])}")


def measure_steps(bench: Bench, args: argparse.Namespace, known: Row) -> list[Row]:
    """Rows of steps, and of rounds with --drafts; written after each, so that a failure loses
    nothing."""
    floors, rows = Floors(args.config, bench), list[Row]()
    bench.run(1, args.ctx, 8)  # a first pass: lazy loading, clocks
    bench.finish()
    ks = [0, *(int(k) for k in args.drafts if k != AUTO)]
    sets = args.acceptance or ACCEPTANCES
    for npl, ctx in [*((n, args.ctx) for n in args.rows), *((1, n) for n in args.prefill)]:
        found = list[Row]()
        for k in ks:
            if k and not bench.bucket(verify_family(k), npl):
                print(f"  no bucket verifies {k} drafts of {npl} sequences", flush=True)
                continue
            row = known | bench.run(npl, ctx, args.steps, k) | card()
            if args.split:
                add_split(bench, row, npl == args.rows[-1])
            bench.finish()
            found += rounds_of(row, sets) if args.drafts else [row]
        for acceptance in sets if AUTO in args.drafts else ():
            cost = bench.engine.scheduler.depth.cost(npl)
            best = promised(cost, acceptance, [r["k"] for r in found])
            one = next(
                r for r in found if r["k"] == best and r["acceptance"] in ([], [*acceptance])
            )
            found.append(one | {"k": AUTO, "chosen": best, "acceptance": [*acceptance]})
        for row in found:
            rows.append(floors.add(row, ctx + args.steps // 2 + WARM))
            print(line(rows[-1]), flush=True)
        if args.out:
            save(args.out, rows)
    return rows


def compared(rows: Sequence[Row], others: Sequence[Row]) -> Iterator[str]:
    """A line for each step or round that both engines were timed with."""
    other = {(r["npl"], r["ctx"], r["k"]): r["step_ms"] for r in others}
    own = {(r["npl"], r["ctx"], r["k"]): r["step_ms"] for r in rows}
    for (npl, ctx, k), ms in own.items():
        before = other[npl, ctx, k]
        yield (
            f"{npl} sequences of {ctx}, k {k}: {ms:.3f} ms, against {before:.3f}: "
            f"{1 - ms / before:.1%} less"
        )


def measure_launches(bench: Bench, args: argparse.Namespace, known: Row) -> list[Row]:
    """Runs of `steps.launch_times`: each bucket is written as soon as it is measured."""
    from benchmarks.steps import launch_times  # needs the extra `cuda`

    manifest, limits = bench.folder.manifest, bench.engine.loaded.limits
    first = next(iter(bench.executors))
    run: Row = {"model": known["model"], "target": manifest.target}
    run |= {"machine": launch_times.machine(launch_times.native(bench, *first).gpu)}
    run |= {"config": name_of(args.config)}
    listed = f"{DRAFT_HEAD}shortlist" in bench.folder.weights()
    run |= {"options": launch_times.options_of(manifest, listed), "engine_card": manifest.card}
    run |= {"ranks": manifest.ranks, "buckets": []}
    run |= {name: known[name] for name in ("commit", "date")}

    def keep(row: Row) -> None:
        print("\n".join(launch_times.lines(row)), flush=True)
        run["buckets"].append(row)
        if args.out:
            launch_times.save(args.out, run)

    drafts = [int(k) for k in args.drafts if k != AUTO]
    for npl in args.rows:
        for row in launch_times.of_steps(bench, npl, drafts, args.ctx, args.steps):
            keep(row)
    for tokens in args.prefill:
        if tokens > capacity(limits) or (PREFILL, tokens // PREFILL_TILE) not in bench.executors:
            print(f"  no bucket prefills a sequence of {tokens} tokens", flush=True)
            continue
        keep(launch_times.of_prefill(bench, tokens))
    return []


def numbers(text: str) -> tuple[int, ...]:
    """`1,8` as numbers."""
    return tuple(int(word) for word in text.split(",") if word)


def drafts(text: str) -> tuple[str, ...]:
    """`1,3,auto`. Raises ArgumentTypeError for anything else."""
    words = tuple(word for word in text.split(",") if word)
    if wrong := [word for word in words if word != AUTO and not word.isdigit()]:
        raise argparse.ArgumentTypeError(f"{wrong[0]} is neither a number of drafts nor {AUTO}")
    return words


def rates(text: str) -> tuple[float, ...]:
    """`0.8,0.75` as shares."""
    found = tuple(float(word) for word in text.split(","))
    if not all(0 <= rate <= 1 for rate in found):
        raise argparse.ArgumentTypeError(f"{text}: each is a share between 0 and 1")
    return found


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("engine", type=Path, help="engine folder")
    parser.add_argument("config", type=Path, help="the configs it was built from: folder or layout")
    parser.add_argument("--build", metavar="OPTIONS", help="build ENGINE first with these options")
    parser.add_argument("--against", metavar="OPTIONS", help="of another engine to compare with")
    parser.add_argument("--built-in", type=float, help="seconds that its default build took before")
    usual = "default 1,8,32,64,128; of a default build also 65 and 96"
    parser.add_argument("--rows", type=numbers, help=f"sequences, a list; {usual}")
    parser.add_argument("--ctx", type=int, default=1024, help="tokens of each prompt")
    parser.add_argument("--steps", type=int, default=48, help="timed steps of each width")
    parser.add_argument("--drafts", type=drafts, default=(), help="of a round, a list, or auto")
    parser.add_argument("--acceptance", type=rates, action="append", help="A1,A2,…; repeatable")
    parser.add_argument("--no-split", dest="split", action="store_false", help="no parts of a step")
    parser.add_argument("--host", action="store_true", help="time the host's parts of a step")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="launch by launch")
    parser.add_argument("--per-launch", action="store_true", help="time every launch")
    parser.add_argument("--prefill", type=numbers, default=(), help="tokens of a prompt, a list")
    parser.add_argument("--commit", help="default the tree's, or SPARK_COMMIT's")
    parser.add_argument("--out", type=Path, help="file of rows, or of runs, to add to")
    args = parser.parse_args(words)
    if args.per_launch and (args.host or not args.graphs or args.acceptance):
        parser.error("--host, --no-graphs and --acceptance do not apply to --per-launch")
    if args.per_launch and args.against is not None:
        parser.error("--against compares steps and rounds: leave --per-launch out")
    if args.acceptance and not args.drafts:
        parser.error("--acceptance belongs to --drafts")
    if args.against is not None and args.build is None:
        parser.error("--against is an option of the build: give --build as well")
    args.default = args.built_in is not None or args.build == ""
    args.rows = args.rows or (DEFAULT_ROWS if args.default else ROWS)
    return args


def check_limits(limits: Limits, largest_prefill: int, args: argparse.Namespace) -> None:
    """Raises SystemExit where the engine does not hold the sequences until the last timed step."""
    most = max((int(k) for k in args.drafts if k != AUTO), default=0)
    prompts = () if args.per_launch else args.prefill
    for n, ctx in [*((n, args.ctx) for n in args.rows), *((1, n) for n in prompts)]:
        more = tokens_made(n, ctx, args.steps, most, largest_prefill)
        more = TIMED_POSITIONS if args.per_launch else more
        check_held(limits, n, ctx, more, paged=not args.per_launch)


def command(args: argparse.Namespace) -> str:
    """The command that measures this again."""
    places = f"engines/{args.config.name} {name_of(args.config)}"
    numbers = f"--rows {','.join(map(str, args.rows))} --ctx {args.ctx} --steps {args.steps}"
    more = " --build ''" if args.default else ""
    if args.against is not None:
        more = f" --build {shlex.quote(args.build)} --against {shlex.quote(args.against)}"
    more += f" --drafts {','.join(args.drafts)}" if args.drafts else ""
    for rates in args.acceptance or ():
        more += f" --acceptance {','.join(f'{rate:g}' for rate in rates)}"
    return f"python -m benchmarks.time_step {places} {numbers}{more}"


def measured(args: argparse.Namespace, engine: Path, before: float, took: float) -> list[Row]:
    """Measures an engine: this process spent `before` seconds on something else, and its build
    `took` so many."""
    drafted = bool(args.drafts) or args.per_launch
    manifest = read_manifest(engine)
    if manifest.executor != NATIVE and (args.split or args.per_launch):
        raise SystemExit(
            f"{engine} is no engine for a GPU, so its launches have no times: --no-split"
        )
    bench = Bench(engine, before, drafted, args.graphs, args.host)
    print(f"{engine} is ready after {bench.ready:.2f} s", flush=True)
    check_limits(bench.engine.loaded.limits, bench.largest_prefill, args)
    known: Row = {"model": args.config.name, "gdn_state": str(manifest.dtypes.state)}
    known |= {"kv": str(manifest.dtypes.kv), "ranks": manifest.ranks}
    if args.default:
        known |= {"build": "default", "build_s": round(took, 1)}
    known |= {} if args.graphs else {"graphs": False}
    known |= {"start_to_ready_s": round(bench.ready, 2), "command": command(args)}
    known |= {"commit": args.commit or commit_here(), "date": str(date.today())}

    rows = (measure_launches if args.per_launch else measure_steps)(bench, args, known)
    bench.engine.close()
    return rows


def main(words: Sequence[str] | None = None) -> None:
    """The command."""
    args = arguments(words)
    args.config, took = folder_of(args.config), 0.0
    if args.build is not None:
        took = build(args.config, args.engine, args.build)
    try:
        rows = measured(args, args.engine, took, took if args.built_in is None else args.built_in)
    except UserError as error:
        raise SystemExit(str(error)) from error
    if args.against is None:
        return
    other = args.engine.with_name(f"{args.engine.name}-other")
    took = build(args.config, other, f"{args.build} {args.against}")
    args.out = None  # a file has one row of the same work
    others = measured(args, other, seconds_since_start(), took)
    print("\n".join(compared(rows, others)))


if __name__ == "__main__":
    main()
