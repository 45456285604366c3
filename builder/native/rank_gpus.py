"""GPUs of this host as ranks of one engine, in one process: a stream for each, and memory that all
of them read. Used to time launches that several ranks run together, in tests and in benchmarks.

Knows the driver and the layout of `Plan.symmetric`; knows no engine and no op. Ranks may share one
GPU if the launches of all of them fit on it at once.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from spark_engine.builder.native import nvrtc
from spark_engine.device.cuda_driver import MAX_SHARED, driver, queueing, value
from spark_engine.errors import ExecutorError
from spark_engine.kernel import Plan, Pointer, Rank, Tactic, Target
from spark_engine.tensors import Array

Queue = Callable[[], None]
Places = Mapping[str, Sequence[int]]  # addresses by the kinds of pointers
NODES, REPEATS, WARM = 32, 7, 2


def reach_each_other(ranks: int) -> bool:
    """True if this process has that many GPUs, and each reads the others' memory."""
    value(driver.cuInit(0))
    if value(driver.cuDeviceGetCount()) < ranks:
        return False
    gpus = [value(driver.cuDeviceGet(i)) for i in range(ranks)]
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    return all(value(driver.cuDeviceCanAccessPeer(gpus[a], gpus[b])) for a, b in pairs)


class RankGpus:
    """`devices`: the GPU of each rank. `symmetric`: bytes of each rank's region, initially zero."""

    def __init__(self, devices: Sequence[int], target: Target, cache: Path, symmetric: int) -> None:
        value(driver.cuInit(0))
        self.target, self._cache, self.ranks = target, cache, len(devices)
        self.symmetric = symmetric
        self._functions: dict[tuple[object, ...], Any] = {}
        self.streams: list[Any] = []
        with ExitStack() as undo:
            held = {}
            for i in dict.fromkeys(devices):
                gpu = value(driver.cuDeviceGet(i))
                held[i] = value(driver.cuDevicePrimaryCtxRetain(gpu))
                undo.callback(driver.cuDevicePrimaryCtxRelease, gpu)
            self._contexts = [held[i] for i in devices]
            for mine in held:
                value(driver.cuCtxSetCurrent(held[mine]))
                for other in held.keys() - {mine}:
                    with suppress(ExecutorError):  # it is enabled already
                        value(driver.cuCtxEnablePeerAccess(held[other], 0))
            self._undo = undo
            for rank in range(self.ranks):
                self.use(rank)
                flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
                self.streams.append(value(driver.cuStreamCreate(flags.value)))
                self._later(rank, driver.cuStreamDestroy, self.streams[rank])
            self.regions = [self._kept(r, np.zeros(symmetric, np.uint8)) for r in range(self.ranks)]
            table = np.array(self.regions, np.uint64)
            self._tables = [self._kept(r, table) for r in range(self.ranks)]
            self._undo = undo.pop_all()

    def close(self) -> None:
        """Frees all resources but the arrays that were `put` and not freed."""
        self._undo.close()

    def use(self, rank: int) -> None:
        value(driver.cuCtxSetCurrent(self._contexts[rank]))

    def put(self, rank: int, array: Array) -> int:
        """The address of a copy on the rank's GPU."""
        self.use(rank)
        address = int(value(driver.cuMemAlloc(max(array.nbytes, 1))))
        data = np.ascontiguousarray(array)
        value(driver.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))
        # a copy from pageable memory may return early, and the ranks' streams do not wait for it
        value(driver.cuCtxSynchronize())
        return address

    def free(self, rank: int, address: int) -> None:
        self.use(rank)
        value(driver.cuMemFree(address))

    def wait(self, rank: int) -> None:
        self.use(rank)
        value(driver.cuStreamSynchronize(self.streams[rank]))

    def queue_all(self, rank: int, tactic: Tactic, plan: Plan, places: Places) -> list[Queue]:
        """A function that queues the plan's launches on the rank's stream, over addresses by kind
        of pointer. Loads the kernels now: a later load could wait for a launch that waits for
        another rank."""
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
                job = nvrtc.Job(launch.source or tactic.source, launch.defines, (launch.symbol,))
                cubin = nvrtc.compile(job, self.target, self._cache)
                module = value(driver.cuModuleLoadData(cubin.code))
                self._later(rank, driver.cuModuleUnload, module)
                entry = value(driver.cuModuleGetFunction(module, launch.symbol.encode()))
                value(driver.cuFuncLoad(entry))
                if shared := cubin.launched(launch).shared:
                    value(driver.cuFuncSetAttribute(entry, MAX_SHARED, shared))
                self._functions[key] = entry, cubin
            function, cubin = self._functions[key]
            shape = cubin.launched(launch).shape
            found.append(queueing(self.streams[rank], function, shape, values))
        return found

    @contextmanager
    def placed(
        self,
        tactic: Tactic,
        plan: Plan,
        operands: Sequence[Sequence[Array]],
        outputs: Sequence[int],
    ) -> Iterator[tuple[list[Places], list[list[Queue]]]]:
        """A node's buffers by rank, and the functions that queue it, over each rank's own operands
        and outputs. `outputs`: bytes of each output, which is filled with NaN."""
        with ExitStack() as held:

            def put(rank: int, array: Array) -> int:
                address = self.put(rank, array)
                held.callback(self.free, rank, address)
                return address

            def bytes_of(rank: int, count: int, byte: int = 0xFF) -> int:
                return put(rank, np.full(count, byte, np.uint8))

            places: list[Places] = [
                {
                    "input": [put(rank, array) for array in mine],
                    "output": [bytes_of(rank, count) for count in outputs],
                    "scratch": [
                        bytes_of(rank, s.nbytes, 0 if s.zeroed else 0xFF) for s in plan.scratch
                    ],
                }
                for rank, mine in enumerate(operands)
            ]
            yield places, [self.queue_all(r, tactic, plan, at) for r, at in enumerate(places)]

    def seconds(self, queues: Sequence[Sequence[Queue]]) -> float:
        """Seconds of one concurrent run of all ranks' launches: the median over replays of a graph
        per rank with NODES runs. Measured on the rank that starts last, since the others wait for
        it."""
        events, graphs = [], []
        flag = driver.CUevent_flags.CU_EVENT_DEFAULT.value
        for rank, launches in enumerate(queues):
            for launch in launches:  # outside a graph, so that an error has a name
                self.use(rank)
                launch()
        for rank, launches in enumerate(queues):
            self.wait(rank)
            mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
            value(driver.cuStreamBeginCapture(self.streams[rank], mode))
            for launch in [*launches] * NODES:
                launch()
            recorded = value(driver.cuStreamEndCapture(self.streams[rank]))
            graphs.append(value(driver.cuGraphInstantiate(recorded, 0)))
            value(driver.cuGraphDestroy(recorded))
            value(driver.cuGraphUpload(graphs[rank], self.streams[rank]))
            events.append([value(driver.cuEventCreate(flag)) for _ in range(2)])
            self.wait(rank)
        times = []
        for _ in range(WARM + REPEATS):
            for rank, (first, last) in enumerate(events):
                self.use(rank)
                value(driver.cuEventRecord(first, self.streams[rank]))
                value(driver.cuGraphLaunch(graphs[rank], self.streams[rank]))
                value(driver.cuEventRecord(last, self.streams[rank]))
            taken = []
            for rank, pair in enumerate(events):
                self.wait(rank)
                taken.append(value(driver.cuEventElapsedTime(*pair)) / 1e3 / NODES)
            times.append(min(taken))
        for rank, pair in enumerate(events):
            self.use(rank)
            value(driver.cuGraphExecDestroy(graphs[rank]))
            for event in pair:
                value(driver.cuEventDestroy(event))
        return float(statistics.median(times[WARM:]))

    def _kept(self, rank: int, array: Array) -> int:
        address = self.put(rank, array)
        self._later(rank, driver.cuMemFree, address)
        return address

    def _later(self, rank: int, undo: Callable[..., Any], what: Any) -> None:
        """Registers `undo`, which `close` calls on the rank's GPU."""

        def work() -> None:
            self.use(rank)
            undo(what)

        self._undo.callback(work)
