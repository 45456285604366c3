"""The full-attention mixer: paged attention with an output gate. Its tensors, and its ops.

Knows the mathematics' wiring (docs/graph.md); knows no tensor's name, nor how a projection is
stored. Shapes are [tokens, columns].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from spark_engine.models.checkpoint.tensor_list import Linear, Tensor
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
from spark_engine.tensors import DType, TensorSpec


@dataclass(frozen=True)
class GatedAttention:
    """Projections, norms of q and k, rotation, attention, output gate, projection.

    Shapes: q [2·heads·D, H] with each head's gate rows behind its own, k and v [kv_heads·D, H],
    o [H, heads·D], q_norm and k_norm [D]. `k_scales` and `v_scales` are the names that an FP8
    cache's scale may have.
    """

    name: str
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Tensor
    k_norm: Tensor
    k_scales: tuple[Tensor, ...]
    v_scales: tuple[Tensor, ...]

    def write(self, w: Writer, x: gs.Variable, layer: str) -> gs.Variable:
        """The mixer over normed x [tokens, H]; `layer` names its states."""
        c = w.config
        qkv = w.concat(
            [w.project(x, part) for part in (self.q, self.k, self.v)], f"{self.name}.qkv"
        )
        o = self._paged_attention(w, qkv, layer)
        attrs = {"heads": c.heads, "head_dim": c.head_dim}
        y = w.one("sigmoid_gate", [o, qkv], f"{self.name}.gated", **attrs)
        return w.project(y, self.o)

    def _paged_attention(self, w: Writer, qkv: gs.Variable, layer: str) -> gs.Variable:
        c, p = w.config, self.name
        pages = [_pages(w, f"{layer}.{name}") for name in ("k_pages", "v_pages")]
        norms = [w.weight(t.name, _head_norm(w, t)) for t in (self.q_norm, self.k_norm)]
        freqs = w.weight("rotary.inv_freq", constant(c.rope.inv_freq()))
        scales = w.weight(f"{p}.kv_scale", self._kv_scale(w))
        attrs = {"heads": c.heads, "kv_heads": c.kv_heads, "head_dim": c.head_dim, "tile": w.tile}
        outputs = [f"{p}.o", *(state_out(page.name) for page in pages)]
        operands = [qkv, *norms, freqs, scales, *pages, w["page_table"], *w.rows]
        kv_dtype = w.precision.kv.value
        o, _, _ = w.op("paged_attention", operands, outputs, eps=c.eps, kv_dtype=kv_dtype, **attrs)
        return o

    def _kv_scale(self, w: Writer) -> Recipe:
        """f32 [2]: the FP8 cache's scales of k and v, 1 where the checkpoint has none."""
        one = constant(np.array(1.0))
        found = [one, one]
        fp8 = w.precision.kv is DType.F8E4M3
        for i, scales in enumerate((self.k_scales, self.v_scales) if fp8 else ()):
            for scale in scales:
                if w.model.has(scale.name):
                    found[i] = reshape(cast(whole_scale(w.model.source(scale.name))), ())
        return stack(found)


def _pages(w: Writer, name: str) -> gs.Variable:
    c = w.config
    shape = (w.limits.pages + 1, c.kv_heads, w.limits.page_size, c.head_dim)
    return w.state(TensorSpec(name, w.precision.kv_storage, shape), "page")


def _head_norm(w: Writer, norm: Tensor) -> Recipe:
    """1 + weight, with yarn's factor on the rotated elements (see `rope.Rope`)."""
    scale, rope = one_plus(w.model.source(norm.name)), w.config.rope
    if rope.attention_factor == 1.0:
        return scale
    factor = np.ones(w.config.head_dim, np.float32)
    factor[: rope.dims] = rope.attention_factor
    return multiply(scale, constant(factor))
