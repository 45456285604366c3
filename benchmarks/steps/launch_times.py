"""Device time of every launch of an engine's buckets, in order, and of each bucket's whole graph.

The launches of the last step are queued one after the other with an event between them, and once
more as one graph; of several ranks, on all at once and without the graph. With them goes what the
GPU is: the multiprocessors that launches have (all, or those of a partition), their clock under
load, and the bytes a second that a plain kernel on them reads. A file of such runs is what
`benchmarks.rehearsal.gb10.predict` learns from (`--from`) and is compared with (`--held-to`).
"""

import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks.graphs import each_seconds, target_here
from benchmarks.result_files import read, write
from benchmarks.steps import drawn, rank_follower
from benchmarks.steps.launch_parts import Timed, by_part, counts
from benchmarks.steps.lockstep import Bench, card, checked
from benchmarks.steps.time_queue import PASSES, time_launches
from benchmarks.weightless_plan import label_of
from spark_engine.builder.native import nvrtc
from spark_engine.builder.native.launches import launches
from spark_engine.device.gpu import Gpu
from spark_engine.device.resources import DeviceResources
from spark_engine.interface import DECODE, PREFILL, PREFILL_TILE, drafts_of, verify_family
from spark_engine.kernel import Shape
from spark_engine.manifest import Manifest
from spark_engine.plugins.formats.nvfp4 import W4A8
from spark_engine.runtime.doctor.probe import probe

REPLAYS, READS = 10, 8
ROUNDS = 3  # of drafts before their launches are timed
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
    found = {"card": known["card"], "driver": known["driver"], "sms": gpu.multiprocessors}
    found |= {"part": gpu.kind, "l2_bytes": gpu.l2_bytes, "sm_mhz": round(probe(gpu).sm_mhz, 1)}
    return found | {"read": round(read_rate(gpu) / 1e9) * 1e9}


def native(bench: Bench, family: str, rows: int) -> Any:
    """This process's own executor of a bucket: rank 0's, where there are several."""
    inner = bench.executors[family, rows].inner
    return inner.inner if bench.folder.manifest.ranks > 1 else inner


def options_of(manifest: Manifest, listed: bool = False) -> Row:
    """What a plan with the same nodes is made with (`builder.plan.options.Options`); `listed`: its
    drafts come from the shipped list."""
    limits, dtypes = manifest.limits, manifest.dtypes
    fp8 = any(q.format == W4A8.name for q in manifest.quantisation)
    return {
        "max_seqs": limits.max_seqs,
        "max_context": limits.max_context,
        "kv_tokens": limits.pages * limits.page_size,
        "gdn_ring": limits.gdn_ring,
        "drafts": limits.drafts,
        "draft_vocab": "full" if limits.drafts and not listed else "auto",
        "kv_dtype": "fp8" if dtypes.kv.itemsize == 1 else str(dtypes.kv),
        "state_dtype": str(dtypes.state),
        "mlp_activations": "fp8" if fp8 else "bf16",
    }


