"""SwiGLU's middle: y = silu(gate) · up, gate the left and up the right half of the columns."""

import numpy as np

from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.kernels.rowwise import act_quant_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array, TensorSpec


def evaluate(gate_up: Array) -> Array:
    """y in float64, cast once to the dtype of `gate_up`."""
    gate, up = np.split(gate_up.astype(np.float64), 2, axis=-1)
    y: Array = (gate / (1 + np.exp(-gate)) * up).astype(gate_up.dtype)
    return y


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(gate_up,) -> (y,)."""
    return (evaluate(arrays[0]),)


def fragment(f: Text, gate_up: str, half: int) -> str:
    """y, f32, of the f32 value `gate_up` [..., 2·half]."""
    gate = fr.columns(f, gate_up, 0, half)
    up = fr.columns(f, gate_up, half, 2 * half)
    return f("Mul", fr.silu(f, gate), up)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Split, silu, multiply."""
    f = Text()
    node = OP.named(attrs, specs)
    y = fragment(f, fr.widen(f, "gate_up"), node.dim("I"))
    f.cast(y, node["gate_up"].dtype, "y")
    return f.function("silu_mul", ("gate_up",), ("y",))


OP = serve(
    Op(
        name="silu_mul",
        operands=(operands.x("A[tokens,2I]", "gate first", "gate_up"),),
        results=(Result("y", "A[tokens,I]"),),
        attrs={},
        reference=reference,
        body=body,
    ),
    act_quant_kernels.CANDIDATES,
    whole=act_quant_kernels.alone("silu_mul", "none"),
    called={"gate_up": "x"},
)
