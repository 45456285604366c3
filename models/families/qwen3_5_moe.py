"""What model type qwen3_5_moe changes: every MLP is routed experts beside a gated shared one.

Knows the router, the stacked experts and the shared expert; the rest is `qwen3_5.py`.
"""

from __future__ import annotations

import onnx_graphsurgeon as gs

from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.families import qwen3_5
from spark_engine.models.graph.layers import swiglu
from spark_engine.models.graph.writer import Writer
from spark_engine.models.weights.operands import MOE_FORMATS, expert_params


def write(w: Writer, debug: bool) -> None:
    """Writes the whole graph."""
    qwen3_5.write(w, debug, mixture)


def mixture(w: Writer, x: gs.Variable, layer: str) -> gs.Variable:
    """sum over the chosen experts of weight · expert(x), plus sigmoid(gate x) · shared(x)."""
    assert w.config.moe is not None
    p = f"{layer}.mlp"
    router = w.matrix(f"{p}.gate.weight", w.model.source(f"{p}.gate.weight"))
    choice = [f"{p}.expert_ids", f"{p}.expert_weights"]
    chosen = w.op("moe_router", [x, router], choice, top_k=w.config.moe.top_k)
    scheme = w.model.table[f"{p}.experts"]
    stacked = expert_params(w.model, f"{p}.experts", scheme)
    put = w.matrix if scheme is Scheme.PLAIN else w.weight
    operands = [x, *chosen, *(put(f"{p}.experts.{n}", r) for n, r in stacked.items())]
    attrs = {"format": MOE_FORMATS[scheme], "dtype": w.activation}
    routed = w.one("grouped_moe", operands, f"{p}.routed", **attrs)
    shared = swiglu(w, x, f"{p}.shared_expert")
    name = f"{p}.shared_expert_gate.weight"
    gate = w.matrix(name, w.model.source(name))
    return w.one("shared_gate", [routed, shared, x, gate], f"{p}.y")