def buckets_of(bench: Bench, npl: int, drafts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Family and rows of the buckets that run so many sequences, with each number of drafts."""
    for family in (DECODE, *map(verify_family, filter(None, drafts))):
        if rows := bench.bucket(family, npl):
            yield family, rows
        else:
            print(f"  no bucket {family} holds {npl} sequences", flush=True)


def of_steps(bench: Bench, npl: int, drafts: Sequence[int], ctx: int, steps: int) -> Iterator[Row]:
    """A step of so many sequences, then a round of each number of drafts that has a bucket."""
    step_ms = bench.run(npl, ctx, steps)["step_ms"]
    found = list(buckets_of(bench, npl, drafts))
    for family, _ in found[1:]:
        bench.hold(drafts_of(family))
        for _ in range(ROUNDS):
            checked(bench.engine.step())
    bench.pave()
    for family, rows in found:
        own = {"step_ms": step_ms} if family == DECODE else {}
        yield timed(bench, family, rows) | {"npl": npl, "context": ctx} | own
    bench.finish()


def of_prefill(bench: Bench, tokens: int) -> Row:
    """One sequence of so many tokens from its beginning."""
    rows = tokens // PREFILL_TILE
    drawn.prefill(bench, rows)
    return timed(bench, PREFILL, rows) | {"context": 0}


def timed(bench: Bench, family: str, rows: int) -> Row:
    """The bucket's launches over the inputs of its last run."""
    executor, ranks = native(bench, family, rows), bench.folder.manifest.ranks
    file = next(b for b in bench.folder.manifest.buckets if (b.family, b.rows) == (family, rows))
    payload = bench.folder.engine(file).payload
    row: Row = {"family": family, "rows": rows}
    passes = PASSES
    if ranks > 1:
        rank_follower.ask(bench.engine.loaded.device_states, family, rows)
    else:
        queue = executor.launches(payload)

        def queued() -> None:
            for launch in queue:
                launch.queue()

        [first] = each_seconds(executor.gpu, queued, 1)
        replays, passes = (REPLAYS, PASSES) if first < LONG else (2, 1)
        graph = statistics.median(each_seconds(executor.gpu, queued, replays))
        row["graph_ms"] = round(graph * 1e3, 4)
    found = time_launches(executor, payload, passes)
    named = [(label_of(n.node), n.op, n.tactic, n.symbol) for n in launches(payload)]
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(named))}
    pairs = [[kinds[k], round(t.microseconds, 2)] for k, t in zip(named, found, strict=True)]
    return row | {"kinds": [list(kind) for kind in kinds], "launches": pairs}


def parts(row: Row, layers: int, step_ms: float) -> Row:
    """A bucket's launches and their times by part.

    One by one launches take longer than in a graph: the difference to `step_ms` is taken off every
    launch alike (`gap_us`).
    """
    found = [
        Timed(row["kinds"][kind][0], row["kinds"][kind][3], us) for kind, us in row["launches"]
    ]
    alone = sum(t.microseconds for t in found) / 1e3
    gap = max(alone - step_ms, 0) / len(found) * 1e3
    return {
        "launches": len(found),
        "launches_per_layer": round(len(found) / layers, 1),
        "alone_ms": round(alone, 3),
        "gap_us": round(gap, 2),
        "parts_ms": by_part(found, gap),
        "parts_launches": counts(found),
    }


def of_kinds(row: Row) -> list[tuple[str, str, str, int, float]]:
    """Node, op, tactic, launches and microseconds of all, of equal nodes; the longest first."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for kind, us in row["launches"]:
        node, op, tactic, _ = row["kinds"][kind]
        found.setdefault((node, op, tactic), []).append(us)
    rows = [(*key, len(us), round(sum(us), 2)) for key, us in found.items()]
    return sorted(rows, key=lambda one: -one[-1])


def lines(row: Row, most: int = 12) -> Iterator[str]:
    """What is printed of a bucket: its times, and the kinds of node that take most of it."""
    alone = sum(us for _, us in row["launches"]) / 1e3
    step = f"{row['step_ms']:.3f} ms a step of the engine; " if "step_ms" in row else ""
    graph = f"{row['graph_ms']:.3f} ms as a graph; " if "graph_ms" in row else ""
    count = len(row["launches"])
    head = f"{row['family']:10} {row['rows']:4} rows: {graph}{step}"
    yield f"{head}{count} launches one by one {alone:.3f} ms"
    for node, op, tactic, n, us in of_kinds(row)[:most]:
        yield f"  {us / 1e3:8.3f} ms, {n:4} x {us / n:8.2f} us  {node} ({op}, {tactic})"


def of_run(bucket: Mapping[str, Any]) -> bool:
    """Whether a kept bucket is of its run, and not of an earlier one of other sources perhaps."""
    return not any(name in bucket for name in WHEN)


def save(path: Path, run: Row) -> None:
    """Writes the run, a bucket a line, in place of one of the same model and multiprocessors;
    buckets of that one that were not measured again stay, with their own commit and date."""
    runs = read(path)["runs"] if path.is_file() else []
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
        texts = ",\n  ".join(json.dumps(bucket) for bucket in one["buckets"])
        written.append(f' {head}, "buckets": [\n  {texts}]}}')
    write(path, None, '{"runs": [\n' + ",\n".join(written) + "\n]}\n")
