"""Planner of `append_kv`: one launch, a block a token."""

from spark_engine.kernel import Plan
from spark_engine.plugins.kernels.attention.attention_decode_kernels import (
    PAGES,
    pages_macros,
    refuse_pages,
    rope_macros,
    sizes,
    token_bytes,
)
from spark_engine.plugins.launch import Candidate, Kernel, Node

WARPS = 8  # of a block, at most; a warp has a head of keys or values at a time
KERNEL = Kernel("append_kv", f"kv k_norm inv_freq rope_offsets kv_scale {PAGES} longest")


def refuse(node: Node) -> str | None:
    """Why no kernel over pages takes the node, or None."""
    return refuse_pages(node, "kv")


def plan(node: Node) -> Plan:
    """A block a token; its warps take the heads of keys and of values in turn."""
    s = sizes(node)
    warps = min(WARPS, 2 * s.kv_heads)
    macros = {**pages_macros(node, 0), **rope_macros(node), "TOKENS": s.tile, "WARPS": warps}
    grid = node.dim("rows") * s.tile
    return node.plan(KERNEL.launch(node, grid, 32 * warps, macros, longest=node.dim("MP")))


def cost(node: Node) -> float:
    """Seconds: a short launch, and the bytes that it reads and writes."""
    s = sizes(node)
    token = 2 * s.kv_heads * (2 * s.dim + token_bytes(s))
    return 4e-6 + node.dim("rows") * s.tile * token / (0.5 * node.target.bandwidth)


CANDIDATES = (Candidate("tokens", "attention/append_kv_fma.cu", plan, cost, refuse),)
