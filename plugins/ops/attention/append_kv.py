"""Appends keys and values of tokens without queries to the pages of their rows, for a draft head.

k is RMS-normalised per head (the weight holds the +1) and rotated; v is unchanged. Both are stored
with the bits that `paged_attention` stores.
"""

from dataclasses import replace

import numpy as np

from spark_engine.kernel import Plan
from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import expand_rows, page_ids
from spark_engine.plugins.kernels.attention.attention_decode_kernels import (
    PAGES,
    pages_macros,
    refuse_pages,
    rope_macros,
    sizes,
    token_bytes,
)
from spark_engine.plugins.launch import Candidate, Kernel, Node, serve
from spark_engine.plugins.ops.attention import paged_attention
from spark_engine.plugins.ops.attention.paged_attention_nodes import (
    DIMS,
    LEGAL,
    append,
    check,
    turned,
)
from spark_engine.plugins.ops.attention.rope import places, rotate_array
from spark_engine.plugins.state.paged_kv import SECTIONS, sizes_of, store
from spark_engine.tensors import Array, DType, TensorSpec

NAME = "append_kv"
OPERANDS = (
    operands.x("A[tokens,2·nkv·D]", "k; v", "kv"),
    operands.weight("k_norm", "f32[D]"),
    operands.weight("inv_freq", "f32[R/2]"),
    operands.ROPE_OFFSETS,
    Operand("kv_scale", Role.SCALE, "f32[2]"),
    *paged_attention.CACHE,
)


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands' arrays -> (k_pages_out, v_pages_out), token by token."""
    kv, k_norm, inv_freq, offsets, kv_scale, k_pages, v_pages, table, *steps = arrays
    s = sizes_of(attrs, k_pages.shape[2])
    turns = places(attrs, steps[1], offsets, len(inv_freq))
    k_pages, v_pages = k_pages.copy(), v_pages.copy()
    for row, (slot, start, valid) in enumerate(zip(*steps, strict=True)):
        for at in range(start, start + valid if slot >= 0 else start):
            packed = kv[row * s.tile + at - start].astype(np.float64)
            k, v = packed.reshape(2, s.kv_heads, s.dim)
            k = paged_attention.normed(k, k_norm, float(attrs["eps"]))
            k = rotate_array(k, turns[row, at - start], inv_freq)
            page, offset = table[slot, at // s.page], at % s.page
            k_pages[page, :, offset] = store(k, s.storage, kv_scale[0])
            v_pages[page, :, offset] = store(v, s.storage, kv_scale[1])
    return k_pages, v_pages


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The append of `paged_attention`'s body."""
    f, node = Text(), OP.named(attrs, specs)
    s = sizes_of(attrs, node.dim("page"))
    rows = expand_rows(f, s.tile)
    s = replace(s, tile=1)
    longest = node.dim("MP") * s.page
    both = f("Reshape", f.cast("kv", DType.F32), [-1, 1, 2 * s.kv_heads, s.dim])
    both = f("Where", f("Unsqueeze", f("Greater", rows.counts, 0), [1, 2, 3]), both, 0.0)
    k, v = f.many(2, "Split", both, axis=2, num_outputs=2)
    _, k = turned(f, s, rows, {"k_norm": k}, longest, node)
    append(f, s, rows, page_ids(f, rows, node.dim("P+1")), (k, v), longest)
    return f.function(NAME, OP.inputs, OP.outputs)


WARPS = 8  # of a block, at most; a warp has a head of keys or values at a time
KERNEL = Kernel("append_kv", f"kv k_norm inv_freq rope_offsets kv_scale {PAGES} longest")


def _refuse(node: Node) -> str | None:
    """Why no kernel over pages takes the node, or None."""
    return refuse_pages(node, "kv")


def _plan(node: Node) -> Plan:
    """A block a token; its warps take the heads of keys and of values in turn."""
    s = sizes(node)
    warps = min(WARPS, 2 * s.kv_heads)
    macros = {**pages_macros(node, 0), **rope_macros(node), "TOKENS": s.tile, "WARPS": warps}
    grid = node.dim("rows") * s.tile
    return node.plan(KERNEL.launch(node, grid, 32 * warps, macros, longest=node.dim("MP")))


def _cost(node: Node) -> float:
    """Seconds: a short launch, and the bytes that it reads and writes."""
    s = sizes(node)
    token = 2 * s.kv_heads * (2 * s.dim + token_bytes(s))
    return 4e-6 + node.dim("rows") * s.tile * token / (0.5 * node.target.bandwidth)


OP = serve(
    Op(
        name=NAME,
        operands=OPERANDS,
        results=paged_attention.PAGES,
        attrs={
            **dict.fromkeys(("tile", "kv_heads", "head_dim", "eps", "kv_dtype")),
            **dict.fromkeys(SECTIONS, 0),
        },
        dims=DIMS,
        legal=LEGAL,
        check=check,
        reference=reference,
        body=body,
    ),
    (Candidate("tokens", "attention/append_kv_fma.cu", _plan, _cost, _refuse),),
)
