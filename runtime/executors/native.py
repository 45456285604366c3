"""The native executor: cubins and launch records, replayed as one CUDA graph per bucket.

Knows the payload format of docs/engine_file.md and no op. One `NativeEngine` owns the device for
all buckets of an engine: weights, states, tables and the arena exist once. All launches run in
order on one stream, so the buckets can share all memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from spark_engine.device.buffers import Block, Buffers
from spark_engine.device.gpu import Function, Gpu
from spark_engine.device.resources import DeviceResources
from spark_engine.engine_file import CHUNK_BYTES, EngineFolder, EngineHeader
from spark_engine.errors import EngineError, ExecutorError
from spark_engine.kernel import Shape
from spark_engine.runtime.executors.bucket_graphs import MASKS, BucketGraphs, QueuedLaunch
from spark_engine.runtime.executors.communicator import Communicator
from spark_engine.runtime.executors.device_memory import DeviceStates, DeviceTables
from spark_engine.runtime.executors.executor import Specs, Wait
from spark_engine.runtime.executors.gpu_lock import lock_gpu, refuse_mps
from spark_engine.runtime.executors.kernels import Kernels
from spark_engine.runtime.executors.peers import calls, connect_peers
from spark_engine.runtime.executors.program import (
    PEERS,
    KernelEntry,
    LaunchRecord,
    MemoryOperand,
    Operand,
    Program,
    RankOperand,
)
from spark_engine.runtime.executors.staging import StagedBuffers, Staging
from spark_engine.runtime.executors.timed import DeviceClock
from spark_engine.runtime.executors.upload import Upload
from spark_engine.tensors import Array
from spark_engine.weights_file import read_index

INERT = ("slots", "sources", "saves")  # tables of step inputs that are -1 in an inactive row
Mark = Callable[[str], None]  # receives the name of each completed stage


class NativeEngine:
    """Device state that all buckets of one engine share.

    `rows_in` receives the device before the engine allocates memory; it raises if the engine does
    not fit and otherwise returns the number of snapshot rows that fit. With `comm` the engine is
    one of several ranks, each with a process and a GPU; ranks communicate through NCCL if they do
    not read each other's memory. Weights are verified while they are copied, and are there once
    `wait` has returned; buckets can be opened meanwhile. Without `graphs` the launches of a step
    are queued one by one. With `masks` the graphs of steps that wait for masks
    are recorded here. Raises EngineError if the weights differ from the manifest, if another engine
    is open in this process, or under MPS. `close`, or that of the last executor, frees everything.
    """

    def __init__(
        self,
        folder: EngineFolder,
        rows_in: Callable[[Gpu], int],
        mark: Mark,
        graphs: bool = True,
        masks: bool = False,
        comm: Communicator | None = None,
    ) -> None:
        self.graphs, self.masks = graphs, masks
        self.rank = 0 if comm is None else comm.rank
        manifest, path = folder.manifest, folder.weights_of(self.rank)
        buckets, self.card = manifest.buckets, manifest.card
        self._executors: list[NativeExecutor] = []
        with ExitStack() as undo:
            undo.callback(lock_gpu())
            self.gpu = Gpu()
            undo.callback(self.gpu.close)
            refuse_mps(self.gpu)
            resources = DeviceResources(self.gpu)
            undo.callback(resources.close)
            self.symmetric_bytes = max((b.symmetric_bytes for b in buckets), default=0)
            self._calls = calls(resources, self.symmetric_bytes, comm)
            self._kernels = Kernels(self.gpu)
            self.clock = DeviceClock(resources)
            snapshots = rows_in(self.gpu)
            mark("device")
            digests = partial(folder.check_chunk, path.name)
            self._upload = Upload(resources, path, CHUNK_BYTES, digests)
            undo.callback(self._upload.close)
            at = self._upload.address
            self.weights = {k: at + e.offset for k, e in read_index(path).items()}
            self.states = DeviceStates(resources, manifest.states, snapshots)
            self.tables = DeviceTables(resources, manifest.tables)
            self.arena_bytes = max(b.arena_bytes for b in buckets)
            self.arena = resources.zeros(self.arena_bytes)
            self.zeroed_bytes = max(b.zeroed_bytes for b in buckets)
            self.zeroed = resources.zeros(self.zeroed_bytes)
            self.wide_bytes = max(b.wide_bytes for b in buckets)
            self.wide = resources.zeros(self.wide_bytes)
            self.peers = connect_peers(resources, self.symmetric_bytes, comm)
            self.specs = {s.name: s for s in (*manifest.tables, *(i.spec for i in manifest.states))}
            self.gpu.wait()
            mark("memory")
            self._undo = undo.pop_all()

    def wait(self) -> None:
        """Returns once the weights are there, before which no bucket may run. Raises EngineError if
        they differ from the manifest's."""
        self._upload.wait()

    def open(
        self, header: EngineHeader, payload: bytes, folder: Path, threads: int
    ) -> NativeExecutor:
        """A captured bucket, of the manifest's payload or of another one.

        Raises EngineError if the payload is invalid, needs more memory than the manifest's buckets,
        or has a launch of which not all blocks fit on this GPU at once.
        """
        self.gpu.use()
        self._executors.append(NativeExecutor(self, header, payload))
        return self._executors[-1]

    def function(self, kernel: KernelEntry) -> Function | None:
        """A kernel of a cubin, with its dynamic shared memory limit set; None for an NCCL call."""
        cubin, symbol, shared = kernel.cubin, kernel.symbol, kernel.shared
        return None if cubin is None else self._kernels.find(cubin, symbol, shared)

    @property
    def across(self) -> bool:
        """True if the ranks use NCCL."""
        return self._calls is not None

    def call(self, symbol: str, args: Sequence[int | float]) -> Callable[[], None]:
        """A function that queues an NCCL call. Raises EngineError if the ranks do not use NCCL."""
        if self._calls is None:
            raise EngineError(
                f"the payload calls {symbol} of NCCL, and this engine's ranks do not use NCCL; "
                "rebuild the engine"
            )
        return self._calls.queueing(symbol, args)

    def release(self, executor: NativeExecutor) -> None:
        """Records that one executor was closed; the last one frees the device memory."""
        self._executors.remove(executor)
        if not self._executors:
            self._undo.close()

    def close(self) -> None:
        """Closes the executors and frees the device memory. May be called twice."""
        for executor in tuple(self._executors):
            executor.close()
        self._undo.close()


