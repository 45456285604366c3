"""A projection with a bias: y = gelu(x · wᵀ + bias) + residual, where a node has these two.

Sums in f32, casts once. `gelu`: "" for none, "tanh" for its approximation x / (1 + exp(−2u)) with
u = √(2/π)·(x + 0.044715·x³), "erf" for x/2 · (1 + erf(x/√2)) (Hendrycks & Gimpel, 2016).
"""

import math

import numpy as np

from spark_engine.op import Attrs, Case, Op, rtol_of
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands, random_arrays
from spark_engine.plugins.common.fragments import widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import format_fragments as ff
from spark_engine.plugins.kernels.vision.linear_bias_kernels import CANDIDATES, GELUS, PACKS, whole
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, DType, TensorSpec

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


def _case(
    size: tuple[int, int, int], gelu: str = "", residual: bool = False,
    dtype: DType = DType.F32, weight: DType = DType.F32,
) -> Case:  # fmt: skip
    m, n, k = size

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = random_arrays.normal(rng, m, k, dtype=dtype)
        w = random_arrays.normal(rng, n, k, scale=2 * k**-0.5, dtype=weight)
        bias = random_arrays.normal(rng, n)
        bias[0], bias[-1] = 30, -30  # far outside of where gelu bends
        more = (random_arrays.normal(rng, m, n, dtype=dtype),) if residual else ()
        return x, w, bias, *more

    rtol = rtol_of(dtype)
    words = (f"{m}x{n}x{k}", gelu, "residual" * residual, weight, dtype)
    label = " ".join(str(word) for word in words if word)
    return Case(label, {"gelu": gelu}, make, rtol, rtol, bench=m == 65)


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
        cases=(
            _case((3, 40, 48)),
            _case((5, 36, 64), "tanh"),
            _case((4, 64, 96), "erf"),
            _case((65, 48, 40), residual=True),
            _case((4, 64, 64), weight=DType.BF16),
            _case((8, 64, 64), "tanh", dtype=DType.BF16, weight=DType.BF16),
            _case((8, 64, 64), "erf", dtype=DType.BF16, weight=DType.BF16),
            _case((6, 64, 128), residual=True, dtype=DType.BF16, weight=DType.BF16),
        ),
    ),
    CANDIDATES,
    PACKS,
    whole,
)
