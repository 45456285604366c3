"""The bodies of the gated delta rule (formulas: `gated_delta`): a decode step or a round of drafts,
and the chunk form.

Knows the operands' names and the two rings; knows no `Op`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spark_engine.named import Named
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import (
    Rows,
    continuing,
    final_slots,
    over,
    read_rows,
    read_tiles,
    store_tiles,
)
from spark_engine.plugins.ops.delta_rule.gated_delta_nodes import inverse, per_head, rates
from spark_engine.plugins.state import replay_ring_nodes, round_ring_nodes
from spark_engine.plugins.state.replay_ring import Heads, Ring, heads_of, ring_of
from spark_engine.tensors import DType


def step_fragment(f: Text, node: Named, outs: Sequence[str]) -> None:
    """The body over the operands' names, written to `o` and `outs` (the state, [the ring])."""
    h, ring = heads_of(node.attrs), ring_of(node.attrs)
    rows = read_rows(f, "slots", "starts", "counts")
    if ring and ring.drafts:
        _round_fragment(f, h, ring, rows, node, outs)
        return
    if ring is None:
        new = _step_terms(f, h, rows, node, _old_state(f, rows)).state
    else:
        lag = replay_ring_nodes.catch_up(f, ring, rows, "gdn_state", "gdn_ring")
        step = _step_terms(f, h, rows, node, lag.state)
        new = f("Where", replay_ring_nodes.folds(f, ring, rows), step.state, lag.stored)
    _store(f, rows.slots, f.cast(new, node["gdn_state"].dtype), outs[0])
    if ring is not None:
        replay_ring_nodes.append(f, ring, rows, lag, (step.delta, step.k, step.g), outs[1])


def _round_fragment(
    f: Text, h: Heads, ring: Ring, rows: Rows, node: Named, outs: Sequence[str]
) -> None:
    """Token after token of every row, each a step of one; see `round_ring`."""
    n = node.dim("rows")
    one, dtype = replace(h, tile=1), node["gdn_state"].dtype
    held = round_ring_nodes.opened(f, ring, rows, dtype)
    made, certain = [], ""
    for j in range(h.tile):
        left = f("Max", f("Sub", rows.counts, j), 0)
        known = f("Min", f("Max", f("Sub", rows.counts, 1), 0), j)  # behind the last: the last
        position = f("Add", rows.starts, known)
        there, tokens = f("Greater", left, 0), replace(rows, counts=left)
        given = [_token(f, name, n, h.tile, j) for name in ("c", "ba")]
        state = round_ring_nodes.before(f, held, position)
        step = _step_terms(f, one, tokens, node, state, given[0], given[1], f.fresh())
        token = step.delta, step.k, step.g
        held = round_ring_nodes.append(f, held, position, there, token)
        held = round_ring_nodes.fold(f, held, position, there, step.state)
        certain = certain or held.state
        made.append(f("Unsqueeze", step.o, [1]))
    f("Reshape", f("Concat", *made, axis=1), [n * h.tile, h.values * h.value_dim], out="o")
    has = over(f, f("Greater", rows.counts, 0), [1, 2])
    state = f("Where", over(f, has, [3]), certain, held.stored)
    _store(f, rows.slots, f.cast(state, dtype), outs[0])
    done, base = f("Add", rows.starts, 1), round_ring_nodes.base(f, held, rows)
    last = f("Where", has, round_ring_nodes.header(f, held, done, base), held.header)
    records = f("Concat", held.records, last, axis=1)
    f("ScatterND", "gdn_ring", over(f, rows.slots, [1]), records, out=outs[1])


def _token(f: Text, name: str, rows: int, tile: int, j: int) -> str:
    """[rows, width]: token j of every row."""
    apart = f("Reshape", name, [rows, tile, -1])
    return f("Squeeze", f("Slice", apart, [j], [j + 1], [1]), [1])


@dataclass(frozen=True)
class Step:
    """Names of what one token of every row makes, all f32."""

    state: str  # [rows,Hv,Dv,Dk]
    delta: str  # [rows,Hv,Dv]
    k: str  # [rows,Hv,Dk]
    g: str  # [rows,Hv,1], 0 where there is no token
    o: str  # [rows,Hv·Dv], an activation


def _step_terms(
    f: Text,
    h: Heads,
    rows: Rows,
    node: Named,
    state: str,
    c: str = "c",
    ba: str = "ba",
    out: str = "o",
) -> Step:
    """The rule over a token of every row, [rows, …] each, and the old `state` [rows,Hv,Dv,Dk];
    writes `out`."""
    q, k, v = (_drop_token(f, x) for x in per_head(f, h, rows, node.dim("rows"), c))
    beta, g = rates(f, h, rows, node.dim("rows"), ba)  # [rows, Hv, 1]
    decay = f("Exp", g)
    both = f("Concat", over(f, k, [3]), over(f, q, [3]), axis=3)
    seen_k, seen_q = f.many(2, "Split", f("MatMul", state, both), axis=3, num_outputs=2)
    delta = f("Mul", beta, f("Sub", v, f("Mul", decay, f("Squeeze", seen_k, [3]))))
    dot = f("ReduceSum", f("Mul", k, q), [2], keepdims=1)
    o = f("Add", f("Mul", decay, f("Squeeze", seen_q, [3])), f("Mul", delta, dot))
    f.cast(f("Reshape", o, [-1, h.values * h.value_dim]), node["ba"].dtype, out=out)
    return Step(round_ring_nodes.advanced(f, state, delta, k, decay), delta, k, g, out)


