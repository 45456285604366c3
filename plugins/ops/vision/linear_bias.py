"""A projection with a bias: y = gelu(x · wᵀ + bias) + residual, where a node has these two.

Sums in f32, casts once. `gelu`: "" for none, "tanh" for its approximation x / (1 + exp(−2u)) with
u = √(2/π)·(x + 0.044715·x³), "erf" for x/2 · (1 + erf(x/√2)) (Hendrycks & Gimpel, 2016).
"""

import math

import numpy as np

from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.fragments import widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import format_fragments as ff
from spark_engine.plugins.kernels.vision.linear_bias_kernels import CANDIDATES, GELUS, PACKS, whole
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, TensorSpec

TANH = 2 * math.sqrt(2 / math.pi), 0.044715  # u is half of the first · (x + the second · x³)
_erf = np.vectorize(math.erf, otypes=[np.float64])


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, w, bias, residual?) -> (y,)."""
    x, w, bias, *residual = (a.astype(np.float64) for a in arrays)
    y, gelu = x @ w.T + bias, attrs.get("gelu", "")
    if gelu == "tanh":
        with np.errstate(over="ignore"):
            y = y / (1 + np.exp(-TANH[0] * (y + TANH[1] * y**3)))
    elif gelu == "erf":
        y = y / 2 * (1 + _erf(y / math.sqrt(2)))
    return ((y + residual[0] if residual else y).astype(arrays[0].dtype),)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """One product, then element by element."""
    f, node = Text(), OP.named(attrs, specs)
    y = f("Add", ff.times(f, widen(f, "x"), widen(f, "w")), "bias")
    if node.text("gelu") == "tanh":
        cube = f("Mul", f("Mul", f("Mul", y, y), y), TANH[1])
        u = f("Mul", f("Add", y, cube), -TANH[0])
        y = f("Div", y, f("Add", f("Exp", u), 1.0))
    elif node.text("gelu") == "erf":
        wide = f("Add", f("Erf", f("Mul", y, math.sqrt(0.5))), 1.0)
        y = f("Mul", f("Mul", y, 0.5), wide)
    if "residual" in node:
        y = f("Add", y, widen(f, "residual"))
    f.cast(y, node["x"].dtype, "y")
    return f.function("linear_bias", OP.names(attrs, len(specs)), ("y",))


OP = serve(
    Op(
        name="linear_bias",
        operands=(
            operands.x(),
            operands.weight("w", "W[N,K]"),
            operands.weight("bias", "f32[N]"),
            Operand("residual", Role.ACTIVATION, "A[tokens,N]", optional=True),
        ),
        results=(Result("y", "A[tokens,N]"),),
        attrs={"gelu": ""},
        legal={"gelu": GELUS},
        reference=reference,
        body=body,
    ),
    CANDIDATES,
    PACKS,
    whole,
)
