"""NVFP4 activations as values: x[t,k] = code·x_scale, exact in bf16 (six significant bits).

A GPU without FP4 matrix instructions multiplies these by NVFP4 weights (`nvfp4_linear`).
"""

import numpy as np

from spark_engine.kernel import Plan
from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.fragments import widen
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.shapes import LEGAL, activation
from spark_engine.plugins.formats import numpy_codecs
from spark_engine.plugins.formats.format_fragments import nvfp4_decode
from spark_engine.plugins.kernels.common import row_quant as rq
from spark_engine.plugins.launch import Candidate, Kernel, Node, serve
from spark_engine.tensors import Array, DType, TensorSpec

THREADS = 256
KERNEL = Kernel("nvfp4_widen", "xq x_scale x words")


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(xq, x_scale) -> (x,)."""
    codes, scale = arrays
    return (
        numpy_codecs.nvfp4_decode(codes.astype(np.uint8), scale).astype(activation(attrs).numpy),
    )


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """A gather of values, times the scales of blocks."""
    f, k = Text(), OP.named(attrs, specs).dim("K")
    f.cast(nvfp4_decode(f, "xq", widen(f, "x_scale"), k), activation(attrs), "x")
    return f.function("nvfp4_widen", ("xq", "x_scale"), ("x",))


def _refuse(node: Node) -> str | None:
    if node.text("dtype") != DType.BF16:
        return f"dtype is {node.text('dtype')}; the kernel makes bf16 activations"
    return None


def _plan(node: Node) -> Plan:
    words = node.dim("tokens") * node.dim("K") // rq.VECTOR
    launch = KERNEL.launch(node, -(-words // THREADS), THREADS, {}, words=words)
    return node.plan(launch)


def _cost(node: Node) -> float:
    return rq.seconds(node.specs, node.dim("tokens") * node.dim("K") * 2, node.target)


OP = serve(
    Op(
        name="nvfp4_widen",
        operands=(
            operands.x("u8[tokens,K/2]", name="xq"),
            Operand("x_scale", Role.SCALE, "f8[tokens,K/16]"),
        ),
        results=(Result("x", "A[tokens,K]"),),
        attrs={"dtype": None},
        legal=LEGAL,
        reference=reference,
        body=body,
    ),
    (Candidate("elementwise", "rowwise/nvfp4_widen_fma.cu", _plan, _cost, _refuse),),
)
