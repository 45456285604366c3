"""A native bucket's payload (docs/engine_file.md) as records: kernels, and launches of them.

Knows the form of the bytes; knows no device, and no address of what the records name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from spark_engine.kernel import Shape

NUMBERS = ("i32", "i64", "f32")
Operand = tuple[str, Any]  # of NUMBERS and the value, or of memory and a name or an offset


@dataclass(frozen=True)
class Kernel:
    """An entry of a cubin, and the most dynamic shared memory that a launch gives it."""

    cubin: bytes
    symbol: str
    shared: int


@dataclass(frozen=True)
class Record:
    """One launch: the graph's node, the number of its kernel, and how it is launched on what."""

    node: str
    kernel: int
    shape: Shape
    args: tuple[Operand, ...]


@dataclass(frozen=True)
class Program:
    """A bucket's launches in order, and the scratch memory that they share.

    `places`: where tensors between nodes lie, for who runs nodes by themselves.
    """

    kernels: tuple[Kernel, ...]
    launches: tuple[Record, ...]
    arena_bytes: int
    zeroed_bytes: int
    places: Mapping[str, Operand]

    @classmethod
    def read(cls, payload: bytes) -> Program:
        """Raises KeyError, ValueError, TypeError or IndexError when the bytes are not a program."""
        length = int.from_bytes(payload[:8], "little")
        body = json.loads(payload[8 : 8 + length])
        ends = accumulate(body["cubins"], initial=8 + length)
        cubins = [payload[start:end] for start, end in pairwise(ends)]
        kernels = (Kernel(cubins[k["cubin"]], k["symbol"], k["shared"]) for k in body["kernels"])
        return cls(
            tuple(kernels),
            tuple(map(_record, body["launches"])),
            body["arena_bytes"],
            body["zeroed_bytes"],
            {name: (kind, value) for name, (kind, value) in body.get("places", {}).items()},
        )


def _record(row: Mapping[str, Any]) -> Record:
    args = tuple((kind, value) for kind, value in row["args"])
    kinds = tuple(kind if kind in NUMBERS else "address" for kind, _ in args)
    grid, block, cluster = (_three(row[name]) for name in ("grid", "block", "cluster"))
    shape = Shape(grid, block, kinds, row["shared"], cluster, row["overlaps"])
    return Record(row["node"], row["kernel"], shape, args)


def _three(values: list[int]) -> tuple[int, int, int]:
    x, y, z = values
    return x, y, z
