"""The blocks of a Qwen3.5 decoder layer, written unfused: norms, both mixers, the dense MLP.

Knows the mathematics' wiring (docs/graph.md) and the checkpoint's module names; knows neither
how a projection is stored nor how many layers there are. Shapes are [tokens, columns].
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from spark_engine.models.graph.writer import Writer, state_out
from spark_engine.models.weights.recipes import (
    Recipe,
    cast,
    constant,
    multiply,
    one_plus,
    reshape,
    stack,
    whole_scale,
)
from spark_engine.plugins.gdn.replay_ring import ring_width
from spark_engine.tensors import DType, TensorSpec


def zero_centred_norm(w: Writer, x: gs.Variable, module: str, output: str) -> gs.Variable:
    """RMSNorm whose stored weight is the deviation from one."""
    scale = w.weight(f"{module}.weight", one_plus(w.model.source(f"{module}.weight")))
    return w.one("rms_norm", [x, scale], output, eps=w.config.eps)


def gated_delta_net(w: Writer, x: gs.Variable, layer: str) -> gs.Variable:
    """The linear-attention mixer: projections, convolution, delta rule, gated norm, projection."""
    c, p = w.config, f"{layer}.linear_attn"
    qkv, z, b, a = (w.project(x, f"{p}.in_proj_{part}") for part in ("qkv", "z", "b", "a"))
    packed = w.concat([qkv, z], f"{p}.qkvz")
    gates = w.concat([b, a], f"{p}.ba")
    mixed = _convolution(w, packed, layer)
    o = _delta_rule(w, mixed, gates, layer)
    scale = w.weight(f"{p}.norm.weight", cast(w.model.source(f"{p}.norm.weight")))
    attrs = {"eps": c.eps, "heads": c.value_heads, "offset": c.conv_channels}
    y = w.one("gated_norm", [o, packed, scale], f"{p}.norm.y", **attrs)
    return w.project(y, f"{p}.out_proj")


def _convolution(w: Writer, packed: gs.Variable, layer: str) -> gs.Variable:
    c, name = w.config, f"{layer}.linear_attn.conv1d"
    slots = w.limits.max_seqs + 1
    shape = (slots, c.conv_kernel - 1, c.conv_channels)
    state = w.state(TensorSpec(f"{layer}.conv_state", w.precision.activation, shape), "slot")
    stored = cast(w.model.source(f"{name}.weight"))  # [C, 1, K]
    kernel = w.weight(f"{name}.weight", reshape(stored, (c.conv_channels, c.conv_kernel)))
    outputs = [f"{name}.y", state_out(state.name)]
    mixed, _ = w.op("causal_conv", [packed, kernel, state, *w.rows], outputs, tile=w.tile)
    return mixed


def _delta_rule(w: Writer, mixed: gs.Variable, gates: gs.Variable, layer: str) -> gs.Variable:
    c, p = w.config, f"{layer}.linear_attn"
    shape = (w.limits.max_seqs + 1, c.value_heads, c.value_dim, c.key_dim)
    state = w.state(TensorSpec(f"{layer}.gdn_state", w.precision.state, shape), "slot")
    decay = [w.weight(f"{p}.{n}", cast(w.model.source(f"{p}.{n}"))) for n in ("A_log", "dt_bias")]
    kind = "step" if w.tile == 1 else "chunk"
    attrs = {**c.delta_heads, "tile": w.tile, "ring": w.limits.gdn_ring}
    states = [state]
    if w.limits.gdn_ring:
        records = (w.limits.max_seqs + 1, w.limits.gdn_ring, ring_width(**c.delta_heads))
        states.append(w.state(TensorSpec(f"{layer}.gdn_ring", DType.F32, records), "slot"))
    outputs = [f"{p}.delta", *(state_out(s.name) for s in states)]
    operands = [mixed, gates, *decay, *states, *w.rows]
    return w.op(f"gated_delta_{kind}", operands, outputs, **attrs)[0]


def gated_attention(w: Writer, x: gs.Variable, layer: str) -> gs.Variable:
    """The full-attention mixer: projections, paged attention, output gate, projection."""
    c, p = w.config, f"{layer}.self_attn"
    parts = [w.project(x, f"{p}.{part}_proj") for part in ("q", "k", "v")]
    qkv = w.concat(parts, f"{p}.qkv")
    o = _paged_attention(w, qkv, layer)
    attrs = {"heads": c.heads, "head_dim": c.head_dim}
    y = w.one("sigmoid_gate", [o, qkv], f"{p}.gated", **attrs)
    return w.project(y, f"{p}.o_proj")


def _paged_attention(w: Writer, qkv: gs.Variable, layer: str) -> gs.Variable:
    c, p = w.config, f"{layer}.self_attn"
    pages = [_pages(w, f"{layer}.{name}") for name in ("k_pages", "v_pages")]
    norms = [
        w.weight(f"{p}.{n}.weight", _head_norm(w, f"{p}.{n}.weight")) for n in ("q_norm", "k_norm")
    ]
    freqs = w.weight("rotary.inv_freq", constant(c.rope.inv_freq()))
    scales = w.weight(f"{p}.kv_scale", _kv_scale(w, p))
    attrs = {"heads": c.heads, "kv_heads": c.kv_heads, "head_dim": c.head_dim, "tile": w.tile}
    outputs = [f"{p}.o", *(state_out(page.name) for page in pages)]
    operands = [qkv, *norms, freqs, scales, *pages, w["page_table"], *w.rows]
    kv_dtype = w.precision.kv.value
    o, _, _ = w.op("paged_attention", operands, outputs, eps=c.eps, kv_dtype=kv_dtype, **attrs)
    return o


def _pages(w: Writer, name: str) -> gs.Variable:
    c = w.config
    shape = (w.limits.pages + 1, c.kv_heads, w.limits.page_size, c.head_dim)
    return w.state(TensorSpec(name, w.precision.kv_storage, shape), "page")


def _head_norm(w: Writer, name: str) -> Recipe:
    """1 + weight, with yarn's factor on the rotated elements (see `rope.Rope`)."""
    scale, rope = one_plus(w.model.source(name)), w.config.rope
    if rope.attention_factor == 1.0:
        return scale
    factor = np.ones(w.config.head_dim, np.float32)
    factor[: rope.dims] = rope.attention_factor
    return multiply(scale, constant(factor))


def _kv_scale(w: Writer, attention: str) -> Recipe:
    """f32 [2]: the FP8 cache's scales of k and v, 1 where the checkpoint has none."""
    one = constant(np.array(1.0))
    found = [one, one]
    for i, side in enumerate("kv" if w.precision.kv is DType.F8E4M3 else ""):
        for name in (f"{attention}.{side}_proj.{side}_scale", f"{attention}.{side}_scale"):
            if w.model.has(name):
                found[i] = reshape(cast(whole_scale(w.model.source(name))), ())
    return stack(found)


def swiglu(w: Writer, x: gs.Variable, module: str) -> gs.Variable:
    """down(silu(gate x) · up x)."""
    parts = [w.project(x, f"{module}.{part}_proj") for part in ("gate", "up")]
    joined = w.concat(parts, f"{module}.gate_up")
    return w.project(w.one("silu_mul", [joined], f"{module}.act"), f"{module}.down_proj")


def dense_mlp(w: Writer, x: gs.Variable, layer: str) -> gs.Variable:
    """The MLP of a dense layer."""
    return swiglu(w, x, f"{layer}.mlp")
