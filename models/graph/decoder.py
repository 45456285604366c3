"""A decoder of pre-normed layers: embedding, layers, final norm, head, sampling.

Knows the order of the blocks and the names that docs/graph.md gives to what a layer makes; knows
no tensor's name. A block is a frozen dataclass of tensors, and of how it is written in ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import onnx_graphsurgeon as gs

from spark_engine.models.checkpoint.tensor_list import Linear, Tensor
from spark_engine.models.graph.writer import Writer, state_out
from spark_engine.models.weights.recipes import one_plus
from spark_engine.tensors import DType


class Mixer(Protocol):
    """What mixes tokens: x [tokens, H] -> [tokens, H], with states named after `layer`."""

    def write(self, w: Writer, x: gs.Variable, layer: str) -> gs.Variable: ...


class Mlp(Protocol):
    """What works on each token: x [tokens, H] -> [tokens, H]."""

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
        h = _zero_centred_norm(w, x, self.mixer_norm, f"{self.mixer_norm.module}.y")
        u = w.add(x, self.mixer.write(w, h, layer), f"{layer}.mixed")
        h = _zero_centred_norm(w, u, self.mlp_norm, f"{self.mlp_norm.module}.y")
        return w.add(u, self.mlp.write(w, h), f"{layer}.out")


@dataclass(frozen=True)
class Decoder:
    """The whole text network. The head is a projection [V, H], or the tied embedding."""

    embedding: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Linear | Tensor

    def write(self, w: Writer, debug: bool) -> None:
        """Writes the whole graph; steps, tables and common states are its inputs already."""
        embedding = w.stored_matrix(self.embedding)
        operands = [w["token_ids"], w["last_tokens"], w["slots"], embedding]
        x = w.one("embed", operands, "embed", tile=w.tile, dtype=w.activation)
        for i, layer in enumerate(self.layers):
            x = layer.write(w, x, f"layers.{i}")
            if debug:
                w.output(x)
        last = w.one("last_rows", [x, w["counts"]], "last", tile=w.tile)
        logits = self._logits(w, last, "logits")
        if debug:
            w.output(self._logits(w, x, "logits_all"))
        _sample(w, logits)

    def _logits(self, w: Writer, x: gs.Variable, output: str) -> gs.Variable:
        """f32 logits [rows or tokens, V]; a tied head reads the embedding's own matrix."""
        h = _zero_centred_norm(w, x, self.norm, f"{output}.norm")
        if isinstance(self.head, Linear):
            return w.project(h, self.head, DType.F32.value, output)
        return w.matmul(h, w[self.embedding.name], output, DType.F32.value)


def _zero_centred_norm(w: Writer, x: gs.Variable, norm: Tensor, output: str) -> gs.Variable:
    """RMSNorm whose stored weight is the deviation from one."""
    scale = w.weight(norm.name, one_plus(w.model.source(norm.name)))
    return w.one("rms_norm", [x, scale], output, eps=w.config.eps)


def _sample(w: Writer, logits: gs.Variable) -> None:
    """Counts this step's tokens, then samples; writes every output that engines share."""
    step = [w[n] for n in ("token_ids", "last_tokens", "slots", "starts", "counts")]
    counted = [w["token_counts"], *step, w["prompt_lens"]]
    token_counts = w.one("mark_tokens", counted, state_out("token_counts"), tile=w.tile)
    bias = ("bias_ids", "bias_values", "bias_until")
    knobs = [w[n] for n in ("sampling_f", "sampling_i", *bias)]
    operands = [logits, token_counts, *knobs, *w.rows, w["emit"], w["last_tokens"]]
    names = ("next_tokens", "logprobs", "top_ids", "top_logprobs", "ok")
    outputs = [*names, state_out("last_tokens")]
    attrs = {"vocab": w.config.vocab, "top": w.limits.top_logprobs}
    made = w.op("sample", operands, outputs, **attrs)
    for tensor in (*made[: len(names)], logits):
        w.output(tensor)
