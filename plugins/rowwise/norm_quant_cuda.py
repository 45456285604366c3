"""The CUDA side of the norms over whole rows: rms_norm and norm_quant, one kernel."""

from __future__ import annotations

from spark_engine.kernel import NULL, Arg, Attrs, Cuda, Launch, Plan, Pointer, Specs, Tactic, Target
from spark_engine.plugins.common import row_quant_cuda as rq

MOST_THREADS, MOST_VECTORS = 1024, 2


def threads_of(k: int) -> tuple[int, int]:
    """(threads, vectors of a thread) of a row: one vector a thread as far as 1024 go."""
    vectors = -(-k // rq.VECTOR)
    each = -(-vectors // MOST_THREADS)
    return rq.whole_warps(-(-vectors // each)), each


def _refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    k = specs[0].dims[1]
    most = MOST_THREADS * MOST_VECTORS * rq.VECTOR
    if k > most:
        return f"a row of {k} does not fit the registers of a block; at most {most} do"
    used = (specs[0], specs[2]) if attrs["add"] else (specs[0],)
    return rq.refuse_rows(used, k) or rq.refuse_copies(attrs)


def _plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    rows, k = specs[0].dims
    threads, vectors = threads_of(k)
    add, keep = int(attrs["add"]), int(attrs["keep"])
    args: tuple[Arg, ...] = (
        Pointer("input", 0),
        Pointer("input", 1),
        Pointer("input", 2) if add else NULL,
        Pointer("input", 2 + add) if rq.takes_scales(attrs) else NULL,
        Pointer("output", keep) if add else NULL,
        *rq.outputs(attrs, keep + add),
    )
    defines = rq.defines(attrs, k, THREADS=threads, VECS=vectors, ADD=add, EPS=float(attrs["eps"]))
    block = (threads, 1, 1)
    launch = Launch("norm_quant", (rows, 1, 1), block, args, 0, (1, 1, 1), defines, True)
    return Plan((launch,))


def _cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    rows, k = specs[0].dims
    written = 2 * (int(attrs["add"]) + int(attrs["keep"])) + int(attrs["n"])
    return rq.seconds(specs, rows * k * written, target)


def _alone(attrs: Attrs) -> Attrs:
    """rms_norm as a norm_quant that keeps y and quantises nothing."""
    return {**attrs, "add": 0, "keep": 1, "quant": "none", "n": 1}


NORM_QUANT = Cuda((Tactic("row", "rowwise/norm_quant.cu", _refuse, _plan, _cost),))
RMS_NORM = Cuda(
    (
        Tactic(
            "row",
            "rowwise/norm_quant.cu",
            lambda attrs, specs, target: _refuse(_alone(attrs), specs, target),
            lambda attrs, specs, target: _plan(_alone(attrs), specs, target),
            lambda attrs, specs, target: _cost(_alone(attrs), specs, target),
        ),
    )
)
