"""The CUDA side of `paged_attention`: the tactics of decode and of rounds, and prefill in two
launches.

Sizes here mirror the tiles of paged_prefill.cu.
"""

from __future__ import annotations

from spark_engine.kernel import (
    Attrs,
    Cuda,
    Launch,
    Plan,
    Scalar,
    Scratch,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins.attention.paged_decode_cuda import (
    DECODE,
    defines,
    pointers,
    refuse_any,
    sizes,
    token_bytes,
)
from spark_engine.plugins.attention.paged_round_cuda import ROUNDS

TILE = 64  # tokens of a prefill row
KEYS = 32  # tokens of a prefill tile of keys


def refuse_prefill(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses rows that are not tiles of 64 tokens."""
    s = sizes(attrs, specs)
    if s.tile != TILE:
        return f"rows are of {s.tile} tokens, not {TILE}"
    return refuse_any(attrs, specs, target)


def plan_prefill(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """`paged_append` over tokens, then `paged_prefill` over rows and heads."""
    s, rows = sizes(attrs, specs), specs[8].dims[0]
    shared = TILE * 2 * s.dim + 2 * 2 * KEYS * token_bytes(s)
    blocks = min(2, target.shared_bytes // (shared + 1024))
    macros = (*defines(attrs, specs), ("BLOCKS", str(blocks)))
    steps = pointers("input", 7, 8, 9, 10)
    pages = Scalar("i32", specs[7].dims[1])
    append = Launch(
        "paged_append",
        (rows * TILE, 1, 1),
        (256, 1, 1),
        (
            *pointers("input", 0, 1, 2, 3, 4),
            *pointers("output", 1, 2),
            *steps,
            *pointers("scratch", 0),
            pages,
        ),
        defines=macros,
        pdl=True,
    )
    attend = Launch(
        "paged_prefill",
        (rows, s.heads, 1),
        (128, 1, 1),
        (
            *pointers("scratch", 0),
            *pointers("input", 4),
            *pointers("output", 1, 2),
            *steps,
            *pointers("output", 0),
            pages,
        ),
        shared=shared,
        defines=macros,
        pdl=True,
    )
    return Plan((append, attend), (Scratch(rows * TILE * s.heads * s.dim * 2),))


def cost_prefill(attrs: Attrs, specs: Specs, target: Target) -> float:
    """The products of half of the longest context at a third of a library's rate."""
    s, rows = sizes(attrs, specs), specs[8].dims[0]
    pairs = rows * TILE * (specs[7].dims[1] * s.page / 2)
    return 4 * pairs * s.heads * s.dim / (target.bf16_flops / 3) + 8e-6


CUDA = Cuda(
    tactics=(
        *DECODE,
        *ROUNDS,
        Tactic("tiles", "attention/paged_prefill.cu", refuse_prefill, plan_prefill, cost_prefill),
    )
)
