"""The CUDA side of `paged_attention`: one launch for decode, append and attend for prefill.

How decode cuts a row into chunks depends on the tactic and on the row's length alone: with one
tactic in every bucket, a row's bits do not depend on its company or its bucket.
Sizes here mirror `struct Block` of paged_decode.cu and the tiles of paged_prefill.cu.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from spark_engine.kernel import (
    Arg,
    Attrs,
    Cuda,
    Launch,
    Plan,
    Pointer,
    Scalar,
    Scratch,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins.paged_attention_nodes import Sizes, sizes_of
from spark_engine.tensors import DType

DIMS = (32, 64, 128, 256)
COLUMNS = 8  # heads of a group, padded
MOST_CHUNKS = 64  # of one row
CHUNKS = (64, 128, 256, 512)  # tokens of the smallest chunk, a tactic each
TILE = 64  # tokens of a prefill row
TYPICAL = 1024  # tokens of a row that costs are predicted for
KEYS = 32  # tokens of a prefill tile of keys


def _sizes(attrs: Attrs, specs: Specs) -> Sizes:
    return sizes_of(attrs, specs[5])


def _token_bytes(s: Sizes) -> int:
    """Bytes of one token of one kv head's keys."""
    return s.dim * s.storage.itemsize


def _defines(attrs: Attrs, specs: Specs) -> tuple[tuple[str, str], ...]:
    s = _sizes(attrs, specs)
    values = {
        "HEADS": s.heads,
        "KV_HEADS": s.kv_heads,
        "HEAD_DIM": s.dim,
        "HALF": specs[3].dims[0],
        "PAGE": s.page,
        "KV_FP8": int(s.storage is DType.U8),
        "EPS": float(attrs["eps"]),
    }
    return tuple((k, str(v)) for k, v in values.items())


