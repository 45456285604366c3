"""Parts of the paged attention body: projections, page indices, the loop over pages.

They use the names of the op's operands; the formula is in paged_attention.py.
"""

import math
from collections.abc import Mapping

import numpy as np

from spark_engine.interface import PREFILL_TILE, ROPE_ROWS
from spark_engine.named import Named
from spark_engine.plugins.common.onnx_nodes import LOOP_TYPES, Text
from spark_engine.plugins.common.sequence_tiles import Rows, over, positions, valid_tokens
from spark_engine.plugins.formats import fp8_codes
from spark_engine.plugins.ops.attention.rope import axes, cos_sin, rotate
from spark_engine.plugins.state.paged_kv import Sizes, sizes_of
from spark_engine.tensors import DType

HIDDEN = -1e30  # the score of an unseen position; finite, so that HIDDEN − HIDDEN is 0
LEGAL = {"kv_dtype": (DType.F32.value, DType.BF16.value, DType.F8E4M3.value)}  # `Op.legal`
DIMS = {"nq": "heads", "nkv": "kv_heads", "D": "head_dim"}  # `Op.dims`


def check(node: Named) -> str | None:
    """Why the heads or the pages' dtypes are illegal, or None. `Op.check`."""
    s = sizes_of(node.attrs, node.dim("page"))
    if s.heads % s.kv_heads:
        return f"{s.heads} heads are no multiple of {s.kv_heads} kv heads"
    turns = ROPE_ROWS * s.tile if s.tile == PREFILL_TILE else 1
    if node.dim("turns") != turns:
        return f"a row has {node.dim('turns')} rope offsets; with {s.tile} tokens it has {turns}"
    for pages in (node["k_pages"], node["v_pages"]):
        if pages.dtype is not s.storage:
            return f"operand {pages.name} is {pages.dtype}, expected {s.storage}"
    return None


def project(f: Text, s: Sizes, rows: Rows, longest: int, node: Named) -> tuple[str, str, str, str]:
    """(q as `_columns` makes it, k and v [rows,tile,nkv,D], limits), f32.

    limits int64 [rows,1,group·tile,1]: the position each query sees up to, −1 for none.
    """
    valid = valid_tokens(f, rows, s.tile)
    q_size, kv_size = 2 * s.heads * s.dim, s.kv_heads * s.dim
    x = f("Reshape", f.cast("qkv", DType.F32), [-1, s.tile, q_size + 2 * kv_size])
    x = f("Where", over(f, valid, [2]), x, 0.0)
    both = f("Reshape", f("Slice", x, [0], [q_size], [2]), [-1, s.tile, s.heads, 2 * s.dim])
    q = f("Slice", both, [0], [s.dim], [3])
    kv_shape = [-1, s.tile, s.kv_heads, s.dim]
    k = f("Reshape", f("Slice", x, [q_size], [q_size + kv_size], [2]), kv_shape)
    v = f("Reshape", f("Slice", x, [q_size + kv_size], [q_size + 2 * kv_size], [2]), kv_shape)
    at, q, k = turned(f, s, rows, {"q_norm": q, "k_norm": k}, longest, node)
    limits = f("Expand", over(f, f("Where", valid, at, -1), [1]), [1, s.group, 1])
    limits = f("Reshape", limits, [-1, 1, s.group * s.tile, 1])
    return _columns(f, s, q), k, v, limits


def turned(
    f: Text, s: Sizes, rows: Rows, heads: Mapping[str, str], longest: int, node: Named
) -> tuple[str, ...]:
    """(legal positions int64 [rows,tile], and by their norm's name heads [rows,tile,heads,D],
    normalised and rotated)."""
    at, cos, sin = _turns(f, s, rows, longest, node)
    eps, half = node.real("eps"), node.dim("R/2")
    normed = (_normed(f, x, norm, eps) for norm, x in heads.items())
    return at, *(rotate(f, x, cos, sin, half, s.dim) for x in normed)


