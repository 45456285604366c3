"""Times the experts of one 35B layer: graph replay, weights cold, uniform random routing.

Prints tokens, tactic, microseconds, the share of the floor (bytes of the experts hit, or bf16
mathematics, whichever is longer), and what each launch adds to those before it.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import graphs
from spark_engine.device import Gpu
from spark_engine.kernel import H200, Tactic
from spark_engine.plugins.moe import grouped_moe
from spark_engine.plugins.moe import grouped_moe_cuda as cuda
from spark_engine.tensors import DType, TensorSpec

EXPERTS, CHOSEN, HIDDEN, INNER = 257, 9, 2048, 512
CACHE = Path("/tmp/moe_cubins")
COPIES = 4  # layers whose weights rotate


def specs(tokens: int) -> tuple[TensorSpec, ...]:
    """The packed operands of one layer."""
    attrs = {"format": "nvfp4", "dtype": "bf16"}
    found = [
        TensorSpec("x", DType.BF16, (tokens, HIDDEN)),
        TensorSpec("ids", DType.I32, (tokens, CHOSEN)),
        TensorSpec("weights", DType.F32, (tokens, CHOSEN)),
    ]
    for name, (dtypes, shape) in grouped_moe.param_specs("nvfp4", EXPERTS, HIDDEN, INNER).items():
        found.append(TensorSpec(name, dtypes[0], shape))
    packs = cuda.CUDA.packs
    return tuple(packs[i].infer(attrs, s) if i in packs else s for i, s in enumerate(found))


def route(tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct experts at random, the shared one last."""
    ids = np.argsort(rng.random((tokens, EXPERTS - 1)), axis=1)[:, : CHOSEN - 1]
    return np.concatenate([ids, np.full((tokens, 1), EXPERTS - 1)], axis=1).astype(np.int32)


class Layers:
    """Random weights of COPIES layers on the device, without NaN."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.weights = []
        block = np.random.default_rng(0).integers(0, 256, 1 << 24, np.uint8)
        scales = block % 16 + 104
        for _ in range(COPIES):
            addresses = []
            for spec in specs(1)[3:]:
                address = gpu.allocate(spec.nbytes)
                if spec.dtype is DType.F32:
                    gpu.upload(address, np.full(spec.dims, 2.0**-12, np.float32))
                for at in range(0, spec.nbytes if spec.dtype is DType.U8 else 0, block.size):
                    part = block if spec.dims[2] > 128 and "scale" not in spec.name else scales
                    gpu.upload(address + at, part[: min(block.size, spec.nbytes - at)])
                addresses.append(address)
            self.weights.append(addresses)
        gpu.wait()

    def time(self, tactic: Tactic, tokens: int, rounds: int = 5) -> tuple[list[float], float]:
        """Seconds of one layer's first launch, first two, …; the experts hit."""
        gpu, rng = self.gpu, np.random.default_rng(tokens)
        bound = specs(tokens)
        attrs = {"format": "nvfp4", "dtype": "bf16"}
        plan = tactic.plan(attrs, bound, H200)
        x, y = gpu.allocate(bound[0].nbytes), gpu.allocate(bound[0].nbytes)
        share = gpu.allocate(bound[2].nbytes)
        gpu.upload(x, rng.standard_normal(bound[0].dims).astype(DType.BF16.numpy))
        gpu.upload(share, np.full(bound[2].dims, 0.125, np.float32))
        routes = [route(tokens, rng) for _ in range(COPIES)]
        ids = [gpu.allocate(r.nbytes) for r in routes]
        for address, r in zip(ids, routes, strict=True):
            gpu.upload(address, r)
        scratch = [gpu.allocate(s.nbytes) for s in plan.scratch]
        functions = graphs.load(gpu, tactic.source, plan, H200, CACHE)
        gpu.wait()

        def queued(count: int) -> None:
            for layer in range(2 * COPIES):
                which = layer % COPIES
                operands = [x, ids[which], share, *self.weights[which]]
                places = {"input": operands, "output": [y], "scratch": scratch}
                graphs.queue(gpu, plan.launches[:count], functions, places)

        counts = range(1, len(plan.launches) + 1)
        found = [
            graphs.mean_seconds(gpu, partial(queued, n), rounds) / (2 * COPIES) for n in counts
        ]
        for address in (x, y, share, *ids, *scratch):
            gpu.free(address)
        return found, float(np.mean([len(np.unique(r)) for r in routes]))


def main(tokens: list[int]) -> None:
    """Prints a line for each number of tokens and each tactic that takes it."""
    layers = Layers(Gpu())
    for n in tokens:
        for tactic in cuda.CUDA.tactics:
            if tactic.refuse({"format": "nvfp4", "dtype": "bf16"}, specs(n), H200):
                continue
            seconds, hit = layers.time(tactic, n)
            read = hit * 3 * HIDDEN * INNER * 0.5625 / H200.bandwidth
            floor = max(read, 6 * n * CHOSEN * HIDDEN * INNER / H200.bf16_flops)
            whole = f"{seconds[-1] * 1e6:8.1f} us {100 * floor / seconds[-1]:4.0f} %"
            steps = " ".join(f"{s * 1e6:.1f}" for s in np.diff([0.0, *seconds]))
            print(f"{n:5d} {tactic.name:8s} {whole} of {floor * 1e6:6.1f} ({steps})", flush=True)


if __name__ == "__main__":
    main(
        [int(a) for a in sys.argv[1:]]
        or [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 2048, 8192]
    )
