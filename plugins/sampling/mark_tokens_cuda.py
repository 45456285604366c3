"""The CUDA side of `mark_tokens`: fresh sequences' rows cleared, tokens counted, in one launch."""

from __future__ import annotations

from spark_engine.interface import PREFILL_TILE
from spark_engine.kernel import (
    Arg,
    Attrs,
    Cuda,
    Launch,
    Plan,
    Pointer,
    Scalar,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins.common import row_quant_cuda as rq

BLOCK = 256
DECODE_PARTS, PREFILL_PARTS = 4, 64


def _refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    return None


def _plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    vocab, rows, tile = specs[0].dims[1], specs[3].dims[0], int(attrs["tile"])
    parts = PREFILL_PARTS if tile == PREFILL_TILE else DECODE_PARTS
    macros = {"VOCAB": vocab, "TILE": tile, "THREADS": BLOCK, "PARTS": parts}
    args: tuple[Arg, ...] = (
        Pointer("output", 0),
        *(Pointer("input", i) for i in range(1, 7)),
        Scalar("i32", rows),
    )
    defines = tuple((name, str(value)) for name, value in macros.items())
    grid, block = (parts, rows, 1), (BLOCK, 1, 1)
    return Plan((Launch("mark", grid, block, args, 0, (1, 1, 1), defines, True),))


def _cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    return rq.LAUNCH_SECONDS


CUDA = Cuda((Tactic("pieces", "sampling/mark_tokens.cu", _refuse, _plan, _cost),))
