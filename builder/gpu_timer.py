"""Times tactics on the GPU of this machine: cold weights and states, replayed graphs, the median.

Knows the CUDA driver and the contract of a kernel; knows no op. A graph holds the node's launches
several times, each over its own copy of what no kernel before it has just written (weights,
states), so that the copies together are larger than the L2 cache; activations stay where they are,
warm, as they are behind the kernel that made them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from cuda.bindings import driver

from spark_engine.builder import nvrtc
from spark_engine.builder.tactics import Work
from spark_engine.builder.timing_inputs import Filling, fillings
from spark_engine.builder.timings import Machine, Timings, driver_version, key_of
from spark_engine.cuda_driver import MAX_SHARED, free_bytes, queueing, value
from spark_engine.errors import CapacityError, ExecutorError, InternalError
from spark_engine.kernel import Plan, Pointer, Tactic, Target

COLD = 2  # times the L2 cache that the rotating copies hold
MOST_COPIES, LEAST_LAUNCHES = 32, 4
REPEATS, WARM = 7, 2
SHARE = 0.8  # of the free memory that one measurement may take
_NAMES = driver.CUdevice_attribute
VERSION = Path("/proc/driver/nvidia/version")


class GpuTimer:
    """A `Timer` over the first GPU; earlier times come from the file `known`. A context manager.

    `cubins` is the folder of compiled kernels. Nothing is left on the GPU at the end.
    """

    def __init__(self, target: Target, cubins: Path, known: Path) -> None:
        value(driver.cuInit(0))
        self._device = value(driver.cuDeviceGet(0))
        self._context = value(driver.cuDevicePrimaryCtxRetain(self._device))
        value(driver.cuCtxSetCurrent(self._context))
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
        self._stream = value(driver.cuStreamCreate(flags.value))
        cache = _NAMES.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE
        self._l2 = int(value(driver.cuDeviceGetAttribute(cache, self._device)))
        self._target, self._cubins = target, cubins
        self._timings = Timings(known, machine(self._device))
        self.measured = 0

    def __enter__(self) -> GpuTimer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._timings.save()
        driver.cuStreamDestroy(self._stream)
        driver.cuDevicePrimaryCtxRelease(self._device)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the report."""
        return tuple(self._timings.notes)

    def __call__(self, work: Work, tactic: Tactic, plan: Plan) -> float | None:
        """Seconds of one run of the plan; None where the GPU's memory does not hold it.

        Raises InternalError naming a tactic that the GPU cannot run.
        """
        key = key_of(work, tactic, plan, _texts(tactic, plan))
        known = self._timings.get(key)
        if known is not None:
            return known
        try:
            seconds = self._measure(work, tactic, plan)
        except CapacityError:
            return None  # another program took the memory meanwhile
        except ExecutorError as error:
            raise InternalError(
                f"timing {work.name}/{tactic.name} over "
                f"{[(str(s.dtype), s.dims) for s in work.ins]}: {error}; --no-timing builds "
                "without the GPU"
            ) from error
        if seconds is not None:
            self._timings.put(key, seconds)
            self.measured += 1
        return seconds

    def _measure(self, work: Work, tactic: Tactic, plan: Plan) -> float | None:
        bench = _Bench(self._stream, work, plan, self._l2)
        if bench.nbytes > SHARE * free_bytes(self._device):
            return None
        functions, modules = self._functions(tactic, plan)
        try:
            bench.fill()
            return bench.seconds(functions)
        finally:
            bench.free()
            for module in modules:
                driver.cuModuleUnload(module)

    def _functions(self, tactic: Tactic, plan: Plan) -> tuple[list[Any], list[Any]]:
        functions, modules = [], []
        for launch in plan.launches:
            source = launch.source or tactic.source
            job = nvrtc.Job(source, launch.defines, (launch.symbol,))
            code = nvrtc.compile(job, self._target, self._cubins).code
            modules.append(value(driver.cuModuleLoadData(code)))
            function = value(driver.cuModuleGetFunction(modules[-1], launch.symbol.encode()))
            if launch.shared:
                value(driver.cuFuncSetAttribute(function, MAX_SHARED, launch.shared))
            functions.append(function)
        return functions, modules


