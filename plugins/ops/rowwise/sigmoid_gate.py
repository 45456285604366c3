"""The attention output gate: y = o · sigmoid(gate), element by element.

The gates are in the merged projection `qkv` [tokens, 2·nq·D + 2·nkv·D]: each query head has its D
queries, then its D gates (transformers, `Qwen3_5Attention`).
"""

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands, random_arrays
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.kernels.rowwise import act_quant_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, DType, TensorSpec


def gates_fit(node: Named) -> str | None:
    """Why the width of `qkv` does not match the gates, or None."""
    gates = 2 * node.dim("nq·D")
    if node.dim("X") < gates:
        return f"operand {node['qkv'].name} has {node.dim('X')} columns, expected {gates}"
    return None


def evaluate(attrs: Attrs, o: Array, qkv: Array) -> Array:
    """y in float64, cast once to the dtype of `o`."""
    heads, dim = int(attrs["heads"]), int(attrs["head_dim"])
    pairs = qkv[:, : 2 * heads * dim].astype(np.float64).reshape(-1, heads, 2, dim)
    gate = pairs[:, :, 1].reshape(o.shape)
    y: Array = (o.astype(np.float64) / (1 + np.exp(-gate))).astype(o.dtype)
    return y


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(o, qkv) -> (y,)."""
    return (evaluate(attrs, *arrays),)


def fragment(f: Text, attrs: Attrs, o: str, qkv: str) -> str:
    """y, f32, of the f32 values o and qkv."""
    heads, dim = int(attrs["heads"]), int(attrs["head_dim"])
    pairs = f("Reshape", fr.columns(f, qkv, 0, 2 * heads * dim), [0, heads, 2 * dim])
    gate = f("Reshape", fr.columns(f, pairs, dim, 2 * dim), [0, heads * dim])
    return f("Mul", o, fr.sigmoid(f, gate))


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Slice the gates, sigmoid, multiply."""
    f = Text()
    y = fragment(f, attrs, fr.widen(f, "o"), fr.widen(f, "qkv"))
    f.cast(y, OP.named(attrs, specs)["o"].dtype, "y")
    return f.function("sigmoid_gate", ("o", "qkv"), ("y",))


def arrays(
    rng: np.random.Generator, rows: int, heads: int, dim: int, dtype: DType
) -> tuple[Array, ...]:
    """o and qkv, NaN in every column of qkv that is not a gate."""
    o = random_arrays.normal(rng, rows, heads * dim, dtype=dtype)
    gates = random_arrays.normal(rng, rows, heads, dim, scale=4.0, dtype=dtype)
    gates[0, 0, :2] = (-200.0, 200.0)
    pairs = np.stack([np.full_like(gates, np.nan), gates], axis=2).reshape(rows, -1)
    return o, np.concatenate([pairs, np.full((rows, 2 * dim), np.nan, dtype.numpy)], axis=1)


DIMS = {"nq": "heads", "D": "head_dim"}
QKV = operands.x("A[tokens,X]", "gates inside", "qkv")
OP = serve(
    Op(
        name="sigmoid_gate",
        operands=(operands.x("A[tokens,nq·D]", name="o"), QKV),
        results=(Result("y", "A[tokens,nq·D]"),),
        attrs={"heads": None, "head_dim": None},
        dims=DIMS,
        check=gates_fit,
        reference=reference,
        body=body,
    ),
    act_quant_kernels.CANDIDATES,
    whole=act_quant_kernels.alone("sigmoid_gate", "none"),
    called={"o": "x"},
)
