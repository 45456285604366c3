"""A block drafter (DFlash2): one pass over a block drafts all tokens of a round.

Its context is not its own tokens: of each token of the sequence, the target's residual streams
after some layers (`taps`) are projected, and every layer's keys and values are made of that
(`fill`). `draft` then runs the layers over the block [last token, mask, mask, …], each token of
which sees the context and the whole block, and chooses one path through the candidates that the
target's own head ranks. Knows the wiring (docs/graph.md); knows no tensor's name.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from spark_engine.models.checkpoint.tensor_list import Linear, Tensor
from spark_engine.models.config.drafter_config import DrafterConfig
from spark_engine.models.graph.gated_attention import HeadProjections, kv_pages
from spark_engine.models.graph.mlp import Swiglu
from spark_engine.models.graph.writer import Writer, state_out
from spark_engine.models.weights import recipes

Block = Callable[[gs.Variable], gs.Variable]
Logits = Callable[[gs.Variable], tuple[gs.Variable, Sequence[gs.Variable]]]


@dataclass(frozen=True)
class BlockConv:
    """A convolution before and behind a sublayer. Shapes: base [2 sides, 2 taps, H], projection
    [4·groups, H]."""

    name: str
    base: Tensor
    projection: Tensor

    def around(self, w: Writer, h: gs.Variable, sublayer: Block) -> gs.Variable:
        """The sublayer over normed h [tokens, H] between both sides; its deltas are h's."""
        deltas = w.matmul(h, w.stored_matrix(self.projection), f"{self.name}.deltas")
        flat = (self.base.shape[0] * self.base.shape[1], self.base.shape[2])
        stored = recipes.cast(w.model.source(self.base.name))
        base = w.weight(self.base.name, recipes.reshape(stored, flat))

        def side(x: gs.Variable, which: int, name: str) -> gs.Variable:
            attrs = {"tile": w.tile, "side": which}
            return w.one("block_conv", [x, deltas, base], f"{self.name}.{name}", **attrs)

        return side(sublayer(side(h, 0, "in")), 1, "out")


@dataclass(frozen=True)
class BlockAttention(HeadProjections):
    """Shapes: q [heads·D, H], k and v [kv_heads·D, H], o [H, heads·D], the norms [D]."""

    config: DrafterConfig

    def append(self, w: Writer, context: gs.Variable, layer: str) -> None:
        """Stores keys and values of the context [tokens, H] in the layer's pages."""
        c = self.config
        pages = kv_pages(w, layer, c.kv_heads, c.head_dim)
        kv = w.concat([w.project(context, part) for part in (self.k, self.v)], f"{self.name}.kv")
        operands = [kv, *self._keys(w), *pages, w["page_table"], *w.rows]
        w.op("append_kv", operands, [state_out(p.name) for p in pages], **self._attrs(w))

    def attend(self, w: Writer, h: gs.Variable, layer: str) -> gs.Variable:
        """The attention of normed h [tokens, H] of a block."""
        qkv = w.concat([w.project(h, part) for part in (self.q, self.k, self.v)], f"{layer}.qkv")
        pages = [w[state_out(f"{layer}.{page}")] for page in ("k_pages", "v_pages")]
        operands = [qkv, _scale(w, self.q_norm), *self._keys(w), *pages, w["page_table"], *w.rows]
        own = {"heads": self.config.heads, "window": self.config.window}
        o = w.one("block_attention", operands, f"{self.name}.o", **self._attrs(w), **own)
        return w.project(o, self.o)

    def _keys(self, w: Writer) -> list[gs.Variable]:
        """k_norm, frequencies, what is added to positions, scales."""
        base = self.name.partition(".")[0]
        freqs = w.weight(f"{base}.inv_freq", recipes.constant(self.config.inv_freq()))
        scales = w.weight(f"{base}.kv_scale", recipes.constant((1.0, 1.0)))
        return [_scale(w, self.k_norm), freqs, w["rope_offsets"], scales]

    def _attrs(self, w: Writer) -> dict[str, int | float | str]:
        c = self.config
        sizes = {"kv_heads": c.kv_heads, "head_dim": c.head_dim, "tile": w.tile}
        return {**sizes, "eps": c.eps, "kv_dtype": w.precision.kv.value}


