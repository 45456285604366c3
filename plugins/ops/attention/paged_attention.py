"""Causal attention over paged keys and values: norm, RoPE, append, attend. Decode and prefill.

q and k are RMS-normalised per head (weights hold the +1), rotated, and k and v are appended to
the pages of the row's slot before they are read. Query head h reads kv head ⌊h / (nq/nkv)⌋;
o = softmax(q·kᵀ / sqrt(D)) v over the positions up to the query's own (Qwen3.5, before the gate).
FP8 pages hold x / kv_scale as codes; f32 and bf16 pages hold raw values, kv_scale unused.

The body is an online softmax (Milakov & Gimelshein, 2018) over blocks of one page, in f32. Every
block has the same shape, and a block that a query does not see leaves its maximum, sum and
accumulator bit-equal: a row's result does not depend on the lengths of other rows. A round of
drafts (tile 2 to 8) is computed as rows of one token: each token's bits are those of tile 1. With
pages of more than 128 tokens this holds on one thread only, since onnxruntime's threads then
decide the order of sums.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from spark_engine.named import Named
from spark_engine.op import Attrs, Op, Tolerance
from spark_engine.operand import Operand, Result, Role
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import expand_rows, page_ids, read_rows
from spark_engine.plugins.kernels.attention import attention_prefill_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.attention.paged_attention_nodes import (
    DIMS,
    LEGAL,
    append,
    attend,
    check,
    project,
)
from spark_engine.plugins.ops.attention.rope import places, rotate_array
from spark_engine.plugins.state.paged_kv import ROUND, SECTIONS, Sizes, read_back, sizes_of, store
from spark_engine.tensors import Array, DType, TensorSpec

NAME = "paged_attention"
CACHE = (
    Operand("k_pages", Role.STATE, "KV[P+1,nkv,page,D]"),
    Operand("v_pages", Role.STATE, "KV[P+1,nkv,page,D]"),
    operands.PAGE_TABLE,
    *operands.ROWS,
)
OPERANDS = (
    operands.x("A[tokens,2·nq·D+2·nkv·D]", "per head q then gate; k; v", "qkv"),
    operands.weight("q_norm", "f32[D]"),
    operands.weight("k_norm", "f32[D]"),
    operands.weight("inv_freq", "f32[R/2]"),
    operands.ROPE_OFFSETS,
    Operand("kv_scale", Role.SCALE, "f32[2]"),
    *CACHE,
)
PAGES = (
    Result("k_pages_out", "KV[P+1,nkv,page,D]", updates="k_pages"),
    Result("v_pages_out", "KV[P+1,nkv,page,D]", updates="v_pages"),
)
Wide = NDArray[np.float64]


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands' arrays -> (o, k_pages_out, v_pages_out), token by token."""
    qkv, q_norm, k_norm, inv_freq, offsets, kv_scale, k_pages, v_pages, table, *steps = arrays
    s = sizes_of(attrs, k_pages.shape[2])
    turns = places(attrs, steps[1], offsets, len(inv_freq))
    k_pages, v_pages = k_pages.copy(), v_pages.copy()
    o = np.zeros((len(qkv), s.heads, s.dim))
    for row, (slot, start, valid) in enumerate(zip(*steps, strict=True)):
        for t in range(valid if slot >= 0 else 0):
            q, k, v = _split(s, qkv[row * s.tile + t], float(attrs["eps"]), q_norm, k_norm)
            q, k = (rotate_array(x, turns[row, t], inv_freq) for x in (q, k))
            page, offset = table[slot, (start + t) // s.page], (start + t) % s.page
            k_pages[page, :, offset] = store(k, s.storage, kv_scale[0])
            v_pages[page, :, offset] = store(v, s.storage, kv_scale[1])
            pages = table[slot, : (start + t) // s.page + 1]
            keys = _context(k_pages[pages], start + t + 1, s.storage, kv_scale[0])
            values = _context(v_pages[pages], start + t + 1, s.storage, kv_scale[1])
            o[row * s.tile + t] = _attend(s, q, keys, values)
    return o.reshape(len(qkv), -1).astype(qkv.dtype), k_pages, v_pages


def _split(
    s: Sizes, packed: Array, eps: float, q_norm: Array, k_norm: Array
) -> tuple[Wide, Wide, Wide]:
    """Normalised q [nq,D] and k [nkv,D], and raw v [nkv,D] of one token."""
    wide: Wide = packed.astype(np.float64)
    q_size, kv_size = 2 * s.heads * s.dim, s.kv_heads * s.dim
    q = wide[:q_size].reshape(s.heads, 2, s.dim)[:, 0]
    k = wide[q_size : q_size + kv_size].reshape(s.kv_heads, s.dim)
    v = wide[q_size + kv_size :].reshape(s.kv_heads, s.dim)
    return normed(q, q_norm, eps), normed(k, k_norm, eps), v


def normed(x: Wide, weight: Array, eps: float) -> Wide:
    """x / rms(x) · weight over the last axis."""
    root: Wide = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)
    y: Wide = x / root * weight.astype(np.float64)
    return y


def _context(pages: Array, length: int, storage: DType, scale: np.generic) -> Wide:
    """[nkv, length, D]: the first `length` positions of pages [n,nkv,page,D]."""
    joined = pages.swapaxes(0, 1).reshape(pages.shape[1], -1, pages.shape[3])
    return read_back(joined[:, :length], storage, scale)


def _attend(s: Sizes, q: Wide, keys: Wide, values: Wide) -> Wide:
    o = np.zeros((s.heads, s.dim))
    for head in range(s.heads):
        kv = head // s.group
        scores = keys[kv] @ q[head] / np.sqrt(s.dim)
        weights = np.exp(scores - scores.max())
        o[head] = weights @ values[kv] / weights.sum()
    return o


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Appends, then reads the pages that the append returns, so pages may be updated in place."""
    f = Text()
    fragment(f, OP.named(attrs, specs), "o")
    return f.function(NAME, OP.inputs, OP.outputs)


def fragment(f: Text, node: Named, out: str = "") -> str:
    """Writes the body over the operands' names, with the results of PAGES; returns o's name."""
    s = sizes_of(node.attrs, node.dim("page"))
    if s.tile <= ROUND:
        rows = expand_rows(f, s.tile)
        s = replace(s, tile=1)
    else:
        rows = read_rows(f, "slots", "starts", "counts")
    longest = node.dim("MP") * s.page
    q, k, v, limits = project(f, s, rows, longest, node)
    table = page_ids(f, rows, node.dim("P+1"))
    append(f, s, rows, table, (k, v), longest)
    o = attend(f, s, rows, q, limits, table)  # [rows, nkv, group·tile, D]
    o = f("Reshape", o, [-1, s.heads, s.tile, s.dim])
    o = f("Reshape", f("Transpose", o, perm=[0, 2, 1, 3]), [-1, s.heads * s.dim])
    return f.cast(o, node["qkv"].dtype, out)


def tolerance(attrs: Attrs) -> Tolerance:
    """Over bf16 pages q and the softmax's weights are bf16, as in every kernel on this matrix unit.
    In numpy these two roundings alone give an element of the cases an error of 4.3 times 2^-7
    (relative L2 distance 3e-3). Over e4m3 pages both are f16, and
    tests/plugins/attention requires 2^-7."""
    return Tolerance(element=6 * 2.0**-7)


OP = serve(
    Op(
        name=NAME,
        operands=OPERANDS,
        results=(Result("o", "A[tokens,nq·D]", note="before the gate"), *PAGES),
        attrs={
            **dict.fromkeys(("tile", "heads", "kv_heads", "head_dim", "eps", "kv_dtype")),
            **dict.fromkeys(SECTIONS, 0),
        },
        dims=DIMS,
        legal=LEGAL,
        check=check,
        reference=reference,
        body=body,
        tolerance=tolerance,
    ),
    attention_prefill_kernels.CANDIDATES,
    called={"o": "y"},
)
