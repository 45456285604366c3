"""What the CUDA sides of the row-wise ops share: refusals, the outputs' arguments, the cost.

The kernels are those of `row_quant.cuh`. Knows the operands of no op.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spark_engine.kernel import NULL, Arg, Attrs, Pointer, Target
from spark_engine.plugins.common import quantised
from spark_engine.plugins.launch import Node
from spark_engine.tensors import DType, TensorSpec

VECTOR = 8  # bf16 values of one 16-byte load
MOST_COPIES = 4
# `QUANT_OUTPUTS`: y, then (codes, scales) of four copies.
OUTPUTS = "y? q0? s0? q1? s1? q2? s2? q3? s3?"
LAUNCH_SECONDS = 2e-6  # what a launch inside a graph costs when it moves nothing


def refuse_rows(activations: Sequence[TensorSpec], columns: int) -> str | None:
    """Why rows of these activations, `columns` wide, cannot be read 16 bytes at a time."""
    for spec in activations:
        if spec.dtype is not DType.BF16:
            return f"{spec.name} is {spec.dtype}; the kernels take bf16 activations"
    if columns % VECTOR:
        return f"rows of {columns} columns; 16-byte loads want a multiple of {VECTOR}"
    return None


def refuse_copies(node: Node) -> str | None:
    """Why that many quantised copies cannot be written."""
    n = node.number("n")
    if n > MOST_COPIES:
        return f"n is {n}; at most {MOST_COPIES} quantised copies are written at once"
    return None


def macros(node: Node, columns: int, **more: int | float) -> dict[str, int | float]:
    """The macros of `row_quant.cuh`, and others."""
    return {
        "K": columns,
        "KEEP": node.number("keep"),
        "QUANT": quantised.QUANTS.index(node.text("quant")),
        "COPIES": node.number("n") if quantised.takes_scales(node.attrs) else 1,
        **more,
    }


def whole_warps(threads: int) -> int:
    """`threads` rounded up to a multiple of 32."""
    return -(-threads // 32) * 32


def seconds(specs: Iterable[TensorSpec], made_bytes: int, target: Target) -> float:
    """Every operand read once, `made_bytes` written, and a launch."""
    return (sum(s.nbytes for s in specs) + made_bytes) / target.bandwidth + LAUNCH_SECONDS


def refuse_copies_of(attrs: Attrs) -> str | None:
    """Why that many quantised copies cannot be written."""
    n = int(attrs.get("n", 1))
    if n > MOST_COPIES:
        return f"n is {n}; at most {MOST_COPIES} quantised copies are written at once"
    return None


def takes_scales(attrs: Attrs) -> bool:
    """Whether the op has a `scales` operand."""
    return attrs["quant"] in ("fp8", "nvfp4")


def old_defines(attrs: Attrs, columns: int, **more: int | float) -> tuple[tuple[str, str], ...]:
    """The macros of `row_quant.cuh`, and others."""
    quant = str(attrs["quant"])
    values: dict[str, int | float] = {
        "K": columns,
        "KEEP": int(attrs["keep"]),
        "QUANT": quantised.QUANTS.index(quant),
        "COPIES": int(attrs["n"]) if takes_scales(attrs) else 1,
        **more,
    }
    return tuple((name, repr(value)) for name, value in values.items())


def outputs(attrs: Attrs, first: int) -> tuple[Arg, ...]:
    """`QUANT_OUTPUTS`: y, then (codes, scales) of four copies; absent ones are null.

    y is output 0 if it is kept; the quantised outputs begin at `first`.
    """
    y = Pointer("output", 0) if attrs["keep"] else NULL
    return (y, *quantised_outputs(attrs, first, MOST_COPIES))


def quantised_outputs(attrs: Attrs, first: int, most: int) -> tuple[Arg, ...]:
    """(codes, scales) of `most` copies, from output `first` on; null where there is none."""
    parts = (0, 1, 2, 2)[quantised.QUANTS.index(str(attrs["quant"]))]
    copies = int(attrs["n"]) if takes_scales(attrs) else min(parts, 1)
    return tuple(
        Pointer("output", first + copy * parts + part) if copy < copies and part < parts else NULL
        for copy in range(most)
        for part in range(2)
    )
