"""The MLPs of a layer: dense, or a mixture of experts with a gated shared expert.

Knows their tensors and how they are written in ops (docs/graph.md); knows no tensor's name.
Shapes are [tokens, columns].
"""

from dataclasses import dataclass

import onnx_graphsurgeon as gs

from spark_engine.models.checkpoint.quant_schemes import Scheme
from spark_engine.models.checkpoint.tensor_list import Experts, Linear, Tensor
from spark_engine.models.graph.writer import Writer
from spark_engine.models.weights.operands import expert_operands


@dataclass(frozen=True)
class Swiglu:
    """down(silu(gate x) · up x), with gate and up [I, H], down [H, I]."""

    name: str
    gate: Linear
    up: Linear
    down: Linear

    def write(self, w: Writer, x: gs.Variable) -> gs.Variable:
        """The MLP over normed x [tokens, H]."""
        parts = [w.project(x, part) for part in (self.gate, self.up)]
        joined = w.concat(parts, f"{self.name}.gate_up")
        return w.project(w.one("silu_mul", [joined], f"{self.name}.act"), self.down)


@dataclass(frozen=True)
class Mixture:
    """sum over the chosen experts of weight · expert(x), plus sigmoid(gate x) · shared(x).

    Shapes: router [E, H], shared_gate [1, H].
    """

    name: str
    router: Tensor
    shared_gate: Tensor
    shared: Swiglu
    experts: Experts

    def write(self, w: Writer, x: gs.Variable) -> gs.Variable:
        """The MLP over normed x [tokens, H]."""
        assert w.config.moe is not None
        p = self.name
        router = w.stored_matrix(self.router)
        choice = [f"{p}.expert_ids", f"{p}.expert_weights"]
        chosen = w.op("moe_router", [x, router], choice, top_k=w.config.moe.top_k)
        scheme = w.model.table[self.experts.name]
        stacked = expert_operands(w.model, self.experts)
        put = w.matrix if scheme is Scheme.PLAIN else w.weight
        operands = [x, *chosen, *(put(f"{self.experts.name}.{n}", r) for n, r in stacked.items())]
        attrs = {"format": scheme.weights, "dtype": w.activation}
        routed = w.one("grouped_moe", operands, f"{p}.routed", **attrs)
        shared = self.shared.write(w, x)
        gate = w.stored_matrix(self.shared_gate)
        return w.one("shared_gate", [routed, shared, x, gate], f"{p}.y")
