"""A decoder of pre-normed layers: embedding, layers, final norm, head, sampling.

Knows the order of the blocks and the names of a layer's results in docs/graph.md; knows no tensor's
name. A block is a frozen dataclass of tensors with a method that writes its ops. `draft_round.py`
writes graphs with drafts from the same blocks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import onnx_graphsurgeon as gs

from spark_engine.models.checkpoint.tensor_list import Linear, Tensor
from spark_engine.models.graph.writer import Writer, state_out
from spark_engine.models.weights.recipes import one_plus
from spark_engine.tensors import DType

SAMPLED = ("next_tokens", "logprobs", "top_ids", "top_logprobs", "ok")


class Mixer(Protocol):
    """A block that mixes tokens: x [tokens, H] -> [tokens, H], with states named after `layer`."""

    def write(self, w: Writer, x: gs.Variable, layer: str) -> gs.Variable: ...


class Mlp(Protocol):
    """A block over each token: x [tokens, H] -> [tokens, H]."""

    def write(self, w: Writer, x: gs.Variable) -> gs.Variable: ...


@dataclass(frozen=True)
class Layer:
    """u = x + mixer(norm(x)); u + mlp(norm(u)), with zero-centred norms [H]."""

    mixer_norm: Tensor
    mixer: Mixer
    mlp_norm: Tensor
    mlp: Mlp

    def write(self, w: Writer, x: gs.Variable, layer: str) -> gs.Variable:
        """The layer over the residual stream x [tokens, H]."""
        return self.around(w, x, layer, lambda h: self.mixer.write(w, h, layer))

    def around(
        self, w: Writer, x: gs.Variable, layer: str, mix: Callable[[gs.Variable], gs.Variable]
    ) -> gs.Variable:
        """The layer with `mix` of normed x in place of the mixer."""
        u = w.add(x, w.summed(mix(self.normed(w, x))), f"{layer}.mixed")
        h = centred_norm(w, u, self.mlp_norm, f"{self.mlp_norm.module}.y")
        return w.add(u, w.summed(self.mlp.write(w, h)), f"{layer}.out")

    def normed(self, w: Writer, x: gs.Variable) -> gs.Variable:
        """The normed x, which the mixer reads."""
        return centred_norm(w, x, self.mixer_norm, f"{self.mixer_norm.module}.y")


@dataclass(frozen=True)
class Decoder:
    """The whole text network. The head is a projection [V, H], or the tied embedding."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear | Tensor

    def write(self, w: Writer, debug: bool) -> gs.Variable:
        """Writes the graph without drafts; steps, tables and common states are inputs already.

        Returns the residual stream x [tokens, H] after the last layer.
        """
        x = self.stream(w, w["token_ids"], debug)
        last = w.one("last_rows", [x, w["counts"]], "last", tile=w.tile)
        logits = self.logits(w, self.normed(w, last, "logits.norm"), "logits")
        if debug:
            normed = self.normed(w, x, "logits_all.norm")
            w.output(self.all_logits(w, normed, "logits_all"))
        _sample(w, logits)
        return x

    def stream(self, w: Writer, ids: gs.Variable, debug: bool) -> gs.Variable:
        """The residual stream [tokens, H] of these ids after the last layer."""
        operands = [ids, w["last_tokens"], w["slots"], self.embedded(w), *w.images]
        x = w.one("embed", operands, "embed", tile=w.tile, dtype=w.activation)
        for i, layer in enumerate(self.layers):
            x = layer.write(w, x, f"layers.{i}")
            if debug:
                w.output(x)
        return x

    def embedded(self, w: Writer) -> gs.Variable:
        """The embedding [V, H]."""
        return w.stored_matrix(self.embedding)

    def normed(self, w: Writer, x: gs.Variable, output: str) -> gs.Variable:
        """The final norm of x [tokens or rows, H], which the head reads."""
        return centred_norm(w, x, self.norm, output)

    def logits(self, w: Writer, h: gs.Variable, output: str) -> gs.Variable:
        """f32 logits [rows or tokens, V/samplers] of h, of the ids that this rank samples from."""
        if w.model.shards.across:
            return w.gathered(self._own_logits(w, h, f"{output}.own"), output)
        return self._own_logits(w, h, output)

    def _own_logits(self, w: Writer, h: gs.Variable, output: str) -> gs.Variable:
        """f32 logits [rows or tokens, V/ranks] of h, of this rank's ids. A tied head reads the
        embedding's matrix; each of several ranks has a copy of its share."""
        if isinstance(self.head, Linear):
            return w.project(h, self.head, DType.F32.value, output)
        matrix, shards = self.embedded(w), w.model.shards
        if shards.ranks > 1:
            recipe = shards.cut(self.head.name, w.model.source(self.embedding.name))
            matrix = w.matrix(self.head.name, recipe)
        return w.matmul(h, matrix, output, DType.F32.value)

    def all_logits(self, w: Writer, h: gs.Variable, output: str) -> gs.Variable:
        """f32 logits [rows or tokens, V] of h, of all ids."""
        own = output if w.model.shards.ranks == 1 else f"{output}.own"
        return w.gathered(self._own_logits(w, h, own), output)


def centred_norm(w: Writer, x: gs.Variable, norm: Tensor, output: str) -> gs.Variable:
    """RMSNorm with a weight that is stored as its deviation from one."""
    return w.one("rms_norm", [x, norm_scale(w, norm)], output, eps=w.config.eps)


def norm_scale(w: Writer, norm: Tensor) -> gs.Variable:
    """f32: one plus the stored weight."""
    return w.weight(norm.name, one_plus(w.model.source(norm.name)))


def sampling_tables(w: Writer) -> list[gs.Variable]:
    """The sampling parameters of a sequence, in the order of `sample`'s operands."""
    names = ("sampling_f", "sampling_i", "bias_ids", "bias_values", "bias_until", "allow")
    return [w[name] for name in names]


def sampling_attrs(w: Writer) -> dict[str, int]:
    ranks = w.model.shards.samplers
    shared = {"ranks": ranks} if ranks > 1 else {}
    return {"vocab": w.config.vocab, "top": w.limits.top_logprobs, **shared}


def _sample(w: Writer, logits: gs.Variable) -> None:
    """Counts this step's tokens, then samples; writes the outputs that all engines have."""
    step = [w[n] for n in ("token_ids", "last_tokens", "slots", "starts", "counts")]
    counted = [w["token_counts"], *step, w["prompt_lens"]]
    token_counts = w.one("mark_tokens", counted, state_out("token_counts"), tile=w.tile)
    operands = [logits, token_counts, *sampling_tables(w), *w.rows, w["emit"], w["last_tokens"]]
    outputs = [*SAMPLED, state_out("last_tokens")]
    made = w.op("sample", [*operands, *w.first_id()], outputs, **sampling_attrs(w))
    for tensor in (*made[: len(SAMPLED)], logits):
        w.output(tensor)
