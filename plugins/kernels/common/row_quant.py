"""Shared by planners of kernels with `row_quant.cuh`: refusals, arguments of outputs, the cost."""

from collections.abc import Iterable, Sequence

from spark_engine.kernel import Target
from spark_engine.plugins.formats import quantised
from spark_engine.plugins.launch import Node
from spark_engine.tensors import DType, TensorSpec

VECTOR = 8  # bf16 values of one 16-byte load
MOST_COPIES = 4
MOST_THREADS = 1024
# `QUANT_OUTPUTS`: y, then (codes, scales) of four copies.
OUTPUTS = "y? q0? s0? q1? s1? q2? s2? q3? s3?"
LAUNCH_SECONDS = 2e-6  # of a launch within a graph that moves no bytes


def refuse_rows(activations: Sequence[TensorSpec], columns: int) -> str | None:
    """Why kernels with 16-byte loads do not take rows of `columns` activations, or None."""
    for spec in activations:
        if spec.dtype is not DType.BF16:
            return f"{spec.name} is {spec.dtype}; the kernels take bf16 activations"
    if columns % VECTOR:
        return f"rows of {columns} columns; 16-byte loads need a multiple of {VECTOR}"
    return None


def refuse_copies(node: Node) -> str | None:
    """Why a kernel does not write the node's quantised copies, or None."""
    n = node.number("n")
    if n > MOST_COPIES:
        return f"n is {n}; at most {MOST_COPIES} quantised copies are written at once"
    return None


def macros(node: Node, columns: int, **more: int | float) -> dict[str, int | float]:
    """The macros of `row_quant.cuh`, and `more`."""
    quant = node.text("quant")
    halves = {"HALVES": 1} if quant == "fp8_halves" else {}
    return {
        "K": columns,
        "KEEP": node.number("keep"),
        "QUANT": quantised.QUANTS.index("fp8_token" if halves else quant),
        "COPIES": node.number("n") if quantised.takes_scales(node.attrs) else 1,
        **halves,
        **more,
    }


def whole_warps(threads: int) -> int:
    """`threads` rounded up to a multiple of 32."""
    return -(-threads // 32) * 32


def threads_of(k: int, most: int = MOST_THREADS) -> tuple[int, int]:
    """(threads, vectors of a thread) of a block with a row: one vector a thread while `most` do."""
    vectors = -(-k // VECTOR)
    each = -(-vectors // most)
    return whole_warps(-(-vectors // each)), each


def seconds(specs: Iterable[TensorSpec], made_bytes: int, target: Target) -> float:
    """Seconds to read every operand once and write `made_bytes`, and of a launch."""
    return (sum(s.nbytes for s in specs) + made_bytes) / target.bandwidth + LAUNCH_SECONDS
