"""Attention of a block drafter: a row's block over its context in pages, and over the whole block.

q and k of the block are RMS-normalised per head and rotated as `append_kv` does; v is unchanged.
Query i of a row sees the context (positions below starts) at distances below `window`, and every
key of the block, also later ones. The block's keys and values are not stored: the next round's
block has others. o = softmax(q·kᵀ / sqrt(D)) v; query head h reads kv head ⌊h / (nq/nkv)⌋. A row
without a token has results 0 and reads nothing.
"""

import math

import numpy as np

from spark_engine.named import Named
from spark_engine.op import Attrs, Op, Tolerance
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import over, page_ids, read_rows
from spark_engine.plugins.formats import fp8_codes
from spark_engine.plugins.kernels.attention import block_attention_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.attention import paged_attention
from spark_engine.plugins.ops.attention.paged_attention import normed
from spark_engine.plugins.ops.attention.paged_attention_nodes import DIMS, LEGAL, indices, turned
from spark_engine.plugins.ops.attention.paged_attention_nodes import check as check_pages
from spark_engine.plugins.ops.attention.rope import places, rotate_array
from spark_engine.plugins.state.paged_kv import Sizes, read_back, sizes_of
from spark_engine.tensors import Array, DType, TensorSpec

OPERANDS = (
    operands.x("A[tokens,nq·D+2·nkv·D]", "q; k; v", "qkv"),
    operands.weight("q_norm", "f32[D]"),
    operands.weight("k_norm", "f32[D]"),
    operands.weight("inv_freq", "f32[R/2]"),
    operands.ROPE_OFFSETS,
    Operand("kv_scale", Role.SCALE, "f32[2]"),
    *paged_attention.CACHE,
)


