"""The whole gated delta net of one decode token or a round of drafts: the fusion of causal_conv,
gated_delta_step and gated_norm[_quant] (see those for the maths).

c = causal_conv(qkvz), o = gated_delta_step(c, ba), y = gated_norm(o, qkvz), then the quantised
copies of y. Each intermediate is rounded to the activation dtype as if it were stored. Written
with the fragments of the ops it replaces, so that the CPU's bits do not change. The states are
the first outputs, since the number of the others depends on the format. `ring`, `drafts` and
`tile` are gated_delta_step's.
"""

from typing import TypeVar

from spark_engine.named import Named
from spark_engine.op import Attrs, Chain, Op, Part
from spark_engine.operand import Result, When
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import quantised
from spark_engine.plugins.kernels.delta_rule.delta_decode_kernels import CANDIDATES
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.delta_rule import causal_conv, gated_delta, gated_norm
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
    f, node = Text(), OP.named(attrs, specs)
    states, dtype, k = _states(attrs), node["qkvz"].dtype, node.dim("Hv·Dv")
    outs = [s.name for s in OP.infer(attrs, specs)]
    free = iter(outs[len(states) :])
    causal_conv.fragment(f, node, ("qkvz", "conv_weight"), ("c", states[0]))
    gated_delta.step_fragment(f, node, states[1:])
    y_out = next(free) if attrs["keep"] else ""
    y = gated_norm.fragment(f, _norm(attrs), k, dtype, y_out, "qkvz", "norm_weight")
    quantised.body(f, attrs, fr.widen(f, y), k, "scales", list(free))
    return f.function(NAME, OP.names(attrs, len(specs)), outs)


def _check(node: Named) -> str | None:
    needed = node.number("offset") + node.dim("Hv·Dv")
    if (columns := node.dim("X")) < needed:
        return f"operand {node['qkvz'].name} has {columns} columns, expected {needed}"
    return quantised.check(node) or causal_conv.fits(node) or gated_delta.check(node)


RULE = {o.name: o for o in gated_delta.STEP.operands}
CONV = {o.name: o for o in causal_conv.OPERANDS}
Y = Result("y", "A[tokens,Hv·Dv]", When("keep"))
STATES = (CONV["conv_state"], RULE["gdn_state"], RULE["gdn_ring"])
OP = serve(
    Op(
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
            quantised.several("[y A[tokens,Hv·Dv] if keep], quantised…", "Hv·Dv", Y),
        ),
        attrs={
            **dict.fromkeys((*SIZES, "eps", "offset", "keep", "quant", "n")),
            "drafts": 0,
            "tile": 1,
        },
        dims={**causal_conv.DIMS, **gated_delta.DIMS, "C": "2·Hk·Dk+Hv·Dv"},
        legal=quantised.LEGAL,
        check=_check,
        reference=reference,
        body=body,
        fuses=parts,
    ),
    CANDIDATES,
)
