"""Runs a tactic of an op on the GPU over numpy arrays. Knows no op."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spark_engine.builder import nvrtc
from spark_engine.kernel import H200, Launch, Pointer, Scalar, Tactic, Target
from spark_engine.op import Attrs, Op
from spark_engine.runtime.device import Gpu
from spark_engine.tensors import Array, DType, TensorSpec

CACHE = Path("/tmp/gdn_cubins")
GUARD = 4096  # bytes around each buffer that must stay untouched


def specs_of(op: Op, arrays: Sequence[Array]) -> tuple[TensorSpec, ...]:
    """The arrays' specs under made-up names."""
    return tuple(TensorSpec(f"a{i}", DType.of(a.dtype), a.shape) for i, a in enumerate(arrays))


class Prepared:
    """A node on the device: buffers, kernels; `launch` may be repeated or captured."""

    def __init__(
        self, gpu: Gpu, op: Op, tactic: Tactic, attrs: Attrs, arrays: Sequence[Array],
        target: Target = H200,
    ) -> None:  # fmt: skip
        self.gpu, self.op = gpu, op
        specs = specs_of(op, arrays)
        self.plan = tactic.plan(attrs, specs, target)
        self.outs = op.infer(attrs, specs)
        self.held: list[int] = []
        self.inputs = [self._put(np.ascontiguousarray(a)) for a in arrays]
        self.outputs = [
            self.inputs[op.aliases[i]] if i in op.aliases else self._poison(s.nbytes)
            for i, s in enumerate(self.outs)
        ]
        self.scratch = [self._poison(s.nbytes, 0 if s.zeroed else 0xFF) for s in self.plan.scratch]
        self.functions: list[tuple[Any, Launch]] = []
        for job in nvrtc.jobs_of([(tactic.source, self.plan)]):
            cubin = nvrtc.compile(job, target, CACHE)
            mine = [x for x in self.plan.launches if x.defines == job.defines]
            found = gpu.load(cubin.code, job.symbols, max(x.shared for x in mine))
            self.functions += [(found[x.symbol], x) for x in mine]
        self.functions.sort(key=lambda pair: self.plan.launches.index(pair[1]))

    def _poison(self, nbytes: int, byte: int = 0xFF) -> int:
        base = self.gpu.allocate(nbytes + 2 * GUARD)
        self.held.append(base)
        self.gpu.fill(base, byte, nbytes + 2 * GUARD)
        return base + GUARD

    def _put(self, array: Array) -> int:
        address = self._poison(array.nbytes)
        if array.nbytes:
            self.gpu.upload(address, array)
        self.gpu.wait()
        return address

    def _value(self, arg: Pointer | Scalar, replaced: Mapping[tuple[str, int], int]) -> int | float:
        if isinstance(arg, Scalar):
            return arg.value
        table = {"input": self.inputs, "output": self.outputs, "scratch": self.scratch}
        return replaced.get((arg.kind, arg.index), table[arg.kind][arg.index])

    def launch(self, replaced: Mapping[tuple[str, int], int] | None = None) -> None:
        for function, launch in self.functions:
            args = [self._value(a, replaced or {}) for a in launch.args]
            self.gpu.launch(function, launch, args)

    def fetch(self) -> tuple[Array, ...]:
        results = tuple(np.empty(s.dims, s.dtype.numpy) for s in self.outs)
        for array, address in zip(results, self.outputs, strict=True):
            self.gpu.download(array, address)
        self.gpu.wait()
        return results

    def free(self) -> None:
        for address in self.held:
            self.gpu.free(address)


def run(
    gpu: Gpu, op: Op, tactic: Tactic, attrs: Attrs, arrays: Sequence[Array]
) -> tuple[Array, ...]:
    """The outputs of one launch of the plan."""
    node = Prepared(gpu, op, tactic, attrs, arrays)
    node.launch()
    results = node.fetch()
    node.free()
    return results