@dataclass(frozen=True)
class BlockLayer:
    """u = x + conv(attention)(norm(x)); u + conv(mlp)(norm(u)), with norms [H] as stored."""

    name: str
    mixer_norm: Tensor
    mixer: BlockAttention
    mixer_conv: BlockConv
    mlp_norm: Tensor
    mlp: Swiglu
    mlp_conv: BlockConv

    def write(self, w: Writer, x: gs.Variable) -> gs.Variable:
        """The layer over the block's residual stream x [tokens, H]."""
        eps, mixer = self.mixer.config.eps, self.mixer
        h = _norm(w, x, self.mixer_norm, eps)
        mixed = self.mixer_conv.around(w, h, lambda y: mixer.attend(w, y, self.name))
        u = w.add(x, mixed, f"{self.name}.mixed")
        h = _norm(w, u, self.mlp_norm, eps)
        return w.add(u, self.mlp_conv.around(w, h, lambda y: self.mlp.write(w, y)), self.name)


@dataclass(frozen=True)
class BlockDrafter:
    """Shapes: fc [H, taps·H], the norms [H], the selector's query [R, H], its codebooks [V, R]."""

    name: str
    config: DrafterConfig
    fc: Linear
    context_norm: Tensor
    layers: tuple[BlockLayer, ...]
    norm: Tensor
    query: Tensor
    predecessor: Tensor
    successor: Tensor

    def fill(self, w: Writer) -> None:
        """Stores keys and values of the launch's tokens, from the target's layers."""
        taps = [w[f"layers.{i}.out"] for i in self.config.taps]
        x = w.project(w.concat(taps, f"{self.name}.taps"), self.fc)
        context = _norm(w, x, self.context_norm, self.config.eps)
        for layer in self.layers:
            layer.mixer.append(w, context, layer.name)

    def draft(
        self,
        w: Writer,
        read_ids: gs.Variable,
        accepted: gs.Variable,
        embedding: gs.Variable,
        logits: Logits,
        last: bool,
    ) -> gs.Variable:
        """The state with the next round's drafts, as many as the round read tokens, `read_ids`, but
        for one a row. `logits`: of a hidden [tokens, H], with the ids
        that they are of if those are not all; `last`: the state's last update."""
        slots, read = w["slots"], w[state_out("last_tokens")]
        given = [read_ids, read, w[state_out("positions")], slots, accepted]
        names, attrs = ["draft.ids", "draft.starts", "draft.counts"], {"mask": self.config.mask}
        ids, starts, counts = w.op("block_rows", given, names, tile=w.tile, **attrs)
        with w.over([slots, starts, counts], scope="draft."):
            operands = [ids, read, slots, embedding]
            x = w.one("embed", operands, "embed", tile=w.tile, dtype=w.activation)
            for layer in self.layers:
                x = layer.write(w, x)
            z = _norm(w, x, self.norm, self.config.eps)
            found, listed = logits(z)
            sizes = {"tile": w.tile, "shortlist": len(listed), "vocab": w.config.vocab}
            sizes["top"] = min(self.config.top, int(found.shape[1]))
            candidates = w.op("top_ids", [found, *listed, counts], ["top", "values"], **sizes)
            query = w.matmul(z, w.stored_matrix(self.query), "query")
            books = [w.stored_matrix(book) for book in (self.predecessor, self.successor)]
            chosen = [*candidates, query, *books, read, w["drafts"], slots, counts]
            name = state_out("drafts") if last else "drafts"
            return w.one("draft_path", chosen, name, tile=w.tile)


def _scale(w: Writer, norm: Tensor) -> gs.Variable:
    return w.weight(norm.name, recipes.cast(w.model.source(norm.name)))


def _norm(w: Writer, x: gs.Variable, norm: Tensor, eps: float) -> gs.Variable:
    """RMSNorm with the weight as it is stored."""
    return w.one("rms_norm", [x, _scale(w, norm)], f"{norm.module}.y", eps=eps)
