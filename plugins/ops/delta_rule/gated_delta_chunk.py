"""The gated delta rule over tiles of C tokens, in ONNX (`gated_delta` has the rule).

With G = cumsum(g), D[i,j] = e^(G_i − G_j) for j ≤ i, else 0:
    A = strict_lower(βK Kᵀ ⊙ D);  (I+A) U = βV;  (I+A) W = e^G βK
    V' = U − W Sᵀ;  O = e^G Q Sᵀ + (Q Kᵀ ⊙ D) V';  Sᵀ ← e^(G_C) Sᵀ + (e^(G_C − G) K)ᵀ V'
(I+A)⁻¹ comes from blocks of 1, 2, 4, … rows, each inverse made of two inverses half its size.
The Neumann product (I−A)(I+A²)(I+A⁴)… is exact too but not stable: with equal keys and β near 1
the powers of A reach 1e18 and cancel. G is summed in float64: small differences of large sums.
Knows no `Op`.
"""

import numpy as np

from spark_engine.named import Named
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import Rows, continuing, over
from spark_engine.plugins.ops.delta_rule.gated_delta_nodes import per_head, rates
from spark_engine.plugins.state.replay_ring import Heads, heads_of
from spark_engine.plugins.state.replay_ring_nodes import narrowed
from spark_engine.tensors import Array, DType


def chunk(f: Text, node: Named, rows: Rows, state: str) -> str:
    """Of tiles of c and ba and the old `state` f32 [rows,Hv,Dv,Dk] of each: the new ones, stored as
    `gdn_state` is. All that needs no state is batched over tiles; a Scan carries the state through
    them. Writes `o`."""
    h = heads_of(node.attrs)
    q, k, v = per_head(f, h, rows)  # [rows, Hv, C, D]
    beta, g = rates(f, h, rows)  # [rows, Hv, C]
    inputs = _chunk_terms(f, h, q, k, v, over(f, beta, [3]), g)
    old = f("Transpose", state, perm=[0, 1, 3, 2])  # [rows, Hv, Dk, Dv]
    zero = np.zeros((), np.float32)
    start = f("Expand", zero, [h.values, h.key_dim, h.value_dim])
    scan = f.graph(9, _tile_step)
    _, o, states = f.many(
        3, "Scan", start, continuing(f, rows), old, *inputs, body=scan, num_scan_inputs=8
    )
    tokens = f("Transpose", o, perm=[0, 2, 1, 3])
    flat = f("Reshape", tokens, [-1, h.values * h.value_dim])
    f.cast(flat, node["ba"].dtype, out="o")
    return narrowed(f, f("Transpose", states, perm=[0, 1, 3, 2]), node["gdn_state"].dtype)


def _chunk_terms(
    f: Text, h: Heads, q: str, k: str, v: str, beta: str, g: str
) -> tuple[str, str, str, str, str, str]:
    """(U, W, Q Kᵀ ⊙ D, e^G Q, (e^(G_C − G) K)ᵀ, e^(G_C)), each [rows, Hv, …]."""
    sums = f("CumSum", f.double(g), 2)  # G, float64 [rows, Hv, C]
    last = f("Slice", sums, [h.tile - 1], [h.tile], [2])
    lower = np.tril(np.ones((h.tile, h.tile), np.float32))
    gaps = f.cast(f("Sub", over(f, sums, [3]), over(f, sums, [2])), DType.F32)
    decay = f("Mul", f("Exp", f("Where", lower.astype(np.bool_), gaps, 0.0)), lower)  # D
    grown = over(f, f("Exp", f.cast(sums, DType.F32)), [3])  # e^G
    tail = over(f, f("Exp", f.cast(f("Sub", last, sums), DType.F32)), [2])
    keys_t = f("Transpose", k, perm=[0, 1, 3, 2])
    scaled = f("Mul", k, beta)
    strict = f("Mul", decay, np.tril(lower, -1))
    solve = _inverse(f, f("Mul", f("MatMul", scaled, keys_t), strict), h.tile)
    return (
        f("MatMul", solve, f("Mul", v, beta)),
        f("MatMul", solve, f("Mul", scaled, grown)),
        f("Mul", f("MatMul", q, keys_t), decay),
        f("Mul", q, grown),
        f("Mul", keys_t, tail),
        over(f, f("Exp", f.cast(last, DType.F32)), [3]),
    )


def _tile_step(f: Text, carry: str, continues: str, old: str, *terms: str) -> tuple[str, str, str]:
    """One tile of every head: (state to carry, O, the same state), states as Sᵀ [Hv, Dk, Dv]."""
    u, w, scores, queries, keys_t, decay = terms
    state = f("Where", continues, carry, old)
    values = f("Sub", u, f("MatMul", w, state))
    o = f("Add", f("MatMul", queries, state), f("MatMul", scores, values))
    new = f("Add", f("Mul", state, decay), f("MatMul", keys_t, values))
    return new, o, f("Identity", new)


def _inverse(f: Text, lower: str, size: int) -> str:
    """(I + A)⁻¹ for a strictly lower triangular A [..., size, size]; size is a power of two.

    With T the inverses of the diagonal blocks of s rows, those of 2s rows are T − T·B·T, where B
    keeps only the lower left quarter of each larger block.
    """
    eye = np.eye(size, dtype=np.float32)
    result = ""
    block = 1
    while block < size:
        quarter = f("Mul", lower, _quarters(size, block))
        if block == 1:
            result = f("Sub", eye, quarter)
        else:
            product = f("MatMul", f("MatMul", result, quarter), result)
            result = f("Sub", result, product)
        block *= 2
    return result


def _quarters(size: int, block: int) -> Array:
    """1 where row and column are in the two halves of the same block of 2·`block` rows."""
    index = np.arange(size) // block
    row, column = index[:, None], index[None, :]
    quarters: Array = ((row == column + 1) & (row % 2 == 1)).astype(np.float32)
    return quarters
