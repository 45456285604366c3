"""Why a step as a graph takes another time than its launches one by one: overlap, kind by kind.

`python -m benchmarks.launch_overlap ENGINE CONFIG --rows 1,8 --out FILE` replays a decode step as
graphs of the same launches: as they are ("pdl"), and none beginning before the one before has ended
("plain"); each also "loose": in a rehearsal (`SPARK_REHEARSE`) with blocks that have no more shared
memory than they ask for, so that a larger multiprocessor holds more of them than that of the
rehearsed GPU. Elsewhere all are loose, and those that are not have a multiprocessor for each block
of a launch that has no more blocks than there are multiprocessors. Then kind by kind (node and
kernel), as loose as that, what a step takes when this kind alone does not begin early ("late"), and
when it alone is not loose ("crowded").

With `--chains` also a kind's own launches behind one another, all their weights cold, and the first
of them again and again ("warm": what it reads is in L2 where it fits). Kinds that are given numbers
which another launch of the step makes, experts' ids for instance, are left out there and say so:
alone they would read whatever came to lie in that place since, and reach beyond the weights.

Where a step gets faster because a kind begins late, blocks of that kind were put on some
multiprocessors twice while others had none. One line a bucket is printed, one a kind with
`--kinds`; FILE holds all of it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.drawn_step import drawn
from benchmarks.graphs import each_seconds
from benchmarks.kernel_split import time_queue
from benchmarks.launch_times import Timer, machine, numbers
from benchmarks.lockstep import Bench
from benchmarks.weightless_plan import label_of
from spark_engine.builder.native.launches import launches
from spark_engine.interface import DECODE
from spark_engine.kernel import Shape
from spark_engine.operand import Role
from spark_engine.plugins.registry import REGISTRY

REPLAYS, WARM, KINDS, STEPS = 5, 20, 14, 4
MORE_THAN_HALF = 115 << 10  # bytes of a Hopper multiprocessor's shared memory
Row = dict[str, Any]
Queue = Sequence[Any]


class Overlap:
    """One bucket's launches in four forms: programmatic or not, crowded as there or loose."""

    def __init__(self, executor: Any, payload: bytes) -> None:
        self._gpu = executor.gpu
        found = launches(payload)
        self.kinds = [f"{label_of(n.node)} {n.symbol}" for n in found]
        self._given = {k for k, n in zip(self.kinds, found, strict=True) if reads_numbers(n.op)}
        self._forms: dict[tuple[bool, bool], Queue] = {}
        for pdl in (True, False):
            for loose in (True, False):
                with self._prepared(pdl, loose):
                    self._forms[pdl, loose] = executor.launches(payload)

    @contextmanager
    def _prepared(self, pdl: bool, loose: bool) -> Iterator[None]:
        """Launches are prepared like this meanwhile."""
        gpu, smem_scale, prepare = self._gpu, self._gpu.smem_scale, self._gpu.prepare

        def changed(function: Any, shape: Shape, args: Any) -> Callable[[], None]:
            own = replace(shape, pdl=shape.pdl and pdl)
            if smem_scale is None and not loose and math.prod(own.grid) <= gpu.multiprocessors:
                own = replace(own, shared=max(own.shared, MORE_THAN_HALF))
                gpu.allow_shared(function, own.shared)
            queue: Callable[[], None] = prepare(function, own, args)
            return queue

        gpu.prepare, gpu.smem_scale = changed, None if loose else smem_scale
        try:
            yield
        finally:
            gpu.prepare, gpu.smem_scale = prepare, smem_scale

    def seconds(self, chosen: Queue, replays: int = REPLAYS) -> float:
        """Of a graph of these launches, the median."""

        def queued() -> None:
            for launch in chosen:
                launch.queue()

        return statistics.median(each_seconds(self._gpu, queued, replays))

    def whole(self) -> Row:
        """The whole step in each form, and its launches one by one."""
        row: Row = {}
        for (pdl, loose), queue in self._forms.items():
            name = name_of(pdl, loose)
            row[name] = ms(self.seconds(queue))
            if pdl:
                alone = sum(time_queue(self._gpu, queue, 2))
                row[f"alone_{name}"] = round(alone / 1e3, 4)
        return row

    def common(self) -> list[str]:
        """The kinds of which there are most, and the largest product, which is there once."""
        many = sorted(dict.fromkeys(self.kinds), key=self.kinds.count, reverse=True)[:KINDS]
        return many + [k for k in dict.fromkeys(self.kinds) if k.startswith("logits")]

    def of_kind(self, kind: str) -> Row:
        """What one kind does in the step."""
        forms, mine = self._forms, [k == kind for k in self.kinds]
        row: Row = {"kind": kind, "launches": sum(mine)}
        for name, other in (("late", (False, True)), ("crowded", (True, False))):
            pairs = zip(mine, forms[True, True], forms[other], strict=True)
            row[f"step_{name}"] = ms(self.seconds([b if own else a for own, a, b in pairs]))
        pairs = zip(mine, forms[True, False], forms[False, False], strict=True)
        row["crowded_step_late"] = ms(self.seconds([b if own else a for own, a, b in pairs]))
        return row

    def chains(self, kind: str) -> Row:
        """What one kind takes by itself; why it is left out where it cannot be by itself."""
        if kind in self._given:
            return {"alone": "left out: it is given ids that another launch makes"}
        row: Row = {}
        mine = [k == kind for k in self.kinds]
        for (pdl, loose), queue in self._forms.items():
            own = [launch for launch, is_mine in zip(queue, mine, strict=True) if is_mine]
            row[name_of(pdl, loose)] = ms(self.seconds(own))
        first = self._forms[False, False][mine.index(True)]
        row["warm"] = ms(self.seconds([first] * WARM) / WARM * sum(mine))
        return row


