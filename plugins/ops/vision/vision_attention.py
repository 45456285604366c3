"""Attention of an image's patches to one another, with axial rope; not causal.

q, k, v of a patch are side by side. q and k turn by row · f and column · f, for the frequencies f
of a quarter of the head: [rows, columns] twice is the angle of each element, and an element's
partner is half a head away. scores = q · k / √D over the first `live` patches; rows beyond are
unspecified.
"""

import math

import numpy as np

from spark_engine.op import Attrs, Op, Tolerance
from spark_engine.operand import Operand, Result, Role, TimedLaunch
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.fragments import widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.kernels.vision import vision_attention_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, DType, TensorSpec

TILE = 64  # the most queries that have scores in memory at once, in the body
NEVER = np.float32(-3e38)  # a score that is no share of any sum


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(qkv, coords, inv_freq, live) -> (y,), head by head; y is 0 beyond the live patches."""
    qkv, coords, inv_freq, live = arrays
    heads, count = int(attrs["heads"]), int(live[0])
    y = np.zeros((len(qkv), qkv.shape[1] // 3))
    angle = coords[:count, :, None] * inv_freq.astype(np.float64)
    angle = np.tile(angle.reshape(count, 2 * len(inv_freq)), 2)
    cos, sin = np.cos(angle), np.sin(angle)
    parts = qkv[:count].astype(np.float64).reshape(count, 3, heads, y.shape[1] // heads)
    dim = parts.shape[-1]
    for head in range(heads):
        q, k, v = parts[:, :, head].swapaxes(0, 1)
        q, k = (x * cos + np.hstack([-x[:, dim // 2 :], x[:, : dim // 2]]) * sin for x in (q, k))
        scores = q @ k.T / math.sqrt(dim)
        shares = np.exp(scores - scores.max(-1, keepdims=True, initial=-np.inf))
        y[:count, head * dim : (head + 1) * dim] = shares / shares.sum(-1, keepdims=True) @ v
    return (y.astype(qkv.dtype),)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Turns q and k; a Scan over tiles of queries, so that the scores of a tile are in memory."""
    f, node = Text(), OP.named(attrs, specs)
    n, heads, dim = node.dim("tokens"), node.number("heads"), node.dim("D")
    alive = f("Less", np.arange(n, dtype=np.int32), "live")
    qkv = f("Where", f("Unsqueeze", alive, [1]), widen(f, "qkv"), 0.0)  # padding may be NaN
    q, k, v = f.many(3, "Split", f("Reshape", qkv, [n, 3, heads, dim]), axis=1, num_outputs=3)
    q, k, v = (f("Squeeze", part, [1]) for part in (q, k, v))
    angle = f("Mul", f("Unsqueeze", f.cast("coords", DType.F32), [2]), "inv_freq")
    angle = f("Reshape", angle, [n, 1, dim // 2])
    cos, sin = f("Cos", angle), f("Sin", angle)
    q, k = (_turned(f, part, cos, sin) for part in (q, k))
    q = f("Mul", q, dim**-0.5)
    tile = math.gcd(n, TILE)
    q = f("Transpose", f("Reshape", q, [n // tile, tile, heads, dim]), perm=[0, 2, 1, 3])
    k, v = f("Transpose", k, perm=[1, 2, 0]), f("Transpose", v, perm=[1, 0, 2])

    def scan(g: Text, nothing: str, queries: str) -> tuple[str, ...]:
        shares = g("Softmax", g("Where", alive, g("MatMul", queries, k), NEVER), axis=-1)
        return g("Identity", nothing), g("MatMul", shares, v)

    # TensorRT takes no Scan without a state.
    _, y = f.many(2, "Scan", 0.0, q, body=f.graph(2, scan), num_scan_inputs=1)
    y = f("Reshape", f("Transpose", y, perm=[0, 2, 1, 3]), [n, heads * dim])
    f.cast(y, node["qkv"].dtype, "y")
    return f.function("vision_attention", OP.inputs, OP.outputs)


def _turned(f: Text, x: str, cos: str, sin: str) -> str:
    """x [n, heads, D] turned by angles [n, 1, D/2]."""
    a, b = f.many(2, "Split", x, axis=2, num_outputs=2)
    first = f("Sub", f("Mul", a, cos), f("Mul", b, sin))
    return f("Concat", first, f("Add", f("Mul", b, cos), f("Mul", a, sin)), axis=2)


def tolerance(attrs: Attrs) -> Tolerance:
    """Turned q and k and the softmax's weights are bf16, as the matrix unit takes them. In numpy
    these roundings alone give an element of the cases an error of 5.3 times 2^-7 (relative L2
    distance 6e-3)."""
    return Tolerance(element=8 * 2.0**-7)


def _all(launch: TimedLaunch, dims: tuple[int, ...], rng: np.random.Generator) -> Array:
    return np.asarray([launch.specs["qkv"].dims[0]], np.int32)


OP = serve(
    Op(
        name="vision_attention",
        operands=(
            operands.x("A[tokens,3·heads·D]", "q; k; v, head by head", "qkv"),
            Operand("coords", Role.STEP, "i32[tokens,2]"),
            operands.weight("inv_freq", "f32[D/4]"),
            Operand("live", Role.STEP, "i32[1]", fill=_all),
        ),
        results=(Result("y", "A[tokens,heads·D]"),),
        attrs={"heads": None},
        reference=reference,
        body=body,
        tolerance=tolerance,
    ),
    vision_attention_kernels.CANDIDATES,
)
