"""The CUDA side of the gated norms: gated_norm and gated_norm_quant, one kernel."""

from __future__ import annotations

import math

from spark_engine.kernel import NULL, Attrs, Cuda, Launch, Plan, Pointer, Specs, Tactic, Target
from spark_engine.plugins.common import row_quant_cuda as rq

CHUNK = 2048  # columns of a block, about
MOST = 8192  # columns that one block can take
SCALE_COLUMNS = 128  # of fp8_block; a block of threads begins at a multiple of it too


def _columns(k: int, dim: int) -> int:
    """Columns of a block: whole heads and whole scales of fp8_block, or the whole row."""
    least = math.lcm(dim, SCALE_COLUMNS)
    return min(k, max(CHUNK // least, 1) * least)


def _refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    o, packed = specs[:2]
    k = o.dims[1]
    dim = k // int(attrs["heads"])
    if dim % rq.VECTOR:
        return f"a head of {dim} columns; 16-byte loads want a multiple of {rq.VECTOR}"
    if (columns := _columns(k, dim)) > MOST:
        return f"heads of {dim} need blocks of {columns} columns; at most {MOST} fit"
    return rq.refuse_rows((o, packed), k) or rq.refuse_copies_of(attrs)


def _plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    (rows, k), width = specs[0].dims, specs[1].dims[1]
    offset, dim = int(attrs["offset"]), k // int(attrs["heads"])
    columns = _columns(k, dim)
    threads = rq.whole_warps(columns // rq.VECTOR)
    args = (
        *(Pointer("input", i) for i in range(3)),
        Pointer("input", 3) if rq.takes_scales(attrs) else NULL,
        *rq.outputs(attrs, int(attrs["keep"])),
    )
    defines = rq.old_defines(
        attrs,
        k,
        THREADS=threads,
        COLUMNS=columns,
        DIM=dim,
        PACKED=width,
        OFFSET=offset,
        EPS=float(attrs["eps"]),
        Z_ALIGNED=int(offset % rq.VECTOR == 0 and width % rq.VECTOR == 0),
    )
    grid, block = (-(-k // columns), rows, 1), (threads, 1, 1)
    return Plan((Launch("gated_norm_quant", grid, block, args, 0, (1, 1, 1), defines, True),))


def _cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    rows, k = specs[0].dims
    written = 2 * int(attrs["keep"]) + int(attrs["n"])
    return rq.seconds((), rows * k * (4 + written), target)


def _alone(attrs: Attrs) -> Attrs:
    """gated_norm as a gated_norm_quant that keeps y and quantises nothing."""
    return {**attrs, "keep": 1, "quant": "none", "n": 1}


GATED_NORM_QUANT = Cuda((Tactic("heads", "gdn/gated_norm_quant.cu", _refuse, _plan, _cost),))
GATED_NORM = Cuda(
    (
        Tactic(
            "heads",
            "gdn/gated_norm_quant.cu",
            lambda attrs, specs, target: _refuse(_alone(attrs), specs, target),
            lambda attrs, specs, target: _plan(_alone(attrs), specs, target),
            lambda attrs, specs, target: _cost(_alone(attrs), specs, target),
        ),
    )
)
