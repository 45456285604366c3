"""The logits of all ranks side by side; each rank has those of its share of the vocabulary.

Every rank then samples from the same bits. Reference and body are those of one rank.
"""

import numpy as np

from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import identity
from spark_engine.plugins.kernels.ranks import collectives_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array


def gathered(parts: tuple[Array, ...]) -> Array:
    """The result on every rank, of `parts` [ranks]."""
    return np.concatenate(parts, axis=1)


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x,) -> (y,) of a single rank."""
    return (gathered(arrays),)


OP = serve(
    Op(
        name="gather_logits",
        operands=(operands.x("f32[rows,V/ranks]"),),
        results=(Result("y", "f32[rows,V]"),),
        attrs={"ranks": None, "across": 0},  # 1: the ranks are on several hosts
        reference=reference,
        body=identity("gather_logits"),
    ),
    collectives_kernels.GATHER_LOGITS,
)
