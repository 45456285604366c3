"""A prompt's prefill by kind of node, and the floor of the multiprocessors that it has.

`SPARK_REHEARSE=sm_121a python -m benchmarks.rehearsal.prefill_floor` times each kind of node of a
prefill of 4,096 tokens of the 35B, with the sources of sm_121a on 48 multiprocessors, as a build
times tactics (replayed graphs, cold weights; of several tactics of nearly the predicted cost the
fastest), and prints what no kernel on them is below: its bytes of DRAM at what a plain kernel reads
there, or its operations at the rate that mma.sync reaches there in a
plain loop over registers (`mma_rate`), whichever is longer. e4m3 products count at bf16's rate:
Hopper makes them of two of f16. Tensors that two launches share count as DRAM where they are
larger than half of L2 (`node_work`). `--out FILE` keeps what docs/results/ shows.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.graphs import each_seconds, target_here
from benchmarks.node_work import amounts
from benchmarks.result_files import ROOT, commit_here, read, write
from benchmarks.steps.launch_times import machine
from benchmarks.weightless_plan import decided_of, label_of, options, work_of
from spark_engine.builder.native import nvrtc
from spark_engine.builder.native.gpu_timer import GpuTimer
from spark_engine.builder.native.program import BucketTactics
from spark_engine.builder.native.tactics import TacticChoice, Work
from spark_engine.device.gpu import Gpu
from spark_engine.device.resources import DeviceResources
from spark_engine.interface import PREFILL
from spark_engine.kernel import Plan, Shape, Target
from spark_engine.plugins.registry import REGISTRY, STANDARD

TOKENS = 4096  # of the prompt
TRIPS, WARPS, CHAINS = 4096, 8, 8  # of the loop of products; sums of a warp that do not wait
NEAR = 1.3  # times the least predicted cost that a tactic may have to be timed
PRODUCT = 2 * 16 * 8 * 16  # operations of an m16n8k16
SOURCE = """
#include "common/ptx.cuh"
extern "C" __global__ void __launch_bounds__(WARPS * 32) products(float* y, int trips) {
  u32 a[4], b[2];
  float sums[CHAINS][4] = {};
  for (int i = 0; i < 4; ++i) a[i] = 0x3f803f80u + threadIdx.x * i;
  b[0] = b[1] = 0x3c003c00u + threadIdx.x;
#pragma unroll 4
  for (int trip = 0; trip < trips; ++trip)
#pragma unroll
    for (int i = 0; i < CHAINS; ++i) mma_bf16(sums[i], a, b[0], b[1]);
  float all = 0.0f;
  for (int i = 0; i < CHAINS; ++i) all += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
  if (all == 1.5f) *y = all;
}
"""
Row = dict[str, Any]


def mma_rate(gpu: Gpu) -> float:
    """Operations a second of mma.sync with bf16 factors and f32 sums on all that `gpu` has."""
    defines = (("WARPS", str(WARPS)), ("CHAINS", str(CHAINS)))
    with tempfile.TemporaryDirectory() as folder, closing(DeviceResources(gpu)) as held:
        source = Path(folder) / "products.cu"
        header = ROOT / "plugins/kernels/common/ptx.cuh"
        source.write_text(SOURCE.replace('#include "common/ptx.cuh"', header.read_text()))
        job = nvrtc.Job(source.name, defines, ("products",))
        code = nvrtc.compile(job, target_here(), None, Path(folder)).code
        function = gpu.load(code, job.symbols)["products"]
        shape = Shape((gpu.multiprocessors, 1, 1), (WARPS * 32, 1, 1), ("address", "i32"))
        work = gpu.prepare(function, shape, (held.zeros(16), TRIPS))
        work()
        gpu.wait()
        done = gpu.multiprocessors * WARPS * TRIPS * CHAINS * PRODUCT
        return done / min(each_seconds(gpu, work, 8))


@dataclass
class Kind:
    """Equal nodes."""

    node: str  # their name without numbers of layers
    op: str
    tactic: str
    count: int  # how many the bucket has
    us: float | None  # of one, measured; None where it could not be
    # bytes_us and ops_us: of one, what its bytes and its operations ask for.
    bytes_us: float
    ops_us: float

    @property
    def floor_us(self) -> float:
        return max(self.bytes_us, self.ops_us)


def bucket(model: str, tokens: int, target: Target) -> BucketTactics:
    """The prefill bucket of one prompt of so many tokens."""
    given = options(target.name, decode=(1,), prefill=(tokens,), verify=None, drafts=0, gpu=target)
    found = decided_of(model, given)
    return next(d for d in found if d.size.family == PREFILL)


def kinds(decided: BucketTactics, known: Row, timer: GpuTimer) -> Iterator[Kind]:
    """The bucket's nodes, equal ones once, timed.

    `known`: "read" in bytes a second, "mma" in operations a second, "l2_bytes".
    """
    tokens = decided.size.rows * decided.size.tile
    found: dict[tuple[object, ...], tuple[str, Work, TacticChoice, int]] = {}
    for node, choice in decided.nodes:
        if choice.tactic is None:
            continue
        work, label = work_of(node, decided.size, tokens), label_of(node.name)
        key = (label if work.op is None else "", *work.key)
        first, _, _, count = found.get(key, (label, work, choice, 0))
        found[key] = (first, work, choice, count + 1)
    for label, work, choice, count in found.values():
        tactic, seconds = fastest(work, choice, timer)
        moved = amounts(work)
        bytes_us = moved.dram(known["l2_bytes"]) / known["read"] * 1e6
        ops_us = moved.ops / known["mma"] * 1e6 if moved.kind else 0.0
        us = None if seconds is None else round(seconds * 1e6, 2)
        known_of = (work.name, tactic, count, us, round(bytes_us, 2), round(ops_us, 2))
        yield Kind(label, *known_of)


def plans(decided: BucketTactics, target: Target) -> Iterator[tuple[str, Plan]]:
    """Sources and plans of all that is timed."""
    tokens = decided.size.rows * decided.size.tile
    for node, choice in decided.nodes:
        work = work_of(node, decided.size, tokens)
        cuda = REGISTRY[node.op].cuda if work.op is not None else STANDARD[node.op]
        for tactic in cuda.tactics:
            if choice.tactic is not None and tactic.name in near(choice):
                yield tactic.source, tactic.plan(work.attrs, work.ins, target)


def near(choice: TacticChoice) -> list[str]:
    """The tactics that are worth timing, by their predicted costs."""
    return [name for name, cost in choice.candidates.items() if cost <= NEAR * choice.seconds]


def fastest(work: Work, choice: TacticChoice, timer: GpuTimer) -> tuple[str, float | None]:
    """The tactic's name and its seconds; None where none of them can be timed."""
    assert choice.tactic is not None
    cuda = work.op.cuda if work.op is not None else STANDARD[work.name]
    tactics = [t for t in cuda.tactics if t.name in near(choice)]
    plans = [(t, t.plan(work.attrs, work.ins, target_here())) for t in tactics]
    times = {t.name: s for t, p in plans if (s := timer(work, t, p)) is not None}
    best = min(times, key=lambda name: times[name], default=choice.tactic.name)
    return best, times.get(best)


