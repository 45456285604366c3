"""Ranks in one process, for measurement and tests: a stream for each, on a GPU of its own or all on
one, and memory that all of them read.

Knows the driver and the layout that `Plan.symmetric` asks for; knows no engine. On one GPU the
launches of all ranks must fit it together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
        """What puts the plan's launches, over one input and one output, on the rank's stream."""
        return self.queue_all(rank, tactic, plan, {"input": [x], "output": [y]})

    def queue_all(
        self, rank: int, tactic: Tactic, plan: Plan, places: Mapping[str, Sequence[int]]
    ) -> list[Queue]:
        """The same over addresses by the kinds of pointers."""
        self.use(rank)
        places = {**places, "peers": [self._tables[rank]]}
        found = []
        for launch in plan.launches:
            values: list[int | float] = []
            for arg in launch.args:
                if isinstance(arg, Pointer):
                    values.append(places[arg.kind][arg.index])
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
        operands = [(part,) for part in parts]
        return [y for (y,) in self.run(op, attrs, op.cuda.tactics[0], operands)]

    def run(
        self, op: Op, attrs: Attrs, tactic: Tactic, operands: Sequence[Sequence[Array]]
    ) -> list[list[Array]]:
        """What each rank has of a node over its own operands; outputs are NaN before."""
        specs = specs_of(op, attrs, operands[0])
        outs = op.infer(attrs, specs)
        assert tactic.refuse(attrs, specs, self.target) is None
        plan = tactic.plan(attrs, specs, self.target)
        places = []
        for rank, mine in enumerate(operands):
            sizes = {
                "output": [s.nbytes for s in outs],
                "scratch": [s.nbytes for s in plan.scratch],
            }
            made = {"input": [self.put(rank, array) for array in mine]}
            for kind, several in sizes.items():
                made[kind] = [self.put(rank, np.full(n, 0xFF, np.uint8)) for n in several]
            places.append(made)
        queues = [self.queue_all(r, tactic, plan, places[r]) for r in range(self.ranks)]
        for rank, launches in enumerate(queues):
            self.use(rank)
            for launch in launches:
                launch()
        found = [
            [self.get(r, at, spec) for at, spec in zip(places[r]["output"], outs, strict=True)]
            for r in range(self.ranks)
        ]
        for rank, made in enumerate(places):
            for address in (at for some in made.values() for at in some):
                self.free(rank, address)
        return found


def specs_of(op: Op, attrs: Attrs, arrays: Sequence[Array]) -> tuple[TensorSpec, ...]:
    """The operands' specs."""
    pairs = zip(op.names(attrs, len(arrays)), arrays, strict=True)
    return tuple(TensorSpec(name, DType.of(a.dtype), a.shape) for name, a in pairs)
