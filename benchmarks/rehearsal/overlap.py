"""What programmatic launches gain or lose in a decode step, and what a GB10's occupancy does to it.

`python -m benchmarks.rehearsal.overlap ENGINE CONFIG --rows 1,8 --out FILE` replays a decode step
as graphs of the same launches, in milliseconds: as they are ("pdl"), and each after the end of the
one before ("plain"). Both also "loose": in a rehearsal (`SPARK_REHEARSE`) blocks have no more
shared memory than they ask for, so a larger multiprocessor holds more of them than the rehearsed
GPU's.
Elsewhere all are loose; those that are not have a multiprocessor for each block of a launch with no
more blocks than there are multiprocessors. Contexts are not computed (`steps.drawn`).
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.graphs import each_seconds, target_here
from benchmarks.result_files import read, write
from benchmarks.steps import drawn
from benchmarks.steps.launch_times import machine
from benchmarks.steps.lockstep import Bench
from benchmarks.steps.time_queue import time_queue
from spark_engine.interface import DECODE
from spark_engine.kernel import Shape

REPLAYS, PASSES = 5, 2
MORE_THAN_HALF = 115 << 10  # bytes of a Hopper multiprocessor's shared memory
Row = dict[str, Any]


@contextmanager
def prepared(gpu: Any, pdl: bool, loose: bool) -> Iterator[None]:
    """Launches that are prepared meanwhile have this form."""
    smem_scale, prepare = gpu.smem_scale, gpu.prepare

    def changed(function: Any, shape: Shape, args: Any) -> Callable[[], None]:
        own = shape._replace(pdl=shape.pdl and pdl)
        if smem_scale is None and not loose and math.prod(own.grid) <= gpu.multiprocessors:
            own = own._replace(shared=max(own.shared, MORE_THAN_HALF))
            gpu.allow_shared(function, own.shared)
        queue: Callable[[], None] = prepare(function, own, args)
        return queue

    gpu.prepare, gpu.smem_scale = changed, None if loose else smem_scale
    try:
        yield
    finally:
        gpu.prepare, gpu.smem_scale = prepare, smem_scale


def forms(executor: Any, payload: bytes) -> Row:
    """A bucket's step in each form, and its launches one by one."""
    row: Row = {}
    for name, pdl, loose in (("pdl", True, False), ("plain", False, False),
                             ("pdl_loose", True, True), ("plain_loose", False, True)):  # fmt: skip
        with prepared(executor.gpu, pdl, loose):
            queue = executor.launches(payload)

        def queued(queue: Sequence[Any] = queue) -> None:
            for launch in queue:
                launch.queue()

        row[name] = round(statistics.median(each_seconds(executor.gpu, queued, REPLAYS)) * 1e3, 4)
        if pdl:
            row[f"alone_{name}"] = round(sum(time_queue(executor.gpu, queue, PASSES)) / 1e3, 4)
    return row


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, help="engine folder")
    parser.add_argument("config", type=Path, help="the folder of configs it was built from")
    parser.add_argument("--rows", default="1,8,32,128", help="sequences, a list")
    parser.add_argument("--ctx", type=int, default=1024, help="tokens of each sequence")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of rows to add to")
    args = parser.parse_args(words)
    target_here()
    bench = Bench(args.engine, drafts=True)
    here = machine(next(iter(bench.executors.values())).inner.gpu)
    rows: list[Row] = read(args.out) if args.out.is_file() else []
    files = {(b.family, b.rows): b for b in bench.folder.manifest.buckets}
    for n in map(int, args.rows.split(",")):
        drawn.decode(bench, DECODE, n, n, args.ctx)
        payload = bench.folder.engine(files[DECODE, n]).payload
        found = forms(bench.executors[DECODE, n].inner, payload)
        print(f"{args.config.name} {n}: {', '.join(f'{k} {v:.3f}' for k, v in found.items())}")
        rows.append({"model": args.config.name, "rows": n, "machine": here} | found)
        write(args.out, rows)
    bench.engine.close()


if __name__ == "__main__":
    main()