def _refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """What neither kernel can do."""
    s, half = _sizes(attrs, specs), specs[3].dims[0]
    if specs[0].dtype is not DType.BF16:
        return f"activations are {specs[0].dtype}, not bf16"
    if s.storage not in (DType.BF16, DType.U8):
        return f"pages hold {s.storage}, not bf16 or fp8 codes"
    if s.dim not in DIMS:
        return f"heads of {s.dim} are none of {', '.join(map(str, DIMS))}"
    if s.page < 16 or s.page & (s.page - 1):
        return f"pages of {s.page} tokens are no power of two from 16"
    if half % (s.dim // 32) or 2 * half > s.dim:
        return f"{half} rotary pairs do not fall on lanes of {s.dim // 32} dimensions"
    return None


def _pointers(kind: Literal["input", "output", "scratch"], *indices: int) -> tuple[Pointer, ...]:
    return tuple(Pointer(kind, i) for i in indices)


def refuse_decode(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses tiles, and groups that the matrix unit's eight columns do not hold."""
    s = _sizes(attrs, specs)
    if s.tile != 1:
        return f"rows are of {s.tile} tokens, not one"
    if s.group > COLUMNS:
        return f"{s.group} heads share a kv head, more than {COLUMNS}"
    return _refuse(attrs, specs, target)


def _decode_shape(s: Sizes) -> tuple[int, int, int]:
    """(warps, stages, bytes of `struct Block` without its list of rows)."""
    token = _token_bytes(s)
    warps = 2 if token > 256 else 4
    stages = 2 if token >= 256 else 4
    arena = max(stages * 2 * 16 * token, COLUMNS * (s.dim + 4) * 4)
    rest = COLUMNS * (s.dim + 8) * 2 + 2 * token + warps * COLUMNS * 8
    return warps, stages, warps * arena + rest + COLUMNS * MOST_CHUNKS * 4 + 128


def plan_decode(attrs: Attrs, specs: Specs, target: Target, chunk: int) -> Plan:
    """As many blocks as are resident; partial sums of every chunk and a counter a kv head."""
    s, rows = _sizes(attrs, specs), specs[8].dims[0]
    warps, stages, shared = _decode_shape(s)
    blocks = min(3, target.shared_bytes // (shared + 12 * rows + 1024))
    longest = specs[7].dims[1] * s.page
    units = rows * s.kv_heads * min(MOST_CHUNKS, -(-longest // chunk))
    shape = {"WARPS": warps, "STAGES": stages, "CHUNK": chunk, "BLOCKS": blocks, "SHARED": shared}
    args: tuple[Arg, ...] = (
        *_pointers("input", 0, 1, 2, 3, 4),
        *_pointers("output", 1, 2),
        *_pointers("input", 7, 8, 9, 10),
        *_pointers("output", 0),
        *_pointers("scratch", 0, 1, 2),
        Scalar("i32", rows),
        Scalar("i32", specs[7].dims[1]),
    )
    launch = Launch(
        "paged_decode",
        (min(units, target.sms * blocks), 1, 1),
        (32 * warps, 1, 1),
        args,
        shared=shared + 12 * rows,
        defines=(*_defines(attrs, specs), *((k, str(v)) for k, v in shape.items())),
        overlaps=True,
    )
    sums = units * s.group
    scratch = (
        Scratch(sums * s.dim * 4),
        Scratch(sums * 8),
        Scratch(rows * s.kv_heads * 4, zeroed=True),
    )
    return Plan((launch,), scratch)


def cost_decode(attrs: Attrs, specs: Specs, target: Target, chunk: int) -> float:
    """Rows of a typical length: reading, a fixed time a round of blocks, and a chunk's own way."""
    s, rows = _sizes(attrs, specs), specs[8].dims[0]
    length = min(specs[7].dims[1] * s.page, TYPICAL)
    units = rows * s.kv_heads * -(-length // chunk)
    rounds = -(-units // (target.sms * 3)) if target.hopper else -(-units // target.sms)
    read = 2 * rows * length * s.kv_heads * _token_bytes(s) / (0.9 * target.bandwidth)
    return 5e-6 + read + rounds * 4e-6 + min(chunk, length) * 1.5e-8


def refuse_prefill(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Refuses rows that are not tiles of 64 tokens."""
    s = _sizes(attrs, specs)
    if s.tile != TILE:
        return f"rows are of {s.tile} tokens, not {TILE}"
    return _refuse(attrs, specs, target)


def plan_prefill(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """`paged_append` over tokens, then `paged_prefill` over rows and heads."""
    s, rows = _sizes(attrs, specs), specs[8].dims[0]
    shared = TILE * 2 * s.dim + 2 * 2 * KEYS * _token_bytes(s)
    blocks = min(2, target.shared_bytes // (shared + 1024))
    defines = (*_defines(attrs, specs), ("BLOCKS", str(blocks)))
    steps = _pointers("input", 7, 8, 9, 10)
    pages = Scalar("i32", specs[7].dims[1])
    append = Launch(
        "paged_append",
        (rows * TILE, 1, 1),
        (256, 1, 1),
        (
            *_pointers("input", 0, 1, 2, 3, 4),
            *_pointers("output", 1, 2),
            *steps,
            *_pointers("scratch", 0),
            pages,
        ),
        defines=defines,
        overlaps=True,
    )
    attend = Launch(
        "paged_prefill",
        (rows, s.heads, 1),
        (128, 1, 1),
        (
            *_pointers("scratch", 0),
            *_pointers("input", 4),
            *_pointers("output", 1, 2),
            *steps,
            *_pointers("output", 0),
            pages,
        ),
        shared=shared,
        defines=defines,
        overlaps=True,
    )
    return Plan((append, attend), (Scratch(rows * TILE * s.heads * s.dim * 2),))


def cost_prefill(attrs: Attrs, specs: Specs, target: Target) -> float:
    """The products of half of the longest context at a third of a library's rate."""
    s, rows = _sizes(attrs, specs), specs[8].dims[0]
    pairs = rows * TILE * (specs[7].dims[1] * s.page / 2)
    return 4 * pairs * s.heads * s.dim / (target.bf16_flops / 3) + 8e-6


CUDA = Cuda(
    tactics=(
        *(
            Tactic(
                f"chunks_{chunk}",
                "paged_decode.cu",
                refuse_decode,
                partial(plan_decode, chunk=chunk),
                partial(cost_decode, chunk=chunk),
            )
            for chunk in CHUNKS
        ),
        Tactic("tiles", "paged_prefill.cu", refuse_prefill, plan_prefill, cost_prefill),
    )
)
