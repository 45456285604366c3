"""Parses a native bucket's payload (docs/engine_file.md): kernels and their launches.

Knows the byte format and rejects invalid launches; knows no device and no address.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from spark_engine.kernel import Shape

Natural = Annotated[int, Meta(ge=0, le=1 << 48)]
Blocks = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]
Few = Annotated[int, Meta(ge=1, le=1024)]
Shared = Annotated[int, Meta(ge=0, le=1 << 20)]
Arg = tuple[str | int | float, ...]
T = TypeVar("T")


class KernelEntry(NamedTuple):
    """An entry of a cubin, and the largest dynamic shared memory of its launches; without a cubin,
    the NCCL call of that name."""

    cubin: bytes | None
    symbol: str
    shared: int


class MemoryOperand(NamedTuple):
    """An operand in memory: `nbytes` from `offset` of the memory that `kind` and `name` identify.

    The kinds "arena", "zeroed" and "symmetric" (this rank's region that other ranks read) have an
    offset and no name. The kind "peers" (the addresses of all ranks' regions) has neither. The
    other kinds have a name and no offset.
    """

    kind: str
    name: str = ""
    offset: int = 0
    nbytes: int = 0


class ScalarOperand(NamedTuple):
    """An operand by value; `kind` as in `kernel.Scalar`."""

    kind: str
    value: int | float


@dataclass(frozen=True)
class RankOperand:
    """The number of the launching rank, an i32."""


Operand = MemoryOperand | ScalarOperand | RankOperand


class LaunchRecord(NamedTuple):
    """One launch: the graph's node, the kernel's index, the launch geometry and the operands."""

    node: str
    kernel: int
    shape: Shape
    args: tuple[Operand, ...]
    resident: bool


@dataclass(frozen=True)
class Program:
    """A bucket's launches in order, and the sizes of the scratch memory that they share;
    `symmetric_bytes` is at the same offset in every rank.

    `places`: memory of the tensors between nodes, for callers that run single nodes. `operands`:
    those of the launches, each once; equal ones are one object.
    """

    kernels: tuple[KernelEntry, ...]
    launches: tuple[LaunchRecord, ...]
    arena_bytes: int
    zeroed_bytes: int
    places: Mapping[str, MemoryOperand]
    symmetric_bytes: int = 0
    operands: tuple[Operand, ...] = ()

    @classmethod
    def read(cls, payload: bytes, places: bool = True) -> Program:
        """Raises ValueError if the bytes are not a program, or an operand exceeds its memory.
        Without `places` these are left out."""
        length = int.from_bytes(payload[:8], "little")
        try:
            body = msgspec.json.decode(payload[8 : 8 + length], type=_Whole if places else _Body)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error
        ends = list(accumulate(body.cubins, initial=8 + length))
        if ends[-1] != len(payload):
            raise ValueError(f"{ends[-1]} bytes of payload expected, {len(payload)} found")
        cubins = [payload[start:end] for start, end in pairwise(ends)]
        kernels = (_kernel(row, cubins) for row in body.kernels)
        operands = _Operands({kind: getattr(body, f"{kind}_bytes") for kind in _BY_OFFSET})
        for row in body.launches:
            _pick(body.kernels, row.kernel)
        launches = tuple(map(operands.record, body.launches))
        found = tuple(operand for operand, _ in operands.known.values())
        named = body.places.items() if isinstance(body, _Whole) else ()
        at = {name: operands.place(arg) for name, arg in named}
        scratch = body.arena_bytes, body.zeroed_bytes
        return cls(tuple(kernels), launches, *scratch, at, body.symmetric_bytes, found)


class _KernelRow(msgspec.Struct):
    cubin: Natural | None
    symbol: str
    shared: Shared


class _LaunchRow(msgspec.Struct):
    node: str
    kernel: Natural
    grid: tuple[Blocks, Blocks, Blocks]
    block: tuple[Few, Few, Few]
    cluster: tuple[Few, Few, Few]
    shared: Shared
    pdl: bool
    resident: bool
    args: list[Arg]


class _Body(msgspec.Struct):
    arena_bytes: Natural
    zeroed_bytes: Natural
    cubins: list[Natural]
    kernels: list[_KernelRow]
    launches: list[_LaunchRow]
    symmetric_bytes: Natural = 0


class _Whole(_Body):
    places: dict[str, Arg] = {}


_BY_OFFSET = ("arena", "zeroed", "symmetric")
PEERS = "peers"
CALLS = ("all_gather", "all_reduce")  # of NCCL; "all_reduce" sums bf16
_BY_NAME = ("weight", "state", "input", "output")
_BITS = {"i32": 32, "i64": 64}
MOST_F32 = 3.4028235e38


def _kernel(row: _KernelRow, cubins: list[bytes]) -> KernelEntry:
    cubin = None if row.cubin is None else _pick(cubins, row.cubin)
    if cubin is None and row.symbol not in CALLS:
        raise ValueError(f"{row.symbol!r} is not an NCCL call that this version supports")
    return KernelEntry(cubin, row.symbol, row.shared)


class _Operands:
    """The operands and shapes of one program, within memory of these `sizes`; equal ones are one
    object, since most of a bucket's thousands occur several times."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self.known: dict[Arg, tuple[Operand, str]] = {}  # with its kind
        self._shapes: dict[tuple[Any, ...], Shape] = {}

    def record(self, row: _LaunchRow) -> LaunchRecord:
        known = self.known
        found = [known.get(arg) or self._find(arg) for arg in row.args]
        args, kinds = zip(*found, strict=True) if found else ((), ())
        key = (row.grid, row.block, kinds, row.shared, row.cluster, row.pdl)
        shape = self._shapes.get(key) or self._shapes.setdefault(key, Shape(*key))
        return LaunchRecord(row.node, row.kernel, shape, args, row.resident)

    def _find(self, arg: Arg) -> tuple[Operand, str]:
        found = self.known[arg] = operand, _ = _operand(arg)
        if isinstance(operand, MemoryOperand) and operand.kind in _BY_OFFSET:
            first, size = operand.offset, self._sizes[operand.kind]
            end = first + operand.nbytes
            if not 0 <= first <= end <= size:
                where = f"{first}:{end} of {size} bytes"
                raise ValueError(f"an operand is at {where} of the {operand.kind} memory")
        return found

    def place(self, arg: Arg) -> MemoryOperand:
        place, _ = self.known.get(arg) or self._find(arg)
        if not isinstance(place, MemoryOperand):
            raise ValueError(f"{arg!r} is not a memory operand")
        return place


@lru_cache(1 << 16)  # most are the same in all buckets of an engine
def _operand(arg: Arg) -> tuple[Operand, str]:
    """The operand, and its kind as `Shape.kinds` has it."""
    match arg:
        case [str(kind), str(name)] if kind in _BY_NAME:
            return MemoryOperand(kind, name), "address"
        case [str(kind), offset, nbytes] if kind in _BY_OFFSET and _are_ints(offset, nbytes):
            return MemoryOperand(kind, "", int(offset), int(nbytes)), "address"
        case ["peers"]:
            return MemoryOperand(PEERS), "address"
        case ["rank"]:
            return RankOperand(), "i32"
        case [str(kind), int(value)] if kind in _BITS:
            if not -(1 << _BITS[kind] - 1) <= value < 1 << _BITS[kind] - 1:
                raise ValueError(f"{value} is not of type {kind}")
            return ScalarOperand(kind, value), kind
        case ["f32", int(value) | float(value)] if abs(value) <= MOST_F32:
            return ScalarOperand("f32", value), "f32"
    raise ValueError(f"{arg!r} is not an operand")


def _are_ints(*values: object) -> bool:
    return all(type(value) is int for value in values)


def _pick(rows: list[T], index: int) -> T:
    if index >= len(rows):
        raise ValueError(f"index {index} is outside {len(rows)} rows")
    return rows[index]
