"""Parts of ONNX bodies that several ops share: each appends nodes and returns a value's name.

The body of a fused op consists of the fragments of the ops that it replaces, in their order, so
fusion does not change bits on the CPU. All values are f32 unless stated.

Measured on onnxruntime 1.31 (CPU): with Exp, Log, Sqrt, Div, Reciprocal and last-axis maxima, and
with sums if a row is a multiple of 16 bytes, a row's bits do not depend on other rows. With
Softplus, Sin and Cos they do (their vector tails differ). Sigmoid and Softmax have an absolute
accuracy only, so a SiLU of them has no relative accuracy for negative numbers. Hence the fragments
use Exp and Log.
"""

from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.tensors import DType


def widen(f: Text, x: str) -> str:
    """`x` (f32 or bf16) as f32. A cast to its own dtype costs nothing: it is eliminated."""
    return f.cast(x, DType.F32)


def columns(f: Text, x: str, start: int, stop: int) -> str:
    """x[..., start:stop], any dtype that onnxruntime can slice."""
    return f("Slice", x, [start], [stop], [-1])


def sigmoid(f: Text, x: str) -> str:
    """1 / (1 + exp(-x)); an infinite exponential gives 0.

    Not Div by a constant 1: onnxruntime fuses (1/a)·b to b/a, which has other bits and, next to a
    cast, fails to load ("Node input is not a graph input").
    """
    return f("Reciprocal", f("Add", f("Exp", f("Neg", x)), 1.0))


def silu(f: Text, x: str) -> str:
    """x / (1 + exp(-x))."""
    return f("Div", x, f("Add", f("Exp", f("Neg", x)), 1.0))


def row_sum(f: Text, x: str, width: int) -> str:
    """Σ over the last axis of `x` [..., width], kept as 1.

    onnxruntime's ReduceSum uses another order if a row does not start on a vector boundary, so the
    bits of a row of odd width would depend on its index: zeros make the width even.
    """
    if width % 16:
        x = f("Pad", x, [0, -width % 16], 0.0, [-1])
    return f("ReduceSum", x, [-1], keepdims=1)


def normalise(f: Text, x: str, width: int, eps: float) -> str:
    """x / sqrt(mean(x², last axis) + eps) of `x` [..., width]."""
    mean = f("Div", row_sum(f, f("Mul", x, x), width), float(width))
    return f("Div", x, f("Sqrt", f("Add", mean, eps)))


def rms_norm(f: Text, x: str, weight: str, width: int, eps: float) -> str:
    """normalise(x) · weight."""
    return f("Mul", normalise(f, x, width, eps), weight)
