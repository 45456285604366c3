"""Looks for a race in the wide experts: many launches, each over shared memory full of 0xFF.

`wide_up` reads rows that cp.async brought with wgmma, which reads through another proxy: without a
fence at the right place it may see what the memory held before, and 0xFF bytes are NaN in bf16.
Every round runs sort, up, down and combine with overlapping launches, and counts on the device the
words that differ from the `grouped` tactic's, which has the same bits. Prints one line per number
of tokens. `python -m benchmarks.moe_fence --rounds 1000000 --tokens 96`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import graphs
from benchmarks.moe import CACHE
from spark_engine.builder.native import nvrtc
from spark_engine.device.gpu import Gpu
from spark_engine.kernel import Launch, Pointer, Scalar, Tactic, Target
from spark_engine.plugins.moe import grouped_moe
from spark_engine.tensors import Array, DType, TensorSpec
from tests.plugins import packed_node

ATTRS = {"format": "nvfp4", "dtype": "bf16"}
SIZES = (
    12,
    9,
    2048,
    512,
)  # experts and the shared one, chosen and it, H, I: few, so that a round is short
ROUNDS = 50  # of one graph
HELPERS = nvrtc.Job("moe_fence.cu", (), ("count_differences", "poison_shared"))


class Trial:
    """One layer's operands on the device and the answer of `grouped`."""

    def __init__(self, gpu: Gpu, target: Target, tokens: int) -> None:
        self.gpu, self.target = gpu, target
        arrays = _packed(grouped_moe.arrays(np.random.default_rng(5), "nvfp4", tokens, SIZES))
        self.specs = tuple(TensorSpec("", DType.of(a.dtype), a.shape) for a in arrays)
        self.inputs = [self._sent(a) for a in arrays]
        self.nbytes = tokens * SIZES[2] * 2
        self.got, self.want = gpu.allocate(self.nbytes), gpu.allocate(self.nbytes)
        self.found = self._sent(np.zeros(1, np.uint64))
        code = nvrtc.compile(HELPERS, target, CACHE, Path(__file__).parent).code
        self.helpers = gpu.load(code, HELPERS.symbols, target.shared_bytes)

    def _sent(self, array: Array) -> int:
        address = self.gpu.allocate(array.nbytes)
        self.gpu.upload(address, np.ascontiguousarray(array))
        self.gpu.wait()
        return address

    def queue(self, tactic: Tactic, output: int, poisoned: str = "") -> Any:
        """What queues the tactic once; `poisoned` names launches that get poisoned memory."""
        plan = tactic.plan(ATTRS, self.specs, self.target)
        functions = graphs.load(self.gpu, tactic.source, plan, self.target, CACHE)
        places = {"input": self.inputs, "output": [output]}
        places["scratch"] = [self.gpu.allocate(s.nbytes) for s in plan.scratch]
        for address, scratch in zip(places["scratch"], plan.scratch, strict=True):
            self.gpu.fill(address, 0, scratch.nbytes)

        def once() -> None:
            for launch in plan.launches:
                if launch.symbol == poisoned:
                    self.poison()
                graphs.queue(self.gpu, [launch], functions, places)

        return once

    def poison(self) -> None:
        """Queues filling the shared memory of every multiprocessor."""
        nbytes = self.target.shared_bytes
        words, grid = nbytes // 4, (self.target.sms, 1, 1)
        args = (Scalar("i32", words),)
        launch = Launch("poison_shared", grid, (1024, 1, 1), args, nbytes, pdl=True)
        self.gpu.launch(self.helpers[launch.symbol], launch, [words])

    def count(self) -> None:
        """Queues the comparison; what is compared is poisoned."""
        at = Pointer("scratch", 0)
        launch = Launch("count_differences", (32, 1, 1), (256, 1, 1),
                        (at, at, Scalar("i32", 0), at), pdl=True)  # fmt: skip
        args = [self.got, self.want, self.nbytes // 4, self.found]
        self.gpu.launch(self.helpers[launch.symbol], launch, args)

    def run(self, rounds: int) -> tuple[int, float]:
        """Words that differed in all rounds, and the seconds taken."""
        tactics = {t.name: t for t in grouped_moe.OP.cuda.tactics}
        self.queue(tactics["grouped"], self.want)()
        # Before the sort: wide_up may begin beside it. Before wide_up: nobody else writes after.
        ways = [
            self.queue(tactics["wide"], self.got, n) for n in ("moe_sort", "wide_up", "wide_down")
        ]
        self.gpu.begin_capture()
        for i in range(ROUNDS):
            ways[i % len(ways)]()
            self.count()
        graph = self.gpu.end_capture()
        start = time.perf_counter()
        for _ in range(-(-rounds // ROUNDS)):
            self.gpu.replay(graph)
        found = np.empty(1, np.uint64)
        self.gpu.download(found, self.found)
        self.gpu.wait()
        return int(found[0]), time.perf_counter() - start


def _packed(arrays: tuple[Array, ...]) -> list[Array]:
    first = arrays[0].astype(DType.BF16.numpy)
    rest = packed_node.packed_arrays(grouped_moe.OP, ATTRS, arrays)[1:]
    return [first, *rest]


def main() -> None:
    """Prints tokens, rounds, words that differed, seconds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, nargs="+", default=[96])
    args = parser.parse_args()
    gpu, target = Gpu(), graphs.target_here()
    for tokens in args.tokens:
        differ, seconds = Trial(gpu, target, tokens).run(args.rounds)
        print(f"{tokens} tokens, {args.rounds} rounds: {differ} words differ, {seconds:.1f} s")


if __name__ == "__main__":
    main()
