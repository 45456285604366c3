"""What activations and weights may be, and the attribute that says so. Knows no op."""

from __future__ import annotations

from collections.abc import Sequence

from spark_engine.errors import GraphError
from spark_engine.tensors import Dim, DType, TensorSpec

ACTIVATIONS = (DType.F32, DType.BF16)
WEIGHTS = (DType.F32, DType.F16, DType.BF16)
LEGAL = {"dtype": tuple(d.value for d in ACTIVATIONS)}  # `Op.legal`


def activation(*attrs: object) -> DType:
    """The attribute `dtype`."""
    return DType(str(attrs[-1]["dtype"]))  # type: ignore[index]


def count(op: str, specs: Sequence[TensorSpec], least: int, most: int | None = None) -> None:
    """Raises GraphError unless `least` (to `most`) operands are there."""
    top = least if most is None else most
    if not least <= len(specs) <= top:
        raise GraphError(f"{op} takes {least} to {top} operands, not {len(specs)}")


def expect(op: str, spec: TensorSpec, dtypes: Sequence[DType], shape: Sequence[Dim | None]) -> None:
    """Raises GraphError naming the operand unless its dtype and shape are as asked.

    A None in `shape` stands for any dimension.
    """
    same_rank = len(spec.shape) == len(shape)
    fits = same_rank and all(
        want is None or want == got for want, got in zip(shape, spec.shape, strict=True)
    )
    if spec.dtype not in dtypes or not fits:
        wanted = f"{'/'.join(dtypes)} {['any' if d is None else d for d in shape]}"
        got = f"{spec.dtype} {list(spec.shape)}"
        raise GraphError(f"{op}: operand {spec.name} is {got}, expected {wanted}")


def width(op: str, spec: TensorSpec, multiple: int = 1) -> int:
    """The last dimension as a number. Raises GraphError if unbound or not such a multiple."""
    size = spec.shape[-1] if spec.shape else None
    if not isinstance(size, int) or size % multiple:
        raise GraphError(
            f"{op}: operand {spec.name} has shape {list(spec.shape)}; its last dimension must be "
            f"a number divisible by {multiple}"
        )
    return size


def at_least(op: str, spec: TensorSpec, columns: int) -> None:
    """Raises GraphError unless the last dimension holds `columns`."""
    if width(op, spec) < columns:
        raise GraphError(
            f"{op}: operand {spec.name} has shape {list(spec.shape)}, expected at least "
            f"{columns} columns"
        )
