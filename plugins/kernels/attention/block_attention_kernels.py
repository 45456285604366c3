"""Planner of `block_attention`: parts of the window share a row's kv head; the last to arrive
merges them."""

from spark_engine.kernel import DECLARED, Plan, Scratch
from spark_engine.plugins.kernels.attention.attention_decode_kernels import (
    pages_macros,
    refuse_pages,
    sizes,
    token_bytes,
)
from spark_engine.plugins.launch import Candidate, Kernel, Node

CHUNK, MOST_PARTS = 128, 32  # positions of a part, at least; parts of a row's kv head
MOST_TOKENS, MOST_QUERIES = 32, 256  # of a row; of a kv head: two warps have 16
KERNEL = Kernel(
    "block_attention",
    "qkv q_norm k_norm inv_freq rope_offsets kv_scale k_pages v_pages page_table slots starts"
    " counts o sums stats arrived longest",
)


def _keys(node: Node) -> int:
    """Positions that a block has in shared memory at once, as many as fit; 0: none do."""
    s = sizes(node)
    queries, row = s.group * s.tile, 2 * (s.dim + 8)
    known = -(-queries // 16) * 16 * row + 32 * 4 * queries
    return next((n for n in (CHUNK, 64, 32) if known + 2 * n * row <= node.target.shared_bytes), 0)


def _refuse(node: Node) -> str | None:
    s = sizes(node)
    if s.tile > MOST_TOKENS or s.group * s.tile > MOST_QUERIES:
        return f"{s.tile} tokens, {s.group * s.tile} queries of a kv head; a block has 32 and 256"
    if not _keys(node):
        return f"heads of {s.dim}: 32 keys and values are more than the shared memory of a block"
    return refuse_pages(node)


def _plan(node: Node) -> Plan:
    s, rows, window = sizes(node), node.dim("rows"), node.number("window")
    longest = node.dim("MP") * s.page
    keys = min(window - 1, longest)
    chunk = CHUNK * max(1, -(-keys // (CHUNK * (MOST_PARTS - 1))))
    parts = -(-keys // chunk) + 1
    threads = 64 * -(-s.group * s.tile // 16)
    macros = {**pages_macros(node, s.heads), "TOKENS": s.tile, "WINDOW": window}
    macros |= {"CHUNK": chunk, "KEYS": _keys(node)}
    groups = rows * s.kv_heads
    queries = groups * parts * s.group * s.tile
    arrived = Scratch(4 * groups, zeroed=True)
    node = node.with_scratch(sums=4 * queries * s.dim, stats=8 * queries, arrived=arrived)
    grid = (parts, s.kv_heads, rows)
    longest = node.dim("MP")
    return node.plan(KERNEL.launch(node, grid, threads, macros, shared=DECLARED, longest=longest))


def _cost(node: Node) -> float:
    """Seconds: the latency of a part and of the merge, and the bytes of the window."""
    s, rows = sizes(node), node.dim("rows")
    keys = min(node.number("window"), node.dim("MP") * s.page)
    read = 2 * rows * keys * s.kv_heads * token_bytes(s) / (0.5 * node.target.bandwidth)
    return 8e-6 + read


CANDIDATES = (Candidate("parts", "attention/block_attention_mma.cu", _plan, _cost, _refuse),)
