"""The native executor: cubins and launch records, replayed as one CUDA graph per bucket.

Knows the payload of docs/engine_file.md and no op. One `NativeEngine` owns the device for all
buckets of an engine: weights, states, tables and the arena exist once. Buckets run in the order of
their launch on one stream, so they may share every byte.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from spark_engine.engine_file import CHUNK_BYTES, WEIGHTS, EngineFolder, EngineHeader
from spark_engine.errors import EngineError, ExecutorError
from spark_engine.kernel import TARGETS
from spark_engine.runtime.device import Event, Function, Gpu
from spark_engine.runtime.device_memory import (
    Bytes,
    DeviceStates,
    DeviceTables,
    unit_bytes,
    zeros,
)
from spark_engine.runtime.executor import WIDE, Specs, Wait
from spark_engine.runtime.program import NUMBERS, Operand, Program
from spark_engine.runtime.upload import upload_file
from spark_engine.tensors import Array, TensorSpec
from spark_engine.weights_file import read_index

ALIGNMENT = 256
MAX_STAGED = 4  # sets of host buffers remembered by a bucket; an engine has one or two
Mark = Callable[[str], None]  # told the name of each stage that has ended


class NativeEngine:
    """The device's owner: what all buckets of one engine share.

    `check` is given the free bytes of the device before anything is allocated, and raises when
    the engine does not fit. The weights are verified while they are copied. Raises EngineError
    when a byte of them is not the manifest's, or the GPU is smaller than the engine's launches.
    """

    def __init__(self, folder: EngineFolder, check: Callable[[int], None], mark: Mark) -> None:
        manifest, path = folder.manifest, folder.weights_path
        self.gpu = Gpu()
        self._kernels = _Kernels(self.gpu)
        self._open = 0
        try:
            _check_size(manifest.target, self.gpu.multiprocessors)
            check(self.gpu.free_bytes)
            mark("device")
            digests = partial(folder.check_chunk, WEIGHTS)
            self._weights = upload_file(self.gpu, path, CHUNK_BYTES, digests)
            mark("weights")
            self.weights = {k: self._weights + e.offset for k, e in read_index(path).items()}
            self.states = DeviceStates(self.gpu, manifest.states)
            self.tables = DeviceTables(self.gpu, manifest.tables)
            self.arena_bytes = max(b.arena_bytes for b in manifest.buckets)
            self.arena = zeros(self.gpu, self.arena_bytes)
            self.gpu.wait()
            mark("memory")
        except BaseException:
            self.gpu.close()
            raise

    def open(
        self, header: EngineHeader, payload: bytes, folder: Path, threads: int
    ) -> NativeExecutor:
        """A bucket, captured; also one of another payload, beside those of the manifest.

        Raises EngineError when the payload is not what it should be, or wants more scratch memory
        than the manifest's buckets.
        """
        self.gpu.use()
        self._open += 1
        try:
            return NativeExecutor(self, header, payload)
        except BaseException:
            self.release()
            raise

    def function(self, cubin: bytes, symbol: str, shared: int) -> Function:
        """A kernel of a cubin, allowed `shared` bytes of dynamic shared memory."""
        return self._kernels.find(cubin, symbol, shared)

    def release(self) -> None:
        """One executor was closed; the last one takes the device's memory with it."""
        self._open -= 1
        if self._open:
            return
        self.gpu.use()
        shared = (self._weights, self.arena)
        for address in (*shared, *self.states.addresses.values(), *self.tables.addresses.values()):
            self.gpu.free(address)
        self.gpu.close()


def _check_size(target: str, multiprocessors: int) -> None:
    """Blocks of one launch wait for one another, so all of them must run at once."""
    wanted = TARGETS[target].sms if target in TARGETS else 0
    if multiprocessors < wanted:
        raise EngineError(
            f"an engine for {target} launches {wanted} blocks that wait for one another, and this "
            f"GPU has {multiprocessors} multiprocessors: use a whole GPU of that kind (no MIG "
            "slice), or rebuild with --target cpu"
        )