def _turns(f: Text, s: Sizes, rows: Rows, longest: int, node: Named) -> tuple[str, str, str]:
    """(legal positions int64 [rows,tile], cosines and sines f32 [rows,tile,1,R/2])."""
    at = f("Clip", positions(f, rows, s.tile), 0, longest - 1)
    offsets, tile = f.long("rope_offsets"), node.number("tile") or 1
    if tile == PREFILL_TILE:
        by_token = f("Reshape", offsets, [-1, ROPE_ROWS])
        offsets = f("Gather", by_token, axes(node.attrs, node.dim("R/2")), axis=1)
    elif tile > 1:
        offsets = f("Expand", offsets, [1, tile])
    own = f("Reshape", offsets, [-1, s.tile, 1, node.dim("R/2") if tile == PREFILL_TILE else 1])
    return at, *cos_sin(f, f("Add", over(f, at, [2, 3]), own), "inv_freq")


def _normed(f: Text, x: str, weight: str, eps: float) -> str:
    mean = f("ReduceMean", f("Mul", x, x), [-1], keepdims=1)
    return f("Mul", f("Div", x, f("Sqrt", f("Add", mean, eps))), weight)


def _columns(f: Text, s: Sizes, q: str) -> str:
    """q as columns, [rows, nkv, groups of columns, D, columns], scaled by softmax and key scale.

    No group has more columns than a page has rows: onnxruntime would cut such a product between
    threads along its columns, which changes how it sums over D > 128, and only for few rows.
    """
    q = f("Mul", q, float(s.dim**-0.5))
    if s.storage is DType.U8:
        q = f("Mul", q, f("Gather", "kv_scale", 0))
    if s.tile == 1:
        by_head = f("Reshape", q, [-1, s.kv_heads, 1, s.group, s.dim])
        return f("Transpose", by_head, perm=[0, 1, 2, 4, 3])
    width = math.gcd(s.tile, s.page)
    split = f("Reshape", q, [-1, s.tile // width, width, s.kv_heads, s.group, s.dim])
    moved = f("Transpose", split, perm=[0, 3, 4, 1, 5, 2])
    return f("Reshape", moved, [0, s.kv_heads, -1, s.dim, width])


def append(f: Text, s: Sizes, rows: Rows, table: str, kv: tuple[str, str], longest: int) -> None:
    """Writes k and v [rows,tile,nkv,D] to the pages: k_pages_out and v_pages_out."""
    at = _append_indices(f, s, rows, table, longest)
    for which, (name, x) in enumerate(zip(("k_pages", "v_pages"), kv, strict=True)):
        f("ScatterND", name, at, _stored(f, s, x, which), out=f"{name}_out")


def _append_indices(f: Text, s: Sizes, rows: Rows, table: str, longest: int) -> str:
    """int64 [rows, tile, nkv, 3]: (page, kv head, offset) of every token, the scratch page if the
    row does not have the token."""
    at = f("Clip", positions(f, rows, s.tile), 0, longest - 1)
    page = f("GatherElements", table, f("Div", at, s.page), axis=1)
    page = f("Where", valid_tokens(f, rows, s.tile), page, -1)
    return indices(f, s, page, f("Mod", at, s.page))


def indices(f: Text, s: Sizes, page: str, offset: str) -> str:
    """int64 [rows, n, nkv, 3]: (page, kv head, offset), of `page` and `offset` int64 [rows, n]."""
    heads = np.arange(s.kv_heads).reshape(1, 1, -1, 1)
    page, offset = (f("Expand", over(f, x, [2, 3]), [1, 1, s.kv_heads, 1]) for x in (page, offset))
    return f("Concat", page, f("Expand", heads, f("Shape", page)), offset, axis=3)


def _stored(f: Text, s: Sizes, x: str, which: int) -> str:
    """k (which 0) or v (which 1) in the pages' format."""
    if s.storage is not DType.U8:
        return f.cast(x, s.storage)
    return fp8_codes.encode(f, f("Div", x, f("Gather", "kv_scale", which)))


def attend(f: Text, s: Sizes, rows: Rows, q: str, limits: str, table: str) -> str:
    """f32 [rows, nkv, group·tile, D]: a loop over full pages, then each row's last, partial one.

    Where a row has fewer full pages than the longest, it reads the longest row's first page, which
    its queries do not see: that page is finite, while unwritten positions may hold NaN.
    """
    ends = f("Add", rows.starts, rows.counts)
    full = f("Div", ends, s.page)
    trips, longest = f.many(2, "TopK", full, [1])
    covered = f("Sub", f("Mul", full, s.page), 1)  # the last position of the full pages
    within = f("Min", limits, over(f, covered, [1, 2, 3]))
    spare = f("Reshape", f("Gather", f("Gather", table, longest), 0, axis=1), [1])
    one, wide = (
        f("Concat", f.length(table), [s.kv_heads, s.group * s.tile, size], axis=0)
        for size in (1, s.dim)
    )
    state = (f("Expand", HIDDEN, one), f("Expand", 0.0, one), f("Expand", 0.0, wide))

    def page_step(g: Text, index: str, go: str, *carried: str) -> tuple[str, ...]:
        own = g("Gather", table, index, axis=1)  # [rows]
        page = g("Where", g("Less", index, full), own, spare)
        at = g("Add", g("Mul", index, s.page), np.arange(s.page))
        values = _read(g, s, "v_pages_out", page)
        new = _block(g, s, q, carried, _read(g, s, "k_pages_out", page), values, at, within)
        return g("Identity", go), *new

    loop = f.graph(5, page_step, LOOP_TYPES)
    after = f.many(3, "Loop", trips, np.asarray(True), *state, body=loop)
    _, total, sums = _last_page(f, s, q, after, ends, limits, table)
    o = f("Div", sums, f("Where", f("Greater", total, 0.0), total, 1.0))
    return f("Mul", o, f("Gather", "kv_scale", 1)) if s.storage is DType.U8 else o


def _last_page(
    f: Text, s: Sizes, q: str, state: tuple[str, ...], ends: str, limits: str, table: str
) -> tuple[str, str, str]:
    """The block of each row's partial page; positions at or beyond its end count as zero."""
    end = over(f, ends, [1])  # [rows, 1]
    last = f("Div", f("Sub", end, 1), s.page)  # a page exactly full was seen in the loop
    last = f("Where", f("Equal", f("Mod", end, s.page), 0), f("Sub", end, end), last)
    page = f("Squeeze", f("GatherElements", table, last, axis=1), [1])
    at = f("Add", f("Mul", f("Div", end, s.page), s.page), np.arange(s.page)[None])  # [rows, page]
    exists = over(f, f("Less", at, end), [1, 3])
    values = f("Where", exists, _read(f, s, "v_pages_out", page), 0.0)
    keys = _read(f, s, "k_pages_out", page)
    return _block(f, s, q, state, keys, values, over(f, at, [1, 2]), limits)


def _block(
    f: Text, s: Sizes, q: str, state: tuple[str, ...], keys: str, values: str, at: str, limits: str
) -> tuple[str, str, str]:
    """(maximum, sum, accumulator) after one block of keys and values at positions `at`."""
    top, total, sums = state
    seen = f("LessOrEqual", at, limits)  # [rows, 1, group·tile, page]
    product = f("MatMul", f("Unsqueeze", keys, [2]), q)  # [rows, nkv, groups, page, columns]
    across = f("Transpose", product, perm=[0, 1, 2, 4, 3])
    scores = f("Reshape", across, [0, s.kv_heads, s.group * s.tile, -1])
    scores = f("Where", seen, scores, HIDDEN)
    higher = f("Max", top, f("ReduceMax", scores, [3], keepdims=1))
    weights = f("Where", seen, f("Exp", f("Sub", scores, higher)), 0.0)
    shrink = f("Exp", f("Sub", top, higher))
    total = f("Add", f("Mul", total, shrink), f("ReduceSum", weights, [3], keepdims=1))
    return higher, total, f("Add", f("Mul", sums, shrink), f("MatMul", weights, values))


def _read(f: Text, s: Sizes, pages: str, ids: str) -> str:
    """f32 [rows, nkv, page, D]: one page of each row, without its scale."""
    block = f("Gather", pages, ids)
    if s.storage is not DType.U8:
        return f.cast(block, DType.F32)
    return fp8_codes.decode(f, block, [-1, s.kv_heads, s.page, s.dim])
