"""`weights.safetensors`: all weights of an engine, written one by one, read by mapping.

Knows the safetensors format (8-byte header length, JSON header, data without holes) and that
every tensor of ours starts on a 64-byte boundary of the file; knows nothing about what the
tensors mean. Holes between tensors are filled by U8 tensors named `.pad.{offset}`, because the
format allows none.
"""

import json
import mmap
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Event

import numpy as np

from spark_engine.errors import EngineError, InternalError
from spark_engine.tensors import Array, DType, TensorSpec

ALIGNMENT = 64  # bytes; one cache line, and what vector loads of every executor need
PAD = ".pad."
IN_FLIGHT = 12 << 30  # bytes that a parallel write may hold at once
COPIES = 3  # arrays of a tensor's size alive while it is made: parts, whole, packed

_DTYPES = {dtype.safetensors: dtype for dtype in DType}


@dataclass(frozen=True)
class WeightEntry:
    """Where one tensor's bytes are; `offset` counts from the start of the file."""

    spec: TensorSpec
    offset: int


@dataclass(frozen=True)
class WeightLayout:
    """The whole file but its data: the header's bytes, each tensor's place, the length."""

    header: bytes
    entries: Mapping[str, WeightEntry]
    total: int  # bytes of the file


def plan_weights(specs: Sequence[TensorSpec]) -> WeightLayout:
    """Places every tensor in the order given, each on a 64-byte boundary.

    Raises InternalError when two tensors share a name or a name is reserved for padding.
    """
    _check_names(specs)
    rows: dict[str, object] = {}
    places: list[tuple[TensorSpec, int]] = []
    end = 0
    for spec in specs:
        start = _align(end)
        if start > end:
            rows[f"{PAD}{end}"] = _row("U8", (start - end,), end, start)
        end = start + spec.nbytes
        rows[spec.name] = _row(spec.dtype.safetensors, spec.dims, start, end)
        places.append((spec, start))
    header = _header(rows)
    entries = {spec.name: WeightEntry(spec, len(header) + at) for spec, at in places}
    return WeightLayout(header, entries, len(header) + end)


def fill_weights(
    path: Path,
    layout: WeightLayout,
    make: Callable[[str], Array],
    workers: int,
    in_flight: int = IN_FLIGHT,
) -> None:
    """Writes the file by `workers` threads, each making a tensor and writing it in its place.

    The largest come first. A tensor is started when it fits `in_flight` bytes together with those
    in work, each counted `COPIES` times, or when none is in work. Raises what `make` raises,
    and InternalError when an array's dtype or shape is not what the layout says.
    """
    budget, failed = _Budget(in_flight), Event()
    with path.open("wb") as file, ThreadPoolExecutor(workers, "weights", _yield) as pool:
        file.truncate(layout.total)
        handle = file.fileno()
        _write_at(handle, memoryview(layout.header), 0)

        def work(entry: WeightEntry, taken: int) -> None:
            try:
                if failed.is_set():
                    return
                array = make(entry.spec.name)
                _check_array(entry.spec, array)
                flat = np.ascontiguousarray(array).reshape(-1)
                _write_at(handle, flat.view(np.uint8).data, entry.offset)
            except BaseException:
                failed.set()
                raise
            finally:
                budget.give(taken)

        futures: list[Future[None]] = []
        try:
            for entry in sorted(layout.entries.values(), key=lambda e: (-e.spec.nbytes, e.offset)):
                taken = budget.take(COPIES * entry.spec.nbytes)
                if failed.is_set():
                    break
                futures.append(pool.submit(work, entry, taken))
            for future in futures:
                future.result()
        except BaseException:  # a signal too: what is started is completed, the rest is left
            failed.set()
            raise


def _yield() -> None:
    """Lets what else a build does meanwhile have the cores first: that is waited for."""
    if sys.platform == "linux":  # elsewhere it would be of the whole process
        os.setpriority(os.PRIO_PROCESS, 0, 10)


class _Budget:
    """Bytes that threads may hold together; a need beyond all of it gets all of it."""

    def __init__(self, total: int) -> None:
        self._total = self._left = total
        self._changed = Condition()

    def take(self, need: int) -> int:
        """Waits for the bytes; returns how many were taken."""
        need = min(need, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= need)
            self._left -= need
        return need

    def give(self, taken: int) -> None:
        with self._changed:
            self._left += taken
            self._changed.notify_all()


def _write_at(handle: int, data: memoryview, offset: int) -> None:
    """All of `data` from `offset` on; one call of the system writes at most 2 GiB."""
    while len(data):
        done = os.pwrite(handle, data, offset)
        data, offset = data[done:], offset + done


def read_index(path: Path) -> dict[str, WeightEntry]:
    """Every tensor's place, padding left out. Raises EngineError on a malformed file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            size = path.stat().st_size
            if length > size:
                raise ValueError(f"header of {length} bytes in a file of {size}")
            rows = json.loads(file.read(length))
        named = {k: v for k, v in rows.items() if k != "__metadata__" and not k.startswith(PAD)}
        return {name: _entry(name, row, 8 + length, size) for name, row in named.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} is not a readable safetensors file ({error}); rebuild with spark-build"
        raise EngineError(message) from error


def map_weights(path: Path) -> dict[str, Array]:
    """Every tensor as a read-only array over the mapped file; nothing is copied.

    Raises EngineError on a malformed file.
    """
    index = read_index(path)
    if not index:
        return {}
    with path.open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return {name: _view(data, entry) for name, entry in index.items()}


def _view(data: mmap.mmap, entry: WeightEntry) -> Array:
    spec = entry.spec
    raw = np.frombuffer(data, np.uint8, spec.nbytes, entry.offset)
    view: Array = raw.view(spec.dtype.numpy).reshape(spec.dims)
    return view


def _entry(name: str, row: Mapping[str, object], base: int, size: int) -> WeightEntry:
    offsets, shape = row["data_offsets"], row["shape"]
    if not isinstance(offsets, list) or not isinstance(shape, list):
        raise ValueError(f"tensor {name} has shape {shape} and offsets {offsets}")
    start, end = (int(v) for v in offsets)
    spec = TensorSpec(name, _DTYPES[str(row["dtype"])], tuple(int(d) for d in shape))
    if start < 0 or end - start != spec.nbytes or base + end > size:
        raise ValueError(f"tensor {name} is at {start}:{end} of {size - base} bytes")
    return WeightEntry(spec, base + start)


def _header(rows: Mapping[str, object]) -> bytes:
    """Length and JSON, filled with spaces up to the alignment, as the format allows."""
    text = json.dumps(rows, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (_align(8 + len(text)) - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


def _row(dtype: str, shape: Sequence[int], start: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _check_names(specs: Sequence[TensorSpec]) -> None:
    counts = Counter(s.name for s in specs)
    reserved = {n for n in counts if n.startswith(PAD) or n == "__metadata__"}
    twice = reserved | {n for n, count in counts.items() if count > 1}
    if twice:
        raise InternalError(f"weight names used twice or reserved: {sorted(twice)}")


def _check_array(spec: TensorSpec, array: Array) -> None:
    if array.dtype != spec.dtype.numpy or array.shape != spec.dims:
        raise InternalError(
            f"weight {spec.name} is {array.dtype}{array.shape}, planned {spec.dtype}{spec.dims}"
        )
