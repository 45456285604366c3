"""The draft (MTP) head: one layer that drafts the next tokens from the last hidden state.

Its row at position t takes (hidden_t, token t+1), where `hidden` is the network's output after the
final norm, and predicts token t+2. It has its own keys and values, so every token of the sequence
passes through `fill`; `step` then drafts one token after another, each from the head's previous
output. Knows the wiring (docs/graph.md); knows no tensor's name, nor how a projection is stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from spark_engine.models.checkpoint.tensor_list import Linear, Tensor
from spark_engine.models.graph.decoder import Layer, centred_norm, norm_scale
from spark_engine.models.graph.gated_attention import GatedAttention
from spark_engine.models.graph.writer import Writer


@dataclass(frozen=True)
class DraftHead:
    """Shapes: fc [H, 2·H], embedding first; the norms [H], zero-centred. The layer's mixer is
    attention."""

    name: str
    embedding_norm: Tensor
    hidden_norm: Tensor
    fc: Linear
    layer: Layer
    norm: Tensor

    @property
    def attention(self) -> GatedAttention:
        """The layer's mixer."""
        assert isinstance(self.layer.mixer, GatedAttention)
        return self.layer.mixer

    def pages(self, w: Writer) -> list[gs.Variable]:
        """The states that hold its keys and values, new to the graph."""
        return self.attention.pages(w, self.name)

    def input(
        self, w: Writer, ids: gs.Variable, hidden: gs.Variable, embedding: gs.Variable
    ) -> gs.Variable:
        """x [tokens, H]: fc of the normed embeddings of `ids` and the normed hidden [tokens, H]."""
        norms = [norm_scale(w, norm) for norm in (self.embedding_norm, self.hidden_norm)]
        attrs = {"eps": w.config.eps, "dtype": w.activation}
        operands = [ids, hidden, embedding, *norms, *w.images]
        joined = w.one("mtp_input", operands, f"{self.name}.input", **attrs)
        return w.project(joined, self.fc)

    def fill(
        self, w: Writer, x: gs.Variable, pages: Sequence[gs.Variable], updates: Sequence[str]
    ) -> list[gs.Variable]:
        """The pages with the keys and values of x [tokens, H]."""
        return self.attention.append(w, self.layer.normed(w, x), pages, updates)

    def step(
        self, w: Writer, x: gs.Variable, pages: Sequence[gs.Variable], updates: Sequence[str]
    ) -> tuple[gs.Variable, list[gs.Variable]]:
        """y [rows, H], which the language model's head and the next step read, and the pages with
        the keys and values of x [rows, H]."""
        kept: list[gs.Variable] = []

        def attend(h: gs.Variable) -> gs.Variable:
            y, updated = self.attention.attend(w, h, pages, updates)
            kept.extend(updated)
            return y

        out = self.layer.around(w, x, f"{self.name}.layers.0", attend)
        return centred_norm(w, out, self.norm, f"{self.name}.hidden"), kept
