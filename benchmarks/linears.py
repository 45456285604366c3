"""The linear ops at served sizes: microseconds, bytes a second, share of the floor, vLLM's figure.

Weights are cold: a graph goes through at least 512 MB of copies of them. Run as
`python -m benchmarks.linears [results.json]` where a GPU is. With SPARK_REHEARSE=sm_121a it is the
kernels of a GB10 on 48 multiprocessors, at 512 rows and with NVFP4 activations too (emulated
there, so those are right or wrong, not fast or slow). `--reckon` needs no GPU: what bytes and
products ask of a GB10, layer by layer, and which of them holds a layer up.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.graphs import target_here
from spark_engine.device.gpu import Gpu
from spark_engine.kernel import GB10, Target
from spark_engine.op import Attrs, Case, Op
from spark_engine.plugins.common import formats
from spark_engine.plugins.common.weight_packing import padded
from spark_engine.plugins.linear import (
    fp8_linear,
    fp8_linear_cuda,
    linear,
    linear_cuda,
    nvfp4_linear,
    nvfp4_linear_a4,
    nvfp4_linear_a4_cuda,
    nvfp4_linear_cuda,
)
from spark_engine.plugins.linear import stream_k_gemm as sg
from spark_engine.plugins.rowwise import act_quant
from spark_engine.tensors import Array, DType, TensorSpec
from tests.plugins import cuda_node

COLD = 512_000_000  # bytes of weights in a graph, at least
BATCHES = (1, 8, 32, 64, 128)
BF16 = DType.BF16.numpy
NVFP4, A4 = "nvfp4_linear", "nvfp4_linear_a4"
DRAFTED = 512  # rows of 128 sequences that verify three drafts each
ACT: Attrs = {"act": "silu_mul", "heads": 0, "head_dim": 0, "keep": 1, "quant": "none", "n": 1}


@dataclass(frozen=True)
class Layer:
    """One projection and how often a step runs it."""

    model: str
    name: str
    op: str
    n: int
    k: int
    times: int


LAYERS = (
    Layer("27b", "qkvz", "fp8_linear", 16384, 5120, 48),
    Layer("27b", "qkv", "fp8_linear", 14336, 5120, 16),
    Layer("27b", "out", "fp8_linear", 5120, 6144, 64),
    Layer("27b", "ba", "linear", 96, 5120, 48),
    Layer("27b", "gate_up", "nvfp4_linear", 34816, 5120, 64),
    Layer("27b", "down", "nvfp4_linear", 5120, 17408, 64),
    Layer("27b", "lm_head", "nvfp4_linear", 248320, 5120, 1),
    Layer("35b", "qkvz", "fp8_linear", 12288, 2048, 30),
    Layer("35b", "qkv", "fp8_linear", 9216, 2048, 10),
    Layer("35b", "out", "fp8_linear", 2048, 4096, 40),
    Layer("35b", "ba", "linear", 64, 2048, 30),
    Layer("35b", "lm_head", "nvfp4_linear", 248320, 2048, 1),
)
# Those of a 27B whose MLP has NVFP4 activations.
A4_LAYERS = tuple(
    Layer("27b W4A4", layer.name, A4, layer.n, layer.k, layer.times)
    for layer in LAYERS
    if layer.name in ("gate_up", "down")
)
# Milliseconds a step that vLLM 0.23 spends on the same card in the same projections, by batch:
# NVFP4 in Marlin's kernels, FP8 in CUTLASS's.
VLLM = {
    ("27b", "nvfp4_linear"): (4.907, 4.967, 6.375, 9.476, 15.890),
    ("27b", "fp8_linear"): (2.129, 2.250, 2.705, 2.440, 2.779),
    ("35b", "nvfp4_linear"): (0.129, 0.128, 0.156, 0.224, 0.427),
    ("35b", "fp8_linear"): (0.637, 0.621, 0.767, 0.716, 0.847),
}
OPS = {"linear": linear.OP, "fp8_linear": fp8_linear.OP, "nvfp4_linear": nvfp4_linear.OP}
OPS |= {A4: nvfp4_linear_a4.OP}
FORMS = {
    "linear": linear_cuda.FORM,
    "fp8_linear": fp8_linear_cuda.FORM,
    "nvfp4_linear": nvfp4_linear_cuda.FORM,
    A4: nvfp4_linear_a4_cuda.FORM,
}
# Operations a second that libraries reach, over bf16's, on a card without wgmma: kernels.md's
# 213 and 356 of 100 TFLOP/s on a GB10.
RATES = {"linear": 1.0, NVFP4: 1.0, "fp8_linear": 2.13, A4: 3.56}


@dataclass(frozen=True)
class Row:
    """One measurement."""

    model: str
    layer: str
    op: str
    m: int
    n: int
    k: int
    microseconds: float
    gigabytes_a_second: float
    of_floor: float
    tactic: str


def activations(op: str, m: int, k: int) -> Array:
    """Random x as the kernel sees it."""
    x = np.random.default_rng(m + k).standard_normal((m, k), dtype=np.float32)
    return (x * 50).astype(DType.F8E4M3.numpy) if op == "fp8_linear" else x.astype(BF16)


def inputs(op: str, m: int, k: int) -> list[Array]:
    """The same with its scales, where it has some."""
    if op != A4:
        return [activations(op, m, k)]
    x = np.random.default_rng(m + k).standard_normal((m, k), dtype=np.float32)
    return list(formats.nvfp4_quantise(x, np.float32(0.002)))


def problem_of(layer: Layer, m: int) -> sg.Problem:
    """Its k counts bytes where a byte holds two codes."""
    return sg.Problem(m, layer.n, layer.k // 2 if layer.op == A4 else layer.k)


def weights(op: str, n: int, k: int) -> list[Array]:
    """Random weights and scales as the kernel sees them."""
    rng = np.random.default_rng(n + k)
    if op == A4:
        blocks = rng.integers(0x30, 0x40, (n, k // 16), dtype=np.uint8).view(DType.F8E4M3.numpy)
        codes = np.frombuffer(rng.bytes(n * k // 2), np.uint8).reshape(n, k // 2)
        return [codes, blocks, rng.uniform(0.5, 2, n).astype(np.float32)]
    wide = padded(k, FORMS[op].slab)
    code = np.frombuffer(rng.bytes(n * wide * FORMS[op].weight_bits // 8), np.uint8) & 0xBF
    if op == "linear":
        return [code.view(BF16).reshape(n, wide)]
    scale = rng.uniform(0.5, 2, n).astype(np.float32)
    if op == "fp8_linear":
        return [
            code.view(DType.F8E4M3.numpy).reshape(n, wide),
            np.asarray(0.01, np.float32),
            scale,
        ]
    # A byte's low half is the high part of some scale's exponent: near 1, whatever the rest.
    blocks = rng.integers(0, 16, (n, wide // 16), dtype=np.uint8) << 4
    return [
        code.reshape(n, wide // 2),
        blocks | rng.integers(9, 12, blocks.shape, np.uint8),
        scale,
    ]


def planned(
    bench: cuda_node.Bench, op: Op, attrs: Attrs, arrays: Sequence[Array]
) -> cuda_node.Planned:
    """The tactic that an untimed build would choose; operands stand as the kernel sees them."""
    specs = tuple(TensorSpec("", DType.of(a.dtype), a.shape) for a in arrays)
    able = [t for t in op.cuda.tactics if t.refuse(attrs, specs, bench.target) is None]
    tactic = min(able, key=lambda t: t.cost(attrs, specs, bench.target))
    plan = tactic.plan(attrs, specs, bench.target)
    return cuda_node.Planned(op, Case("", attrs, lambda rng: ()), tactic, plan)


def measure(bench: cuda_node.Bench, layer: Layer, m: int, w: Sequence[Array]) -> Row:
    """Median time of a launch among cold ones in a replayed graph."""
    arrays = [*inputs(layer.op, m, layer.k), *w]
    work = planned(bench, OPS[layer.op], {"dtype": "bf16"}, arrays)
    plan = work.plan
    weight = sum(a.nbytes for a in w)
    copies = min(300, max(2, -(-COLD // weight)))
    sizes = [a.nbytes for a in arrays] * copies
    sizes += [m * layer.n * 2, *(s.nbytes for s in plan.scratch)]
    with bench.buffers(sizes) as made:
        for i, buffer in enumerate(made[: copies * len(arrays)]):
            bench.put(buffer, arrays[i % len(arrays)])
        for buffer in made[copies * len(arrays) :]:
            bench.gpu.fill(buffer.address, 0, buffer.nbytes)
        seconds = replays(bench, work, [b.address for b in made], len(arrays), copies) / copies
    problem, form = problem_of(layer, m), FORMS[layer.op]
    moved = sg.bytes_moved(problem, form, "bf16")
    least = sg.floor(problem, form, bench.target, "bf16")
    place = (layer.model, layer.name, layer.op, m, layer.n, layer.k)
    speed = moved / seconds / 1e9
    return Row(*place, seconds * 1e6, speed, least / seconds, work.tactic.name)


def replays(
    bench: cuda_node.Bench,
    work: cuda_node.Planned,
    at: Sequence[int],
    operands: int,
    copies: int,
    times: int = 7,
) -> float:
    """The median seconds of a graph of one launch for each copy of the operands."""
    functions = bench.functions(work.tactic.source, work.plan)
    rest = list(at[copies * operands :])

    def queue() -> None:
        for i in range(copies):
            inputs = list(at[i * operands : (i + 1) * operands])
            places = {"input": inputs, "output": rest[:1], "scratch": rest[1:]}
            bench.launch(work.plan, functions, places)

    return timed(bench.gpu, queue, times)


def mlp(bench: cuda_node.Bench, batches: Sequence[int]) -> Iterator[tuple[int, float]]:
    """Batch and seconds of gate_up, SiLU and down of the 27B in a row, weights cold."""
    inner, hidden, copies = 17408, 5120, 4
    up, down = weights(NVFP4, 2 * inner, hidden), weights(NVFP4, hidden, inner)
    with bench.buffers([a.nbytes for a in (*up, *down)] * copies) as held:
        for i, buffer in enumerate(held):
            bench.put(buffer, (*up, *down)[i % 6])
        for m in batches:
            x = activations(NVFP4, m, hidden)
            wide = np.ones((m, 2 * inner), BF16)
            dtype: Attrs = {"dtype": "bf16"}
            works = (
                planned(bench, nvfp4_linear.OP, dtype, [x, *up]),
                planned(bench, act_quant.OP, ACT, [wide]),
                planned(bench, nvfp4_linear.OP, dtype, [wide[:, :inner], *down]),
            )
            sizes = [x.nbytes, wide.nbytes, wide.nbytes // 2, x.nbytes]
            with bench.buffers(sizes + [s.nbytes for w in works for s in w.plan.scratch]) as made:
                for buffer in made:
                    bench.gpu.fill(buffer.address, 0, buffer.nbytes)
                bench.put(made[0], x)
                queue = chain(bench, works, held, made)
                yield m, timed(bench.gpu, queue) / copies


def chain(
    bench: cuda_node.Bench,
    works: Sequence[cuda_node.Planned],
    held: Sequence[cuda_node.Buffer],
    made: Sequence[cuda_node.Buffer],
) -> Callable[[], None]:
    """Queues gate_up, SiLU and down for each copy of the weights `held` (three and three).

    `made`: x, gate_up, act, y and the scratch memory of each of `works` in turn.
    """
    functions = [bench.functions(w.tactic.source, w.plan) for w in works]
    x, wide, act, y, *scratch = [b.address for b in made]

    def queue() -> None:
        for i in range(0, len(held), 6):
            w = [b.address for b in held[i : i + 6]]
            operands = (([x, *w[:3]], wide), ([wide], act), ([act, *w[3:]], y))
            free = iter(scratch)
            for work, found, (given, out) in zip(works, functions, operands, strict=True):
                own = [next(free) for _ in work.plan.scratch]
                bench.launch(work.plan, found, {"input": given, "output": [out], "scratch": own})

    return queue


def timed(gpu: Gpu, queue: Callable[[], None], times: int = 7) -> float:
    """The median seconds of a replayed graph of what `queue` queues."""
    gpu.wait()
    gpu.begin_capture()
    queue()
    graph = gpu.end_capture()
    events = [gpu.event(timed=True) for _ in range(times + 1)]
    gpu.replay(graph)
    gpu.record(events[0])
    for event in events[1:]:
        gpu.replay(graph)
        gpu.record(event)
    gpu.wait()
    gpu.destroy_graph(graph)
    return (
        float(np.median([gpu.milliseconds(*p) for p in zip(events, events[1:], strict=False)]))
        / 1e3
    )


def totals(rows: Sequence[Row]) -> list[str]:
    """Milliseconds a step by model, op and batch, beside vLLM's."""
    times = {(layer.model, layer.name): layer.times for layer in LAYERS}
    lines = []
    for (model, op), theirs in VLLM.items():
        for m, other in zip(BATCHES, theirs, strict=True):
            mine = [r for r in rows if (r.model, r.op, r.m) == (model, op, m)]
            ours = sum(r.microseconds * times[model, r.layer] for r in mine) / 1e3
            lines.append(f"{model} {op:13} batch {m:4}: {ours:7.3f} ms, vLLM {other:7.3f}")
    return lines


