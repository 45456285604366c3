"""Keys and values of tokens whose queries nobody asks for, appended to the pages of their rows.

k is RMS-normalised per head (the weight holds the +1) and rotated, v is taken as it is; both are
stored as `paged_attention` stores them, with the same bits. A draft head fills its cache so.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spark_engine.op import Attrs, Op
from spark_engine.operand import Operand, Role
from spark_engine.plugins.attention import append_kv_cuda, paged_attention
from spark_engine.plugins.attention.append_kv_cases import CASES
from spark_engine.plugins.attention.paged_attention_cases import store
from spark_engine.plugins.attention.paged_attention_nodes import (
    Sizes,
    append,
    expand_rows,
    page_ids,
    sizes_of,
    turned_keys,
)
from spark_engine.plugins.attention.rope import rotate_array
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import expect_rows, tokens_of
from spark_engine.plugins.common.shapes import ACTIVATIONS, count, expect
from spark_engine.tensors import Array, DType, TensorSpec

NAME = "append_kv"
OPERANDS = (
    operands.x("A[tokens,2·nkv·D]", "k; v", "kv"),
    operands.weight("k_norm", "f32[D]"),
    operands.weight("inv_freq", "f32[R/2]"),
    Operand("kv_scale", Role.SCALE, "f32[2]"),
    *paged_attention.CACHE,
)


def infer(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The operands -> (k_pages_out, v_pages_out)."""
    count(NAME, specs, len(OPERANDS))
    kv, k_norm, inv_freq, kv_scale, k_pages, v_pages, table, *steps = specs
    s = _sizes(attrs, k_pages)
    tokens = tokens_of(NAME, expect_rows(NAME, *steps), s.tile)
    expect(NAME, kv, ACTIVATIONS, (tokens, 2 * s.kv_heads * s.dim))
    expect(NAME, k_norm, (DType.F32,), (s.dim,))
    expect(NAME, inv_freq, (DType.F32,), (None,))
    expect(NAME, kv_scale, (DType.F32,), (2,))
    return paged_attention.infer_pages(NAME, s, k_pages, v_pages, table)


def _sizes(attrs: Attrs, pages: TensorSpec) -> Sizes:
    return sizes_of({"heads": attrs["kv_heads"], **attrs}, pages, NAME)


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands' arrays -> (k_pages_out, v_pages_out), token by token."""
    kv, k_norm, inv_freq, kv_scale, k_pages, v_pages, table, *steps = arrays
    s = _sizes(attrs, TensorSpec("k_pages", DType.of(k_pages.dtype), k_pages.shape))
    k_pages, v_pages = k_pages.copy(), v_pages.copy()
    for row, (slot, start, valid) in enumerate(zip(*steps, strict=True)):
        for at in range(start, start + valid if slot >= 0 else start):
            packed = kv[row * s.tile + at - start].astype(np.float64)
            k, v = packed.reshape(2, s.kv_heads, s.dim)
            k = rotate_array(paged_attention.normed(k, k_norm, float(attrs["eps"])), at, inv_freq)
            page, offset = table[slot, at // s.page], at % s.page
            k_pages[page, :, offset] = store(k, s.storage, kv_scale[0])
            v_pages[page, :, offset] = store(v, s.storage, kv_scale[1])
    return k_pages, v_pages


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The appending part of `paged_attention`'s body."""
    f = Text()
    s = _sizes(attrs, specs[4])
    rows, n = expand_rows(f, s.tile, specs[7].dims[0])
    s = replace(s, tile=1)
    longest = specs[6].dims[1] * s.page
    both = f("Reshape", f.cast("kv", DType.F32), [n, 1, 2 * s.kv_heads, s.dim])
    both = f("Where", f("Reshape", f("Greater", rows.counts, 0), [n, 1, 1, 1]), both, 0.0)
    k, v = f.many(2, "Split", both, axis=2, num_outputs=2)
    k = turned_keys(f, s, rows, k, longest, float(attrs["eps"]), specs[2].dims[0])
    append(f, s, rows, page_ids(f, rows, specs[4].dims[0]), (k, v), n, longest)
    return f.function(NAME, OP.inputs, OP.outputs)


OP = Op(
    name=NAME,
    operands=OPERANDS,
    results=paged_attention.PAGES,
    attrs=dict.fromkeys(("tile", "kv_heads", "head_dim", "eps", "kv_dtype")),
    infer_by=infer,
    reference=reference,
    body=body,
    cases=CASES,
    cuda=append_kv_cuda.CUDA,
)
