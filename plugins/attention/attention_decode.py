"""The whole attention of one decode token after its projection: the fusion of paged_attention,
sigmoid_gate and the quantisers (see those for the maths).

o = paged_attention(qkv), y = o · sigmoid(gate), then the quantised copies of y. Each intermediate
is rounded to the activation dtype as if it were stored. Written with the fragments of the ops it
replaces, so that the CPU's bits do not change. The pages are the first outputs, since the number
of the others depends on the format.
"""

from __future__ import annotations

from spark_engine.errors import GraphError
from spark_engine.op import Attrs, Op
from spark_engine.plugins.attention import paged_attention, paged_decode_cuda
from spark_engine.plugins.attention.attention_decode_cases import CASES
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import quantised
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.shapes import count
from spark_engine.plugins.rowwise import sigmoid_gate
from spark_engine.tensors import Array, TensorSpec

NAME = "attention_decode"
OPERANDS = paged_attention.INPUTS
PAGES = ("k_pages_out", "v_pages_out")
SIZES = ("heads", "kv_heads", "head_dim", "eps", "kv_dtype")


def infer(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """The operands, [scales f32[n]] -> k_pages', v_pages', [y A[tokens,nq·D]], quantised…"""
    quantised.check(NAME, attrs)
    count(NAME, specs, len(OPERANDS) + quantised.takes_scales(attrs))
    try:
        o, *pages = paged_attention.infer(_attention(attrs), specs[: len(OPERANDS)])
        (y,) = sigmoid_gate.infer(attrs, (o, specs[0]))
    except GraphError as error:
        raise GraphError(f"{NAME}: {error}") from error
    for spec in specs[len(OPERANDS) :]:
        quantised.check_scales(NAME, attrs, spec)
    outs = [y] * bool(attrs["keep"]) + quantised.infer(NAME, attrs, y)
    named = (TensorSpec(f"result{i}", s.dtype, s.shape) for i, s in enumerate(outs))
    return (*pages, *named)


def _attention(attrs: Attrs) -> Attrs:
    return {"tile": 1, **{n: attrs[n] for n in SIZES}}


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands, [scales] -> k_pages', v_pages', [y], quantised…"""
    o, *pages = paged_attention.reference(_attention(attrs), arrays[: len(OPERANDS)])
    y = sigmoid_gate.evaluate(attrs, o, arrays[0])
    kept = [y] if attrs["keep"] else []
    scales = arrays[-1] if quantised.takes_scales(attrs) else None
    return (*pages, *kept, *quantised.reference(attrs, y, scales))


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The bodies of the parts, one after the other."""
    f = Text()
    outs = [s.name for s in infer(attrs, specs)]
    free = iter(outs[len(PAGES) :])
    o = paged_attention.fragment(f, _attention(attrs), specs[: len(OPERANDS)])
    y = sigmoid_gate.fragment(f, attrs, fr.widen(f, o), fr.widen(f, "qkv"))
    y = f.cast(y, specs[0].dtype, next(free) if attrs["keep"] else "")
    k = int(attrs["heads"]) * int(attrs["head_dim"])
    quantised.body(f, attrs, fr.widen(f, y), k, "scales0", list(free))
    return f.function(NAME, [*OPERANDS, "scales0"][: len(specs)], outs)


OP = Op(
    name=NAME,
    inputs=(*OPERANDS, "scales*"),
    outputs=(*PAGES, "result*"),
    attrs=dict.fromkeys((*SIZES, "keep", "quant", "n")),
    infer=infer,
    reference=reference,
    body=body,
    cases=CASES,
    aliases={0: 5, 1: 6},
    cuda=paged_decode_cuda.FUSED,
)
