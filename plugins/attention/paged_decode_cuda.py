"""The CUDA side of decode attention: `paged_attention` and `attention_decode` of one token a row.

One launch for either. How it cuts a row into chunks depends on the tactic and on the row's length
alone: with one tactic in every bucket, a row's bits do not depend on its company or its bucket.
Sizes here mirror `struct Block` of paged_merge.cuh. Also what rounds of drafts and prefill
share: sizes, macros and refusals.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

from spark_engine.kernel import (
    NULL,
    Arg,
    Attrs,
    Early,
    Launch,
    Plan,
    Pointer,
    Scalar,
    Scratch,
    Specs,
    Tactic,
    Target,
)
from spark_engine.plugins.attention.paged_attention_nodes import Sizes, sizes_of
from spark_engine.plugins.common.quantised import QUANTS
from spark_engine.plugins.common.row_quant_cuda import quantised_outputs
from spark_engine.tensors import DType

DIMS = (32, 64, 128, 256)
COLUMNS = 8  # heads of a group, padded
FAN = 8  # parts that are merged at once
# (tokens that a chunk has about, warps of a block over e4m3 pages, chunks of a row at most), a
# tactic each: where rows times kv heads times chunks are as many as blocks are resident, nothing
# waits for a second round. A few long rows fill the GPU by 64 chunks, several by longer ones; three
# warps are as many as a round's teams of four.
ALONE = FAN * FAN
SHAPES = (
    (128, 8, ALONE),
    (256, 8, ALONE),
    (256, 3, ALONE),
    (128, 8, FAN),
    (256, 8, FAN),
    (512, 12, FAN),
    (1024, 12, FAN),
    (1024, 6, FAN),
    (1024, 3, FAN),
)
# For less shared memory than Hopper has.
SMALL = ((128, 4, ALONE), (256, 4, ALONE), (512, 4, FAN), (1024, 4, FAN))
RESIDENT = 12  # warps of a multiprocessor, at most: 170 registers each
TYPICAL = 1024  # tokens of a row that costs are predicted for
COPIES = 2  # quantised copies that one launch writes at most
OPERANDS = 11  # before the scales
ROW = 16  # bytes of `struct Row`


def sizes(attrs: Attrs, specs: Specs) -> Sizes:
    """The attributes and the pages' size; `attention_decode` has no tile but 1."""
    return sizes_of({"tile": 1, **attrs}, specs[5])


def token_bytes(s: Sizes) -> int:
    """Bytes of one token of one kv head's keys."""
    return s.dim * s.storage.itemsize


def defines(attrs: Attrs, specs: Specs) -> tuple[tuple[str, str], ...]:
    """The macros of paged_kv.cuh."""
    s = sizes(attrs, specs)
    return pages_macros(s, s.heads, specs[3].dims[0], float(attrs["eps"]))


def pages_macros(s: Sizes, heads: int, half: int, eps: float) -> tuple[tuple[str, str], ...]:
    """The same, of an op whose rows have so many heads of queries."""
    values = {
        "HEADS": heads,
        "KV_HEADS": s.kv_heads,
        "HEAD_DIM": s.dim,
        "HALF": half,
        "PAGE": s.page,
        "KV_FP8": int(s.storage is DType.U8),
        "EPS": eps,
    }
    return tuple((k, str(v)) for k, v in values.items())


