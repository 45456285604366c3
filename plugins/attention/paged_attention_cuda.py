"""The CUDA side of `paged_attention`: the tactics of decode and of rounds, and prefill in two
launches.

Sizes here mirror the tiles of paged_prefill.cu and paged_pairs.cu.
"""

from __future__ import annotations

from functools import partial

from spark_engine.kernel import (
    Arg,
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
from spark_engine.plugins.attention.paged_attention_nodes import Sizes
from spark_engine.plugins.attention.paged_decode_cuda import (
    DECODE,
    defines,
    pointers,
    refuse_any,
    sizes,
    token_bytes,
)
from spark_engine.plugins.attention.paged_round_cuda import ROUNDS
from spark_engine.tensors import DType

TILE = 64  # tokens of a prefill row
KEYS = 32  # tokens of a prefill tile of keys
PAIR = 2  # heads of a block of `paged_pairs`
PAIR_DIM, PAIR_KEYS = 256, 64  # of `paged_pairs`: dimensions of a head, tokens of a tile of keys
# Of `paged_pairs`, by whether pages hold codes: pieces of a query in registers, and registers of a
# consumer's and a producer's thread: three groups of 128 have 504 for each lane.
HELD = {True: (3, 216, 72), False: (6, 232, 40)}


def refuse_prefill(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses rows that are not tiles of 64 tokens."""
    s = sizes(attrs, specs)
    if s.tile != TILE:
        return f"rows are of {s.tile} tokens, not {TILE}"
    return refuse_any(attrs, specs, target)


def refuse_pairs(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses what `paged_pairs` is not made for."""
    s = sizes(attrs, specs)
    if not target.wgmma:
        return f"{target.name} has no warpgroup matrix instructions"
    if s.dim != PAIR_DIM:
        return f"heads of {s.dim} are not of {PAIR_DIM}"
    if s.group % PAIR:
        return f"{s.group} heads share a kv head, not a multiple of {PAIR}"
    if s.page % PAIR_KEYS:
        return f"pages of {s.page} tokens do not hold tiles of {PAIR_KEYS}"
    return refuse_prefill(attrs, specs, target)


def plan_prefill(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """`paged_append` over tokens, then `paged_prefill` over rows and heads."""
    s, rows = sizes(attrs, specs), specs[8].dims[0]
    attend = Launch(
        "paged_prefill",
        (rows, s.heads, 1),
        (128, 1, 1),
        attend_arguments(specs),
        shared=tiles_shared(s),
        defines=tiles_macros(attrs, specs, target),
        pdl=True,
    )
    return behind_append(attrs, specs, target, attend)


def plan_pairs(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """`paged_append` over tokens, then `paged_pairs` over rows and pairs of heads."""
    s, rows = sizes(attrs, specs), specs[8].dims[0]
    held, most, rest = HELD[s.storage is DType.U8]
    numbers = {"HELD": held, "MOST": most, "REST": rest}
    attend = Launch(
        "paged_pairs",
        (rows, s.heads // PAIR, 1),
        (128 * (PAIR + 1), 1, 1),
        attend_arguments(specs),
        shared=2 * s.dim * (PAIR * TILE + 2 * 2 * PAIR_KEYS),
        defines=(*defines(attrs, specs), *((k, str(v)) for k, v in numbers.items())),
        pdl=True,
        source="attention/paged_pairs.cu",
    )
    return behind_append(attrs, specs, target, attend)


def tiles_shared(s: Sizes) -> int:
    """Bytes of shared memory of `paged_prefill`: queries, two stages of keys and values."""
    return TILE * 2 * s.dim + 2 * 2 * KEYS * token_bytes(s)


def tiles_macros(attrs: Attrs, specs: Specs, target: Target) -> tuple[tuple[str, str], ...]:
    """The macros of paged_prefill.cu."""
    blocks = min(2, target.shared_bytes // (tiles_shared(sizes(attrs, specs)) + 1024))
    return (*defines(attrs, specs), ("BLOCKS", str(blocks)))


def attend_arguments(specs: Specs) -> tuple[Arg, ...]:
    """Those of the kernels behind `paged_append`."""
    return (
        *pointers("scratch", 0),
        *pointers("input", 4),
        *pointers("output", 1, 2),
        *pointers("input", 7, 8, 9, 10),
        *pointers("output", 0),
        Scalar("i32", specs[7].dims[1]),
    )


def behind_append(attrs: Attrs, specs: Specs, target: Target, attend: Launch) -> Plan:
    """`paged_append` over tokens, then `attend`."""
    s, rows = sizes(attrs, specs), specs[8].dims[0]
    append = Launch(
        "paged_append",
        (rows * TILE, 1, 1),
        (256, 1, 1),
        (
            *pointers("input", 0, 1, 2, 3, 4),
            *pointers("output", 1, 2),
            *pointers("input", 7, 8, 9, 10),
            *pointers("scratch", 0),
            Scalar("i32", specs[7].dims[1]),
        ),
        defines=tiles_macros(attrs, specs, target),
        pdl=True,
        source="attention/paged_prefill.cu",
    )
    return Plan((append, attend), (Scratch(rows * TILE * s.heads * s.dim * 2),))


def cost_prefill(attrs: Attrs, specs: Specs, target: Target, share: float) -> float:
    """The products of half of the longest context at a share of a library's rate."""
    s, rows = sizes(attrs, specs), specs[8].dims[0]
    pairs = rows * TILE * (specs[7].dims[1] * s.page / 2)
    return 4 * pairs * s.heads * s.dim / (target.bf16_flops * share) + 8e-6


TILES = Tactic(
    "tiles",
    "attention/paged_prefill.cu",
    refuse_prefill,
    plan_prefill,
    partial(cost_prefill, share=1 / 3),
)
PAIRS = Tactic(
    "pairs",
    "attention/paged_pairs.cu",
    refuse_pairs,
    plan_pairs,
    partial(cost_prefill, share=2 / 3),
)
CUDA = Cuda(tactics=(*DECODE, *ROUNDS, TILES, PAIRS))
