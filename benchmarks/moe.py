"""Times the experts of one 35B layer: graph replay, weights cold, uniform random routing.

`python -m benchmarks.moe [--format nvfp4_a4] [TOKENS …]` prints tokens, tactic, microseconds, the
share of the floor (bytes of the experts hit, or bf16 mathematics, whichever is longer), and what
each launch adds to those before it. With SPARK_REHEARSE=sm_121a: of the tactics and grids of GB10,
on as many multiprocessors; floors are then GB10's.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks import graphs
from spark_engine.device.gpu import Gpu
from spark_engine.kernel import Attrs, Tactic, Target
from spark_engine.plugins.moe import grouped_moe
from spark_engine.tensors import DType, TensorSpec
from tests.plugins import packed_node

EXPERTS, CHOSEN, HIDDEN, INNER = 257, 9, 2048, 512
CACHE = Path("/tmp/moe_cubins")
COPIES = 4  # layers whose weights rotate


def attrs_of(kind: str) -> Attrs:
    """Of the node."""
    return {"format": kind, "dtype": "bf16"}


def specs(kind: str, tokens: int) -> tuple[TensorSpec, ...]:
    """The packed operands of one layer."""
    attrs = attrs_of(kind)
    sizes = {"tokens": tokens, "k": CHOSEN, "E": EXPERTS, "H": HIDDEN, "I": INNER}
    found = packed_node.declared(grouped_moe.OP, attrs, **sizes)
    return packed_node.packed_specs(grouped_moe.OP, attrs, found)


def route(tokens: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct experts at random, the shared one last."""
    ids = np.argsort(rng.random((tokens, EXPERTS - 1)), axis=1)[:, : CHOSEN - 1]
    return np.concatenate([ids, np.full((tokens, 1), EXPERTS - 1)], axis=1).astype(np.int32)


class Layers:
    """Random weights of COPIES layers on the device, without NaN."""

    def __init__(self, gpu: Gpu, target: Target, kind: str) -> None:
        self.gpu, self.target, self.kind = gpu, target, kind
        self.weights = []
        block = np.random.default_rng(0).integers(0, 256, 1 << 24, np.uint8)
        scales = block % 16 + 104
        for _ in range(COPIES):
            addresses = []
            for spec in specs(kind, 1)[3:]:
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
        bound = specs(self.kind, tokens)
        plan = tactic.plan(attrs_of(self.kind), bound, self.target)
        x, y = gpu.allocate(bound[0].nbytes), gpu.allocate(bound[0].nbytes)
        share = gpu.allocate(bound[2].nbytes)
        gpu.upload(x, rng.standard_normal(bound[0].dims).astype(DType.BF16.numpy))
        gpu.upload(share, np.full(bound[2].dims, 0.125, np.float32))
        routes = [route(tokens, rng) for _ in range(COPIES)]
        ids = [gpu.allocate(r.nbytes) for r in routes]
        for address, r in zip(ids, routes, strict=True):
            gpu.upload(address, r)
        scratch = [gpu.allocate(s.nbytes) for s in plan.scratch]
        functions = graphs.load(gpu, tactic.source, plan, self.target, CACHE)
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


def main(kind: str, tokens: list[int]) -> None:
    """Prints a line for each number of tokens and each tactic that takes it."""
    target = graphs.target_here()
    layers = Layers(Gpu(), target, kind)
    for n in tokens:
        for tactic in grouped_moe.OP.cuda.tactics:
            if tactic.refuse(attrs_of(kind), specs(kind, n), target):
                continue
            seconds, hit = layers.time(tactic, n)
            read = hit * 3 * HIDDEN * INNER * 0.5625 / target.bandwidth
            floor = max(read, 6 * n * CHOSEN * HIDDEN * INNER / target.bf16_flops)
            whole = f"{seconds[-1] * 1e6:8.1f} us {100 * floor / seconds[-1]:4.0f} %"
            steps = " ".join(f"{s * 1e6:.1f}" for s in np.diff([0.0, *seconds]))
            print(f"{n:5d} {tactic.name:9s} {whole} of {floor * 1e6:6.1f} ({steps})", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", choices=("nvfp4", "nvfp4_a4"), default="nvfp4")
    parser.add_argument("tokens", nargs="*", type=int)
    given = parser.parse_args()
    usual = [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 512, 2048, 8192]
    main(given.format, given.tokens or usual)
