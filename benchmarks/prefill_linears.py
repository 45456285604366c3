"""The linear ops at a prefill's rows: every way to cut them, timed beside the floor.

For each projection and number of rows a line by way: microseconds, TFLOP/s, share of the floor
(arithmetic at the card's measured bf16 rate, twice that for FP8). The ways take turns, round by
round, since such kernels run at the clock that power leaves them. Whole tiles of every size must
give the same bits, which is checked first, over rows that fill no tile.
`python -m benchmarks.prefill_linears [MODEL [ROWS…]]` where a GPU is.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.graphs import target_here
from benchmarks.linears import FORMS, LAYERS, OPS, Layer, activations, weights
from spark_engine.device.gpu import Gpu
from spark_engine.kernel import Plan, Scratch, Target
from spark_engine.plugins.linear import stream_k_gemm as sg
from spark_engine.tensors import Array, DType, TensorSpec
from tests.plugins import cuda_node, packed_node

NAMES = ("qkvz", "out", "gate_up", "down")
CHECKED = 1024 + 40  # rows
ROUNDS = 9
SECONDS = 0.008  # of a graph, about


def ways(problem: sg.Problem, layer: Layer, target: Target) -> Iterator[tuple[str, Plan]]:
    """(name, plan) of each way."""
    form = FORMS[layer.op]
    node = packed_node.linear_node(OPS[layer.op], problem.m, problem.n, problem.k, target)
    small = sg.choose(problem, form, target)
    stream = sg.plan(node, small, problem, form)
    (launch,) = stream.launches
    tiles = -(-problem.n // small.block_n) * -(-problem.m // small.block_m)
    alone = replace(launch, grid=(tiles, 1, 1), resident=False)
    yield "stream-k", stream
    yield "a block a tile", Plan((alone,), (Scratch(256), *stream.scratch[1:]))
    large = sg.plan_large(node, problem, form)
    if large is not None:
        yield "large tiles in turn", large


class Measured:
    """One projection's weights on the device."""

    def __init__(self, bench: cuda_node.Bench, layer: Layer) -> None:
        self.bench, self.layer = bench, layer
        self.held = [self.sent(a) for a in weights(layer.op, layer.n, layer.k)]

    def sent(self, array: Array) -> int:
        """The address of an array on the device."""
        address = self.bench.gpu.allocate(array.nbytes)
        self.bench.gpu.upload(address, np.ascontiguousarray(array))
        self.bench.gpu.wait()
        return address

    def free(self) -> None:
        """Gives the weights back."""
        for address in self.held:
            self.bench.gpu.free(address)

    def queue(self, plan: Plan, x: int, y: int, scratch: Sequence[int], times: int = 1) -> None:
        """Queues the plan over x so many times."""
        functions = self.bench.functions(f"linear/{self.layer.op}.cu", plan)
        places = {"input": [x, *self.held], "output": [y], "scratch": list(scratch)}
        for _ in range(times):
            self.bench.launch(plan, functions, places)

    def scratch(self, plan: Plan) -> list[int]:
        """Its scratch memory, zeros."""
        found = [self.bench.gpu.allocate(s.nbytes) for s in plan.scratch]
        for address, s in zip(found, plan.scratch, strict=True):
            self.bench.gpu.fill(address, 0, s.nbytes)
        return found

    def differing(self) -> list[str]:
        """Which ways of whole tiles give other bits than the first of them."""
        problem = sg.Problem(CHECKED, self.layer.n, self.layer.k)
        x = self.sent(activations(self.layer.op, CHECKED, self.layer.k))
        y = TensorSpec("y", DType.BF16, (CHECKED, self.layer.n))
        at, found, wanted = self.bench.gpu.allocate(y.nbytes), [], b""
        for name, plan in ways(problem, self.layer, self.bench.target):
            if name == "stream-k":
                continue
            self.bench.gpu.fill(at, 0xFF, y.nbytes)
            self.queue(plan, x, at, self.scratch(plan))
            got = self.bench.get(cuda_node.Buffer(at, y.nbytes), y)
            assert np.isfinite(got.astype(np.float32)).all(), name
            wanted = wanted or got.tobytes()
            if got.tobytes() != wanted:
                found.append(name)
        self.bench.gpu.free(x)
        self.bench.gpu.free(at)
        return found

    def seconds(self, m: int) -> dict[str, float]:
        """The median of a launch by way, over rounds in which all take turns."""
        gpu, layer = self.bench.gpu, self.layer
        problem = sg.Problem(m, layer.n, layer.k)
        least = sg.floor(problem, FORMS[layer.op], self.bench.target, "bf16")
        times = max(1, round(SECONDS / least))
        x = self.sent(np.resize(activations(layer.op, 256, layer.k), (m, layer.k)))
        y = gpu.allocate(m * layer.n * 2)
        graphs, held = {}, []
        for name, plan in ways(problem, layer, self.bench.target):
            held += (scratch := self.scratch(plan))
            self.queue(plan, x, y, scratch)  # compiled now
            gpu.wait()
            gpu.begin_capture()
            self.queue(plan, x, y, scratch, times)
            graphs[name] = gpu.end_capture()
        found: dict[str, list[float]] = {name: [] for name in graphs}
        first, last = gpu.event(timed=True), gpu.event(timed=True)
        for _ in range(ROUNDS):
            for name, graph in graphs.items():
                gpu.record(first)
                gpu.replay(graph)
                gpu.record(last)
                gpu.wait_for(last)
                found[name].append(gpu.milliseconds(first, last) * 1e-3 / times)
        for graph in graphs.values():
            gpu.destroy_graph(graph)
        for address in (x, y, *held):
            gpu.free(address)
        return {name: float(np.median(s[1:])) for name, s in found.items()}


def main(models: Sequence[str], rows: Sequence[int]) -> None:
    """Prints a line for each projection, number of rows and way."""
    target, gpu = target_here(), Gpu()
    bench = cuda_node.Bench(gpu, target, Path(tempfile.mkdtemp()))
    for layer in LAYERS:
        if layer.name not in NAMES or layer.model not in models:
            continue
        one = Measured(bench, layer)
        wrong = one.differing()
        place = f"{layer.model} {layer.name} {layer.n} x {layer.k}"
        print(f"{place}: {'other bits: ' + ', '.join(wrong) if wrong else 'the same bits'}")
        for m in rows:
            least = sg.floor(sg.Problem(m, layer.n, layer.k), FORMS[layer.op], target, "bf16")
            for name, s in one.seconds(m).items():
                rate = 2 * m * layer.n * layer.k / s / 1e12
                print(
                    f"  {m:5} {s * 1e6:8.1f} us {rate:6.0f} TFLOP/s {least / s:4.0%} {name}",
                    flush=True,
                )
        one.free()
    gpu.close()


if __name__ == "__main__":
    main(sys.argv[1:2] or ["27b", "35b"], [int(a) for a in sys.argv[2:]] or [2048, 8192])