class _Bench:
    """One node's buffers, `copies` of the cold ones, and its launches."""

    def __init__(self, stream: Any, work: Work, plan: Plan, l2: int) -> None:
        self._stream, self._work, self._plan = stream, work, plan
        self._fillings = fillings(work, np.random.default_rng(0))
        cold = sum(self._fillings[i].nbytes for i in work.cold)
        self.copies = min(MOST_COPIES, max(1, -(-COLD * l2 // max(cold, 1))))
        self._addresses: list[int] = []
        made = [*(f.nbytes for f in self._fillings), *(s.nbytes for s in work.outs)]
        warm = sum(made) - cold + sum(s.nbytes for s in plan.scratch)
        self.nbytes = warm + self.copies * cold

    def fill(self) -> None:
        """Allocates everything, and writes operands and zeroed scratch."""
        self._inputs = [self._operand(i, f) for i, f in enumerate(self._fillings)]
        aliases = self._work.op.aliases(self._work.attrs) if self._work.op else {}
        self._outputs = [
            self._inputs[aliases[i]] if i in aliases else [self._allocate(spec.nbytes)]
            for i, spec in enumerate(self._work.outs)
        ]
        self._scratch = [self._allocate(s.nbytes) for s in self._plan.scratch]
        for address, need in zip(self._scratch, self._plan.scratch, strict=True):
            if need.zeroed:
                value(driver.cuMemsetD8Async(address, 0, max(need.nbytes, 1), self._stream))
        value(driver.cuStreamSynchronize(self._stream))

    def seconds(self, functions: Sequence[Any]) -> float:
        """The median over replays, a launch set's share of each."""
        sets = max(self.copies, LEAST_LAUNCHES)
        self._run(functions, 0)  # outside a graph, so that an error has a name
        value(driver.cuStreamSynchronize(self._stream))
        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        value(driver.cuStreamBeginCapture(self._stream, mode))
        for turn in range(sets):
            self._run(functions, turn)
        graph = value(driver.cuStreamEndCapture(self._stream))
        replay = value(driver.cuGraphInstantiate(graph, 0))
        events = [value(driver.cuEventCreate(0)) for _ in range(2)]
        times = []
        for _ in range(WARM + REPEATS):
            value(driver.cuEventRecord(events[0], self._stream))
            value(driver.cuGraphLaunch(replay, self._stream))
            value(driver.cuEventRecord(events[1], self._stream))
            value(driver.cuEventSynchronize(events[1]))
            times.append(float(value(driver.cuEventElapsedTime(*events))) / 1e3 / sets)
        for event in events:
            value(driver.cuEventDestroy(event))
        value(driver.cuGraphExecDestroy(replay))
        value(driver.cuGraphDestroy(graph))
        return statistics.median(times[WARM:])

    def free(self) -> None:
        """Gives the memory back; what fails here failed before."""
        for address in self._addresses:
            driver.cuMemFree(address)
        self._addresses = []

    def _allocate(self, nbytes: int) -> int:
        self._addresses.append(int(value(driver.cuMemAlloc(max(nbytes, 1)))))
        return self._addresses[-1]

    def _operand(self, index: int, filling: Filling) -> list[int]:
        """Addresses of the operand's copies."""
        copies = self.copies if index in self._work.cold else 1
        addresses = [self._allocate(filling.nbytes) for _ in range(copies)]
        for address in addresses:
            self._repeat(address, filling)
        return addresses

    def _repeat(self, address: int, filling: Filling) -> None:
        """Writes the pattern over the whole buffer: once from the host, then doubling."""
        done = min(filling.pattern.nbytes, filling.nbytes)
        if done == 0:
            return
        value(driver.cuMemcpyHtoDAsync(address, filling.pattern.ctypes.data, done, self._stream))
        while done < filling.nbytes:
            more = min(done, filling.nbytes - done)
            value(driver.cuMemcpyDtoDAsync(address + done, address, more, self._stream))
            done += more

    def _run(self, functions: Sequence[Any], turn: int) -> None:
        for launch, function in zip(self._plan.launches, functions, strict=True):
            values = [
                self._address(a, turn) if isinstance(a, Pointer) else a.value for a in launch.args
            ]
            queueing(self._stream, function, launch.shape, values)()

    def _address(self, pointer: Pointer, turn: int) -> int:
        if pointer.kind == "scratch":
            return self._scratch[pointer.index]
        found = self._inputs if pointer.kind == "input" else self._outputs
        copies = found[pointer.index]
        return copies[turn % len(copies)]


def _texts(tactic: Tactic, plan: Plan) -> dict[str, str]:
    """The plan's sources and their headers, by name."""
    found: dict[str, str] = {}
    for name in {launch.source or tactic.source for launch in plan.launches}:
        found |= nvrtc.sources(name)
    return found


def this_machine() -> Machine:
    """The first GPU's. Raises ExecutorError without one."""
    value(driver.cuInit(0))
    return machine(value(driver.cuDeviceGet(0)))


def machine(device: Any) -> Machine:
    """What times of this GPU depend on."""
    name = value(driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode()
    version = str(value(driver.cuDriverGetVersion()))
    try:
        found = driver_version(VERSION.read_text())
    except OSError:
        found = None
    return Machine(name, found or version, nvrtc.compiler_version())
