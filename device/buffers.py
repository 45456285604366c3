"""The layout of a native bucket's inputs and outputs in device memory, in bytes.

The builder plans with it, the runtime allocates with it. Knows specs; knows no device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spark_engine.engine_file import EngineHeader
from spark_engine.tensors import Array, Bytes, TensorSpec

ALIGNMENT = 256  # bytes: alignment of a CUDA allocation
WIDE = 4096  # bytes of an output's row: logits, layers


@dataclass(frozen=True)
class Field:
    """A tensor inside a packed range of memory."""

    spec: TensorSpec
    offset: int

    def view(self, block: Bytes) -> Array:
        """The tensor inside `block`."""
        part: Array = block[self.offset : self.offset + self.spec.nbytes]
        return part.view(self.spec.dtype.numpy).reshape(self.spec.dims)


@dataclass(frozen=True)
class Block:
    """Tensors in consecutive memory."""

    fields: tuple[Field, ...]
    nbytes: int

    @classmethod
    def of(cls, specs: Iterable[TensorSpec]) -> Block:
        """The tensors in the given order, each aligned to ALIGNMENT."""
        fields, at = [], 0
        for spec in specs:
            fields.append(Field(spec, at))
            at += aligned(spec.nbytes)
        return cls(tuple(fields), at)


@dataclass(frozen=True)
class Buffers:
    """A bucket's three ranges of memory."""

    steps: Block  # what the host writes for every step; one range per bucket
    outputs: Block  # what the host reads after every step; one range per bucket
    # Outputs that only `run` reads; buckets share one range, since they run one after the other.
    wide: Block

    @classmethod
    def of(cls, header: EngineHeader, tables: Iterable[str]) -> Buffers:
        """The ranges for a header; `tables` are inputs that the engine keeps."""
        kept = set(tables)
        wide = [s for s in header.outputs if unit_bytes(s) > WIDE]
        return cls(
            Block.of(s for s in header.inputs if s.name not in kept),
            Block.of(s for s in header.outputs if s not in wide),
            Block.of(wide),
        )

    @property
    def own_bytes(self) -> int:
        """Bytes that this bucket does not share."""
        return self.steps.nbytes + self.outputs.nbytes


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to a multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def unit_bytes(spec: TensorSpec) -> int:
    """Bytes of one row of axis 0."""
    return spec.nbytes // max(*spec.dims[:1], 1)
