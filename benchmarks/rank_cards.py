"""Ranks in one process, for measurement and tests: a stream for each, on a GPU of its own or all on
one, and memory that all of them read.

Knows the driver and the layout that `Plan.symmetric` asks for; knows no engine. On one GPU the
launches of all ranks must fit it together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from spark_engine.builder.native import nvrtc
from spark_engine.cuda_driver import driver, queueing, value
from spark_engine.errors import ExecutorError
from spark_engine.kernel import Plan, Pointer, Rank, Tactic, Target
from spark_engine.op import Attrs, Op
from spark_engine.tensors import Array, DType, TensorSpec

Queue = Callable[[], None]


class RankCards:
    """`devices`: the GPU of each rank. `symmetric`: bytes of each rank's region."""

    def __init__(self, devices: Sequence[int], target: Target, cache: Path, symmetric: int) -> None:
        value(driver.cuInit(0))
        self.target, self._cache, self.ranks = target, cache, len(devices)
        handles = {d: value(driver.cuDeviceGet(d)) for d in devices}
        held = {d: value(driver.cuDevicePrimaryCtxRetain(h)) for d, h in handles.items()}
        self._contexts = [held[d] for d in devices]
        for mine in held:
            value(driver.cuCtxSetCurrent(held[mine]))
            for other in held.keys() - {mine}:
                with suppress(ExecutorError):  # enabled before
                    value(driver.cuCtxEnablePeerAccess(held[other], 0))
        self.streams, self._functions = [], {}
        for rank in range(self.ranks):
            self.use(rank)
            flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
            self.streams.append(value(driver.cuStreamCreate(flags.value)))
        self.regions = [self.put(r, np.zeros(symmetric, np.uint8)) for r in range(self.ranks)]
        table = np.array(self.regions, np.uint64)
        self._tables = [self.put(r, table) for r in range(self.ranks)]

    def use(self, rank: int) -> None:
        """Makes the rank's GPU current in this thread."""
        value(driver.cuCtxSetCurrent(self._contexts[rank]))

    def put(self, rank: int, array: Array) -> int:
        """The address of a copy on the rank's GPU."""
        self.use(rank)
        address = int(value(driver.cuMemAlloc(max(array.nbytes, 1))))
        data = np.ascontiguousarray(array)
        value(driver.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))
        return address

    def get(self, rank: int, address: int, spec: TensorSpec) -> Array:
        """A copy of what lies there, when everything queued is done."""
        self.wait(rank)
        array = np.empty(spec.dims, spec.dtype.numpy)
        value(driver.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))
        return array

    def free(self, rank: int, address: int) -> None:
        """Gives memory back."""
        self.use(rank)
        value(driver.cuMemFree(address))

    def wait(self, rank: int) -> None:
        """Until everything queued is done."""
        self.use(rank)
        value(driver.cuStreamSynchronize(self.streams[rank]))

    def queue(self, rank: int, tactic: Tactic, plan: Plan, x: int, y: int) -> list[Queue]:
        """What puts the plan's launches, over one input and one output, on the rank's stream; what
        a library has gathered into scratch is the input too."""
        self.use(rank)
        found = []
        for launch in plan.launches:
            values: list[int | float] = []
            for arg in launch.args:
                if isinstance(arg, Pointer):
                    places = {"input": x, "scratch": x, "output": y, "peers": self._tables[rank]}
                    values.append(places[arg.kind])
                else:
                    values.append(rank if isinstance(arg, Rank) else arg.value)
            key = (rank, launch.source or tactic.source, launch.defines, launch.symbol)
            if key not in self._functions:
                job = nvrtc.Job(key[1], launch.defines, (launch.symbol,))
                code = nvrtc.compile(job, self.target, self._cache).code
                module = value(driver.cuModuleLoadData(code))
                entry = value(driver.cuModuleGetFunction(module, launch.symbol.encode()))
                value(driver.cuFuncLoad(entry))  # later it might wait for a launch that waits
                self._functions[key] = entry
            function = self._functions[key]
            found.append(queueing(self.streams[rank], function, launch.shape, values))
        return found

    def together(self, op: Op, attrs: Attrs, parts: Sequence[Array]) -> list[Array]:
        """What each rank has of the op over its own part, by the op's first tactic."""
        spec = TensorSpec("x", DType.of(parts[0].dtype), parts[0].shape)
        (out,) = op.infer(attrs, (spec,))
        tactic = op.cuda.tactics[0]
        assert tactic.refuse(attrs, (spec,), self.target) is None
        plan = tactic.plan(attrs, (spec,), self.target)
        poison = np.full(out.nbytes, 0xFF, np.uint8)
        places = [(self.put(r, p), self.put(r, poison)) for r, p in enumerate(parts)]
        queues = [self.queue(r, tactic, plan, *places[r]) for r in range(self.ranks)]
        for rank, launches in enumerate(queues):
            self.use(rank)
            for launch in launches:
                launch()
        found = [self.get(r, places[r][1], out) for r in range(self.ranks)]
        for rank, pair in enumerate(places):
            for address in pair:
                self.free(rank, address)
        return found
