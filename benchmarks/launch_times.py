"""Device time of every launch of an engine's buckets, in order, and of each bucket's whole graph.

`python -m benchmarks.launch_times ENGINE CONFIG --out FILE` runs what `bench_decode` runs: so many
sequences of --ctx random tokens in lockstep, then rounds of --drafts drafts. The launches of the
last step are then queued one after the other with an event between them, and once more as one
graph; prefill buckets run one sequence from its beginning. With them goes what the GPU is: the
multiprocessors that launches have (all, or those of a partition), their clock under load, and the
bytes a second that a plain kernel on them reads. `benchmarks.predict_gb10 --held-to FILE` holds
its predictions to these times, and `--from FILE` learns from them.

For a GB10 the engine is a rehearsal (`spark-build CONFIG -o ENGINE --target sm_90a --as sm_121a
--decode 1,8,32,64,128 --prefill 4096,8192 --verify 1:3,8:3,32:3,64:3,128:3 --max-seqs 128
--max-context 9216 --kv-tokens 163840`) and so is the run: `SPARK_REHEARSE=sm_121a python -m
benchmarks.launch_times ENGINE CONFIG --drafts 3 --prefill 4096,8192 --out FILE`. Several calls may
add to one FILE, each with some of the rows or prompts, where a command may only take so long.

With `--drawn` contexts are not computed: steps are of drawn tokens, for dense models, whose time
does not depend on what they hold. CONFIG names the folder of configs that the engine was built
from. Each bucket is written as soon as it is measured; runs of other models or multiprocessors in
FILE are kept.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.drawn_step import drawn
from benchmarks.graphs import each_seconds, target_here
from benchmarks.kernel_split import time_launches
from benchmarks.launch_costs import Launches
from benchmarks.lockstep import Bench, card, checked
from benchmarks.stages.machine import ROOT, commit_here
from benchmarks.weightless_plan import label_of
from spark_engine.builder.native import nvrtc
from spark_engine.builder.native.launches import launches
from spark_engine.device.gpu import Gpu
from spark_engine.device.resources import DeviceResources
from spark_engine.interface import DECODE, PREFILL, PREFILL_TILE, drafts_of, verify_family
from spark_engine.kernel import Shape
from spark_engine.manifest import Manifest
from spark_engine.runtime.doctor.probe import probe
from spark_engine.runtime.engine.request import capacity

ROOM = 320  # positions behind the prompt: steps, and launches that go on while they are timed
ROUNDS = 3  # of drafts before their launches are timed
REPLAYS, PASSES, READS = 10, 5, 8
LONG = 0.2  # seconds of a bucket that is not repeated as often
WHEN = ("commit", "date")  # of a run; also of a bucket that an earlier run left
READ_BYTES = 1 << 30  # larger than any L2 cache
READ_BLOCKS, READ_THREADS = 4, 512  # blocks for each multiprocessor; threads of a block
READ = """
extern "C" __global__ void read_all(const uint4* x, unsigned long long n, unsigned* y) {
  const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  unsigned sum = 0;
  for (unsigned long long i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = i + j * step < n ? __ldcs(x + i + j * step) : uint4();
#pragma unroll
    for (int j = 0; j < 8; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x5bd1e995u) *y = sum;
}
"""
Row = dict[str, Any]


def read_rate(gpu: Gpu) -> float:
    """Bytes a second that a kernel on all multiprocessors of `gpu` reads, the best of some."""
    job = nvrtc.Job("read.cu", (), ("read_all",))
    with tempfile.TemporaryDirectory() as folder, closing(DeviceResources(gpu)) as held:
        (Path(folder) / job.source).write_text(READ)
        code = nvrtc.compile(job, target_here(), None, Path(folder)).code
        function = gpu.load(code, job.symbols)["read_all"]
        grid = (READ_BLOCKS * gpu.multiprocessors, 1, 1)
        shape = Shape(grid, (READ_THREADS, 1, 1), ("address", "i64", "address"))
        args = (held.zeros(READ_BYTES), READ_BYTES // 16, held.zeros(16))
        work = gpu.prepare(function, shape, args)
        work()
        gpu.wait()
        return READ_BYTES / min(each_seconds(gpu, work, READS))


def machine(gpu: Gpu) -> Row:
    """What the GPU, or its partition, is and reaches."""
    known = card()
    told = {"card": known["card"], "driver": known["driver"], "sms": gpu.multiprocessors}
    told |= {"part": gpu.kind, "l2_bytes": gpu.l2_bytes, "sm_mhz": round(probe(gpu).sm_mhz, 1)}
    return told | {"read": round(read_rate(gpu) / 1e9) * 1e9}


def wanted_options(manifest: Manifest) -> Row:
    """What a plan with the same nodes is made with (`builder.plan.options.Options`)."""
    limits, dtypes = manifest.limits, manifest.dtypes
    return {
        "max_seqs": limits.max_seqs,
        "max_context": limits.max_context,
        "kv_tokens": limits.pages * limits.page_size,
        "gdn_ring": limits.gdn_ring,
        "drafts": limits.drafts,
        "kv_dtype": "fp8" if dtypes.kv.itemsize == 1 else str(dtypes.kv),
        "state_dtype": str(dtypes.state),
    }


class Timer:
    """One open engine, bucket by bucket."""

    def __init__(self, bench: Bench) -> None:
        assert bench.folder is not None, "an engine that came from no folder has no payloads"
        self._bench, self._folder = bench, bench.folder
        self._files = {(b.family, b.rows): b for b in self._folder.manifest.buckets}

    @contextmanager
    def standing(self, npl: int, ctx: int, steps: int) -> Iterator[Row]:
        """So many sequences in the middle of their decode, and what a step took meanwhile."""
        self._hold(0)
        yield {"npl": npl, "step_ms": self._bench.run(npl, ctx, steps)["step_ms"]}
        self._hold(0)
        self._bench.finish()

    def decode(self, npl: int, drafts: Sequence[int], ctx: int, steps: int) -> Iterator[Row]:
        """A step of so many sequences, then a round of each number of drafts that has a bucket."""
        bench = self._bench
        with self.standing(npl, ctx, steps) as known:
            found = [(DECODE, bench.bucket(DECODE, npl), known)]
            for family, rows in self._rounds(npl, drafts):
                self._hold(drafts_of(family))
                for _ in range(ROUNDS):
                    checked(bench.engine.step())
                found.append((family, rows, {"npl": npl}))
            bench.pave()
            for family, rows, known in found:
                yield self._timed(family, rows) | known | {"context": ctx}

    def drawn(self, npl: int, drafts: Sequence[int], ctx: int) -> Iterator[Row]:
        """The same over contexts that were never computed."""
        for family, rows in [(DECODE, npl), *self._rounds(npl, drafts)]:
            drawn(self._bench, family, rows, npl, ctx)
            yield self._timed(family, rows) | {"npl": npl, "context": ctx, "drawn": True}

    def _rounds(self, npl: int, drafts: Sequence[int]) -> Iterator[tuple[str, int]]:
        """Families and rows of the buckets that verify drafts of so many sequences."""
        for k in drafts:
            family = verify_family(k)
            rows = [r for r in self._bench.engine.loaded.buckets(family) if r >= npl]
            if rows:
                yield family, min(rows)
            else:
                print(f"  no bucket verifies {k} drafts of {npl} sequences", flush=True)

    def prefill(self, tokens: int) -> Row:
        """One sequence of so many tokens from its beginning."""
        rows = tokens // PREFILL_TILE
        own = Launches(self._bench.engine)
        own.microseconds(own.prefill(rows, rows), 1)
        return self._timed(PREFILL, rows) | {"context": 0}

    def _hold(self, drafts: int) -> None:
        depth: Any = self._bench.engine.scheduler.depth
        depth.choose = lambda requests, brisk=False: drafts

    def _timed(self, family: str, rows: int) -> Row:
        """The bucket's launches over the inputs of its last run."""
        executor = self._bench.executors[family, rows].inner
        payload = self._folder.engine(self._files[family, rows]).payload
        queue = executor.launches(payload)

        def queued() -> None:
            for launch in queue:
                launch.queue()

        [first] = each_seconds(executor.gpu, queued, 1)
        replays, passes = (REPLAYS, PASSES) if first < LONG else (2, 1)
        graph = statistics.median(each_seconds(executor.gpu, queued, replays))
        timed = time_launches(executor, payload, passes)
        told = [(label_of(n.node), n.op, n.tactic, n.symbol) for n in launches(payload)]
        kinds = {kind: i for i, kind in enumerate(dict.fromkeys(told))}
        pairs = [[kinds[k], round(t.microseconds, 2)] for k, t in zip(told, timed, strict=True)]
        return {
            "family": family,
            "rows": rows,
            "graph_ms": round(graph * 1e3, 4),
            "kinds": [list(kind) for kind in kinds],
            "launches": pairs,
        }


def line(row: Row) -> str:
    """One printed line."""
    alone = sum(us for _, us in row["launches"]) / 1e3
    step = f", {row['step_ms']:.3f} ms a step of the engine" if "step_ms" in row else ""
    return (
        f"{row['family']:10} {row['rows']:4} rows: {row['graph_ms']:9.3f} ms as a graph{step}; "
        f"{len(row['launches'])} launches one by one {alone:9.3f} ms"
    )


def of_run(bucket: Row) -> bool:
    """Whether a kept bucket is of its run, and not of an earlier one of other sources perhaps."""
    return not any(name in bucket for name in WHEN)


def save(path: Path, run: Row) -> None:
    """Writes the run, a bucket a line, in the place of one of the same model and multiprocessors;
    buckets of that one that were not measured again stay, with their own commit and date."""
    runs = json.loads(path.read_text())["runs"] if path.is_file() else []
    key = (run["model"], run["machine"]["sms"])
    old = next((r for r in runs if (r["model"], r["machine"]["sms"]) == key), None)
    new = {(b["family"], b["rows"]) for b in run["buckets"]}
    of = {name: (old or {}).get(name, "unknown") for name in WHEN}
    buckets = (old or {}).get("buckets", ())
    kept = [of | bucket for bucket in buckets if (bucket["family"], bucket["rows"]) not in new]
    run = run | {"buckets": kept + run["buckets"]}
    written = []
    for one in [r for r in runs if r is not old] + [run]:
        head = json.dumps({k: v for k, v in one.items() if k != "buckets"})[:-1]
        buckets = ",\n  ".join(json.dumps(bucket) for bucket in one["buckets"])
        written.append(f' {head}, "buckets": [\n  {buckets}]}}')
    text = '{"runs": [\n' + ",\n".join(written) + "\n]}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def numbers(text: str) -> tuple[int, ...]:
    """`1,8` as numbers."""
    return tuple(int(word) for word in text.split(",") if word)


def main(words: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", type=Path, help="engine folder")
    parser.add_argument("config", type=Path, help="the folder of configs it was built from")
    parser.add_argument("--rows", type=numbers, default=(1, 8, 32, 64, 128), help="sequences")
    parser.add_argument("--drafts", type=numbers, default=(), help="of a round, a list")
    parser.add_argument("--prefill", type=numbers, default=(), help="tokens of buckets, a list")
    parser.add_argument("--ctx", type=int, default=1024, help="tokens of each sequence")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of each width")
    parser.add_argument("--drawn", action="store_true", help="contexts need not be computed")
    parser.add_argument("--commit", help="by default the tree's, or SPARK_COMMIT's")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of runs to add to")
    args = parser.parse_args(words)
    bench = Bench(args.engine, drafts=None)
    assert bench.folder is not None
    manifest, limits = bench.folder.manifest, bench.engine.loaded.limits
    if capacity(limits) < args.ctx + ROOM:
        raise SystemExit(
            f"--ctx {args.ctx}: this engine holds {capacity(limits)} positions; give at most "
            f"{capacity(limits) - ROOM}, or build with --max-context {args.ctx + ROOM}"
        )
    gpu = next(iter(bench.executors.values())).inner.gpu
    run: Row = {"model": args.config.name, "target": manifest.target, "machine": machine(gpu)}
    config = args.config.resolve()
    run |= {"config": str(config.relative_to(ROOT) if config.is_relative_to(ROOT) else config)}
    run |= {"options": wanted_options(manifest), "commit": args.commit or commit_here()}
    run |= {"date": str(date.today())}
    run |= {"engine_card": manifest.card, "buckets": []}
    print(json.dumps(run["machine"]), flush=True)
    timer = Timer(bench)

    def keep(row: Row) -> None:
        print(line(row), flush=True)
        run["buckets"].append(row)
        save(args.out, run)

    for npl in args.rows:
        given = (npl, args.drafts, args.ctx)
        for row in timer.drawn(*given) if args.drawn else timer.decode(*given, args.steps):
            keep(row)
    for tokens in args.prefill:
        if tokens > capacity(limits) or (PREFILL, tokens // PREFILL_TILE) not in bench.executors:
            print(f"  no bucket prefills a sequence of {tokens} tokens", flush=True)
            continue
        keep(timer.prefill(tokens))
    bench.engine.close()


if __name__ == "__main__":
    main()