class NativeExecutor:
    """One bucket: a CUDA graph over the engine's memory."""

    def __init__(self, engine: NativeEngine, header: EngineHeader, payload: bytes) -> None:
        self._engine, self.gpu = engine, engine.gpu
        self.specs = Specs(header.inputs, header.states, header.outputs)
        self._label = f"{header.family} {header.rows}"
        self._buffers = Buffers.of(header, engine.tables.addresses)
        self._resources = DeviceResources(self.gpu)
        try:
            self._check_specs()
            self._staging = StagedBuffers(self._resources, self.specs, self._buffers)
            self._steps = self._resources.zeros(self._buffers.steps.nbytes)
            self._outputs = self._resources.zeros(self._buffers.outputs.nbytes)
            larger = self._buffers.wide.nbytes > engine.wide_bytes  # only other payloads
            self._wide = self._resources.zeros(self._buffers.wide.nbytes) if larger else engine.wide
            self._addresses = self._places()
            self._graphs = self._capture(payload)
        except BaseException:
            self._resources.close()
            raise
        self._open = True

    def launches(self, payload: bytes) -> list[QueuedLaunch]:
        """The launches of the bucket's payload in order, for measurement.

        Queued one after the other they run a step over the inputs of the last one and update the
        states.
        """
        self.gpu.use()
        program, values = self._read(payload)
        kernels = [self._engine.function(kernel) for kernel in program.kernels]
        masks = {i for i, operand in enumerate(program.operands) if operand == MASKS}
        packed = self.gpu.pack(values, program.kinds, [r.args for r in program.launches])
        queued, fitting = [], set[tuple[int, Shape]]()
        for record, args in zip(program.launches, packed, strict=True):
            function, symbol = kernels[record.kernel], program.kernels[record.kernel].symbol
            if function is None:
                queue = self._engine.call(symbol, [values[i] for i in record.args])
            else:
                if record.resident and (record.kernel, record.shape) not in fitting:
                    self._check_resident(function, symbol, record)
                    fitting.add((record.kernel, record.shape))
                queue = self.gpu.prepare(function, record.shape, args)
            reads_masks = not masks.isdisjoint(record.args)
            queued.append(QueuedLaunch(record.node, symbol, queue, reads_masks))
        return queued

    def address(self, place: MemoryOperand) -> int:
        return int(self._value(place))

    def run(self, buffers: Mapping[str, Array]) -> None:
        """Runs one step and copies every output.

        Copies states that `buffers` holds to the device before the step and back after it.
        """
        self.gpu.use()
        states = [s for s in self.specs.states if s.name in buffers]
        for spec in states:
            self.gpu.upload(self._engine.states.addresses[spec.name], buffers[spec.name])
        self._engine.tables.write_all(buffers)
        self.launch(buffers)()
        for spec in states:
            self.gpu.download(buffers[spec.name], self._engine.states.addresses[spec.name])
        for field in self._buffers.wide.fields:
            self.gpu.download(buffers[field.spec.name], self._wide + field.offset)
        self.gpu.wait()

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        """Queues the step; the returned function waits and copies the outputs into `buffers`.

        It allocates nothing. The step reads the tables last written to `NativeEngine.tables`.
        """
        staging = self._feed(buffers)
        self._graphs.launch()
        return self._fetch(staging, buffers)

    def launch_to_sample(self, buffers: Mapping[str, Array]) -> Callable[[], Wait]:
        """Queues the part before sampling; the returned function queues the rest, as `launch` does.

        Without `masks` the first call records the two graphs.
        """
        staging = self._feed(buffers)
        rest = self._graphs.launch_until_sampling()

        def launch_rest() -> Wait:
            self.gpu.use()
            rest()
            return self._fetch(staging, buffers)

        return launch_rest

    def _feed(self, buffers: Mapping[str, Array]) -> Staging:
        if not self._open:
            raise ExecutorError(f"{self._label} is closed")
        self.gpu.use()
        staging = self._staging.find(buffers)
        for name, view in staging.fed:
            view[...] = buffers[name]
        self.gpu.upload(self._steps, staging.steps)
        return staging

    def _fetch(self, staging: Staging, buffers: Mapping[str, Array]) -> Wait:
        """Queues the copy of the outputs and returns the function that waits for them."""
        if staging.read:  # the tower has no outputs
            self.gpu.download(staging.outputs, self._outputs)
        self.gpu.record(staging.done)

        def wait() -> None:
            if not self._open:  # `close` has freed the copies
                raise ExecutorError(f"{self._label} is closed")
            self.gpu.use()
            self.gpu.wait_for(staging.done)
            for name, view in staging.read:
                buffers[name][...] = view

        return wait

    def close(self) -> None:
        """Frees the bucket's own memory. May be called twice."""
        if not self._open:
            return
        self._open = False
        try:
            self._resources.close()
        finally:
            self._engine.release(self)

    def _check_specs(self) -> None:
        """Raises EngineError if tables or states differ from the manifest's, which sized the
        allocations."""
        kept = self._engine.specs
        tables = (s for s in self.specs.inputs if s.name in self._engine.tables.addresses)
        for spec in (*tables, *self.specs.states):
            if spec != kept.get(spec.name):
                raise EngineError(
                    f"the {self._label} bucket has {spec}, the manifest {kept.get(spec.name)}; "
                    "rebuild the engine with spark-build"
                )

    def _read(self, payload: bytes) -> tuple[Program, list[int | float]]:
        """The payload's program, and the values of its operands."""
        try:
            program = Program.read(payload, places=False)
            values = [self._value(operand) for operand in program.operands]
        except (KeyError, ValueError) as error:
            raise EngineError(
                f"the {self._label} bucket's launches cannot be read ({error!r}); rebuild the "
                "engine with spark-build"
            ) from error
        for kind, wanted, there in (
            ("scratch", program.arena_bytes, self._engine.arena_bytes),
            ("zeroed", program.zeroed_bytes, self._engine.zeroed_bytes),
            ("symmetric", program.symmetric_bytes, self._engine.symmetric_bytes),
        ):
            if wanted > there:
                raise EngineError(
                    f"the {self._label} bucket needs {wanted} bytes of {kind} memory, "
                    f"the engine has {there}; rebuild the engine with spark-build"
                )
        return program, values

    def _check_resident(self, function: Function, symbol: str, record: LaunchRecord) -> None:
        """Raises EngineError if the blocks of a resident launch do not all fit at once."""
        fitting = self.gpu.resident_blocks(function, record.shape)
        blocks = math.prod(record.shape.grid)
        if blocks > fitting:
            raise EngineError(
                f"{record.node} of the {self._label} bucket launches {blocks} blocks of {symbol} "
                f"that wait for one another, and this GPU ({self.gpu.multiprocessors} "
                f"multiprocessors) runs {fitting} at once: use the card that the engine was built "
                f"for, {self._engine.card}, all of it, or rebuild it on this machine"
            )

    def _capture(self, payload: bytes) -> BucketGraphs:
        """Loads the cubins and records the graph; runs nothing, except where ranks use NCCL."""
        launches, engine = self.launches(payload), self._engine
        if engine.across:
            self._run_inactive(launches)
        return BucketGraphs(self._label, launches, self._resources, engine.graphs, engine.masks)

    def _run_inactive(self, launches: Sequence[QueuedLaunch]) -> None:
        """Runs every launch once over inactive rows: NCCL connects at a call of a new size, which
        is no work for a recording."""
        for field in self._buffers.steps.fields:
            byte = 0xFF if field.spec.name in INERT else 0
            self.gpu.fill(self._steps + field.offset, byte, field.spec.nbytes)
        for launch in launches:
            launch.queue()
        self.gpu.wait()

    def _places(self) -> Mapping[str, Mapping[str, int]]:
        """Device addresses of launch operands, by kind and name; of those with an offset, of their
        memory. Memory that ranks share is only there with several."""
        engine, buffers = self._engine, self._buffers

        def of(block: Block, address: int) -> dict[str, int]:
            return {f.spec.name: address + f.offset for f in block.fields}

        states = {s.name: engine.states.addresses[s.name] for s in self.specs.states}
        peers = engine.peers
        shared = {} if peers is None else {PEERS: {"": peers.table}, "symmetric": {"": peers.own}}
        return {
            "arena": {"": engine.arena},
            "zeroed": {"": engine.zeroed},
            **shared,
            "weight": engine.weights,
            "state": states,
            "input": {**engine.tables.addresses, **of(buffers.steps, self._steps)},
            "output": {**of(buffers.outputs, self._outputs), **of(buffers.wide, self._wide)},
        }

    def _value(self, arg: Operand) -> int | float:
        if isinstance(arg, MemoryOperand):
            if arg.kind not in self._addresses:
                raise ValueError(f"{arg.kind} memory needs several ranks, and the engine has one")
            return self._addresses[arg.kind][arg.name] + arg.offset
        return self._engine.rank if isinstance(arg, RankOperand) else arg.value
