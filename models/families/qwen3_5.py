"""The network of model type qwen3_5: embedding, decoder layers, final norm, head, sampling.

Knows the order of the blocks in `models/graph/layers.py`. The MLP is a parameter, because it is all
that qwen3_5_moe changes.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_graphsurgeon as gs

from spark_engine.models.checkpoint.layout import HEAD
from spark_engine.models.config.model_config import FULL
from spark_engine.models.graph.layers import (
    dense_mlp,
    gated_attention,
    gated_delta_net,
    zero_centred_norm,
)
from spark_engine.models.graph.writer import Writer, state_out
from spark_engine.tensors import DType

Mlp = Callable[[Writer, gs.Variable, str], gs.Variable]


def write(w: Writer, debug: bool, mlp: Mlp = dense_mlp) -> None:
    """Writes the whole graph; steps, tables and common states are its inputs already."""
    embedding = w.matrix("embed_tokens.weight", w.model.source("embed_tokens.weight"))
    operands = [w["token_ids"], w["last_tokens"], w["slots"], embedding]
    x = w.one("embed", operands, "embed", tile=w.tile, dtype=w.activation)
    for i in range(len(w.config.layers)):
        x = _layer(w, x, i, mlp)
        if debug:
            w.output(x)
    last = w.one("last_rows", [x, w["counts"]], "last", tile=w.tile)
    logits = _head(w, last, "logits")
    if debug:
        w.output(_head(w, x, "logits_all"))
    _sample(w, logits)


def _layer(w: Writer, x: gs.Variable, i: int, mlp: Mlp) -> gs.Variable:
    """u = x + mixer(norm(x)); u + mlp(norm(u))."""
    layer = f"layers.{i}"
    h = zero_centred_norm(w, x, f"{layer}.input_layernorm", f"{layer}.input_layernorm.y")
    mixer = gated_attention if w.config.layers[i] == FULL else gated_delta_net
    u = w.add(x, mixer(w, h, layer), f"{layer}.mixed")
    norm = f"{layer}.post_attention_layernorm"
    return w.add(u, mlp(w, zero_centred_norm(w, u, norm, f"{norm}.y"), layer), f"{layer}.out")


def _head(w: Writer, x: gs.Variable, output: str) -> gs.Variable:
    """f32 logits [rows or tokens, V]; a tied head reads the embedding's own matrix."""
    h = zero_centred_norm(w, x, "norm", f"{output}.norm")
    if w.config.tied:
        return w.matmul(h, w["embed_tokens.weight"], output, DType.F32.value)
    return w.project(h, HEAD, DType.F32.value, output)


def _sample(w: Writer, logits: gs.Variable) -> None:
    """Counts this step's tokens, then samples; writes every output that engines share."""
    step = [w[n] for n in ("token_ids", "last_tokens", "slots", "starts", "counts")]
    counted = [w["token_counts"], *step, w["prompt_lens"]]
    token_counts = w.one("mark_tokens", counted, state_out("token_counts"), tile=w.tile)
    knobs = [w[n] for n in ("sampling_f", "sampling_i", "bias_ids", "bias_values")]
    operands = [logits, token_counts, *knobs, *w.rows, w["emit"], w["last_tokens"]]
    names = ("next_tokens", "logprobs", "top_ids", "top_logprobs", "ok")
    outputs = [*names, state_out("last_tokens")]
    attrs = {"vocab": w.config.vocab, "top": w.limits.top_logprobs}
    made = w.op("sample", operands, outputs, **attrs)
    for tensor in (*made[: len(names)], logits):
        w.output(tensor)
