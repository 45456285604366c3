"""Tactics that wait for a GPU, judged: right or not, then beside those that the op had before.

`python -m benchmarks.tactic_trial` judges every tactic of this card that no result file names
(KNOWN); `OP --new NAME,… [--old NAME,…]` judges those of one op
beside all others, or those named. First each runs over all cases of its op that it takes, between
guards and over poisoned memory, and is held to the reference. Then it is timed beside the others as
a build times tactics (cold weights, replayed graphs), in `--rounds` that take turns, at the shapes
that the op has in the published models: `--models`, `--at decode:1,prefill:2048,verify_k3:8`,
`--behind` so many tokens of each prompt that were prefilled before.
A line a tactic: "keep" where it is right and, at some shape, its slowest round is faster by MARGIN
than the fastest of every other; "drop" where it is not. `--out FILE` keeps all times.
Rivals are the tactics that are not judged themselves.

A kernel that was changed in place has no rival in its own tree: run the tree before with `--new`
and `--out FILE`, then this one with `--against FILE`: tactics of the same names are its rivals.
Exit code 1 where a tactic is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.graphs import target_here
from benchmarks.predict_gb10 import CONFIGS, MODELS, RESULTS, options
from benchmarks.rehearsals.ops import compared, truth, works
from benchmarks.weightless_plan import decided_of, work_of
from spark_engine.builder.native import nvrtc
from spark_engine.builder.native.gpu_timer import GpuTimer, this_machine
from spark_engine.builder.native.tactics import Work
from spark_engine.device.gpu import Gpu
from spark_engine.interface import PREFILL, PREFILL_TILE, drafts_of
from spark_engine.kernel import Target
from spark_engine.plugins.registry import REGISTRY
from tests.plugins import cuda_node

AT = "decode:1,decode:8,decode:32,decode:128,verify_k3:8,verify_k3:128,prefill:1024,prefill:8192"
# Files whose rows name tactics; those of `tactics_run.json` ran, and no times of them were kept.
KNOWN = ("tactics_h200.json", "rehearsal_ops.json", "tactics_run.json", "tactics.json")
MARGIN = 0.02  # of a time, which a faster tactic must save
BEFORE = "before"  # behind the name of a tactic of another tree
Row = dict[str, Any]
Times = Mapping[str, Sequence[float]]  # microseconds of each round, by tactic


@dataclass
class Judged:
    """One new tactic: how many cases it was right in, what went wrong, its times by shape; `new`:
    the others of its op that are judged with it, which are no rivals."""

    op: str
    tactic: str
    cases: int = 0
    wrong: str = ""
    at: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    new: frozenset[str] = frozenset()

    @property
    def gains(self) -> dict[str, float]:
        """By shape the share of time that it surely saves, against the fastest other; less than
        nothing where it may be slower. A shape without a rival says nothing."""
        found = {}
        for shape, times in self.at.items():
            mine = times.get(self.tactic, ())
            own = {self.tactic, *self.new}
            others = [min(us) for name, us in times.items() if name not in own and us]
            if mine and others:
                found[shape] = 1 - max(mine) / min(others)
        return found

    @property
    def keeps(self) -> bool:
        """Whether it is worth its lines."""
        right = self.cases > 0 and not self.wrong
        return right and any(gain >= MARGIN for gain in self.gains.values())

    def line(self) -> str:
        """The verdict and why."""
        name = f"{self.op}/{self.tactic.replace(' ', '_')}"
        if self.wrong:
            return f"drop {name}: wrong: {self.wrong}"
        if not self.cases:
            return f"drop {name}: it takes no case of its op"
        if not self.gains:
            return f"drop {name}: right in {self.cases} cases, and timed beside no other tactic"
        word, best = "keep" if self.keeps else "drop", max(self.gains, key=self.gains.__getitem__)
        told = ", ".join(f"{gain:+.0%} at {shape}" for shape, gain in self.gains.items())
        return f"{word} {name}: right in {self.cases} cases; best at {best}; saves {told}"


def named(files: Sequence[str] = KNOWN, results: Path = RESULTS) -> set[tuple[str, str]]:
    """The (op, tactic) that result files have a time of."""
    found: set[tuple[str, str]] = set()
    for path in (results / name for name in files):
        for row in json.loads(path.read_text())["rows"] if path.is_file() else ():
            if "tactic" in row:
                found.add((row["op"], row["tactic"]))
            elif "microseconds" in row:
                found |= {(row["op"], tactic) for tactic in row["microseconds"]}
            elif row.get("label", "").count("/") >= 2:
                op, tactic, _ = row["label"].split("/", 2)
                found.add((op, tactic))
    return found


def waiting(target: Target, known: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """The (op, tactic) that take some case on this card, and that nobody knows."""
    found = {(w.op.name, w.tactic.name): None for _, _, plans in works(target) for w in plans}
    return [pair for pair in found if pair not in known]


def sizes_of(text: str) -> dict[str, tuple[int, ...]]:
    """`decode:1,prefill:2048` as numbers by family."""
    found: dict[str, tuple[int, ...]] = {}
    for word in text.split(","):
        family, given, number = word.partition(":")
        if not given or not number.isdigit():
            raise SystemExit(f"--at {word} is to be FAMILY:ROWS or prefill:TOKENS")
        found[family] = (*found.get(family, ()), int(number))
    return found


def shapes(
    models: Sequence[str], sizes: Mapping[str, Sequence[int]], target: Target, ops: set[str],
    behind: int = 0,
) -> Iterator[tuple[str, Work]]:  # fmt: skip
    """The different nodes of these ops in the models' buckets, and what they are called."""
    rounds = tuple((n, drafts_of(f)) for f, ns in sizes.items() for n in ns if drafts_of(f))
    decode, prefill = (tuple(sizes.get(f, (n,))) for f, n in (("decode", 1), (PREFILL, 1024)))
    drafts = max((k for _, k in rounds), default=0)
    rows = max((*decode, *(n for n, _ in rounds)))
    given = {"decode": decode, "prefill": prefill, "verify": rounds or None, "drafts": drafts}
    seen: set[tuple[object, ...]] = set()
    for model in models:
        asked = options(target.name, gpu=target, max_seqs=rows, **given)
        for decided in decided_of(CONFIGS / model, asked):
            size = decided.size
            number = size.rows * (PREFILL_TILE if size.family == PREFILL else 1)
            if number not in sizes.get(size.family, ()):
                continue
            context = behind + number if size.family == PREFILL else 1024
            for node, _ in decided.nodes:
                if node.op in ops:
                    work = work_of(node, size, context)
                    if work.key not in seen:
                        seen.add(work.key)
                        yield f"{model} {size.family}:{number} {node.name}", work


