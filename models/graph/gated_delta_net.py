"""The linear-attention mixer: gated delta net. Its tensors, and how it is written in ops.

Knows the mathematics' wiring (docs/graph.md); knows no tensor's name, nor how a projection is
stored. Shapes are [tokens, columns].
"""

from dataclasses import dataclass

import onnx_graphsurgeon as gs

from spark_engine.interface import PREFILL_TILE
from spark_engine.manifest import SEQUENCE
from spark_engine.models.checkpoint.tensor_list import Linear, Tensor
from spark_engine.models.graph.writer import Writer, state_out
from spark_engine.models.weights.recipes import cast, reshape
from spark_engine.plugins.ops.delta_rule.causal_conv import conv_rows
from spark_engine.plugins.state.replay_ring import ring_records, ring_width
from spark_engine.tensors import DType, TensorSpec


@dataclass(frozen=True)
class GatedDeltaNet:
    """Projections, convolution, delta rule, gated norm, projection.

    Shapes: qkv [C, H] with C = 2·Hk·Dk + Hv·Dv, z [Hv·Dv, H], b and a [Hv, H], out [H, Hv·Dv],
    conv [C, 1, K], log_decay and decay_bias [Hv], norm [Dv].
    """

    name: str
    qkv: Linear
    z: Linear
    b: Linear
    a: Linear
    out: Linear
    conv: Tensor
    log_decay: Tensor
    decay_bias: Tensor
    norm: Tensor

    def write(self, w: Writer, x: gs.Variable, layer: str) -> gs.Variable:
        """The mixer over normed x [tokens, H]; `layer` names its states."""
        c = w.config
        qkv, z, b, a = (w.project(x, linear) for linear in (self.qkv, self.z, self.b, self.a))
        packed = w.concat([qkv, z], f"{self.name}.qkvz")
        gates = w.concat([b, a], f"{self.name}.ba")
        mixed = self._convolution(w, packed, layer)
        o = self._delta_rule(w, mixed, gates, layer)
        scale = w.weight(self.norm.name, cast(w.model.source(self.norm.name)))
        attrs = {"eps": c.eps, "heads": c.value_heads, "offset": c.conv_channels}
        y = w.one("gated_norm", [o, packed, scale], f"{self.norm.module}.y", **attrs)
        return w.project(y, self.out)

    def _convolution(self, w: Writer, packed: gs.Variable, layer: str) -> gs.Variable:
        c, conv = w.config, self.conv
        columns = conv_rows(c.conv_kernel, w.limits.drafts)
        shape = (w.limits.sequence_rows, columns, c.conv_channels)
        spec = TensorSpec(f"{layer}.conv_state", w.precision.activation, shape)
        state = w.state(spec, SEQUENCE)
        stored = cast(w.model.source(conv.name))  # [C, 1, K]
        kernel = w.weight(conv.name, reshape(stored, (c.conv_channels, c.conv_kernel)))
        outputs = [f"{conv.module}.y", state_out(state.name)]
        operands = [packed, kernel, state, *w.rows, *_elsewhere(w)]
        mixed, _ = w.op("causal_conv", operands, outputs, tile=w.tile, **_drafts(w))
        return mixed

    def _delta_rule(
        self, w: Writer, mixed: gs.Variable, gates: gs.Variable, layer: str
    ) -> gs.Variable:
        c = w.config
        shape = (w.limits.sequence_rows, c.value_heads, c.value_dim, c.key_dim)
        state = w.state(TensorSpec(f"{layer}.gdn_state", w.precision.state, shape), SEQUENCE)
        decay = [
            w.weight(t.name, cast(w.model.source(t.name)))
            for t in (self.log_decay, self.decay_bias)
        ]
        kind = "chunk" if w.tile == PREFILL_TILE else "step"
        attrs = {**c.delta_heads, "tile": w.tile, "ring": w.limits.gdn_ring, **_drafts(w)}
        states = [state]
        if w.limits.gdn_ring:
            records = ring_records(w.limits.gdn_ring, w.limits.drafts)
            ring = (w.limits.sequence_rows, records, ring_width(**c.delta_heads))
            states.append(w.state(TensorSpec(f"{layer}.gdn_ring", DType.F32, ring), SEQUENCE))
        outputs = [f"{self.name}.delta", *(state_out(s.name) for s in states)]
        operands = [mixed, gates, *decay, *states, *w.rows, *_elsewhere(w)]
        return w.op(f"gated_delta_{kind}", operands, outputs, **attrs)[0]


def _elsewhere(w: Writer) -> list[gs.Variable]:
    """In prefill: the rows of the states that it starts from, and those that it saves to."""
    return [w["sources"], w["saves"]] if w.tile == PREFILL_TILE else []


def _drafts(w: Writer) -> dict[str, int]:
    """The attribute of ops with states that keep data to undo a round's rejected drafts."""
    return {"drafts": w.limits.drafts} if w.limits.drafts else {}
