"""Planner of `block_attention`: parts of the window share a row's kv head; the last to arrive
merges them."""

from spark_engine.kernel import Plan, Scratch
from spark_engine.plugins.kernels.attention.attention_decode_kernels import (
    pages_macros,
    refuse_pages,
    sizes,
    token_bytes,
)
from spark_engine.plugins.launch import Candidate, Kernel, Node

CHUNK, MOST_PARTS = 128, 32  # positions of a part, at least; parts of a row's kv head
MOST_QUERIES = 64  # of a kv head: a thread has a sum for each
MOST_SHARED = 48 << 10
KERNEL = Kernel(
    "block_attention",
    "qkv q_norm k_norm inv_freq rope_offsets kv_scale k_pages v_pages page_table slots starts"
    " counts o sums stats arrived longest",
)


def _shared(node: Node) -> int:
    """Bytes: queries, keys and values of 32 positions, weights."""
    s = sizes(node)
    queries = s.group * s.tile
    return queries * s.dim * 4 + 2 * 32 * (s.dim + 8) * 2 + 33 * queries * 4


def _refuse(node: Node) -> str | None:
    s = sizes(node)
    if s.group * s.tile > MOST_QUERIES:
        return f"{s.group * s.tile} queries of a kv head; up to {MOST_QUERIES} are in registers"
    if _shared(node) > MOST_SHARED:
        return f"{_shared(node)} bytes of shared memory; a block has {MOST_SHARED}"
    return refuse_pages(node)


def _plan(node: Node) -> Plan:
    s, rows, window = sizes(node), node.dim("rows"), node.number("window")
    longest = node.dim("MP") * s.page
    keys = min(window - 1, longest)
    chunk = CHUNK * max(1, -(-keys // (CHUNK * (MOST_PARTS - 1))))
    parts = -(-keys // chunk) + 1
    threads = max(128, s.dim)
    macros = {**pages_macros(node, s.heads), "TOKENS": s.tile, "WINDOW": window}
    macros |= {"CHUNK": chunk, "THREADS": threads}
    groups = rows * s.kv_heads
    queries = groups * parts * s.group * s.tile
    arrived = Scratch(4 * groups, zeroed=True)
    node = node.with_scratch(sums=4 * queries * s.dim, stats=8 * queries, arrived=arrived)
    grid = (parts, s.kv_heads, rows)
    return node.plan(KERNEL.launch(node, grid, threads, macros, longest=node.dim("MP")))


def _cost(node: Node) -> float:
    """Seconds: the latency of a part and of the merge, and the bytes of the window."""
    s, rows = sizes(node), node.dim("rows")
    keys = min(node.number("window"), node.dim("MP") * s.page)
    read = 2 * rows * keys * s.kv_heads * token_bytes(s) / (0.5 * node.target.bandwidth)
    return 1.5e-5 + read


CANDIDATES = (Candidate("parts", "attention/block_attention_fma.cu", _plan, _cost, _refuse),)