def hold(bench: cuda_node.Bench, judged: Judged) -> None:
    """The tactic over all cases of its op, to the first that is wrong."""
    for op, case, plans in works(bench.target, {judged.op}):
        for work in (w for w in plans if w.tactic.name == judged.tactic):
            given, want = truth(op, case)
            try:
                compared(bench, work, given, want)
            except AssertionError as error:
                judged.wrong = f"{case.label}: {' '.join(str(error).split())[:200]}"
                return
            judged.cases += 1


def time_at(work: Work, names: Sequence[str], target: Target, rounds: int, folder: Path) -> Times:
    """Microseconds of the tactics that take the node, round by round in turns."""
    assert work.op is not None
    tactics = [t for t in work.op.cuda.tactics if t.name in names]
    able = [t for t in tactics if t.refuse(work.attrs, work.ins, target) is None]
    plans = [(t, t.plan(work.attrs, work.ins, target)) for t in able]
    found: dict[str, list[float]] = {t.name: [] for t in able}
    jobs = nvrtc.jobs_of([(t.source, plan) for t, plan in plans])
    nvrtc.compile_all(jobs, target, folder, os.cpu_count() or 1)
    for turn in range(rounds):
        known = folder / f"times_{turn}.json"
        known.unlink(missing_ok=True)  # of this round alone: a time that is known is not taken
        with GpuTimer(target, folder, known) as timer:
            for tactic, plan in plans[::-1] if turn % 2 else plans:
                if (seconds := timer(work, tactic, plan)) is not None:
                    found[tactic.name].append(round(seconds * 1e6, 2))
    return {name: us for name, us in found.items() if us}


