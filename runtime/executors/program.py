"""Parses a native bucket's payload (docs/engine_file.md): kernels and their launches.

Knows the byte format and rejects invalid launches; knows no device and no address.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Annotated, NamedTuple, TypeVar

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
    """One launch: the graph's node, the kernel's index, the launch geometry, without kinds, and the
    indices of the operands."""

    node: str
    kernel: int
    shape: Shape
    args: list[int]
    resident: bool


@dataclass(frozen=True)
class Program:
    """A bucket's launches in order, and the sizes of the scratch memory that they share;
    `symmetric_bytes` is at the same offset in every rank.

    `places`: memory of the tensors between nodes, for callers that run single nodes. `operands`:
    those of the launches, each once; `kinds`: theirs, as `Shape.kinds` has them.
    """

    kernels: tuple[KernelEntry, ...]
    launches: tuple[LaunchRecord, ...]
    arena_bytes: int
    zeroed_bytes: int
    places: Mapping[str, MemoryOperand]
    symmetric_bytes: int = 0
    operands: tuple[Operand, ...] = ()
    kinds: tuple[str, ...] = ()

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
        kernels = tuple(_kernel(row, cubins) for row in body.kernels)
        sizes = {kind: getattr(body, f"{kind}_bytes") for kind in _BY_OFFSET}
        found = [_operand(arg) for arg in body.operands]
        operands = tuple(operand for operand, _ in found)
        named = body.places.items() if isinstance(body, _Whole) else ()
        at = {name: _place(arg) for name, arg in named}
        for operand in (*operands, *at.values()):
            _check_inside(operand, sizes)
        for row in body.launches:
            _pick(body.kernels, row.kernel)
            if row.args:
                _pick(operands, max(row.args))
        launches = tuple(map(_record, body.launches))
        scratch = body.arena_bytes, body.zeroed_bytes
        kinds = tuple(kind for _, kind in found)
        return cls(kernels, launches, *scratch, at, body.symmetric_bytes, operands, kinds)


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
    args: list[Natural]


class _Body(msgspec.Struct):
    arena_bytes: Natural
    zeroed_bytes: Natural
    cubins: list[Natural]
    kernels: list[_KernelRow]
    launches: list[_LaunchRow]
    operands: list[Arg]
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


def _record(row: _LaunchRow) -> LaunchRecord:
    shape = Shape(row.grid, row.block, (), row.shared, row.cluster, row.pdl)
    return LaunchRecord(row.node, row.kernel, shape, row.args, row.resident)


def _check_inside(operand: Operand, sizes: Mapping[str, int]) -> None:
    if isinstance(operand, MemoryOperand) and operand.kind in _BY_OFFSET:
        first, size = operand.offset, sizes[operand.kind]
        end = first + operand.nbytes
        if not 0 <= first <= end <= size:
            where = f"{first}:{end} of {size} bytes"
            raise ValueError(f"an operand is at {where} of the {operand.kind} memory")


def _place(arg: Arg) -> MemoryOperand:
    place, _ = _operand(arg)
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


def _pick(rows: Sequence[T], index: int) -> T:
    if index >= len(rows):
        raise ValueError(f"index {index} is outside {len(rows)} rows")
    return rows[index]