def reckon(layer: Layer, m: int, target: Target) -> tuple[float, float]:
    """Seconds of the layer's bytes from DRAM, and of its products at a library's rate."""
    moved = sg.bytes_moved(problem_of(layer, m), FORMS[layer.op], "bf16")
    rate = target.bf16_flops * RATES[layer.op]
    return moved / target.bandwidth, 2.0 * m * layer.n * layer.k / rate


def reckoned(target: Target, batches: Sequence[int]) -> Iterator[str]:
    """A line for each layer and batch, then one for each model and batch; milliseconds a step."""
    totals: dict[tuple[str, int], list[float]] = {}
    for layer in LAYERS + A4_LAYERS:
        for m in batches:
            of_bytes, of_products = reckon(layer, m, target)
            held = "products" if of_products > of_bytes else "bytes"
            yield (
                f"{layer.model:8} {layer.name:8} {m:4} x {layer.n:6} x {layer.k:5} bytes "
                f"{of_bytes * 1e6:8.1f} us, products {of_products * 1e6:8.1f} us: {held}"
            )
            total = totals.setdefault((layer.model, m), [0.0, 0.0, 0.0])
            both = (of_bytes, of_products, max(of_bytes, of_products))
            for i, seconds in enumerate(both):
                total[i] += seconds * layer.times * 1e3
    for (model, m), (of_bytes, of_products, longest) in totals.items():
        yield (
            f"{model:8} batch {m:4}: bytes {of_bytes:7.2f} ms, products {of_products:7.2f} ms, "
            f"the longer of each layer {longest:7.2f} ms"
        )


