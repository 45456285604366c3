"""The row-wise kernels at served sizes: equal to the reference, then microseconds in a graph.

Activations of neighbouring kernels stand in L2, and so do these: the time is a launch's latency
until rows are many. Run as `python -m benchmarks.bench_rows` where a GPU is.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.graphs import each_seconds, target_here
from spark_engine.builder.native import nvrtc
from spark_engine.device.gpu import Gpu
from spark_engine.op import Attrs, Case, Op, Tolerance
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins import registry
from spark_engine.plugins.common import random_arrays
from spark_engine.plugins.rowwise import rows_cuda
from spark_engine.tensors import Array, DType
from tests.plugins import cuda_node

BF16 = DType.BF16
REPEATS = 50  # launches in a graph
ROWS = (1, 32, 128, 1024)
PREFILL = 8192
CHECKED = 128  # rows, at most, that are compared with the reference


def cases() -> Iterator[tuple[Op, Case]]:
    """The 27B's rows: hidden 5120, MLP 17408, 48 value heads of 128, 24 query heads of 256."""
    for rows in ROWS:
        for quant in ("none", "fp8", "fp8_block", "nvfp4"):
            n = 2 if quant in ("fp8", "nvfp4") else 1
            keep = int(quant == "none")
            yield norm(rows, 5120, {"eps": 1e-6, "add": 1, "keep": keep, "quant": quant, "n": n})
        for quant in ("fp8", "nvfp4"):
            act: Attrs = {"act": "silu_mul", "heads": 0, "head_dim": 0}
            yield silu(rows, 17408, {**act, "keep": 0, "quant": quant, "n": 1})
            gate: Attrs = {"eps": 1e-6, "heads": 48, "offset": 10240}
            yield gated(rows, 48, {**gate, "keep": 0, "quant": quant, "n": 1})
        yield shared(rows, 2048)
        yield added(rows, 5120)
    for rows in (1, 32, 128):
        yield embedded(rows, 5120)
        yield last(rows, 64, 5120)
        yield marked(rows)
    for quant in ("none", "fp8", "nvfp4"):
        keep = int(quant == "none")
        yield norm(PREFILL, 5120, {"eps": 1e-6, "add": 1, "keep": keep, "quant": quant, "n": 1})


def norm(rows: int, k: int, attrs: Attrs) -> tuple[Op, Case]:
    """norm_quant."""

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x, residual = (random_arrays.normal(rng, rows, k, dtype=BF16) for _ in range(2))
        scales = random_arrays.positive(rng, int(attrs["n"]), low=1e-3, high=3e-2)
        given = (x, random_arrays.positive(rng, k), residual)
        return (*given, scales) if attrs["quant"] in ("fp8", "nvfp4") else given

    label = f"norm_quant {rows}x{k} {attrs['quant']} n{attrs['n']}"
    return registry.get("norm_quant"), Case(label, attrs, make)


def silu(rows: int, k: int, attrs: Attrs) -> tuple[Op, Case]:
    """act_quant."""

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = random_arrays.normal(rng, rows, 2 * k, scale=2.0, dtype=BF16)
        return x, random_arrays.positive(rng, 1, low=1e-3, high=3e-2)

    return registry.get("act_quant"), Case(f"silu {rows}x{k} {attrs['quant']}", attrs, make)


def gated(rows: int, heads: int, attrs: Attrs) -> tuple[Op, Case]:
    """gated_norm_quant."""

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        o = random_arrays.normal(rng, rows, heads * 128, dtype=BF16)
        packed = random_arrays.normal(rng, rows, 16384, scale=2.0, dtype=BF16)
        scales = random_arrays.positive(rng, 1, low=1e-3, high=3e-2)
        return o, packed, random_arrays.positive(rng, 128), scales

    label = f"gated_norm {rows}x{heads}x128 {attrs['quant']}"
    return registry.get("gated_norm_quant"), Case(label, attrs, make)


def shared(rows: int, k: int) -> tuple[Op, Case]:
    """shared_gate."""

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        three = [random_arrays.normal(rng, rows, k, dtype=BF16) for _ in range(3)]
        return (*three, random_arrays.normal(rng, 1, k, scale=k**-0.5, dtype=BF16))

    return registry.get("shared_gate"), Case(f"shared_gate {rows}x{k}", {}, make)


def added(rows: int, k: int) -> tuple[Op, Case]:
    """The standard Add."""

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        return tuple(random_arrays.normal(rng, rows, k, dtype=BF16) for _ in range(2))

    return ADD, Case(f"add {rows}x{k}", {}, make)