class _Kernels:
    """The kernels of all buckets. What several buckets hold is loaded once."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._modules: dict[bytes, Any] = {}
        self._found: dict[tuple[bytes, str], tuple[Function, int]] = {}

    def find(self, cubin: bytes, symbol: str, shared: int) -> Function:
        """The kernel, allowed at least `shared` bytes, and what any bucket asked before."""
        digest = hashlib.sha256(cubin).digest()
        if digest not in self._modules:
            self._modules[digest] = self._gpu.module(cubin)
        key = digest, symbol
        if key not in self._found:
            self._found[key] = self._gpu.function(self._modules[digest], symbol), 0
        function, allowed = self._found[key]
        if shared > allowed:
            self._gpu.allow_shared(function, shared)
            self._found[key] = function, shared
        return function


@dataclass(frozen=True)
class _Field:
    """A tensor inside a packed stretch of memory."""

    spec: TensorSpec
    offset: int

    def view(self, block: Bytes) -> Array:
        """The tensor inside `block`."""
        part: Array = block[self.offset : self.offset + self.spec.nbytes]
        return part.view(self.spec.dtype.numpy).reshape(self.spec.dims)


@dataclass(frozen=True)
class _Staging:
    """Pinned copies of one set of host buffers, and when their last launch is done."""

    buffers: Mapping[str, Array]
    steps: Bytes
    outputs: Bytes
    done: Event
    fed: tuple[tuple[str, Array], ...]  # views of `steps`
    read: tuple[tuple[str, Array], ...]  # views of `outputs`


@dataclass(frozen=True)
class Queued:
    """One launch of a bucket: its node and kernel; `queue` puts it on the stream by itself."""

    node: str
    symbol: str
    queue: Callable[[], None]


class NativeExecutor:
    """One bucket: a CUDA graph over the engine's memory."""

    def __init__(self, engine: NativeEngine, header: EngineHeader, payload: bytes) -> None:
        self._engine, self._gpu = engine, engine.gpu
        self._specs = Specs(header.inputs, header.states, header.outputs)
        self._label = f"{header.family} {header.rows}"
        self._staged: list[_Staging] = []
        tables = engine.tables.addresses
        steps = [s for s in header.inputs if s.name not in tables]
        narrow = [s for s in header.outputs if unit_bytes(s) <= WIDE]
        self._steps, step_bytes = _lay_out(steps)
        self._outputs, output_bytes = _lay_out(narrow)
        wide = {s.name: s for s in header.outputs if s not in narrow}
        self._sizes = step_bytes, output_bytes
        self._step_block = zeros(self._gpu, step_bytes)
        self._output_block = zeros(self._gpu, output_bytes)
        self._wide = {name: (zeros(self._gpu, s.nbytes), s) for name, s in wide.items()}
        self._owned = [self._step_block, self._output_block, *(a for a, _ in self._wide.values())]
        self._zeroed: int | None = None
        try:
            self._graph = self._capture(payload)
        except (KeyError, ValueError, TypeError, IndexError) as error:
            raise EngineError(
                f"the {self._label} bucket's launches are not readable ({error!r}); rebuild the "
                "engine with spark-build"
            ) from error
        self._open = True

    @property
    def specs(self) -> Specs:
        """The buffers `run` expects."""
        return self._specs

    @property
    def gpu(self) -> Gpu:
        """The device that the bucket runs on."""
        return self._gpu

    def launches(self, payload: bytes) -> list[Queued]:
        """The launches of the payload that the bucket was opened with, in order, for measurement.

        Queued one after the other they are a step over the inputs of the last one; states move on.
        """
        self._gpu.use()
        program = Program.read(payload)
        if self._zeroed is None:
            self._zeroed = zeros(self._gpu, program.zeroed_bytes)
            self._owned.append(self._zeroed)
        kernels = [self._engine.function(k.cubin, k.symbol, k.shared) for k in program.kernels]
        queued = []
        for record in program.launches:
            args = [self._value(arg, self._zeroed) for arg in record.args]
            queue = self._gpu.prepare(kernels[record.kernel], record.shape, args)
            queued.append(Queued(record.node, program.kernels[record.kernel].symbol, queue))
        return queued

    def address(self, place: Operand) -> int:
        """Where an argument of a launch lies on the device."""
        return self._address(*place, self._zeroed or 0)

    def run(self, buffers: Mapping[str, Array]) -> None:
        """One step to its end; every output is copied.

        States that `buffers` holds are brought to the device before and fetched after.
        """
        self._gpu.use()
        states = [s for s in self._specs.states if s.name in buffers]
        for spec in states:
            self._gpu.upload(self._engine.states.addresses[spec.name], buffers[spec.name])
        self._engine.tables.write_all(buffers)
        self.launch(buffers)()
        for spec in states:
            self._gpu.download(buffers[spec.name], self._engine.states.addresses[spec.name])
        for name, (address, _) in self._wide.items():
            self._gpu.download(buffers[name], address)
        self._gpu.wait()

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        """Queues the step; the wait copies what was read into `buffers`.

        One copy up, one graph, one copy down, one event: nothing here allocates or waits. Tables
        are those last written to `NativeEngine.tables`.
        """
        if not self._open:
            raise ExecutorError(f"{self._label} was closed")
        self._gpu.use()
        staging = self._staging(buffers)
        for name, view in staging.fed:
            view[...] = buffers[name]
        self._gpu.upload(self._step_block, staging.steps)
        self._gpu.replay(self._graph)
        self._gpu.download(staging.outputs, self._output_block)
        self._gpu.record(staging.done)

        def wait() -> None:
            self._gpu.use()
            self._gpu.wait_for(staging.done)
            for name, view in staging.read:
                buffers[name][...] = view

        return wait

    def close(self) -> None:
        """Frees the bucket's own memory. May be called twice."""
        if not self._open:
            return
        self._open = False
        self._gpu.use()
        self._gpu.wait()
        self._gpu.destroy_graph(self._graph)
        for address in self._owned:
            self._gpu.free(address)
        self._engine.release()

    def _staging(self, buffers: Mapping[str, Array]) -> _Staging:
        for known in self._staged:
            if known.buffers is buffers:
                return known
        self._check(buffers)
        if len(self._staged) == MAX_STAGED:
            oldest = self._staged.pop(0)
            self._gpu.wait_for(oldest.done)
            steps, outputs, done = oldest.steps, oldest.outputs, oldest.done
        else:
            steps, outputs = (self._gpu.pinned(n) for n in self._sizes)
            done = self._gpu.event()
        fed = tuple((f.spec.name, f.view(steps)) for f in self._steps)
        read = tuple((f.spec.name, f.view(outputs)) for f in self._outputs)
        made = _Staging(buffers, steps, outputs, done, fed, read)
        self._staged.append(made)
        return made

    def _check(self, buffers: Mapping[str, Array]) -> None:
        for spec in (*self._specs.inputs, *self._specs.outputs):
            array = buffers.get(spec.name)
            if array is None or (array.dtype, array.shape) != (spec.dtype.numpy, spec.dims):
                found = "missing" if array is None else f"{array.dtype}{array.shape}"
                raise ExecutorError(
                    f"buffer {spec.name} is {found}, wanted {spec.dtype}{spec.dims}"
                )
            if not array.flags.c_contiguous:
                raise ExecutorError(f"buffer {spec.name} is not contiguous")

    def _capture(self, payload: bytes) -> Any:
        """Loads the cubins, runs every launch once over inert rows, and records them."""
        wanted = Program.read(payload).arena_bytes
        if wanted > self._engine.arena_bytes:
            raise EngineError(
                f"the {self._label} bucket wants {wanted} bytes of scratch memory, "
                f"the engine has {self._engine.arena_bytes}; rebuild the engine with spark-build"
            )
        launches = self.launches(payload)
        self._fill_inert()
        for launch in launches:
            launch.queue()
        self._gpu.wait()
        self._gpu.begin_capture()
        for launch in launches:
            launch.queue()
        return self._gpu.end_capture()

    def _fill_inert(self) -> None:
        for field in self._steps:
            byte = 0xFF if field.spec.name == "slots" else 0
            self._gpu.fill(self._step_block + field.offset, byte, field.spec.nbytes)

    def _value(self, arg: Operand, zeroed: int) -> int | float:
        """A number as it is, and a place in memory as its address."""
        kind, value = arg
        number: int | float = value
        return number if kind in NUMBERS else self._address(kind, value, zeroed)

    def _address(self, kind: str, value: Any, zeroed: int) -> int:
        if kind == "arena":
            return self._engine.arena + int(value)
        if kind == "zeroed":
            return zeroed + int(value)
        if kind == "weight":
            return self._engine.weights[value]
        if kind == "state":
            return self._engine.states.addresses[value]
        if kind == "input" and value in self._engine.tables.addresses:
            return self._engine.tables.addresses[value]
        fields, block = {
            "input": (self._steps, self._step_block),
            "output": (self._outputs, self._output_block),
        }[kind]
        for field in fields:
            if field.spec.name == value:
                return block + field.offset
        return self._wide[value][0]


def _lay_out(specs: Iterable[TensorSpec]) -> tuple[tuple[_Field, ...], int]:
    """Places for the tensors one after the other, and the bytes of all."""
    fields, at = [], 0
    for spec in specs:
        fields.append(_Field(spec, at))
        at += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(fields), max(at, ALIGNMENT)
