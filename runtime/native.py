"""The native executor: cubins and launch records, replayed as one CUDA graph per bucket.

Knows the payload of docs/engine_file.md and no op. One `NativeEngine` owns the device for all
buckets of an engine: weights, states, tables and the arena exist once. Buckets run in the order of
their launch on one stream, so they may share every byte.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spark_engine.engine_file import EngineFolder, EngineHeader
from spark_engine.errors import EngineError, ExecutorError
from spark_engine.kernel import Arg, Launch, Pointer, Scalar
from spark_engine.manifest import StateInfo
from spark_engine.runtime.device import Event, Gpu, upload_file
from spark_engine.runtime.executor import WIDE, Specs, Wait
from spark_engine.runtime.memory import Snapshot
from spark_engine.tensors import Array, TensorSpec
from spark_engine.weights_file import read_index

ALIGNMENT = 256
MAX_STAGED = 4  # sets of host buffers remembered by a bucket; an engine has one or two
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class DeviceStates:
    """The states of an engine in device memory."""

    def __init__(self, gpu: Gpu, states: Iterable[StateInfo]) -> None:
        self.arrays: Mapping[str, Array] = {}
        self._gpu = gpu
        self._infos = tuple(states)
        self.addresses = {i.spec.name: _zeros(gpu, i.spec.nbytes) for i in self._infos}

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's rows over all states."""
        return sum(_unit_bytes(i.spec) for i in self._infos if i.unit == "slot")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all states."""
        return sum(_unit_bytes(i.spec) for i in self._infos if i.unit == "page")

    def save(self, slot: int, pages: Iterable[int]) -> Snapshot:
        """Copies one sequence's slot rows and pages, after every launch so far."""
        self._gpu.use()
        where = list(pages)
        kept: dict[str, dict[str, Array]] = {"slot": {}, "page": {}}
        for info in self._infos:
            spec, units = info.spec, [slot] if info.unit == "slot" else where
            array = np.empty((len(units), *spec.dims[1:]), spec.dtype.numpy)
            for i, unit in enumerate(units):
                self._gpu.download(array[i : i + 1], self._at(spec, unit))
            kept[info.unit][spec.name] = array
        self._gpu.wait()
        rows = {name: array.reshape(array.shape[1:]) for name, array in kept["slot"].items()}
        return Snapshot(rows, kept["page"])

    def restore(self, snapshot: Snapshot, slot: int, pages: Iterable[int]) -> None:
        """Writes a snapshot into a slot and as many pages as were saved."""
        self._gpu.use()
        where = list(pages)
        for info in self._infos:
            spec = info.spec
            if info.unit == "slot":
                self._gpu.upload(self._at(spec, slot), snapshot.rows[spec.name])
                continue
            for saved, page in zip(snapshot.pages[spec.name], where, strict=True):
                self._gpu.upload(self._at(spec, page), saved)
        self._gpu.wait()

    def _at(self, spec: TensorSpec, unit: int) -> int:
        return self.addresses[spec.name] + unit * _unit_bytes(spec)


class Tables:
    """The tables in device memory, and what they hold there, to copy only what changed."""

    def __init__(self, gpu: Gpu, specs: Iterable[TensorSpec]) -> None:
        self._gpu = gpu
        self.addresses: dict[str, int] = {}
        self._held: dict[str, Bytes] = {}
        for spec in specs:
            self.addresses[spec.name] = _zeros(gpu, spec.nbytes)
            self._held[spec.name] = gpu.pinned(spec.nbytes)
            self._held[spec.name].fill(0)
        self._copied = gpu.event()

    def update(self, buffers: Mapping[str, Array]) -> None:
        """Queues copies of the tables that differ from what the device holds."""
        stale = [n for n, held in self._held.items() if not _same(held, _raw(buffers[n]))]
        if not stale:
            return
        self._gpu.wait_for(self._copied)  # the staging memory may still be read
        for name in stale:
            self._held[name][:] = _raw(buffers[name])
            self._gpu.upload(self.addresses[name], self._held[name])
        self._gpu.record(self._copied)


class NativeEngine:
    """The device's owner: what all buckets of one engine share.

    `check` is given the free bytes of the device before anything is allocated, and raises when
    the engine does not fit.
    """

    def __init__(self, folder: EngineFolder, check: Callable[[int], None]) -> None:
        manifest = folder.manifest
        self.gpu = Gpu()
        check(self.gpu.free_bytes)
        path = folder.weights_path
        self._weights = upload_file(self.gpu, path)
        self.weights = {k: self._weights + e.offset for k, e in read_index(path).items()}
        self.states = DeviceStates(self.gpu, manifest.states)
        self.tables = Tables(self.gpu, manifest.tables)
        self.arena = self.gpu.allocate(max(b.arena_bytes for b in manifest.buckets))
        self._open = 0

    def open(
        self, header: EngineHeader, payload: bytes, folder: Path, threads: int
    ) -> NativeExecutor:
        """A bucket, captured. Raises EngineError when the payload is not what it should be."""
        self.gpu.use()
        self._open += 1
        return NativeExecutor(self, header, payload)

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


