"""The CUDA side of `shared_gate`: one block a row."""

from __future__ import annotations

from spark_engine.kernel import Attrs, Cuda, Launch, Plan, Pointer, Specs, Tactic, Target
from spark_engine.plugins.common import row_quant_cuda as rq
from spark_engine.tensors import DType

MOST_THREADS, MOST_VECTORS = 512, 4


def _refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    k = specs[0].dims[1]
    most = MOST_THREADS * MOST_VECTORS * rq.VECTOR
    if k > most:
        return f"a row of {k} does not fit the registers of a block; at most {most} do"
    if specs[3].dtype not in (DType.BF16, DType.F32):
        return f"w is {specs[3].dtype}; bf16 and f32 are read"
    return rq.refuse_rows(specs[:3], k)


def _plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    rows, k = specs[0].dims
    vectors = -(-k // rq.VECTOR)
    each = -(-vectors // MOST_THREADS)
    threads = rq.whole_warps(-(-vectors // each))
    macros = {"THREADS": threads, "VECS": each, "K": k, "W_F32": specs[3].dtype is DType.F32}
    defines = tuple((name, str(int(value))) for name, value in macros.items())
    args = (*(Pointer("input", i) for i in range(4)), Pointer("output", 0))
    block = (threads, 1, 1)
    return Plan((Launch("shared_gate", (rows, 1, 1), block, args, 0, (1, 1, 1), defines, True),))


def _cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    return rq.seconds(specs, specs[0].nbytes, target)


CUDA = Cuda((Tactic("row", "moe/shared_gate.cu", _refuse, _plan, _cost),))