def reads_numbers(op: str) -> bool:
    """Whether the op reads numbers of places, which another node of the step has made."""
    known = REGISTRY.get(op)
    return known is not None and any(
        one.role is Role.ACTIVATION and one.spec.startswith("i32") for one in known.operands
    )


def name_of(pdl: bool, loose: bool) -> str:
    """A form's."""
    return ("pdl" if pdl else "plain") + ("_loose" if loose else "")


def ms(seconds: float) -> float:
    """Milliseconds."""
    return round(seconds * 1e3, 4)


def line(row: Row) -> str:
    """A bucket's, or a kind's."""
    words = [f"{k} {v:.3f}" for k, v in row.items() if isinstance(v, float)]
    return f"{row.get('kind', row.get('model', ''))} {row.get('rows', '')}: {', '.join(words)}"


def main(words: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, help="engine folder")
    parser.add_argument("config", type=Path, help="the folder of configs it was built from")
    parser.add_argument("--rows", type=numbers, default=(1, 8, 32, 128), help="sequences")
    parser.add_argument("--ctx", type=int, default=1024, help="tokens of each sequence")
    parser.add_argument("--drawn", action="store_true", help="contexts need not be computed")
    parser.add_argument("--chains", action="store_true", help="each kind by itself, too")
    parser.add_argument("--kinds", action="store_true", help="print them, too")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of rows to add to")
    args = parser.parse_args(words)
    bench = Bench(args.engine, drafts=None)
    assert bench.folder is not None
    files = {(b.family, b.rows): b for b in bench.folder.manifest.buckets}
    here = machine(next(iter(bench.executors.values())).inner.gpu)
    print(json.dumps(here), flush=True)
    rows: list[Row] = json.loads(args.out.read_text()) if args.out.is_file() else []
    timer = Timer(bench)
    for n in args.rows:
        with ExitStack() as step:
            if args.drawn:
                drawn(bench, DECODE, n, n, args.ctx)
            else:
                step.enter_context(timer.standing(n, args.ctx, STEPS))
                bench.pave()
            payload = bench.folder.engine(files[DECODE, n]).payload
            overlap = Overlap(bench.executors[DECODE, n].inner, payload)
            row: Row = {"model": args.config.name, "rows": n, "machine": here} | overlap.whole()
            print(line(row), flush=True)
            row["kinds"] = [overlap.of_kind(kind) for kind in overlap.common()]
            for found in row["kinds"] if args.chains else ():
                found.update(overlap.chains(found["kind"]))
        for found in row["kinds"] if args.kinds else ():
            print("  " + line(found), flush=True)
        rows.append(row)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(rows, indent=1) + "\n")
    bench.engine.close()


if __name__ == "__main__":
    main()