def _check(node: Named) -> str | None:
    window = node.number("window")
    return f"window is {window}; it must be at least 1" if window < 1 else check_pages(node)


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands' arrays -> (o,), row by row."""
    qkv, q_norm, k_norm, inv_freq, offsets, kv_scale, k_pages, v_pages, table, *steps = arrays
    s, window, eps = sizes_of(attrs, k_pages.shape[2]), int(attrs["window"]), float(attrs["eps"])
    turns = places(attrs, steps[1], offsets, len(inv_freq))
    o = np.zeros((len(steps[0]), s.tile, s.heads, s.dim))
    for row, (slot, start, count) in enumerate(zip(*steps, strict=True)):
        if slot < 0 or count == 0:
            continue
        packed = qkv[row * s.tile : (row + 1) * s.tile].astype(np.float64)
        heads = packed.reshape(s.tile, s.heads + 2 * s.kv_heads, s.dim)
        q, k, v = np.split(heads, [s.heads, s.heads + s.kv_heads], axis=1)
        q, k = normed(q, q_norm, eps), normed(k, k_norm, eps)
        q, k = (_turned(x, turns[row], inv_freq) for x in (q, k))
        at = np.arange(max(0, start - window + 1), start)
        past = [
            read_back(pages[table[slot, at // s.page], :, at % s.page], s.storage, scale)
            for pages, scale in zip((k_pages, v_pages), kv_scale, strict=True)
        ]
        keys, values = np.concatenate([past[0], k]), np.concatenate([past[1], v])
        for i in range(s.tile):
            seen = np.concatenate([start + i - at < window, np.ones(s.tile, bool)])
            for head in range(s.heads):
                own = head // s.group
                scores = keys[seen, own] @ q[i, head] / np.sqrt(s.dim)
                weights = np.exp(scores - scores.max())
                o[row, i, head] = weights @ values[seen, own] / weights.sum()
    return (o.reshape(len(qkv), -1).astype(qkv.dtype),)


def _turned(x: paged_attention.Wide, turns: Array, inv_freq: Array) -> paged_attention.Wide:
    """x [tile, heads, D], rotated by the positions [tile, R/2]."""
    return np.stack([rotate_array(one, at, inv_freq) for one, at in zip(x, turns, strict=True)])


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The window before each row's block, gathered and masked, then one softmax."""
    f, node = Text(), OP.named(attrs, specs)
    s, window = sizes_of(attrs, node.dim("page")), node.number("window")
    longest = node.dim("MP") * s.page
    far = min(window - 1, longest)
    rows = read_rows(f, "slots", "starts", "counts")
    live = over(f, f("Greater", rows.counts, 0), [1, 2, 3])
    x = f.cast("qkv", DType.F32)
    x = f("Reshape", x, [-1, s.tile, s.heads + 2 * s.kv_heads, s.dim])
    x = f("Where", live, x, 0.0)
    q, k, v = f.many(3, "Split", x, [s.heads, s.kv_heads, s.kv_heads], axis=2)
    _, q, k = turned(f, s, rows, {"q_norm": q, "k_norm": k}, longest, node)
    keys, values = k, v
    seen = f("Greater", over(f, rows.starts, [1, 2]), np.full((1, s.tile, s.tile), -1))
    if far:
        back = f("Sub", over(f, rows.starts, [1]), np.arange(far, 0, -1)[None])  # [rows, far]
        there = f("And", f("GreaterOrEqual", back, 0), over(f, f("Greater", rows.counts, 0), [1]))
        at = f("Clip", back, 0, longest - 1)
        page = f("GatherElements", page_ids(f, rows, node.dim("P+1")), f("Div", at, s.page), axis=1)
        where = indices(f, s, page, f("Mod", at, s.page))
        exists = over(f, there, [2, 3])
        keys = f("Concat", _context(f, s, where, exists, far, 0), k, axis=1)
        values = f("Concat", _context(f, s, where, exists, far, 1), v, axis=1)
        distance = np.arange(s.tile)[:, None] + np.arange(far, 0, -1)[None]
        near = f("And", over(f, there, [1]), (distance < window)[None])  # [rows, tile, far]
        seen = f("Concat", near, seen, axis=2)
    by_kv = f("Reshape", q, [-1, s.tile, s.kv_heads, s.group, s.dim])
    q = f("Transpose", by_kv, perm=[0, 2, 3, 1, 4])  # [rows, nkv, group, tile, D]
    scores = f("MatMul", q, f("Unsqueeze", f("Transpose", keys, perm=[0, 2, 3, 1]), [2]))
    scores = f("Where", over(f, seen, [1, 2]), f("Mul", scores, 1 / math.sqrt(s.dim)), -1e30)
    weights = f("Exp", f("Sub", scores, f("ReduceMax", scores, [4], keepdims=1)))
    o = f("MatMul", weights, f("Unsqueeze", f("Transpose", values, perm=[0, 2, 1, 3]), [2]))
    o = f("Div", o, f("ReduceSum", weights, [4], keepdims=1))
    o = f("Reshape", f("Transpose", o, perm=[0, 3, 1, 2, 4]), [-1, s.heads * s.dim])
    f.cast(o, node["qkv"].dtype, out="o")
    return f.function("block_attention", OP.inputs, OP.outputs)


def _context(f: Text, s: Sizes, where: str, exists: str, far: int, which: int) -> str:
    """f32 [rows, far, nkv, D] of keys (0) or values (1); 0 where there is no position."""
    x = f("GatherND", ("k_pages", "v_pages")[which], where)
    if s.storage is DType.U8:
        x = fp8_codes.decode(f, x, [-1, far, s.kv_heads, s.dim])
        x = f("Mul", x, f("Gather", "kv_scale", which))
    return f("Where", exists, f.cast(x, DType.F32), 0.0)


def tolerance(attrs: Attrs) -> Tolerance:
    """As `paged_attention`'s: queries and keys of the block are bf16 where the kernel keeps them
    so."""
    return Tolerance(element=6 * 2.0**-7)


OP = serve(
    Op(
        name="block_attention",
        operands=OPERANDS,
        results=(Result("o", "A[tokens,nq·D]"),),
        attrs=dict.fromkeys(("tile", "heads", "kv_heads", "head_dim", "eps", "kv_dtype", "window")),
        dims=DIMS,
        legal=LEGAL,
        check=_check,
        reference=reference,
        body=body,
        tolerance=tolerance,
    ),
    block_attention_kernels.CANDIDATES,
)
