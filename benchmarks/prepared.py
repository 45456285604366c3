"""One node on the GPU, to be timed: its buffers and kernels, launched again and again.

Knows no op. Contents of operands come from the caller; outputs and scratch begin as 0xFF bytes,
scratch that is promised zero as zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.graphs import each_seconds
from spark_engine.builder.native import nvrtc
from spark_engine.device.gpu import Gpu
from spark_engine.kernel import H200, Launch, Pointer, Scalar, Tactic, Target
from spark_engine.op import Attrs, Op
from spark_engine.tensors import Array, DType, TensorSpec

CACHE = Path("/tmp/spark_cubins")
GUARD = 4096  # bytes around each buffer


def specs_of(op: Op, arrays: Sequence[Array]) -> tuple[TensorSpec, ...]:
    """The arrays' specs under made-up names."""
    return tuple(TensorSpec(f"a{i}", DType.of(a.dtype), a.shape) for i, a in enumerate(arrays))


class Prepared:
    """A node on the device: buffers, kernels; `launch` may be repeated or captured."""

    def __init__(
        self,
        gpu: Gpu,
        op: Op,
        tactic: Tactic,
        attrs: Attrs,
        arrays: Sequence[Array],
        target: Target = H200,
        cache: Path = CACHE,
    ) -> None:
        self.gpu, self.op = gpu, op
        specs = specs_of(op, arrays)
        self.plan = tactic.plan(attrs, specs, target)
        self.outs = op.infer(attrs, specs)
        self.held: list[int] = []
        self.inputs, aliases = [self.put(a) for a in arrays], op.aliases(attrs)
        self.outputs = [
            self.inputs[aliases[i]] if i in aliases else self._poison(s.nbytes)
            for i, s in enumerate(self.outs)
        ]
        self.scratch = [self._poison(s.nbytes, 0 if s.zeroed else 0xFF) for s in self.plan.scratch]
        self.functions: list[tuple[Any, Launch]] = []
        for job in nvrtc.jobs_of([(tactic.source, self.plan)]):
            cubin = nvrtc.compile(job, target, cache)
            mine = [
                x
                for x in self.plan.launches
                if (x.source or tactic.source, x.defines) == (job.source, job.defines)
            ]
            found = gpu.load(cubin.code, job.symbols, max(x.shared for x in mine))
            self.functions += [(found[x.symbol], x) for x in mine]
        self.functions.sort(key=lambda pair: self.plan.launches.index(pair[1]))

    def _poison(self, nbytes: int, byte: int = 0xFF) -> int:
        base = self.gpu.allocate(nbytes + 2 * GUARD)
        self.held.append(base)
        self.gpu.fill(base, byte, nbytes + 2 * GUARD)
        return base + GUARD

    def put(self, array: Array) -> int:
        """The address of a copy of `array` on the device; one broadcast from a zero is filled."""
        address = self._poison(array.nbytes)
        if array.size > 1 and not any(array.strides) and not array.flat[0]:
            self.gpu.fill(address, 0, array.nbytes)
        elif array.nbytes:
            self.gpu.upload(address, np.ascontiguousarray(array))
        self.gpu.wait()
        return address

    def value(self, arg: Pointer | Scalar, replaced: Mapping[tuple[str, int], int]) -> int | float:
        """An argument's value; `replaced` maps (kind, index) to another address."""
        if isinstance(arg, Scalar):
            return arg.value
        table = {"input": self.inputs, "output": self.outputs, "scratch": self.scratch}
        return replaced.get((arg.kind, arg.index), table[arg.kind][arg.index])

    def launch(self, replaced: Mapping[tuple[str, int], int] | None = None) -> None:
        """Queues the plan's launches."""
        for function, launch in self.functions:
            args = [self.value(a, replaced or {}) for a in launch.args]
            self.gpu.launch(function, launch, args)

    def alone(self) -> list[tuple[str, Callable[[], None]]]:
        """Each launch by itself, with its symbol."""
        pairs = []
        for function, launch in self.functions:
            args = [self.value(a, {}) for a in launch.args]
            pairs.append(
                (launch.symbol, lambda f=function, x=launch, a=args: self.gpu.launch(f, x, a))
            )
        return pairs

    def fetch(self) -> tuple[Array, ...]:
        """The outputs."""
        results = tuple(np.empty(s.dims, s.dtype.numpy) for s in self.outs)
        for array, address in zip(results, self.outputs, strict=True):
            self.gpu.download(array, address)
        self.gpu.wait()
        return results

    def free(self) -> None:
        """Gives the memory back."""
        for address in self.held:
            self.gpu.free(address)


def timed(gpu: Gpu, launches: Sequence[Callable[[], None]], repeats: int = 7) -> float:
    """Median seconds of one launch of a graph that holds all of them."""
    for launch in launches[:2]:
        launch()
    gpu.wait()

    def queued() -> None:
        for launch in launches:
            launch()

    times = each_seconds(gpu, queued, repeats)
    return sorted(times[1:])[len(times) // 2] / len(launches)
