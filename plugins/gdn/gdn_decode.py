"""The whole gated delta net of one decode token: the fusion of causal_conv, gated_delta_step and
gated_norm[_quant] (see those for the maths).

c = causal_conv(qkvz), o = gated_delta_step(c, ba), y = gated_norm(o, qkvz), then the quantised
copies of y. Each intermediate is rounded to the activation dtype as if it were stored. Written
with the fragments of the ops it replaces, so that the CPU's bits do not change. The states are
the first outputs, since the number of the others depends on the format. `ring` is
gated_delta_step's.
"""

from __future__ import annotations

from typing import TypeVar

from spark_engine.errors import GraphError
from spark_engine.op import Attrs, Op
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import quantised
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.shapes import count
from spark_engine.plugins.gdn import (
    causal_conv,
    gated_delta,
    gated_norm,
)
from spark_engine.plugins.gdn.gdn_decode_cases import CASES
from spark_engine.plugins.gdn.gdn_decode_cuda import CUDA
from spark_engine.tensors import Array, TensorSpec

T = TypeVar("T", TensorSpec, Array)

OPERANDS = (
    "qkvz",
    "ba",
    "conv_weight",
    "conv_state",
    "a_log",
    "dt_bias",
    "gdn_state",
    "norm_weight",
    "slots",
    "starts",
    "counts",
)
STATES = ("conv_state_out", "gdn_state_out")
SIZES = ("key_heads", "value_heads", "key_dim", "value_dim", "ring")
RING = 7  # operand, where there is a ring


def name_of(attrs: Attrs) -> str:
    """The op's name."""
    return "gdn_ring_decode" if attrs["ring"] else "gdn_decode"


def operands_of(attrs: Attrs) -> tuple[str, ...]:
    """The operands' names, but for the scales."""
    return (*OPERANDS[:RING], "gdn_ring", *OPERANDS[RING:]) if attrs["ring"] else OPERANDS


def states_of(attrs: Attrs) -> tuple[str, ...]:
    """The first results' names."""
    return (*STATES, "gdn_ring_out") if attrs["ring"] else STATES


def infer(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The operands, [scales f32[n]] -> conv_state', gdn_state', [gdn_ring'], [y A[tokens,Hv·Dv]],
    quantised…"""
    name, known = name_of(attrs), len(operands_of(attrs))
    quantised.check(name, attrs)
    count(name, specs, known + quantised.takes_scales(attrs))
    try:
        *states, _, y = _inferred(attrs, specs[:known])
    except GraphError as error:
        raise GraphError(f"{name}: {error}") from error
    for spec in specs[known:]:
        quantised.check_scales(name, attrs, spec)
    outs = [y] * bool(attrs["keep"]) + quantised.infer(name, attrs, y)
    pairs = zip(states_of(attrs), states, strict=True)
    named = (TensorSpec(f"result{i}", s.dtype, s.shape) for i, s in enumerate(outs))
    return (*(TensorSpec(n, s.dtype, s.shape) for n, s in pairs), *named)


def _inferred(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """(conv_state', gdn_state', [gdn_ring'], o, y) by the parts' own inference."""
    c, conv = causal_conv.infer({"tile": 1}, _conv(specs))
    o, *states = gated_delta.infer(_delta(attrs), _rule(c, specs))
    (y,) = gated_norm.infer(_norm(attrs), (o, specs[0], specs[-4]))
    return conv, *states, o, y


def _conv(operands: tuple[T, ...]) -> tuple[T, ...]:
    """Of the operands without scales, causal_conv's."""
    return operands[:1] + operands[2:4] + operands[-3:]


def _rule(c: T, operands: tuple[T, ...]) -> tuple[T, ...]:
    """Of the operands without scales, gated_delta_step's."""
    return (c,) + operands[1:2] + operands[4:-4] + operands[-3:]


def _delta(attrs: Attrs) -> Attrs:
    return {"tile": 1, **{n: attrs[n] for n in SIZES}}


def _norm(attrs: Attrs) -> Attrs:
    return {"eps": attrs["eps"], "heads": attrs["value_heads"], "offset": attrs["offset"]}


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands, [scales] -> conv_state', gdn_state', [gdn_ring'], [y], quantised…"""
    known = len(operands_of(attrs))
    operands, scales = arrays[:known], arrays[known:]
    c, conv = causal_conv.reference({"tile": 1}, _conv(operands))
    o, *states = gated_delta.reference(_delta(attrs), _rule(c, operands))
    y = gated_norm.evaluate(_norm(attrs), o, operands[0], operands[-4])
    kept = [y] if attrs["keep"] else []
    made = quantised.reference(attrs, y, scales[0] if scales else None)
    return (conv, *states, *kept, *made)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The bodies of the parts, one after the other."""
    f, states = Text(), states_of(attrs)
    operands = specs[: len(operands_of(attrs))]
    outs = [s.name for s in infer(attrs, specs)]
    free = iter(outs[len(states) :])
    c, _ = causal_conv.infer({"tile": 1}, _conv(operands))
    names = ("qkvz", "conv_weight"), ("c", states[0])
    causal_conv.fragment(f, 1, _conv(operands), *names)
    gated_delta.step_fragment(f, _delta(attrs), _rule(c, operands), states[1:])
    o = _inferred(attrs, operands)[-2]
    y_out = next(free) if attrs["keep"] else ""
    y = gated_norm.fragment(f, _norm(attrs), o, y_out, "qkvz", "norm_weight")
    k = int(attrs["value_heads"]) * int(attrs["value_dim"])
    quantised.body(f, attrs, fr.widen(f, y), k, "scales0", list(free))
    return f.function(name_of(attrs), [*operands_of(attrs), "scales0"][: len(specs)], outs)


def _op(ring: int) -> Op:
    """The op with a ring or without."""
    attrs: Attrs = {"ring": ring}
    return Op(
        name=name_of(attrs),
        inputs=(*operands_of(attrs), "scales*"),
        outputs=(*states_of(attrs), "result*"),
        attrs=dict.fromkeys((*SIZES, "eps", "offset", "keep", "quant", "n")),
        infer=infer,
        reference=reference,
        body=body,
        cases=tuple(case for case in CASES if bool(case.attrs["ring"]) == bool(ring)),
        aliases={0: 3, 1: 6, 2: 7} if ring else {0: 3, 1: 6},
        cuda=CUDA,
    )


OP, RING_OP = _op(0), _op(1)