def main() -> None:
    """Measures every layer in every batch; writes JSON where asked."""
    if "--reckon" in sys.argv:
        print("\n".join(reckoned(GB10, (*BATCHES, DRAFTED))))
        return
    target, gpu = target_here(), Gpu()
    bench = cuda_node.Bench(gpu, target, Path(tempfile.mkdtemp()))
    rows = []
    more = not target.wgmma
    for layer in LAYERS + (A4_LAYERS if more else ()):
        w = weights(layer.op, layer.n, layer.k)
        for m in (*BATCHES, DRAFTED) if more else BATCHES:
            rows.append(row := measure(bench, layer, m, w))
            print(
                f"{row.model} {row.layer:8} {m:4} x {row.n:6} x {row.k:5} "
                f"{row.microseconds:8.2f} us "
                f"{row.gigabytes_a_second:6.0f} GB/s {row.of_floor:5.0%} of the floor "
                f"{row.tactic}",
                flush=True,
            )
    print("\n".join(totals(rows)))
    for m, seconds in mlp(bench, BATCHES):
        print(f"27b gate_up, SiLU, down in one graph, batch {m:4}: {seconds * 1e6:7.1f} us")
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(json.dumps([asdict(r) for r in rows], indent=1) + "\n")
    gpu.close()


if __name__ == "__main__":
    main()
