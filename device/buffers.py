"""Where a native bucket's inputs and outputs lie in device memory, and the bytes that they take.

The builder plans by it and the runtime allocates by it. Knows specs; knows no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spark_engine.engine_file import EngineHeader
from spark_engine.tensors import Array, Bytes, TensorSpec

ALIGNMENT = 256  # bytes: what a CUDA allocation starts on
WIDE = 4096  # bytes of an output's row: logits, layers


@dataclass(frozen=True)
class Field:
    """A tensor inside a packed stretch of memory."""

    spec: TensorSpec
    offset: int

    def view(self, block: Bytes) -> Array:
        """The tensor inside `block`."""
        part: Array = block[self.offset : self.offset + self.spec.nbytes]
        return part.view(self.spec.dtype.numpy).reshape(self.spec.dims)


@dataclass(frozen=True)
class Block:
    """Tensors one after the other."""

    fields: tuple[Field, ...]
    nbytes: int

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> Block:
        """The tensors in the order given, each on a boundary of ALIGNMENT."""
        fields, at = [], 0
        for spec in specs:
            fields.append(Field(spec, at))
            at += aligned(spec.nbytes)
        return cls(tuple(fields), at)


@dataclass(frozen=True)
class Buffers:
    """A bucket's three stretches.

    Attributes:
        steps: what the host writes for every step; the bucket's own.
        outputs: what the host reads after every step; the bucket's own.
        wide: outputs that only `run` reads; all buckets lie in one stretch, since they run one
            after the other.
    """

    steps: Block
    outputs: Block
    wide: Block

    @classmethod
    def of(cls, header: EngineHeader, tables: Iterable[str]) -> Buffers:
        """Those of the header; `tables` are inputs that the engine keeps."""
        kept = set(tables)
        wide = [s for s in header.outputs if unit_bytes(s) > WIDE]
        return cls(
            Block.of(s for s in header.inputs if s.name not in kept),
            Block.of(s for s in header.outputs if s not in wide),
            Block.of(wide),
        )

    @property
    def own_bytes(self) -> int:
        """Bytes that no other bucket uses."""
        return self.steps.nbytes + self.outputs.nbytes


def aligned(nbytes: int) -> int:
    """`nbytes`, filled up to ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def unit_bytes(spec: TensorSpec) -> int:
    """Bytes of one row of axis 0."""
    return spec.nbytes // max(*spec.dims[:1], 1)
