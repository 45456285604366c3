"""The linear ops at a prefill's rows: every way to cut them, timed beside the floor.

For each projection and number of rows a line by tactic and tile: microseconds, TFLOP/s, share of
the floor (arithmetic at the card's measured bf16 rate, twice that for FP8). Whole tiles of every
size must give the same bits, which is checked first, over rows that fill no tile.
`python -m benchmarks.prefill_linears [ROWS…]` where a GPU is; `--bands` tries other bands.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.graphs import target_here
from benchmarks.linears import FORMS, LAYERS, Layer, activations, timed, weights
from spark_engine import device
from spark_engine.kernel import Plan, Scratch
from spark_engine.plugins.linear import stream_k_gemm as sg
from spark_engine.tensors import Array, DType, TensorSpec
from tests.plugins import cuda_node

NAMES = ("qkvz", "out", "gate_up", "down")
CHECKED = 1024 + 40  # rows
TILES = ((256, 128), (128, 256), (128, 128))


def ways(
    problem: sg.Problem, layer: Layer, bench: cuda_node.Bench, bands: bool
) -> Iterator[tuple[str, Plan]]:
    """(name, plan) of each way; the second is a block for each tile."""
    form = FORMS[layer.op]
    inputs = (0, 1, 2, 3) if layer.op != "linear" else (0, 1)
    small = sg.choose(problem, form, bench.target)
    stream = sg.plan(small, problem, form, bench.target, inputs, "bf16")
    (launch,) = stream.launches
    tiles = -(-problem.n // small.block_n) * -(-problem.m // small.block_m)
    alone = replace(launch, grid=(tiles, 1, 1), resident=False)
    yield "stream-k", stream
    yield "a block a tile", Plan((alone,), (Scratch(256), *stream.scratch[1:]))
    for block_n, block_m in TILES:
        tile = sg.StreamKConfig(block_n, block_m, 1, 1, 2, True)
        tile = sg.fill(tile, problem, form, bench.target)
        chosen = (block_n, block_m) == ((128, 256) if form.weight_bits == 8 else (256, 128))
        for rows in (
            (512, 1024, 2048, 4096, 8192)
            if bands and chosen and problem.m > 4096
            else (sg.BAND_ROWS,)
        ):
            made = sg.plan(
                tile, problem, form, bench.target, inputs, "bf16", max(1, rows // block_m)
            )
            yield f"{block_n} x {block_m}, bands of {rows}", made


def differing(bench: cuda_node.Bench, layer: Layer, w: Sequence[Array]) -> list[str]:
    """Which ways of whole tiles give other bits than a block for each tile."""
    problem = sg.Problem(CHECKED, layer.n, layer.k)
    arrays = [activations(layer.op, CHECKED, layer.k), *w]
    wanted, found = None, []
    for name, plan in ways(problem, layer, bench, False):
        if name == "stream-k":
            continue
        y = TensorSpec("y", DType.BF16, (CHECKED, layer.n))
        sizes = [a.nbytes for a in arrays] + [y.nbytes, *(s.nbytes for s in plan.scratch)]
        with bench.buffers(sizes) as made:
            for buffer, array in zip(made, arrays, strict=False):
                bench.put(buffer, array)
            for buffer in made[len(arrays) :]:
                bench.gpu.fill(buffer.address, 0, buffer.nbytes)
            bench.gpu.fill(made[len(arrays)].address, 0xFF, y.nbytes)
            at = [b.address for b in made]
            n = len(arrays)
            places = {"input": at[:n], "output": at[n : n + 1], "scratch": at[n + 1 :]}
            functions = bench.functions(f"linear/{layer.op}.cu", plan)
            bench.launch(plan, functions, places)
            got = bench.get(made[n], y).tobytes()
        wanted = wanted or got
        if got != wanted:
            found.append(name)
    assert (
        wanted is not None
        and np.isfinite(np.frombuffer(wanted, DType.BF16.numpy).astype(np.float32)).all()
    )
    return found


def seconds_of(
    bench: cuda_node.Bench, layer: Layer, inputs: list[int], y: int, plan: Plan
) -> float:
    """Of one launch among four."""
    scratch = [bench.gpu.allocate(s.nbytes) for s in plan.scratch]
    for address, s in zip(scratch, plan.scratch, strict=True):
        bench.gpu.fill(address, 0, s.nbytes)
    places = {"input": inputs, "output": [y], "scratch": scratch}
    functions = bench.functions(f"linear/{layer.op}.cu", plan)

    def queue() -> None:
        for _ in range(4):
            bench.launch(plan, functions, places)

    found = timed(bench.gpu, queue, 5) / 4
    for address in scratch:
        bench.gpu.free(address)
    return found


def sent(bench: cuda_node.Bench, array: Array) -> int:
    """The address of an array on the device."""
    address = bench.gpu.allocate(array.nbytes)
    bench.gpu.upload(address, np.ascontiguousarray(array))
    bench.gpu.wait()
    return address


def main(rows: Sequence[int], bands: bool) -> None:
    """Prints a line for each projection, number of rows and way."""
    target, gpu = target_here(), device.Gpu()
    bench = cuda_node.Bench(gpu, target, Path(tempfile.mkdtemp()))
    for layer in LAYERS:
        if layer.name not in NAMES:
            continue
        w = weights(layer.op, layer.n, layer.k)
        wrong = differing(bench, layer, w)
        place = f"{layer.model} {layer.name} {layer.n} x {layer.k}"
        print(f"{place}: {'other bits: ' + ', '.join(wrong) if wrong else 'the same bits'}")
        held = [sent(bench, a) for a in w]
        some = activations(layer.op, 256, layer.k)
        for m in rows:
            problem = sg.Problem(m, layer.n, layer.k)
            least = sg.floor(problem, FORMS[layer.op], target, "bf16")
            flops = 2 * m * layer.n * layer.k
            x = sent(bench, np.resize(some, (m, layer.k)))
            y = gpu.allocate(m * layer.n * 2)
            for name, plan in ways(problem, layer, bench, bands):
                s = seconds_of(bench, layer, [x, *held], y, plan)
                print(
                    f"  {m:5} {s * 1e6:8.1f} us {flops / s / 1e12:6.0f} TFLOP/s "
                    f"{least / s:4.0%} {name}",
                    flush=True,
                )
            gpu.free(x)
            gpu.free(y)
        for address in held:
            gpu.free(address)
    gpu.close()


if __name__ == "__main__":
    given = [a for a in sys.argv[1:] if a != "--bands"]
    main([int(a) for a in given] or [2048, 8192], "--bands" in sys.argv)