def refuse_any(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """What neither kernel can do."""
    return refuse_pages(sizes(attrs, specs), specs[0].dtype, specs[3].dims[0])


def refuse_pages(s: Sizes, activation: DType, half: int) -> str | None:
    """Refuses what no kernel over these pages does."""
    if activation is not DType.BF16:
        return f"activations are {activation}, not bf16"
    if s.storage not in (DType.BF16, DType.U8):
        return f"pages hold {s.storage}, not bf16 or fp8 codes"
    if s.dim not in DIMS:
        return f"heads of {s.dim} are none of {', '.join(map(str, DIMS))}"
    if s.page < 16 or s.page & (s.page - 1):
        return f"pages of {s.page} tokens are no power of two from 16"
    if half % (s.dim // 32) or 2 * half > s.dim:
        return f"{half} rotary pairs do not fall on lanes of {s.dim // 32} dimensions"
    return None


def pointers(kind: Literal["input", "output", "scratch"], *indices: int) -> tuple[Pointer, ...]:
    """One kind's arguments."""
    return tuple(Pointer(kind, i) for i in indices)


def refuse_decode(attrs: Attrs, specs: Specs, target: Target, most: int) -> str | None:
    """Refuses tiles, and what `refuse_group` does, too many warps."""
    s = sizes(attrs, specs)
    if s.tile != 1:
        return f"rows are of {s.tile} tokens, not one"
    reason = refuse_group(attrs, specs, target, most)
    shared = _shape(s, most)[2] + ROW * specs[8].dims[0]
    if reason is None and shared > target.shared_bytes:
        return f"{most} warps take {shared} bytes of shared memory; {target.name} has less"
    return reason


def refuse_group(attrs: Attrs, specs: Specs, target: Target, most: int) -> str | None:
    """Refuses groups that the matrix unit's eight columns do not hold, copies that are not written,
    another target's numbers of warps."""
    s = sizes(attrs, specs)
    if s.group > COLUMNS:
        return f"{s.group} heads share a kv head, more than {COLUMNS}"
    if attrs.get("quant") == "fp8_block" and s.dim % 128:
        return f"heads of {s.dim} columns do not come in 128-column blocks of fp8_block"
    if int(attrs.get("n", 1)) > COPIES:
        return f"{attrs['n']} quantised copies; at most {COPIES} are written"
    if (most == SMALL[0][1]) == target.large_shared:
        return f"blocks of {most} warps are not for the shared memory of {target.name}"
    return refuse_any(attrs, specs, target)


def walkers_of(s: Sizes, most: int) -> int:
    """Rings of a block: half as many where a token's row is twice as long."""
    return most // 2 if token_bytes(s) > 256 else most


def most_warps(s: Sizes, target: Target) -> int:
    """Of a block whose rings are shared."""
    return RESIDENT if target.large_shared else 16


def stages_alone(s: Sizes) -> int:
    """Tiles of a ring that one warp fills."""
    return 2 if token_bytes(s) >= 256 else 4


def _shape(s: Sizes, most: int) -> tuple[int, int, int]:
    """(warps, stages, bytes of `struct Block` without its list of rows)."""
    token, warps, stages = token_bytes(s), walkers_of(s, most), stages_alone(s)
    arena = max(stages * 2 * 16 * token, COLUMNS * (s.dim + 4) * 4)
    rest = COLUMNS * (s.dim + 8) * 2 + 2 * token + warps * COLUMNS * 8
    return warps, stages, warps * arena + rest + 80


def plan_decode(
    attrs: Attrs, specs: Specs, target: Target, chunk: int, most: int, parts: int
) -> Plan:
    """As many blocks as are resident; partial sums of every chunk, counters of each kv head."""
    s, rows = sizes(attrs, specs), specs[8].dims[0]
    warps, stages, shared = _shape(s, most)
    each = shared + ROW * rows + 1024  # a block takes 1 KiB beside what it asks for, an SM has it
    blocks = min(RESIDENT // most, (target.shared_bytes + 1024) // each)
    longest = specs[7].dims[1] * s.page
    items = rows * s.kv_heads * min(parts, -(-longest // chunk))
    numbers = {
        "WARPS": warps,
        "STAGES": stages,
        "CHUNK": chunk,
        "MOST_CHUNKS": parts,
        "BLOCKS": blocks,
        "SHARED": shared,
    }
    launch = Launch(
        "paged_decode",
        (min(items, target.sms * blocks), 1, 1),
        (32 * warps, 1, 1),
        arguments(attrs, specs, rows),
        shared=shared + ROW * rows,
        defines=(
            *defines(attrs, specs),
            *((k, str(v)) for k, v in numbers.items()),
            *epilogue(attrs),
        ),
        pdl=True,
        early=Early(lets=True),
    )
    sums = items * s.group
    counters = rows * s.kv_heads * (FAN + 1)
    scratch = (Scratch(sums * s.dim * 4), Scratch(sums * 16), Scratch(counters * 4, zeroed=True))
    return Plan((launch,), scratch)


def epilogue(attrs: Attrs) -> tuple[tuple[str, str], ...]:
    """The macros of paged_merge.cuh that say what becomes of the result."""
    values = {
        "FUSED": int("quant" in attrs),
        "KEEP": int(attrs.get("keep", 1)),
        "QUANT": QUANTS.index(str(attrs.get("quant", "none"))),
        "COPIES": int(attrs.get("n", 1)),
    }
    return tuple((k, str(v)) for k, v in values.items())


def arguments(attrs: Attrs, specs: Specs, rows: int) -> tuple[Arg, ...]:
    """Those of the kernels of one token and of a round."""
    if "quant" in attrs:
        pages, y = pointers("output", 0, 1), Pointer("output", 2) if attrs["keep"] else NULL
        copies = quantised_outputs(attrs, 2 + int(attrs["keep"]), COPIES)
    else:
        pages, y, copies = pointers("output", 1, 2), Pointer("output", 0), (NULL,) * 2 * COPIES
    return (
        *pointers("input", 0, 1, 2, 3, 4),
        *pages,
        *pointers("input", 7, 8, 9, 10),
        y,
        Pointer("input", OPERANDS) if len(specs) > OPERANDS else NULL,
        *copies,
        *pointers("scratch", 0, 1, 2),
        Scalar("i32", rows),
        Scalar("i32", specs[7].dims[1]),
    )


def cost_decode(attrs: Attrs, specs: Specs, target: Target, chunk: int, most: int) -> float:
    """Rows of a typical length: a warp's own way, or all bytes and the cost of each round of work
    items; merges. Fitted to measurements behind a launch that fills the GPU."""
    s, rows = sizes(attrs, specs), specs[8].dims[0]
    length = min(specs[7].dims[1] * s.page, TYPICAL)
    chunks = max(1, (length + chunk // 2) // chunk)
    merges = 3e-6 * ((chunks > 1) + (chunks > FAN))
    way = 8e-6 + 2.3e-6 * length / (16 * chunks * most)
    read = 2 * rows * length * s.kv_heads * token_bytes(s) / (0.9 * target.bandwidth)
    resident = target.sms * (RESIDENT // most if target.large_shared else 1)
    return max(way, read + 5.5e-6 * max(1.0, rows * s.kv_heads * chunks / resident)) + merges


def name_of(chunk: int, most: int, parts: int) -> str:
    """What decides how a row's sums are cut and come together."""
    return f"chunks_{chunk}_{most}" if parts == ALONE else f"{parts}_chunks_{chunk}_{most}"


def _tactic(chunk: int, most: int, parts: int) -> Tactic:
    refuse = partial(refuse_decode, most=most)
    plan = partial(plan_decode, chunk=chunk, most=most, parts=parts)
    cost = partial(cost_decode, chunk=chunk, most=most)
    name = name_of(chunk, most, parts)
    return Tactic(name, "attention/paged_decode.cu", refuse, plan, cost)


DECODE = tuple(_tactic(*shape) for shape in (*SHAPES, *SMALL))
