"""Times sampling at the served vocabulary and the router of one 35B layer, by graph replay.

Logits (and router weights) rotate over copies larger than the cache. Prints rows, settings,
microseconds and the share of the time that reading the operand once takes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from spark_engine.builder import nvrtc
from spark_engine.kernel import H200, Pointer, Tactic
from spark_engine.op import Attrs
from spark_engine.plugins import moe_router_cuda, sample_cuda
from spark_engine.runtime.device import Gpu
from spark_engine.tensors import Array, DType, TensorSpec

CACHE = Path("/tmp/moe_cubins")
WIDTH, VOCAB, TOP, BIASES = 248_320, 248_077, 20, 32
RULES = {
    "greedy": (0.0, 1.0, 0),
    "top_k 20, top_p 0.95": (0.8, 0.95, 20),
    "plain": (1.0, 1.0, 0),
    "top_p 0.9": (1.0, 0.9, 0),
}


def time_plan(
    gpu: Gpu, tactic: Tactic, attrs: Attrs, operands: list[list[Array]], outputs: list[int]
) -> float:
    """Seconds of one run; `operands` holds a list of arrays for each copy."""
    specs = tuple(TensorSpec(f"a{i}", DType.of(a.dtype), a.shape)
                  for i, a in enumerate(operands[0]))  # fmt: skip
    plan = tactic.plan(attrs, specs, H200)
    seen: dict[int, int] = {}
    for array in (a for copy in operands for a in copy):
        if id(array) not in seen:
            seen[id(array)] = gpu.allocate(array.nbytes)
            gpu.upload(seen[id(array)], np.ascontiguousarray(array))
            gpu.wait()
    made = [gpu.allocate(n) for n in outputs]
    scratch = [gpu.allocate(s.nbytes) for s in plan.scratch]
    for address, need in zip(scratch, plan.scratch, strict=True):
        gpu.fill(address, 0, need.nbytes)
    functions = {}
    for job in nvrtc.jobs_of([(tactic.source, plan)]):
        code = nvrtc.compile(job, H200, CACHE).code
        functions |= gpu.load(code, job.symbols, max(n.shared for n in plan.launches))
    gpu.begin_capture()
    for copy in operands:
        places = {"input": [seen[id(a)] for a in copy], "output": made, "scratch": scratch}
        for launch in plan.launches:
            args = [places[a.kind][a.index] if isinstance(a, Pointer) else a.value
                    for a in launch.args]  # fmt: skip
            gpu.launch(functions[launch.symbol], launch, args)
    graph = gpu.end_capture()
    gpu.replay(graph)
    first, last = gpu.event(True), gpu.event(True)
    gpu.record(first)
    for _ in range(5):
        gpu.replay(graph)
    gpu.record(last)
    gpu.wait_for(last)
    for address in [*seen.values(), *made, *scratch]:
        gpu.free(address)
    return gpu.milliseconds(first, last) * 1e-3 / (5 * len(operands))


def sampling(gpu: Gpu, rows: int, rule: tuple[float, float, int], presence: float = 0.0) -> float:
    """Seconds of one launch of `sample`."""
    rng = np.random.default_rng(0)
    logits = (rng.standard_normal((rows, WIDTH), np.float32) * 2.5).astype(np.float32)
    floats = np.zeros((rows + 1, 8), np.float32)
    floats[:, :6] = (rule[0], rule[1], 0, 1, presence, 0)
    integers = np.zeros((rows + 1, 4), np.int32)
    integers[:, 0] = rule[2]
    tables = [
        np.zeros((rows + 1, WIDTH), np.int32), floats, integers,
        np.full((rows + 1, BIASES), -1, np.int32), np.zeros((rows + 1, BIASES), np.float32),
    ]  # fmt: skip
    slots = np.arange(rows, dtype=np.int32)
    last = np.zeros(rows + 1, np.int32)
    steps = [slots, slots, np.ones_like(slots), np.ones_like(slots), last]
    copies = [[np.roll(logits, i, 1), *tables, *steps] for i in range(4 if rows > 8 else 16)]
    outputs = [4 * rows, 4 * rows, 80 * rows, 80 * rows, 4 * rows, 4 * rows + 4]
    attrs = {"vocab": VOCAB, "top": TOP}
    return time_plan(gpu, sample_cuda.CUDA.tactics[0], attrs, copies, outputs)


def routing(gpu: Gpu, tokens: int) -> float:
    """Seconds of one `moe_router` of 256 experts with the shared gate."""
    rng, bf16 = np.random.default_rng(0), DType.BF16.numpy
    x = rng.standard_normal((tokens, 2048)).astype(bf16)
    gate = rng.standard_normal((1, 2048)).astype(bf16)
    w = (rng.standard_normal((256, 2048)) * 0.05).astype(bf16)
    copies = [[x, w.copy(), gate] for _ in range(96)]
    attrs = {"top_k": 8}
    return time_plan(gpu, moe_router_cuda.CUDA.tactics[0], attrs, copies, [36 * tokens] * 2)


def main() -> None:
    """Prints every case."""
    gpu = Gpu()
    for tokens in (1, 32, 128, 256, 2048):
        seconds = routing(gpu, tokens)
        print(f"router {tokens:5d} tokens {seconds * 1e6:8.1f} us", flush=True)
    for rows in (1, 32, 128):
        for name, rule in RULES.items():
            seconds = sampling(gpu, rows, rule)
            share = seconds * H200.bandwidth / (4 * rows * WIDTH)
            print(f"sample {rows:4d} rows, {name:22s} {seconds * 1e6:8.1f} us, {share:5.2f} reads",
                  flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
