"""The CUDA side of `gated_delta_chunk`, and with its convolution of `gdn_prefill`: all that needs
no state for all tiles, then a scan, which with a replay ring begins from a state caught up.

Knows the two kernels' shapes and what is between them. A state's output is its input's memory.
"""

from functools import partial

from spark_engine.kernel import DECLARED, Plan, Target
from spark_engine.plugins.launch import Candidate, Kernel, Node
from spark_engine.plugins.state.replay_ring import Heads, heads_of
from spark_engine.tensors import DType

TILE = 64
FACTORS = 5  # rows of 64 floats a tile and value head
SEQUENCES = 16  # that are scanned side by side; a block does every 16th
MOST_HEADS = 8  # value heads a key head: warps of a block
TRIANGLE = 2 * 10 * 256 * 2  # bytes of T or P, packed: two parts of ten blocks of 16 x 16
WGMMA_COLUMNS = 64  # value columns of a block of delta_prefill_wgmma_sm90.cu
WARPS_SHARE = 0.45  # of the time, on 48 multiprocessors (log/delta_rule/delta_prefill.md)
WGMMA_SHARE = 0.6  # of the time: 0.58 to 0.62 (log/delta_rule/delta_prefill.md)

_COLUMNS = "c width conv_weight? conv_state? conv_state_out?"
_ROWS = "slots starts counts sources saves"
PREPARE = Kernel(
    "gated_delta_prepare",
    f"{_COLUMNS} ba a_log dt_bias {_ROWS} gdn_ring? bases? keys values? t p factors rows",
)
SCAN = Kernel(
    "gated_delta_scan",
    f"{_COLUMNS} gdn_state state_out {_ROWS} keys values? t p factors o gdn_ring? ring_out? bases? "
    "rows",
)


def warp_columns(h: Heads, target: Target) -> int:
    """Value columns of one block of delta_prefill_warps_mma.cu: half a head if all run at once, 16
    or 32 where heads are no multiples of 64."""
    if h.value_dim % 64:
        return 16 if h.value_dim % 32 else 32
    halves = h.values * h.value_dim // 64
    return 64 if halves <= target.sms or h.value_dim % 128 else 128


def refuse(node: Node) -> str | None:
    """Says which size or dtype the kernels have no shape for."""
    h, c = heads_of(node.attrs), node["c"]
    if c.dtype is not DType.BF16:
        return f"{c.name} is {c.dtype}; only bf16 is served"
    if (width := c.dims[1]) % 4:
        return f"{width} columns are not read four at a time"
    if h.tile != TILE or h.key_dim not in (16, 32, 64, 128) or h.value_dim % 16:
        return f"tiles of {h.tile}, heads of {h.key_dim} and {h.value_dim}: no such kernel"
    if h.repeat > MOST_HEADS:
        return f"{h.repeat} value heads a key head are more than a block's {MOST_HEADS} warps"
    return None


def refuse_wgmma(node: Node) -> str | None:
    """Serves Hopper's GPUs and the keys of served models."""
    h = heads_of(node.attrs)
    if not node.target.wgmma:
        return f"{node.target.name} has no wgmma"
    if h.key_dim != 128 or h.value_dim % WGMMA_COLUMNS:
        return f"heads of {h.key_dim} and {h.value_dim}: 128 and a multiple of {WGMMA_COLUMNS}"
    return refuse(node)


def refuse_warps(node: Node) -> str | None:
    """Serves all others."""
    if refuse_wgmma(node) is None:
        return f"{node.target.name} has wgmma"
    return refuse(node)


def plan_wgmma(node: Node) -> Plan:
    """The same launches and operands, the scan with 64 value columns a block."""
    return _plan(node, WGMMA_COLUMNS, packed=False)


def plan_warps(node: Node) -> Plan:
    """The same launches and operands, T and P packed, a warp of the scan for 16 value columns."""
    h, target = heads_of(node.attrs), node.target
    return _plan(node, warp_columns(h, target), packed=True)


def _plan(node: Node, ds: int, packed: bool) -> Plan:
    """Two launches; between them q and k of every tile and key head, T, P (as `packed` says) and
    the factors of every tile and value head, and if packed v. `ds`: value columns of a block of
    the scan."""
    h, rows, conv = heads_of(node.attrs), node.dim("rows"), "conv_state" in node
    macros = {
        "ACT_F32": 0,
        "CONV": conv,
        "DRAFTS": node.number("drafts"),
        "DS": ds,
        "HK": h.keys,
        "KD": h.key_dim,
        "PACKED": packed,
        "R": h.repeat,
        "RING": node.number("ring"),
        "STATE_BYTES": node["gdn_state"].dtype.itemsize,
        "STATE_F16": node["gdn_state"].dtype is DType.F16,
        "VD": h.value_dim,
    } | ({"TAPS": node.dim("K")} if conv else {})
    tile_heads, triangle = rows * h.values, TRIANGLE if packed else 2 * TILE * TILE * 2
    node = node.with_scratch(
        keys=rows * h.keys * 2 * TILE * h.key_dim * 2,
        t=tile_heads * triangle,
        p=tile_heads * triangle,
        factors=tile_heads * FACTORS * TILE * 4,
    )
    if packed:
        node = node.with_scratch(values=tile_heads * TILE * h.value_dim * 2)
    if "gdn_ring" in node:
        positions = 2 if node.number("drafts") else 1  # that a ring says of its slot
        node = node.with_scratch(bases=4 * positions * rows)
    width = node["c"].dims[1]
    prepare = PREPARE.launch(node, (h.keys, rows), 256, macros, DECLARED, width=width, rows=rows)
    grid, threads = (h.value_dim // ds, h.values, min(rows, SEQUENCES)), 2 * ds if packed else 256
    scan = SCAN.launch(node, grid, threads, macros, DECLARED, width=width, rows=rows)
    return node.plan(prepare, scan)


def _cost(node: Node, share: float) -> float:
    """The products at a share of a third of the tensor cores' rate, what is between once out and
    in."""
    h, target = heads_of(node.attrs), node.target
    tile_heads = node.dim("rows") * h.values
    wide = TILE * h.key_dim * h.value_dim
    inner = TILE * TILE * (7 * h.value_dim + 2 * h.key_dim)
    flops = 2 * tile_heads * (7 * wide + inner)
    least = 3 * flops / target.bf16_flops + 2 * tile_heads * 34_000 / target.bandwidth + 6e-6
    return share * least


CANDIDATES = (
    Candidate("wgmma", "delta_rule/prefill/delta_prefill_wgmma_sm90.cu",
              plan_wgmma, partial(_cost, share=WGMMA_SHARE), refuse_wgmma,
              why="0.6 of the time of mma.sync: benchmarks/log/delta_rule/delta_prefill.md"),
    Candidate("warps", "delta_rule/prefill/delta_prefill_warps_mma.cu",
              plan_warps, partial(_cost, share=WARPS_SHARE), refuse_warps,
              why="GPUs without wgmma, and heads that it does not serve"),
)  # fmt: skip
