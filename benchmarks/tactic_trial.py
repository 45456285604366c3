"""Tactics that wait for a GPU, judged: right or not, then compared with the op's earlier ones.

`python -m benchmarks.tactic_trial` judges every tactic of this card that no result file names
(KNOWN); `OP --new NAME,… [--old NAME,…]` judges those of one op
against all others, or those named. First each runs over all cases of its op that it takes, between
guards and over poisoned memory, and is compared with the reference. Then all are timed as a build
times tactics (cold weights, replayed graphs), in `--rounds` that take turns, at the shapes
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
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.graphs import target_here
from benchmarks.rehearsal.ops import compared, truth, works
from benchmarks.result_files import MODELS, RESULTS, read, write
from benchmarks.time_op import Times, shapes, sizes_of, takers, time_at
from spark_engine.builder.native.gpu_timer import this_machine
from spark_engine.device.gpu import Gpu
from spark_engine.kernel import Target
from spark_engine.plugins.registry import REGISTRY
from tests.plugins import cuda_node

AT = "decode:1,decode:8,decode:32,decode:128,verify_k3:8,verify_k3:128,prefill:1024,prefill:8192"
# Files with rows that name tactics; those of `tactics_run.json` ran, and their times were not kept.
KNOWN = ("kernels/tactics_h200.json", "rehearsal/ops.json.xz", "kernels/tactics_run.json",
         "kernels/tactics.json")  # fmt: skip
MARGIN = 0.02  # of a time, which a faster tactic must save
BEFORE = "before"  # behind the name of a tactic of another tree
Row = dict[str, Any]


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
            return f"drop {name}: right in {self.cases} cases, and never timed with another tactic"
        word, best = "keep" if self.keeps else "drop", max(self.gains, key=self.gains.__getitem__)
        told = ", ".join(f"{gain:+.0%} at {shape}" for shape, gain in self.gains.items())
        return f"{word} {name}: right in {self.cases} cases; best at {best}; saves {told}"


def named(files: Sequence[str] = KNOWN, results: Path = RESULTS) -> set[tuple[str, str]]:
    """The (op, tactic) that result files have a time of."""
    found: set[tuple[str, str]] = set()
    for path in (results / name for name in files):
        for row in read(path)["rows"] if path.is_file() else ():
            if "tactic" in row:
                found.add((row["op"], row["tactic"]))
            elif "microseconds" in row:
                found |= {(row["op"], tactic) for tactic in row["microseconds"]}
            elif row.get("label", "").count("/") >= 2:
                op, tactic, _ = row["label"].split("/", 2)
                found.add((op, tactic))
    return found


def waiting(target: Target, known: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """The (op, tactic) that take some case on this card, and that no result file names."""
    found = {(w.op.name, w.tactic.name): None for _, _, plans in works(target) for w in plans}
    return [pair for pair in found if pair not in known]


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


def against(path: Path | None) -> Mapping[str, Mapping[str, Times]]:
    """Times of another tree on this machine, by op and shape; SystemExit for another machine's."""
    if path is None:
        return {}
    kept = read(path)
    if kept["machine"] != this_machine().label:
        raise SystemExit(f"{path} is of {kept['machine']}, and this is {this_machine().label}")
    found: dict[str, dict[str, Times]] = {}
    for row in kept["rows"]:
        found.setdefault(row["op"], {}).update(row["at"])
    return found


def with_rival(times: Times, before: Times, tactic: str) -> dict[str, list[float]]:
    """A shape's times, and those that the tactic had in the other tree as a rival."""
    found = {name: [*us] for name, us in times.items()}
    if tactic in before:
        found[f"{tactic}, {BEFORE}"] = [*before[tactic]]
    return found


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("op", nargs="?", help="the op; default: all tactics that no file names")
    parser.add_argument("--new", help="tactics to judge, a list")
    parser.add_argument("--old", help="their rivals, a list; default: all others of the op")
    parser.add_argument("--models", default=",".join(MODELS), help="folders of benchmarks/configs")
    parser.add_argument(
        "--at", type=sizes_of, default=sizes_of(AT), help="buckets that give the timed shapes"
    )
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
        for at in shapes(args.models.split(","), args.at, target, ops, args.behind):
            shape, work = at.label, at.work
            mine = [j for j in right if j.op == work.name]
            old = args.old.split(",") if args.old else None
            names = None if old is None else [*old, *(j.tactic for j in mine)]
            plans = takers(work, target, names)
            if not {t.name for t, _ in plans} & {j.tactic for j in mine}:
                continue
            times = time_at(work, plans, target, args.rounds, Path(cubins))
            print(f"{shape}: {', '.join(f'{n} {min(us):.2f}' for n, us in times.items())} us",
                  flush=True)  # fmt: skip
            for judged in (j for j in mine if j.tactic in times):
                rivals = before.get(judged.op, {}).get(shape, {})
                judged.at[shape] = with_rival(times, rivals, judged.tactic)
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
    write(path, {**head, "rows": rows})


if __name__ == "__main__":
    sys.exit(main())