def against(path: Path | None) -> Mapping[str, Mapping[str, Times]]:
    """Times of another tree on this machine, by op and shape; SystemExit for another machine's."""
    if path is None:
        return {}
    kept = json.loads(path.read_text())
    if kept["machine"] != this_machine().label:
        raise SystemExit(f"{path} is of {kept['machine']}, and this is {this_machine().label}")
    found: dict[str, dict[str, Times]] = {}
    for row in kept["rows"]:
        found.setdefault(row["op"], {}).update(row["at"])
    return found


def beside(times: Times, before: Times, tactic: str) -> dict[str, list[float]]:
    """A shape's times, and those that the tactic had in the other tree as a rival."""
    found = {name: [*us] for name, us in times.items()}
    if tactic in before:
        found[f"{tactic}, {BEFORE}"] = [*before[tactic]]
    return found


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op", nargs="?", help="whose tactics; default: all that no file names")
    parser.add_argument("--new", help="tactics to judge, a list")
    parser.add_argument("--old", help="their rivals, a list; default: all others of the op")
    parser.add_argument("--models", default=",".join(MODELS), help="folders of benchmarks/configs")
    parser.add_argument("--at", type=sizes_of, default=AT, help="buckets whose shapes are timed")
    parser.add_argument("--behind", type=int, default=0, help="tokens before those of a prefill")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, help="an --out of another tree on this machine")
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(words)
    if (args.op is None) != (args.new is None):
        parser.error("an op and --new belong together")
    if args.op is not None:
        known = [t.name for t in REGISTRY[args.op].cuda.tactics] if args.op in REGISTRY else []
        wanted = [*args.new.split(","), *(args.old.split(",") if args.old else ())]
        if unknown := [name for name in wanted if name not in known]:
            parser.error(f"{args.op} has no tactic {', '.join(unknown)}; it has {', '.join(known)}")
    return args


def main(words: Sequence[str] | None = None) -> int:
    """Judges them all: right first, and what is wrong is not timed."""
    args, target = arguments(words), target_here()
    pairs = waiting(target, named())
    if args.op is not None:
        pairs = [(args.op, name) for name in args.new.split(",")]
    found = [Judged(*pair, new=frozenset(t for op, t in pairs if op == pair[0])) for pair in pairs]
    if not found:
        print("keep nothing: result files name every tactic of this card")
    before = against(args.against)
    with tempfile.TemporaryDirectory() as cubins:
        gpu = Gpu()
        bench = cuda_node.Bench(gpu, target, Path(cubins))
        for judged in found:
            hold(bench, judged)
            told = judged.wrong or f"right in {judged.cases} cases"
            print(f"{judged.op}/{judged.tactic}: {told}", flush=True)
        gpu.close()
        right = [j for j in found if j.cases and not j.wrong]
        ops = {j.op for j in right}
        for shape, work in shapes(args.models.split(","), args.at, target, ops, args.behind):
            mine = [j for j in right if j.op == work.name]
            old = args.old.split(",") if args.old else None
            every = [t.name for t in work.op.cuda.tactics] if work.op is not None else []
            names = every if old is None else [*old, *(j.tactic for j in mine)]
            takers = {t.name for t in work.op.cuda.tactics
                      if t.refuse(work.attrs, work.ins, target) is None}  # fmt: skip
            if not takers & {j.tactic for j in mine}:
                continue
            times = time_at(work, names, target, args.rounds, Path(cubins))
            print(f"{shape}: {', '.join(f'{n} {min(us):.2f}' for n, us in times.items())} us",
                  flush=True)  # fmt: skip
            for judged in (j for j in mine if j.tactic in times):
                rivals = before.get(judged.op, {}).get(shape, {})
                judged.at[shape] = beside(times, rivals, judged.tactic)
            keep(args.out, found)
    keep(args.out, found)
    print("\n".join(judged.line() for judged in found))
    return 1 if any(judged.wrong for judged in found) else 0


def keep(path: Path | None, found: Sequence[Judged]) -> None:
    """Writes what is known so far."""
    if path is None:
        return
    rows: list[Row] = [
        {"op": j.op, "tactic": j.tactic, "cases": j.cases, "wrong": j.wrong, "keep": j.keeps}
        | {"gains": {shape: round(gain, 4) for shape, gain in j.gains.items()}, "at": j.at}
        for j in found
    ]
    head = {"machine": this_machine().label, "date": str(date.today())}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
