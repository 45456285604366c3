"""The sum over all ranks: y = x of rank 0 + x of rank 1 + …, the same bits on every rank.

Each rank's part has the activation's dtype; parts are added in f32 in the order of ranks and
rounded once, in a batch of any size. Reference and body are those of one rank. Executors do the
exchange: by launches that read the other ranks' memory, or by a cut of the graph at this node
(docs/engine_file.md).
"""

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import identity
from spark_engine.plugins.kernels.ranks import collectives_kernels
from spark_engine.plugins.launch import serve
from spark_engine.tensors import Array


def _check(node: Named) -> str | None:
    ranks = node.number("ranks")
    return f"ranks is {ranks}" if ranks < 1 else None


def summed(parts: tuple[Array, ...]) -> Array:
    """The result on every rank: `parts` [ranks], of one dtype and shape, added in f32 in order."""
    total = parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + part.astype(np.float32)
    return np.asarray(total.astype(parts[0].dtype))


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x,) -> (y,) of a single rank."""
    return (summed(arrays),)


OP = serve(
    Op(
        name="all_reduce",
        operands=(operands.x("A[tokens,H]"),),
        results=(Result("y", "A[tokens,H]"),),
        attrs={"ranks": None, "across": 0},  # 1: the ranks are on several hosts
        check=_check,
        reference=reference,
        body=identity("all_reduce"),
    ),
    collectives_kernels.ALL_REDUCE,
)