def _drop_token(f: Text, x: str) -> str:
    """[rows, heads, 1, dim] -> [rows, heads, dim]."""
    return f("Squeeze", x, [2])


def _old_state(f: Text, rows: Rows) -> str:
    """f32 [rows, Hv, Dv, Dk]: zero for a fresh row, whatever its slot holds."""
    state = f.cast(f("Gather", "gdn_state", rows.sources), DType.F32)
    return f("Where", over(f, rows.fresh, [1, 2, 3]), 0.0, state)


def _store(f: Text, slots: str, new: str, out: str) -> None:
    f("ScatterND", "gdn_state", over(f, slots, [1]), new, out=out)


def chunk_fragment(f: Text, node: Named) -> None:
    """All that needs no state is batched over tiles; a Scan carries the state through them."""
    h, ring, n = heads_of(node.attrs), ring_of(node.attrs), node.dim("rows")
    rows = read_tiles(f, n)
    if ring is None:
        _chunk_fragment(f, h, rows, node, _old_state(f, rows))
    elif ring.drafts:
        held = round_ring_nodes.opened(f, ring, rows, node["gdn_state"].dtype)
        _chunk_fragment(f, h, rows, node, round_ring_nodes.before(f, held, rows.starts))
        end = f("Add", rows.starts, rows.counts)
        last = f("Squeeze", round_ring_nodes.header(f, held, end, end), [1])
        both = f("Concat", final_slots(f, rows, n), rows.saves, axis=0)
        where = f("Concat", over(f, both, [1]), np.full((2 * n, 1), ring.records), axis=1)
        f("ScatterND", "gdn_ring", where, f("Concat", last, last, axis=0), out="ring_out")
    else:
        lag = replay_ring_nodes.catch_up(f, ring, rows, "gdn_state", "gdn_ring")
        _chunk_fragment(f, h, rows, node, lag.state)
        end = f.cast(f("Add", rows.starts, rows.counts), DType.F32)
        # Never the old one; but the ring, which may be the output's memory, is read before this.
        inert = f("Less", rows.starts, 0)
        end = f("Where", inert, replay_ring_nodes.base_of(f, ring, lag.records), end)
        slots = f("Concat", final_slots(f, rows, n), rows.saves, axis=0)
        both = f("Concat", end, end, axis=0)
        replay_ring_nodes.store_base(f, ring, slots, "gdn_ring", both, "ring_out")


def _chunk_fragment(f: Text, h: Heads, rows: Rows, node: Named, state: str) -> None:
    """The body over the operands' names and every row's old `state`, written to `o` and the
    state."""
    n = node.dim("rows")
    q, k, v = per_head(f, h, rows, n)  # [rows, Hv, C, D]
    beta, g = rates(f, h, rows, n)  # [rows, Hv, C]
    inputs = _chunk_terms(f, h, q, k, v, over(f, beta, [3]), g)
    old = f("Transpose", state, perm=[0, 1, 3, 2])  # [rows, Hv, Dk, Dv]
    zero = np.zeros((), np.float32)
    start = f("Expand", zero, [h.values, h.key_dim, h.value_dim])
    scan = f.graph(9, _tile_step)
    _, o, states = f.many(
        3, "Scan", start, continuing(f, rows, n), old, *inputs, body=scan, num_scan_inputs=8
    )
    tokens = f("Transpose", o, perm=[0, 2, 1, 3])
    flat = f("Reshape", tokens, [n * h.tile, h.values * h.value_dim])
    f.cast(flat, node["ba"].dtype, out="o")
    new = f.cast(f("Transpose", states, perm=[0, 1, 3, 2]), node["gdn_state"].dtype)
    store_tiles(f, rows, n, "gdn_state", new, "state_out")


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
    solve = inverse(f, f("Mul", f("MatMul", scaled, keys_t), strict), h.tile)
    return (
        f("MatMul", solve, f("Mul", v, beta)),
        f("MatMul", solve, f("Mul", scaled, grown)),
        f("Mul", f("MatMul", q, keys_t), decay),
        f("Mul", q, grown),
        f("Mul", keys_t, tail),
        over(f, f("Exp", f.cast(last, DType.F32)), [3]),
    )


def _tile_step(f: Text, carry: str, goes_on: str, old: str, *terms: str) -> tuple[str, str, str]:
    """One tile of every head: (state to carry, O, the same state), states as Sᵀ [Hv, Dk, Dv]."""
    u, w, scores, queries, keys_t, decay = terms
    state = f("Where", goes_on, carry, old)
    values = f("Sub", u, f("MatMul", w, state))
    o = f("Add", f("MatMul", queries, state), f("MatMul", scores, values))
    new = f("Add", f("Mul", state, decay), f("MatMul", keys_t, values))
    return new, o, f("Identity", new)
