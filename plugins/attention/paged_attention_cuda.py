"""The CUDA side of `paged_attention`: the tactics of decode and of rounds, and prefill in two
launches.

Sizes here mirror the tiles of paged_prefill.cu and paged_pairs.cu.
"""

from __future__ import annotations

from functools import partial

from spark_engine.kernel import (
    NULL,
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
HELD = {True: (0, 208, 88), False: (6, 232, 40)}
SPLITS = (2, 4, 8, 16)  # blocks that share a tile's keys, a tactic each


def refuse_prefill(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses rows that are not tiles of 64 tokens."""
    s = sizes(attrs, specs)
    if s.tile != TILE:
        return f"rows are of {s.tile} tokens, not {TILE}"
    return refuse_any(attrs, specs, target)


def refuse_pairs(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses what `paged_pairs` is not made for."""
    if not target.wgmma:
        return f"{target.name} has no warpgroup matrix instructions"
    return refuse_group_of_two(attrs, specs, target)


def refuse_tiles_pair(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses what `paged_prefill_pair` is not made for, and targets that have `paged_pairs`."""
    if target.wgmma:
        return f"{target.name} has warpgroup matrix instructions"
    return refuse_group_of_two(attrs, specs, target)


def refuse_group_of_two(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses what no block of two heads does."""
    s = sizes(attrs, specs)
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


def refuse_split(attrs: Attrs, specs: Specs, target: Target, splits: int) -> str | None:
    """Refuses rows that fill the GPU without splits, or as well with half of them."""
    s, rows = sizes(attrs, specs), specs[8].dims[0]
    reason = refuse_pairs(attrs, specs, target)
    if reason is None and rows * s.heads // PAIR * splits > 3 * target.sms // 2:
        return f"{rows} rows of {s.heads} heads fill {target.sms} multiprocessors with fewer splits"
    return reason


def plan_pairs(attrs: Attrs, specs: Specs, target: Target, splits: int) -> Plan:
    """`paged_append`, then `paged_pairs` over rows, pairs of heads and parts of the keys."""
    s, rows = sizes(attrs, specs), specs[8].dims[0]
    held, most, rest = HELD[s.storage is DType.U8]
    numbers = {"SPLITS": splits, "HELD": held, "MOST": most, "REST": rest}
    parts = rows * s.heads * splits if splits > 1 else 0
    scratch = (
        Scratch(parts * TILE * s.dim * 4),
        Scratch(parts * 128 * 16),
        Scratch(rows * s.heads * 4, zeroed=True),
    )
    attend = Launch(
        "paged_pairs",
        (rows, s.heads // PAIR, splits),
        (128 * (PAIR + 1), 1, 1),
        attend_arguments(
            specs, *(pointers("scratch", 1, 2, 3) if splits > 1 else (NULL, NULL, NULL))
        ),
        shared=2 * s.dim * (PAIR * TILE + 2 * 2 * PAIR_KEYS),
        defines=(*defines(attrs, specs), *((k, str(v)) for k, v in numbers.items())),
        pdl=True,
        source="attention/paged_pairs.cu",
    )
    return behind_append(attrs, specs, target, attend, *(scratch if splits > 1 else ()))


def plan_tiles_pair(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """`paged_append`, then `paged_prefill_pair` over pairs of heads and rows."""
    s, rows = sizes(attrs, specs), specs[8].dims[0]
    keys = 64 if s.storage is DType.U8 else 32
    attend = Launch(
        "paged_prefill_pair",
        (s.heads // PAIR, rows, 1),
        (256, 1, 1),
        attend_arguments(specs),
        shared=PAIR * TILE * 2 * s.dim + 2 * keys * token_bytes(s),
        defines=defines(attrs, specs),
        pdl=True,
        source="attention/paged_prefill_pair.cu",
    )
    return behind_append(attrs, specs, target, attend)


def tiles_shared(s: Sizes) -> int:
    """Bytes of shared memory of `paged_prefill`: queries, two stages of keys and values."""
    return TILE * 2 * s.dim + 2 * 2 * KEYS * token_bytes(s)


def tiles_macros(attrs: Attrs, specs: Specs, target: Target) -> tuple[tuple[str, str], ...]:
    """The macros of paged_prefill.cu."""
    blocks = min(2, target.shared_bytes // (tiles_shared(sizes(attrs, specs)) + 1024))
    return (*defines(attrs, specs), ("BLOCKS", str(blocks)))


def attend_arguments(specs: Specs, *scratch: Arg) -> tuple[Arg, ...]:
    """Those of the kernels behind `paged_append`."""
    return (
        *pointers("scratch", 0),
        *pointers("input", 4),
        *pointers("output", 1, 2),
        *pointers("input", 7, 8, 9, 10),
        *pointers("output", 0),
        *scratch,
        Scalar("i32", specs[7].dims[1]),
    )


def behind_append(
    attrs: Attrs, specs: Specs, target: Target, attend: Launch, *scratch: Scratch
) -> Plan:
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
    return Plan((append, attend), (Scratch(rows * TILE * s.heads * s.dim * 2), *scratch))


def cost_prefill(
    attrs: Attrs, specs: Specs, target: Target, share: float, heads: int, resident: int, splits: int
) -> float:
    """The products of half of the longest context at a share of a library's rate, where blocks of
    so many heads fill the multiprocessors; parts that meet take a while."""
    s, rows = sizes(attrs, specs), specs[8].dims[0]
    pairs = rows * TILE * (specs[7].dims[1] * s.page / 2)
    blocks, room = rows * s.heads // heads * splits, target.sms * resident
    rate = target.bf16_flops * share * blocks / (-(-blocks // room) * room)
    return 4 * pairs * s.heads * s.dim / rate + (12e-6 if splits > 1 else 8e-6)


TILES = Tactic(
    "tiles",
    "attention/paged_prefill.cu",
    refuse_prefill,
    plan_prefill,
    partial(cost_prefill, share=1 / 3, heads=1, resident=2, splits=1),
)

TILES_PAIR = Tactic(
    "tiles_pair",
    "attention/paged_prefill_pair.cu",
    refuse_tiles_pair,
    plan_tiles_pair,
    partial(cost_prefill, share=0.51, heads=PAIR, resident=1, splits=1),
)


def _pairs(splits: int) -> Tactic:
    """With parts a token's bits depend on its tile's end: on the grid of 64, on its position."""
    return Tactic(
        f"pairs_by_{splits}" if splits > 1 else "pairs",
        "attention/paged_pairs.cu",
        partial(refuse_split, splits=splits) if splits > 1 else refuse_pairs,
        partial(plan_pairs, splits=splits),
        partial(cost_prefill, share=0.8, heads=PAIR, resident=1, splits=splits),
    )


CUDA = Cuda(tactics=(*DECODE, *ROUNDS, TILES, TILES_PAIR, *(_pairs(n) for n in (1, *SPLITS))))
