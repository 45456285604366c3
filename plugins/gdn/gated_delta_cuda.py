"""The CUDA side of `gated_delta_chunk`: all that needs no state for all tiles, then a scan, which
with a replay ring begins from a state caught up.

Knows the two kernels' shapes and what lies between them. A state's output is its input's memory.
"""

from __future__ import annotations

from spark_engine.kernel import (
    NULL,
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
from spark_engine.plugins.gdn.gated_delta_nodes import Heads, heads_of
from spark_engine.tensors import DType

TILE = 64
FACTORS = 5  # rows of 64 floats a tile and value head
ALIGNMENT = 128
SEQUENCES = 16  # that are scanned side by side; a block does every 16th
MOST_HEADS = 8  # value heads a key head: warps of a block
TRIANGLE = 2 * 10 * 256 * 2  # bytes of T or P, packed: two parts of ten blocks of 16 x 16
WGMMA_COLUMNS = 64  # value columns of a block of gated_delta_wgmma.cu
WARPS_SHARE = 0.45  # of the time, on 48 multiprocessors (benchmarks/log/delta_rule/gated_delta.md)
WGMMA_SHARE = 0.6  # of the time: 0.58 to 0.62 (benchmarks/log/delta_rule/gated_delta.md)
# `Tiles` of gated_delta_fetch.cuh: two tiles of nine panels, outputs, factors, barriers, bounds.
WGMMA_BYTES = 2 * 9 * TILE * 128 + 4 * TILE * 32 + 2 * FACTORS * TILE * 4 + 4 * 8 + 4 * 16


def columns(h: Heads) -> int:
    """Value columns of one block of the scan."""
    return 32 if h.value_dim % 32 == 0 else 16


def prepare_bytes(h: Heads) -> int:
    """Shared memory of `Prepare`."""
    triangle = 6 * 2 * 512 + 4 * (2 * 512 + 16)  # A's blocks below the diagonal, and those on it
    later = h.repeat * triangle + 4 * (3 * h.repeat + 2) * TILE
    return max(2 * TILE * h.key_dim * 2, later) + 2 * ALIGNMENT


def scan_bytes(h: Heads, buffers: int) -> int:
    """Shared memory of `Scan` with so many buffers for k."""
    ds = columns(h)
    halves = (buffers + 1) * TILE * h.key_dim + 4 * TILE * TILE
    halves += 3 * TILE * ds + max(2 * h.key_dim, 3 * TILE) * ds
    return 2 * halves + 8 * FACTORS * TILE + 2 * ALIGNMENT


def warp_columns(h: Heads, target: Target) -> int:
    """Value columns of one block of gated_delta_warps.cu: half a head where all run at once."""
    halves = h.values * h.value_dim // 64
    return 64 if halves <= target.sms or h.value_dim % 128 else 128


def warps_bytes(h: Heads, target: Target) -> int:
    """Shared memory of `Scan` of gated_delta_warps.cu."""
    tokens = TILE * (3 * h.key_dim + warp_columns(h, target)) * 2
    return tokens + 2 * TRIANGLE + 2 * FACTORS * TILE * 4


def refuse(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Says which size or dtype the kernels have no shape for."""
    h = heads_of(attrs)
    if specs[0].dtype is not DType.BF16:
        return f"{specs[0].name} is {specs[0].dtype}; only bf16 is served"
    if h.tile != TILE or h.key_dim not in (16, 32, 64, 128) or h.value_dim % 16:
        return f"tiles of {h.tile}, heads of {h.key_dim} and {h.value_dim}: no such kernel"
    needed = max(prepare_bytes(h), scan_bytes(h, 1))
    if h.repeat > MOST_HEADS or needed > target.shared_bytes:
        return f"{h.repeat} value heads a key head need {needed} bytes of shared memory"
    return None


def refuse_wgmma(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Serves Hopper's GPUs and the keys of served models."""
    h = heads_of(attrs)
    if not target.wgmma:
        return f"{target.name} has no wgmma"
    if h.key_dim != 128 or h.value_dim % WGMMA_COLUMNS:
        return f"heads of {h.key_dim} and {h.value_dim}: 128 and a multiple of {WGMMA_COLUMNS}"
    return refuse(attrs, specs, target)


def refuse_warps(attrs: Attrs, specs: Specs, target: Target) -> str | None:
    """Serves GPUs without wgmma and the keys of served models."""
    h = heads_of(attrs)
    if target.wgmma:
        return f"{target.name} has wgmma"
    if h.key_dim != 128 or h.value_dim % 64:
        return f"heads of {h.key_dim} and {h.value_dim}: 128 and a multiple of 64"
    return refuse(attrs, specs, target)


def plan_wgmma(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """The same launches and operands, the scan with 64 value columns a block."""
    return _plan(attrs, specs, WGMMA_COLUMNS, WGMMA_BYTES, "SWIZZLED")


def plan_warps(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """The same launches and operands, T and P packed, a warp of the scan for 16 value columns."""
    h = heads_of(attrs)
    return _plan(attrs, specs, warp_columns(h, target), warps_bytes(h, target), "PACKED")


def plan(attrs: Attrs, specs: Specs, target: Target) -> Plan:
    """Two launches, T and P row-major."""
    h, buffers = heads_of(attrs), 2 if target.large_shared else 1
    return _plan(attrs, specs, columns(h), scan_bytes(h, buffers), "", buffers)


def _plan(attrs: Attrs, specs: Specs, ds: int, shared: int, layout: str, buffers: int = 1) -> Plan:
    """Two launches; between them T, P (`layout` says how) and the factors of every tile and value
    head. `ds`, `shared`: value columns of a block of the scan, and its shared memory."""
    h, ring = heads_of(attrs), int(bool(attrs["ring"]))  # operands behind the state are moved by it
    rows, packed = specs[-1].dims[0], layout == "PACKED"
    tile_heads = rows * h.values
    defines = tuple(
        (name, str(value))
        for name, value in (
            ("ACT_F32", 0),
            ("DRAFTS", attrs.get("drafts", 0)),
            ("DS", ds),
            ("HK", h.keys),
            ("KBUFFERS", buffers),
            ("KD", h.key_dim),
            ("R", h.repeat),
            ("RING", attrs["ring"]),
            ("STATE_BYTES", specs[4].dtype.itemsize),
            ("VD", h.value_dim),
            *(((layout, 1),) if layout else ()),
        )
    )
    between = tuple(Pointer("scratch", i) for i in range(3))
    prepare = Launch(
        symbol="gated_delta_prepare",
        grid=(h.keys, rows, 1),
        block=(256, 1, 1),
        args=(
            *(Pointer("input", i) for i in (0, 1, 2, 3)),
            *(Pointer("input", i + ring) for i in (5, 6, 7, 8)),
            *((Pointer("input", 5), Pointer("scratch", 3)) if ring else (NULL, NULL)),
            *between,
        ),
        shared=prepare_bytes(h),
        defines=defines,
        pdl=True,
    )
    scan = Launch(
        symbol="gated_delta_scan",
        grid=(h.value_dim // ds, h.values, min(rows, SEQUENCES)),
        block=(2 * ds if packed else 256, 1, 1),
        args=(
            Pointer("input", 0),
            Pointer("input", 4),
            Pointer("output", 1),
            *(Pointer("input", i + ring) for i in range(5, 10)),
            *between,
            Pointer("output", 0),
            *((Pointer("input", 5), Pointer("output", 2), Pointer("scratch", 3)) if ring else ()),
            *(() if ring else [NULL] * 3),
            Scalar("i32", rows),
        ),
        shared=shared,
        defines=defines,
        pdl=True,
    )
    triangle = TRIANGLE if packed else 2 * TILE * TILE * 2
    sizes = (triangle, triangle, FACTORS * TILE * 4)
    told = 2 if attrs.get("drafts", 0) else 1  # numbers that a ring tells of its slot
    bases = (Scratch(4 * told * rows),) * ring
    return Plan((prepare, scan), (*(Scratch(tile_heads * size) for size in sizes), *bases))


def cost(attrs: Attrs, specs: Specs, target: Target) -> float:
    """The products at a third of the tensor cores' rate, what lies between once out and in."""
    h = heads_of(attrs)
    tile_heads = specs[-1].dims[0] * h.values
    wide = TILE * h.key_dim * h.value_dim
    inner = TILE * TILE * (7 * h.value_dim + 2 * h.key_dim)
    flops = 2 * tile_heads * (7 * wide + inner)
    return 3 * flops / target.bf16_flops + 2 * tile_heads * 34_000 / target.bandwidth + 6e-6


def cost_wgmma(attrs: Attrs, specs: Specs, target: Target) -> float:
    """At WGMMA_SHARE of what the other scan and its prepare take."""
    return WGMMA_SHARE * cost(attrs, specs, target)


def cost_warps(attrs: Attrs, specs: Specs, target: Target) -> float:
    """At WARPS_SHARE of what the other scan and its prepare take."""
    return WARPS_SHARE * cost(attrs, specs, target)


CUDA = Cuda(
    tactics=(
        Tactic("two launches", "gdn/gated_delta.cu", refuse, plan, cost),
        Tactic("wgmma", "gdn/gated_delta_wgmma.cu", refuse_wgmma, plan_wgmma, cost_wgmma),
        Tactic("warps", "gdn/gated_delta_warps.cu", refuse_warps, plan_warps, cost_warps),
    )
)
