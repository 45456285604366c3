"""The CUDA side of `mtp_input`: a block for each half of each row."""

from __future__ import annotations

from spark_engine.kernel import Attrs, Cuda, Launch, Plan, Pointer, Specs, Tactic, Target
from spark_engine.plugins.common import row_quant_cuda as rq

MOST_THREADS = 512
VECTORS = 4  # most 16-byte loads of a thread


def _refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    h = specs[1].dims[1]
    if h > rq.VECTOR * VECTORS * MOST_THREADS:
        return f"rows of {h} columns; up to {rq.VECTOR * VECTORS * MOST_THREADS} fit a block"
    return rq.refuse_rows(specs[1:3], h)


def _plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    (tokens, h), vocab = specs[1].dims, specs[2].dims[0]
    vectors = h // rq.VECTOR
    per = next(n for n in range(1, VECTORS + 1) if vectors <= n * MOST_THREADS)
    threads = rq.whole_warps(-(-vectors // per))
    macros = {"H": h, "VOCAB": vocab, "THREADS": threads, "VECS": per}
    defines = [(name, str(value)) for name, value in macros.items()]
    defines.append(("EPS", repr(float(attrs["eps"]))))
    args = (*(Pointer("input", i) for i in range(5)), Pointer("output", 0))
    grid, block = (2, tokens, 1), (threads, 1, 1)
    launch = Launch("mtp_input", grid, block, args, defines=tuple(defines), pdl=True)
    return Plan((launch,))


def _cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    return rq.seconds(specs[:2], specs[1].nbytes * 3, target)


CUDA = Cuda((Tactic("halves", "rowwise/mtp_input.cu", _refuse, _plan, _cost),))