def summed(rows: Sequence[Kind]) -> tuple[float, float]:
    """Milliseconds measured and of the floor, of all nodes."""
    measured = sum(k.count * (k.us or 0.0) for k in rows)
    return measured / 1e3, sum(k.count * k.floor_us for k in rows) / 1e3


def lines(rows: Sequence[Kind], layers: int) -> Iterator[str]:
    """What is printed: the kinds that could be saved most first."""
    spare = sorted(rows, key=lambda k: k.count * (k.floor_us - (k.us or 0.0)))
    for k in spare:
        bound = "bytes" if k.bytes_us >= k.ops_us else "products"
        times = f"{k.us / k.floor_us:5.2f}" if k.us and k.floor_us else "    –"
        yield (
            f"{k.count:3} x {k.us or 0:8.1f} us, floor {k.floor_us:7.1f} ({bound}), {times}: "
            f"{k.node} ({k.op}, {k.tactic})"
        )
    measured, floor = summed(rows)
    yield (
        f"all: {measured:.1f} ms, {measured / layers:.2f} a layer; floor {floor:.1f} ms, "
        f"{floor / layers:.2f} a layer: {measured / floor:.2f} times"
    )


def layers_of(decided: BucketTactics) -> int:
    """How many layers have experts or another MLP: each quantises its input once more."""
    names = {node.name.partition(".mlp.")[0] for node, _ in decided.nodes if ".mlp." in node.name}
    return len(names)


def keep(path: Path, run: Row) -> None:
    """Adds a run to a file, in the place of one of the same model and tokens."""
    runs = read(path)["runs"] if path.is_file() else []
    runs = [r for r in runs if (r["model"], r["tokens"]) != (run["model"], run["tokens"])]
    write(path, {"runs": [*runs, run]})


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen36-35b-a3b", help="as published.py names them")
    parser.add_argument("--out", type=Path, help="JSON file of the rows")
    args = parser.parse_args(words)
    target = target_here()
    decided = bucket(args.model, TOKENS, target)
    with closing(Gpu()) as gpu:
        known = machine(gpu) | {"mma": round(mma_rate(gpu) / 1e9) * 1e9}
    print(json.dumps(known), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        cubins, times = Path(folder) / "cubins", Path(folder) / "times.json"
        jobs = nvrtc.jobs_of([*plans(decided, target)])
        nvrtc.compile_all(jobs, target, cubins, os.cpu_count() or 1)
        with GpuTimer(target, cubins, times) as timer:
            rows = []
            for kind in kinds(decided, known, timer):
                rows.append(kind)  # printed at once: a run may be cut off
                print(f"{kind.count:3} x {kind.us} us, {kind.node} ({kind.op})", flush=True)
    print("\n".join(lines(rows, layers_of(decided))), flush=True)
    if args.out:
        measured, floor = summed(rows)
        run = {"model": args.model, "tokens": TOKENS, "layers": layers_of(decided)}
        run |= {"machine": known, "commit": commit_here()}
        run |= {"date": str(date.today())}
        run |= {"ms": round(measured, 3), "floor_ms": round(floor, 3)}
        keep(args.out, run | {"rows": [asdict(k) for k in rows]})


if __name__ == "__main__":
    main()
