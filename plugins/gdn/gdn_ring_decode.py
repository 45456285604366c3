"""The whole gated delta net of one decode token over a state that lags behind: the fusion of
causal_conv, gated_delta_ring_step and gated_norm[_quant] (see those for the maths).

It is to `gdn_decode` what gated_delta_ring_step is to gated_delta_step: one state more, the replay
ring of `replay_ring`, and each step rewrites one L-th of the recurrent state.
"""

from __future__ import annotations

from spark_engine.errors import GraphError
from spark_engine.op import Attrs, Chain, Op, Part
from spark_engine.operand import Result
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands, quantised
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.shapes import count
from spark_engine.plugins.gdn import (
    causal_conv,
    gated_norm,
    gated_ring,
)
from spark_engine.plugins.gdn.gated_delta_nodes import Heads
from spark_engine.plugins.gdn.gdn_decode_cuda import CUDA
from spark_engine.plugins.gdn.gdn_ring_decode_cases import CASES
from spark_engine.tensors import Array, TensorSpec

NAME = "gdn_ring_decode"
OPERANDS = (
    "qkvz",
    "ba",
    "conv_weight",
    "conv_state",
    "a_log",
    "dt_bias",
    "gdn_state",
    "gdn_ring",
    "norm_weight",
    "slots",
    "starts",
    "counts",
)
STATES = ("conv_state_out", "gdn_state_out", "gdn_ring_out")
SIZES = ("key_heads", "value_heads", "key_dim", "value_dim")


def infer(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The operands, [scales f32[n]] -> conv_state', gdn_state', gdn_ring', [y A[tokens,Hv·Dv]],
    quantised…"""
    quantised.check(NAME, attrs)
    count(NAME, specs, len(OPERANDS) + quantised.takes_scales(attrs))
    try:
        *states, _, y = _inferred(attrs, specs)
    except GraphError as error:
        raise GraphError(f"{NAME}: {error}") from error
    for spec in specs[len(OPERANDS) :]:
        quantised.check_scales(NAME, attrs, spec)
    outs = [y] * bool(attrs["keep"]) + quantised.infer(NAME, attrs, y)
    named = [TensorSpec(n, s.dtype, s.shape) for n, s in zip(STATES, states, strict=True)]
    return (*named, *(TensorSpec(f"result{i}", s.dtype, s.shape) for i, s in enumerate(outs)))


def _inferred(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """(conv_state', gdn_state', gdn_ring', o, y) by the parts' own inference."""
    qkvz, ba, conv_weight, conv_state, a_log, dt_bias, state, ring, norm, *rows = specs[:12]
    c, conv = causal_conv.infer({"tile": 1}, (qkvz, conv_weight, conv_state, *rows))
    operands = (c, ba, a_log, dt_bias, state, ring, *rows)
    o, state, ring = gated_ring.infer(_delta(attrs), operands)
    (y,) = gated_norm.infer(_norm(attrs), (o, qkvz, norm))
    return conv, state, ring, o, y


def _delta(attrs: Attrs) -> Attrs:
    return {"tile": 1, **{n: attrs[n] for n in (*SIZES, "ring")}}


def _norm(attrs: Attrs) -> Attrs:
    return {"eps": attrs["eps"], "heads": attrs["value_heads"], "offset": attrs["offset"]}


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands, [scales] -> conv_state', gdn_state', gdn_ring', [y], quantised…"""
    qkvz, ba, conv_weight, conv_state, a_log, dt_bias, state, ring, norm, *rest = arrays
    rows, scales = rest[:3], rest[3:]
    c, conv = causal_conv.reference({"tile": 1}, (qkvz, conv_weight, conv_state, *rows))
    operands = (c, ba, a_log, dt_bias, state, ring, *rows)
    o, state, ring = gated_ring.reference(_delta(attrs), operands)
    y = gated_norm.evaluate(_norm(attrs), o, qkvz, norm)
    kept = [y] if attrs["keep"] else []
    made = quantised.reference(attrs, y, scales[0] if scales else None)
    return (conv, state, ring, *kept, *made)


def parts(attrs: Attrs) -> Chain:
    """The convolution, the recurrence, the norm, the quantisers."""
    rows = ("slots", "starts", "counts")
    conv = ("qkvz", "conv_weight", "conv_state", *rows)
    delta = ("c", "ba", "a_log", "dt_bias", "gdn_state", "gdn_ring", *rows)
    step = "gated_delta_ring_step"
    chain = (
        Part("causal_conv", conv, ("c", STATES[0]), {"tile": 1}),
        Part(step, delta, ("o", *STATES[1:]), _delta(attrs)),
        Part("gated_norm", ("o", "qkvz", "norm_weight"), ("y",), _norm(attrs)),
    )
    return quantised.chain(attrs, chain, before=STATES)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The bodies of the parts, one after the other."""
    f = Text()
    outs = [s.name for s in infer(attrs, specs)]
    free = iter(outs[len(STATES) :])
    qkvz, ba, conv_weight, conv_state, a_log, dt_bias, state, _, _, *rows = specs[:12]
    c, _ = causal_conv.infer({"tile": 1}, (qkvz, conv_weight, conv_state, *rows))
    operands = (qkvz, conv_weight, conv_state, *rows)
    causal_conv.fragment(f, 1, operands, ("qkvz", "conv_weight"), ("c", STATES[0]))
    heads = Heads(1, *(int(attrs[n]) for n in SIZES))
    operands = (c, ba, a_log, dt_bias, state, *rows)
    gated_ring.step_fragment(f, heads, int(attrs["ring"]), operands, STATES[1:])
    o = _inferred(attrs, specs)[3]
    y_out = next(free) if attrs["keep"] else ""
    y = gated_norm.fragment(f, _norm(attrs), o, y_out, "qkvz", "norm_weight")
    k = heads.values * heads.value_dim
    quantised.body(f, attrs, fr.widen(f, y), k, "scales", list(free))
    return f.function(NAME, [*OPERANDS, "scales"][: len(specs)], outs)


_QKVZ = operands.x("A[tokens,X]", "q|k|v, z at column `offset`", "qkvz")
_CONV_WEIGHT = operands.weight("conv_weight", "f32[C,K]")
_NORM_WEIGHT = operands.weight("norm_weight", "f32[Dv]")
_PARTS = {o.name: o for o in (*gated_ring.OPERANDS, *causal_conv.OPERANDS)}
_PARTS |= {o.name: o for o in (_QKVZ, _CONV_WEIGHT, _NORM_WEIGHT)}
MOVED = [o for o in OPERANDS if f"{o}_out" in STATES]
DECLARED = (*(_PARTS[name] for name in OPERANDS), operands.SCALES)
OP = Op(
    name=NAME,
    operands=DECLARED,
    results=(
        *(Result(f"{o.name}_out", o.spec, updates=o.name) for o in DECLARED if o.name in MOVED),
        Result("result*", "[y A[tokens,Hv·Dv] if keep], quantised…"),
    ),
    attrs=dict.fromkeys((*SIZES, "ring", "eps", "offset", "keep", "quant", "n")),
    infer=infer,
    reference=reference,
    body=body,
    cases=CASES,
    fuses=parts,
    cuda=CUDA,
)
