"""What the CUDA sides of the row-wise ops share: refusals, the outputs' arguments, the cost.

The kernels are those of `row_quant.cuh`. Knows the operands of no op.
"""

from __future__ import annotations

from collections.abc import Sequence

from spark_engine.kernel import Arg, Attrs, Pointer, Scalar, Specs, Target
from spark_engine.tensors import DType, TensorSpec

VECTOR = 8  # bf16 values of one 16-byte load
MOST_COPIES = 4
LAUNCH_SECONDS = 2e-6  # what a launch inside a graph costs when it moves nothing
NULL = Scalar("i64", 0)
_QUANT = {"none": 0, "fp8": 1, "fp8_block": 2, "nvfp4": 3}
Defines = tuple[tuple[str, str], ...]


def refuse_rows(activations: Sequence[TensorSpec], columns: int) -> str | None:
    """Why rows of these activations, `columns` wide, cannot be read 16 bytes at a time."""
    for spec in activations:
        if spec.dtype is not DType.BF16:
            return f"{spec.name} is {spec.dtype}; the kernels take bf16 activations"
    if columns % VECTOR:
        return f"rows of {columns} columns; 16-byte loads want a multiple of {VECTOR}"
    return None


def refuse_copies(attrs: Attrs) -> str | None:
    """Why that many quantised copies cannot be written."""
    n = int(attrs.get("n", 1))
    if n > MOST_COPIES:
        return f"n is {n}; at most {MOST_COPIES} quantised copies are written at once"
    return None


def takes_scales(attrs: Attrs) -> bool:
    """Whether the op has a `scales` operand."""
    return attrs["quant"] in ("fp8", "nvfp4")


def defines(attrs: Attrs, columns: int, **more: int | float) -> Defines:
    """The macros of `row_quant.cuh`, and others."""
    quant = str(attrs["quant"])
    values: dict[str, int | float] = {
        "K": columns,
        "KEEP": int(attrs["keep"]),
        "QUANT": _QUANT[quant],
        "COPIES": int(attrs["n"]) if takes_scales(attrs) else 1,
        **more,
    }
    return tuple((name, repr(value)) for name, value in values.items())


def outputs(attrs: Attrs, first: int) -> tuple[Arg, ...]:
    """`QUANT_OUTPUTS`: y, then (codes, scales) of four copies; absent ones are null.

    y is output 0 if it is kept; the quantised outputs begin at `first`.
    """
    args: list[Arg] = [Pointer("output", 0) if attrs["keep"] else NULL]
    quant = str(attrs["quant"])
    parts = {"none": 0, "fp8": 1, "fp8_block": 2, "nvfp4": 2}[quant]
    copies = int(attrs["n"]) if takes_scales(attrs) else min(parts, 1)
    for copy in range(MOST_COPIES):
        for part in range(2):
            there = copy < copies and part < parts
            args.append(Pointer("output", first + copy * parts + part) if there else NULL)
    return tuple(args)


def whole_warps(threads: int) -> int:
    """`threads` rounded up to a multiple of 32."""
    return -(-threads // 32) * 32


def seconds(specs: Specs, made_bytes: int, target: Target) -> float:
    """Every operand read once, `made_bytes` written, and a launch."""
    return (sum(s.nbytes for s in specs) + made_bytes) / target.bandwidth + LAUNCH_SECONDS
