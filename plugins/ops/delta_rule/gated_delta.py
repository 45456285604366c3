"""The gated delta rule: a decode step and an exact chunked prefill (Yang et al., 2024; Qwen3.5).

Per value head h, key head ⌊h / (Hv/Hk)⌋, state S [Dv,Dk], all in f32:
    q ← q / sqrt(Σq² + 1e-6) / sqrt(Dk),   k ← k / sqrt(Σk² + 1e-6)
    β = sigmoid(b),   g = −exp(a_log) · softplus(a + dt_bias)
    S ← e^g · S;   δ = β · (v − S k);   S ← S + δ kᵀ;   o = S q
`c` holds q|k|v after the convolution, head-major; `ba` holds b then a.

This is `advance` in float64 and `step` in ONNX, both for one state; `gated_delta_chunk` is the form
for many tokens. `recurrence` makes the ops of them: it finds and stores each row's state, behind a
replay ring with attribute `ring`, and with `drafts` steps over rounds of up to `tile` tokens. A
chunk begins from the state of row `sources` and leaves the state in its slot, and after a tile with
a row in `saves`, in that row too.
"""

from dataclasses import replace
from functools import partial

import numpy as np

from spark_engine.named import Named, Rules
from spark_engine.op import Attrs, Op
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.sequence_tiles import Rows, over
from spark_engine.plugins.kernels.delta_rule import delta_decode_kernels
from spark_engine.plugins.kernels.delta_rule.prefill import delta_prefill_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.delta_rule.gated_delta_chunk import chunk
from spark_engine.plugins.ops.delta_rule.gated_delta_nodes import per_head, rates
from spark_engine.plugins.state import recurrence
from spark_engine.plugins.state.recurrence import Step
from spark_engine.plugins.state.replay_ring import Heads, Update, Wide, heads_of
from spark_engine.plugins.state.replay_ring_nodes import advanced
from spark_engine.tensors import Array, TensorSpec


def advance(
    h: Heads, s: Wide, c: Array, ba: Array, a_log: Array, dt_bias: Array
) -> tuple[Wide, Update]:
    """One token, a row of c and one of ba: (o [Hv,Dv], the update); `s` [Hv,Dv,Dk] becomes the
    state after it."""
    c, b, a = (x.astype(np.float64) for x in (c, *np.split(ba, 2)))
    size = h.keys * h.key_dim
    q, k = c[: 2 * size].reshape(2, h.keys, h.key_dim)
    v = c[2 * size :].reshape(h.values, h.value_dim)
    q = q / np.sqrt(np.sum(q * q, axis=1, keepdims=True) + 1e-6) / np.sqrt(h.key_dim)
    k = k / np.sqrt(np.sum(k * k, axis=1, keepdims=True) + 1e-6)
    beta = 1 / (1 + np.exp(-b))
    g = -np.exp(a_log.astype(np.float64)) * np.logaddexp(0, a + dt_bias.astype(np.float64))
    o, delta = np.zeros((2, h.values, h.value_dim))
    for head in range(h.values):
        key, query = k[head // h.repeat], q[head // h.repeat]
        s[head] *= np.exp(g[head])
        delta[head] = beta[head] * (v[head] - s[head] @ key)
        s[head] += np.outer(delta[head], key)
        o[head] = s[head] @ query
    return o, (delta, k, g)


def step(f: Text, node: Named, rows: Rows, tokens: tuple[str, ...], state: str, out: str) -> Step:
    """A token of every row, [rows, …] of c and ba, S k and S q in one pass over the old `state`
    [rows,Hv,Dv,Dk]; o is written to `out`."""
    h, (c, ba) = replace(heads_of(node.attrs), tile=1), tokens
    q, k, v = (f("Squeeze", x, [2]) for x in per_head(f, h, rows, c))
    beta, g = rates(f, h, rows, ba)  # [rows, Hv, 1]
    decay = f("Exp", g)
    both = f("Concat", over(f, k, [3]), over(f, q, [3]), axis=3)
    seen_k, seen_q = f.many(2, "Split", f("MatMul", state, both), axis=3, num_outputs=2)
    delta = f("Mul", beta, f("Sub", v, f("Mul", decay, f("Squeeze", seen_k, [3]))))
    dot = f("ReduceSum", f("Mul", k, q), [2], keepdims=1)
    o = f("Add", f("Mul", decay, f("Squeeze", seen_q, [3])), f("Mul", delta, dot))
    f.cast(f("Reshape", o, [-1, h.values * h.value_dim]), node["ba"].dtype, out=out)
    return Step(advanced(f, state, delta, k, decay), delta, k, g, out)


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> (o, state_out, [ring_out]), token by token; both ops compute this."""
    c, ba, a_log, dt_bias, *rest = arrays
    h = heads_of(attrs)
    o, states = recurrence.evaluate(
        lambda t, s: advance(h, s, c[t], ba[t], a_log, dt_bias), attrs, len(c), rest
    )
    return o.reshape(len(c), -1).astype(c.dtype), *states


def step_fragment(f: Text, node: Named, outs: tuple[str, ...]) -> None:
    """The step's body over the operands' names, written to `o` and `outs` (the states)."""
    recurrence.step_body(f, node, partial(step, f, node), ("c", "ba"), outs)


def step_body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """One token per row; with drafts up to `tile`."""
    f = Text()
    step_fragment(f, STEP.named(attrs, specs), ("state_out", "ring_out"))
    return _function(f, STEP, attrs)


def chunk_body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """All that needs no state is batched over tiles; a Scan carries the state through them."""
    f, node = Text(), CHUNK.named(attrs, specs)
    recurrence.tile_body(f, node, partial(chunk, f, node))
    return _function(f, CHUNK, attrs)


def _function(f: Text, op: Op, attrs: Attrs) -> str:
    return f.function(op.name, op.names(attrs, 99), [r.name for r in op.made(attrs)])


def check(node: Named) -> str | None:
    """Why value heads do not share key heads, or a row has too many tokens."""
    values, keys = node.shape("Hv", "Hk")
    if values % keys:
        return f"{values} value heads are no multiple of {keys} key heads"
    return recurrence.check(node)


SIZES = {"Hk": "key_heads", "Hv": "value_heads", "Dk": "key_dim", "Dv": "value_dim"}
DIMS: Rules = {**SIZES, **recurrence.DIMS}
STEP = serve(
    Op(
        name="gated_delta_step",
        operands=(
            operands.x("A[tokens,2·Hk·Dk+Hv·Dv]", name="c"),
            operands.x("A[tokens,2·Hv]", name="ba"),
            operands.weight("a_log", "f32[Hv]"),
            operands.weight("dt_bias", "f32[Hv]"),
            recurrence.STATE,
            recurrence.RING,
            *operands.ROWS,
        ),
        results=(Result("o", "A[tokens,Hv·Dv]"), *recurrence.RESULTS),
        attrs={"tile": None, **dict.fromkeys(SIZES.values()), "ring": None, "drafts": 0},
        dims=DIMS,
        check=check,
        reference=reference,
        body=step_body,
    ),
    delta_decode_kernels.UNFUSED,
    called=delta_decode_kernels.STEP,
)
CHUNK = serve(
    replace(
        STEP,
        name="gated_delta_chunk",
        operands=(*STEP.operands, operands.SOURCES, operands.SAVES),
        body=chunk_body,
    ),
    delta_prefill_kernels.CANDIDATES,
)
OPS = (STEP, CHUNK)