class NativeExecutor:
    """One bucket: a CUDA graph over the engine's memory."""

    def __init__(self, engine: NativeEngine, header: EngineHeader, payload: bytes) -> None:
        self._engine, self._gpu = engine, engine.gpu
        self._specs = Specs(header.inputs, header.states, header.outputs)
        self._label = f"{header.family} {header.rows}"
        self._staged: list[_Staging] = []
        tables = engine.tables.addresses
        steps = [s for s in header.inputs if s.name not in tables]
        narrow = [s for s in header.outputs if _unit_bytes(s) <= WIDE]
        self._steps, step_bytes = _lay_out(steps)
        self._outputs, output_bytes = _lay_out(narrow)
        wide = {s.name: s for s in header.outputs if s not in narrow}
        self._sizes = step_bytes, output_bytes
        self._step_block = _zeros(self._gpu, step_bytes)
        self._output_block = _zeros(self._gpu, output_bytes)
        self._wide = {name: (_zeros(self._gpu, s.nbytes), s) for name, s in wide.items()}
        self._owned = [self._step_block, self._output_block, *(a for a, _ in self._wide.values())]
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

    def run(self, buffers: Mapping[str, Array]) -> None:
        """One step to its end; every output is copied.

        States that `buffers` holds are brought to the device before and fetched after.
        """
        self._gpu.use()
        states = [s for s in self._specs.states if s.name in buffers]
        for spec in states:
            self._gpu.upload(self._engine.states.addresses[spec.name], buffers[spec.name])
        self.launch(buffers)()
        for spec in states:
            self._gpu.download(buffers[spec.name], self._engine.states.addresses[spec.name])
        for name, (address, _) in self._wide.items():
            self._gpu.download(buffers[name], address)
        self._gpu.wait()

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        """Queues the step; the wait copies what was read into `buffers`."""
        if not self._open:
            raise ExecutorError(f"{self._label} was closed")
        self._gpu.use()
        staging = self._staging(buffers)
        for field in self._steps:
            field.view(staging.steps)[...] = buffers[field.spec.name]
        self._engine.tables.update(buffers)
        self._gpu.upload(self._step_block, staging.steps)
        self._gpu.replay(self._graph)
        self._gpu.download(staging.outputs, self._output_block)
        self._gpu.record(staging.done)

        def wait() -> None:
            self._gpu.use()
            self._gpu.wait_for(staging.done)
            for field in self._outputs:
                buffers[field.spec.name][...] = field.view(staging.outputs)

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
            made = _Staging(buffers, oldest.steps, oldest.outputs, oldest.done)
        else:
            steps, outputs = (self._gpu.pinned(n) for n in self._sizes)
            made = _Staging(buffers, steps, outputs, self._gpu.event())
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
        length = int.from_bytes(payload[:8], "little")
        body = json.loads(payload[8 : 8 + length])
        functions = _functions(self._gpu, body, payload[8 + length :])
        zeroed = _zeros(self._gpu, body["zeroed_bytes"])
        self._owned.append(zeroed)
        launches = [self._resolve(row, zeroed) for row in body["launches"]]
        self._fill_inert()
        for captured in (False, True):
            if captured:
                self._gpu.wait()
                self._gpu.begin_capture()
            for row, (launch, args) in zip(body["launches"], launches, strict=True):
                self._gpu.launch(functions[row["kernel"]], launch, args)
        return self._gpu.end_capture()

    def _fill_inert(self) -> None:
        for field in self._steps:
            byte = 0xFF if field.spec.name == "slots" else 0
            self._gpu.fill(self._step_block + field.offset, byte, field.spec.nbytes)

    def _resolve(self, row: Mapping[str, Any], zeroed: int) -> tuple[Launch, list[int | float]]:
        """A launch record with addresses in place of names."""
        args: list[Arg] = []
        values: list[int | float] = []
        for kind, value in row["args"]:
            if kind in ("i32", "i64", "f32"):
                args.append(Scalar(kind, value))
                values.append(value)
            else:
                args.append(Pointer("input", 0))
                values.append(self._address(kind, value, zeroed))
        x, y, z = row["grid"]
        bx, by, bz = row["block"]
        cx, cy, cz = row["cluster"]
        launch = Launch(
            "", (x, y, z), (bx, by, bz), tuple(args), row["shared"], (cx, cy, cz), (),
            row["overlaps"],
        )  # fmt: skip
        return launch, values

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


def _functions(gpu: Gpu, body: Mapping[str, Any], images: bytes) -> list[Any]:
    """The kernels by number."""
    ends = np.cumsum(body["cubins"], dtype=np.int64).tolist()
    starts = [0, *ends[:-1]]
    cubins = [images[a:b] for a, b in zip(starts, ends, strict=True)]
    rows = body["kernels"]
    found: dict[tuple[int, str], Any] = {}
    for index, cubin in enumerate(cubins):
        shared = {r["symbol"]: r["shared"] for r in rows if r["cubin"] == index}
        for symbol, function in gpu.load(cubin, list(shared)).items():
            gpu.allow_shared(function, shared[symbol])
            found[index, symbol] = function
    return [found[r["cubin"], r["symbol"]] for r in rows]


def _lay_out(specs: Iterable[TensorSpec]) -> tuple[tuple[_Field, ...], int]:
    """Places for the tensors one after the other, and the bytes of all."""
    fields, at = [], 0
    for spec in specs:
        fields.append(_Field(spec, at))
        at += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(fields), max(at, ALIGNMENT)


def _zeros(gpu: Gpu, nbytes: int) -> int:
    address = gpu.allocate(nbytes)
    gpu.fill(address, 0, max(nbytes, 1))
    return address


def _unit_bytes(spec: TensorSpec) -> int:
    """Bytes of one row of axis 0."""
    return spec.nbytes // max(spec.dims[0], 1)


def _raw(array: Array) -> Bytes:
    return array.reshape(-1).view(np.uint8)


def _same(a: Bytes, b: Bytes) -> bool:
    """Whether two stretches of four-byte elements are equal, compared eight bytes at a time."""
    if len(a) % 8 == 0:
        return bool(np.array_equal(a.view(np.int64), b.view(np.int64)))
    return bool(np.array_equal(a.view(np.int32), b.view(np.int32)))
