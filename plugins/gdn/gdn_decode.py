"""The whole gated delta net of one decode token or a round of drafts: the fusion of causal_conv,
gated_delta_step and gated_norm[_quant] (see those for the maths).

c = causal_conv(qkvz), o = gated_delta_step(c, ba), y = gated_norm(o, qkvz), then the quantised
copies of y. Each intermediate is rounded to the activation dtype as if it were stored. Written
with the fragments of the ops it replaces, so that the CPU's bits do not change. The states are
the first outputs, since the number of the others depends on the format. `ring`, `drafts` and
`tile` are gated_delta_step's.
"""

from __future__ import annotations

from typing import TypeVar

from spark_engine.errors import GraphError
from spark_engine.op import Attrs, Chain, Op, Part
from spark_engine.operand import Result
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands, quantised
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.shapes import count
from spark_engine.plugins.gdn import (
    causal_conv,
    gated_delta,
    gated_delta_body,
    gated_norm,
)
from spark_engine.plugins.gdn.gdn_decode_cases import CASES
from spark_engine.plugins.gdn.gdn_decode_cuda import CUDA
from spark_engine.tensors import Array, TensorSpec

T = TypeVar("T")

NAME = "gdn_decode"
SIZES = ("key_heads", "value_heads", "key_dim", "value_dim", "ring")


def _names(attrs: Attrs) -> tuple[str, ...]:
    """The operands' names, but for the scales."""
    return tuple(o.name for o in OP.given(attrs) if o is not operands.SCALES)


def _states(attrs: Attrs) -> tuple[str, ...]:
    """The first results' names."""
    return tuple(r.name for r in OP.made(attrs) if r.updates)


def infer(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The operands, [scales f32[n]] -> conv_state', gdn_state', [gdn_ring'], [y A[tokens,Hv·Dv]],
    quantised…"""
    known = len(_names(attrs))
    quantised.check_attrs(NAME, attrs)
    count(NAME, specs, known + quantised.takes_scales(attrs))
    try:
        *states, _, y = _inferred(attrs, specs[:known])
    except GraphError as error:
        raise GraphError(f"{NAME}: {error}") from error
    for spec in specs[known:]:
        quantised.check_scales(NAME, attrs, spec)
    outs = [y] * bool(attrs["keep"]) + quantised.infer(NAME, attrs, y)
    pairs = zip(_states(attrs), states, strict=True)
    named = (TensorSpec(f"result{i}", s.dtype, s.shape) for i, s in enumerate(outs))
    return (*(TensorSpec(n, s.dtype, s.shape) for n, s in pairs), *named)


def _inferred(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """(conv_state', gdn_state', [gdn_ring'], o, y) by the parts' own inference."""
    c, conv = causal_conv.infer(_round(attrs), _conv(specs))
    o, *states = gated_delta.infer(_delta(attrs), _rule(c, specs))
    (y,) = gated_norm.infer(_norm(attrs), (o, specs[0], specs[-4]))
    return conv, *states, o, y


def _conv(given: tuple[T, ...]) -> tuple[T, ...]:
    """Of the operands without scales, causal_conv's."""
    return given[:1] + given[2:4] + given[-3:]


def _rule(c: T, given: tuple[T, ...]) -> tuple[T, ...]:
    """Of the operands without scales, gated_delta_step's."""
    return (c,) + given[1:2] + given[4:-4] + given[-3:]


def _round(attrs: Attrs) -> Attrs:
    """causal_conv's attributes."""
    return {"tile": attrs.get("tile", 1), "drafts": attrs.get("drafts", 0)}


def _delta(attrs: Attrs) -> Attrs:
    return {**_round(attrs), **{n: attrs[n] for n in SIZES}}


def _norm(attrs: Attrs) -> Attrs:
    return {"eps": attrs["eps"], "heads": attrs["value_heads"], "offset": attrs["offset"]}


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands, [scales] -> conv_state', gdn_state', [gdn_ring'], [y], quantised…"""
    known = len(_names(attrs))
    given, scales = arrays[:known], arrays[known:]
    c, conv = causal_conv.reference(_round(attrs), _conv(given))
    o, *states = gated_delta.reference(_delta(attrs), _rule(c, given))
    y = gated_norm.evaluate(_norm(attrs), o, given[0], given[-4])
    kept = [y] if attrs["keep"] else []
    made = quantised.reference(attrs, y, scales[0] if scales else None)
    return (conv, *states, *kept, *made)


def parts(attrs: Attrs) -> Chain:
    """The convolution, the recurrence, the norm, the quantisers."""
    names, states = _names(attrs), _states(attrs)
    chain = (
        Part("causal_conv", _conv(names), ("c", states[0]), _round(attrs)),
        Part("gated_delta_step", _rule("c", names), ("o", *states[1:]), _delta(attrs)),
        Part("gated_norm", ("o", "qkvz", "norm_weight"), ("y",), _norm(attrs)),
    )
    return quantised.chain(attrs, chain, before=states)


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The bodies of the parts, one after the other."""
    f, states, names = Text(), _states(attrs), _names(attrs)
    given = specs[: len(names)]
    outs = [s.name for s in infer(attrs, specs)]
    free = iter(outs[len(states) :])
    c, _ = causal_conv.infer(_round(attrs), _conv(given))
    causal_conv.fragment(f, _round(attrs), _conv(given), ("qkvz", "conv_weight"), ("c", states[0]))
    gated_delta_body.step_fragment(f, _delta(attrs), _rule(c, given), states[1:])
    o = _inferred(attrs, given)[-2]
    y_out = next(free) if attrs["keep"] else ""
    y = gated_norm.fragment(f, _norm(attrs), o, y_out, "qkvz", "norm_weight")
    k = int(attrs["value_heads"]) * int(attrs["value_dim"])
    quantised.body(f, attrs, fr.widen(f, y), k, "scales", list(free))
    return f.function(NAME, [*names, "scales"][: len(specs)], outs)


RULE = {o.name: o for o in gated_delta.OPERANDS}
CONV = {o.name: o for o in causal_conv.OPERANDS}
STATES = (CONV["conv_state"], RULE["gdn_state"], RULE["gdn_ring"])
OP = Op(
    name=NAME,
    operands=(
        operands.x("A[tokens,X]", "q|k|v, z at column `offset`", "qkvz"),
        RULE["ba"],
        operands.weight("conv_weight", "f32[C,K]"),
        CONV["conv_state"],
        RULE["a_log"],
        RULE["dt_bias"],
        RULE["gdn_state"],
        RULE["gdn_ring"],
        operands.weight("norm_weight", "f32[Dv]"),
        *operands.ROWS,
        operands.SCALES,
    ),
    results=(
        *(Result(f"{o.name}_out", o.spec, o.when, updates=o.name) for o in STATES),
        Result("result*", "[y A[tokens,Hv·Dv] if keep], quantised…"),
    ),
    attrs={
        **dict.fromkeys((*SIZES, "eps", "offset", "keep", "quant", "n")),
        "drafts": 0,
        "tile": 1,
    },
    infer_by=infer,
    reference=reference,
    body=body,
    cases=CASES,
    fuses=parts,
    cuda=CUDA,
)