def embedded(rows: int, k: int) -> tuple[Op, Case]:
    """embed, of ids that the host gives."""

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        ids, slots = rng.integers(0, 4096, rows), np.arange(rows)
        given = (np.asarray(a, np.int32) for a in (ids, np.zeros(rows + 1), slots))
        return *given, random_arrays.normal(rng, 4096, k, dtype=BF16)

    return registry.get("embed"), Case(f"embed {rows}x{k}", {"tile": 1, "dtype": "bf16"}, make)


def last(rows: int, tile: int, k: int) -> tuple[Op, Case]:
    """last_rows."""

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = random_arrays.normal(rng, rows * tile, k, dtype=BF16)
        return x, np.asarray(rng.integers(1, tile, rows), np.int32)

    return registry.get("last_rows"), Case(f"last_rows {rows}x{k}", {"tile": tile}, make)


def marked(rows: int) -> tuple[Op, Case]:
    """mark_tokens in decode, at the served vocabulary."""

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        slots, ones = np.arange(rows), np.ones(rows)
        lens = np.full(rows + 1, 100)
        columns = (np.full(rows, 7), lens, slots, 500 * ones, ones, lens)
        token_counts = np.zeros((rows + 1, 248_320), np.int32)
        return token_counts, *(np.asarray(c, np.int32) for c in columns)

    return registry.get("mark_tokens"), Case(f"mark_tokens {rows}", {"tile": 1}, make)


ADD = Op(
    name="Add",
    operands=tuple(Operand(n, Role.ACTIVATION, "A[tokens,K]") for n in ("x", "residual")),
    results=(Result("y", "A[tokens,K]"),),
    attrs={},
    reference=lambda attrs, arrays: (
        (arrays[0].astype(np.float32) + arrays[1]).astype(BF16.numpy),
    ),
    body=lambda attrs, specs: "",
    cases=(),
    cuda=rows_cuda.ADD,
)


def microseconds(
    bench: cuda_node.Bench, work: cuda_node.Planned, arrays: tuple[Array, ...]
) -> float:
    """The median of replays of a graph of launches, by launch."""
    gpu, op = bench.gpu, work.op
    outs = op.infer(work.case.attrs, cuda_node.specs_of(op, work.case.attrs, arrays))
    packed = cuda_node.packed_arrays(op, work.case.attrs, arrays)
    functions = bench.functions(work.tactic.source, work.plan)
    sizes = [a.nbytes for a in packed] + [s.nbytes for s in outs]
    with bench.buffers(sizes) as made:
        for buffer, array in zip(made, packed, strict=False):
            bench.put(buffer, array)
        addresses = [b.address for b in made]
        places = {"input": addresses[: len(packed)], "output": addresses[len(packed) :]}

        def queued() -> None:
            for _ in range(REPEATS):
                bench.launch(work.plan, functions, places)

        times = each_seconds(gpu, queued, 10)
    return float(np.median(times)) * 1e6 / REPEATS


def main() -> None:
    """Prints one line a case: microseconds and the share of the bandwidth."""
    target = target_here()
    with tempfile.TemporaryDirectory() as folder:
        bench = cuda_node.Bench(Gpu(), target, Path(folder))
        works = [w for op, case in cases() for w in cuda_node.planned(op, case, bench.target)]
        jobs = nvrtc.jobs_of((w.tactic.source, w.plan) for w in works)
        nvrtc.compile_all(jobs, bench.target, Path(folder), os.cpu_count() or 1)
        for op, case in cases():
            arrays = case.inputs(np.random.default_rng(0))
            for work in cuda_node.planned(op, case, bench.target):
                print(line(bench, work, arrays), flush=True)


def line(bench: cuda_node.Bench, work: cuda_node.Planned, arrays: tuple[Array, ...]) -> str:
    """One case's figures; compared with the reference first if its rows are few."""
    op, case, notes = work.op, work.case, []
    outs = op.infer(case.attrs, cuda_node.specs_of(op, case.attrs, arrays))
    if max(arrays[0].shape[0], outs[0].dims[0]) <= CHECKED:
        got, want = cuda_node.run(bench, work, arrays), op.reference(case.attrs, arrays)
        for i, (g, w) in enumerate(zip(got, want, strict=True)):
            notes.append(cuda_node.compare(f"output {i}", g, w, Tolerance(), True))
    took = microseconds(bench, work, arrays)
    text = f"{case.label:34} {took:7.2f} us"
    if op.name in ("embed", "last_rows", "mark_tokens"):  # they read little of what they are given
        return text
    moved = sum(a.nbytes for a in arrays) + sum(o.nbytes for o in outs)
    share = moved / (took * 1e-6) / bench.target.bandwidth
    return " ".join([f"{text} {share:5.0%}", *filter(None, notes)])


if __name__ == "__main__":
    main()
