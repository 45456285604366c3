"""The fusion of a prefill's causal_conv and gated_delta_chunk (see those for the maths).

c = causal_conv(qkvz), o = gated_delta_chunk(c, ba). c is rounded to the activation dtype as if it
were stored. Written with the fragments of the ops it replaces, so that the CPU's bits do not
change.
"""

from functools import partial
from typing import TypeVar

from spark_engine.op import Attrs, Chain, Op, Part, Tolerance
from spark_engine.operand import Result
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.kernels.delta_rule.prefill.delta_prefill_kernels import CANDIDATES
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.delta_rule import causal_conv, gated_delta
from spark_engine.plugins.ops.delta_rule.gated_delta_chunk import chunk
from spark_engine.plugins.state import recurrence
from spark_engine.tensors import Array, TensorSpec

T = TypeVar("T")
ROWS = 5  # last operands: slots, starts, counts, sources, saves


def _conv(given: tuple[T, ...]) -> tuple[T, ...]:
    """Of the operands, causal_conv's."""
    return given[:1] + given[2:4] + given[-ROWS:]


def _rule(c: T, given: tuple[T, ...]) -> tuple[T, ...]:
    """Of the operands, gated_delta_chunk's."""
    return (c, given[1], *given[4:])


def _round(attrs: Attrs) -> Attrs:
    """causal_conv's attributes."""
    return {"tile": attrs["tile"], "drafts": attrs.get("drafts", 0)}


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> o, conv_state', gdn_state', [gdn_ring']."""
    c, conv = causal_conv.reference(_round(attrs), _conv(arrays))
    o, *states = gated_delta.reference(attrs, _rule(c, arrays))
    return (o, conv, *states)


def parts(attrs: Attrs) -> Chain:
    """The convolution, the rule."""
    names = tuple(o.name for o in OP.given(attrs))
    o, conv, *states = (r.name for r in OP.made(attrs))
    chain = (
        Part("causal_conv", _conv(names), ("c", conv), _round(attrs)),
        Part("gated_delta_chunk", _rule("c", names), (o, *states), {**attrs, **_round(attrs)}),
    )
    return Chain(chain, (o, conv, *states))


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The bodies of the parts, one after the other."""
    f, node = Text(), OP.named(attrs, specs)
    causal_conv.fragment(f, node, ("qkvz", "conv_weight"), ("c", "conv_state_out"))
    recurrence.tile_body(f, node, partial(chunk, f, node))
    return f.function(OP.name, OP.names(attrs, len(specs)), [r.name for r in OP.made(attrs)])


CONV = {o.name: o for o in causal_conv.OPERANDS}
_, *RULE = gated_delta.CHUNK.operands
OUTPUT, *STATES = gated_delta.CHUNK.results
OP = serve(
    Op(
        name="gdn_prefill",
        operands=(
            operands.x("A[tokens,X]", "q|k|v first", "qkvz"),
            RULE[0],
            operands.weight("conv_weight", "f32[C,K]"),
            CONV["conv_state"],
            *RULE[1:],
        ),
        results=(
            OUTPUT,
            Result("conv_state_out", CONV["conv_state"].spec, updates="conv_state"),
            *STATES,
        ),
        attrs=gated_delta.CHUNK.attrs,
        dims={**causal_conv.DIMS, **gated_delta.DIMS, "C": "2·Hk·Dk+Hv·Dv"},
        check=lambda node: causal_conv.fits(node) or gated_delta.check(node),
        reference=reference,
        body=body,
        fuses=parts,
        tolerance=lambda attrs: Tolerance(exact=1e-3),  # where c rounds the other direction: 2^-8
    ),
    CANDIDATES,
    called={"qkvz": "c"},
)
