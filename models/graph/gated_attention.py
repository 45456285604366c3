"""The full-attention mixer: paged attention with an output gate. Its tensors, and its ops.

Knows the mathematics' wiring (docs/graph.md); knows no tensor's name, nor how a projection is
stored. Shapes are [tokens, columns].
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs

from spark_engine.interface import PREFILL_TILE
from spark_engine.models.checkpoint.tensor_list import Linear, Tensor
from spark_engine.models.graph.writer import Writer, state_out
from spark_engine.models.weights import recipes
from spark_engine.models.weights.operands import scalar
from spark_engine.models.weights.recipes import Recipe
from spark_engine.tensors import DType, TensorSpec


@dataclass(frozen=True)
class HeadProjections:
    """The projections of an attention, and the norms of its heads' queries and keys."""

    name: str
    q: Linear
    k: Linear
    v: Linear
    o: Linear
    q_norm: Tensor
    k_norm: Tensor


def kv_pages(w: Writer, layer: str, kv_heads: int, head_dim: int) -> list[gs.Variable]:
    """The states that hold a layer's keys and values, new to the graph."""
    shape = (w.limits.pages + 1, kv_heads, w.limits.page_size, head_dim)
    specs = (TensorSpec(f"{layer}.{n}_pages", w.precision.kv_storage, shape) for n in "kv")
    return [w.state(spec, "page") for spec in specs]


@dataclass(frozen=True)
class GatedAttention(HeadProjections):
    """Projections, norms of q and k, rotation, attention, output gate, projection.

    Shapes: q [2·heads·D, H] with each head's gate rows after its query rows, k and v [kv_heads·D,
        H], o [H, heads·D], q_norm and k_norm [D]. `k_scales` and `v_scales`: the possible names of
        an FP8 cache's scales; `kv_scales`: of one scale for both.
    """

    k_scales: tuple[Tensor, ...]
    v_scales: tuple[Tensor, ...]
    kv_scales: tuple[Tensor, ...]

    def write(self, w: Writer, x: gs.Variable, layer: str) -> gs.Variable:
        """The mixer over normed x [tokens, H]; `layer` names its states."""
        pages = self.pages(w, layer)
        y, _ = self.attend(w, x, pages, [state_out(page.name) for page in pages])
        return y

    def pages(self, w: Writer, layer: str) -> list[gs.Variable]:
        """`kv_pages` of the layer."""
        return kv_pages(w, layer, w.config.kv_heads, w.config.head_dim)

    def attend(
        self, w: Writer, x: gs.Variable, pages: Sequence[gs.Variable], updates: Sequence[str]
    ) -> tuple[gs.Variable, list[gs.Variable]]:
        """The mixer over normed x [tokens, H], and its pages with x's keys and values, with these
        names."""
        c, p = w.config, self.name
        qkv = w.concat([w.project(x, part) for part in (self.q, self.k, self.v)], f"{p}.qkv")
        q_norm = w.weight(self.q_norm.name, _head_norm(w, self.q_norm))
        k_norm, *rest = self._append_operands(w)
        attrs = {"heads": c.heads, **self._append_attrs(w)}
        operands = [qkv, q_norm, k_norm, *rest, *pages, w["page_table"], *w.rows]
        o, *updated = w.op("paged_attention", operands, [f"{p}.o", *updates], **attrs)
        heads = {"heads": c.heads, "head_dim": c.head_dim}
        y = w.one("sigmoid_gate", [o, qkv], f"{p}.gated", **heads)
        return w.project(y, self.o), updated

    def append(
        self, w: Writer, x: gs.Variable, pages: Sequence[gs.Variable], updates: Sequence[str]
    ) -> list[gs.Variable]:
        """The pages with the keys and values of normed x [tokens, H], without attention."""
        kv = w.concat([w.project(x, part) for part in (self.k, self.v)], f"{self.name}.kv")
        operands = [kv, *self._append_operands(w), *pages, w["page_table"], *w.rows]
        return w.op("append_kv", operands, updates, **self._append_attrs(w))

    def _append_operands(self, w: Writer) -> list[gs.Variable]:
        """The operands for storing keys and values in a page: k_norm, frequencies, what is added
        to positions, scales."""
        k_norm = w.weight(self.k_norm.name, _head_norm(w, self.k_norm))
        freqs = w.weight("rotary.inv_freq", recipes.constant(w.config.rope.inv_freq()))
        scales = w.weight(f"{self.name}.kv_scale", self._kv_scale(w))
        return [k_norm, freqs, w["rope_offsets"], scales]

    def _append_attrs(self, w: Writer) -> dict[str, int | float | str]:
        c = w.config
        sizes = {"kv_heads": c.kv_heads, "head_dim": c.head_dim, "tile": w.tile}
        height, width = c.rope.sections if w.tile == PREFILL_TILE else (0, 0)
        sections = {"rope_height": height, "rope_width": width}
        return {**sizes, **sections, "eps": c.eps, "kv_dtype": w.precision.kv.value}

    def _kv_scale(self, w: Writer) -> Recipe:
        """f32 [2]: the FP8 cache's scales of k and v, 1 if the checkpoint has none."""
        one = recipes.constant(np.array(1.0))
        found = [one, one]
        fp8 = w.precision.kv is DType.F8E4M3
        for i, scales in enumerate((self.k_scales, self.v_scales) if fp8 else ()):
            for scale in (*self.kv_scales, *scales):
                if w.model.has(scale.name):
                    found[i] = scalar(w.model, scale.name)
        return recipes.stack(found)


def _head_norm(w: Writer, norm: Tensor) -> Recipe:
    """1 + weight, with yarn's factor on the rotated elements (see `rope.Rope`)."""
    scale, rope = recipes.one_plus(w.model.source(norm.name)), w.config.rope
    if rope.attention_factor == 1.0:
        return scale
    factor = np.ones(w.config.head_dim, np.float32)
    factor[: rope.dims] = rope.attention_factor
    return recipes.multiply(scale, recipes.constant(factor))
