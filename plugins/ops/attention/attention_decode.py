"""Decode attention of a token, or of the tokens of a round (`tile`), after the projection: the
fusion of paged_attention, sigmoid_gate and the quantisers.

o = paged_attention(qkv), y = o · sigmoid(gate), then the quantised copies of y. Each intermediate
is rounded to the activation dtype as if it were stored. The body consists of the fragments of the
fused ops, so the CPU's bits do not change. The pages are the first outputs, since the number of
the others depends on the format.
"""

from spark_engine.op import Attrs, Chain, Op, Part, Tolerance
from spark_engine.operand import Result, When
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import quantised
from spark_engine.plugins.kernels.attention import attention_round_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.attention import paged_attention
from spark_engine.plugins.ops.attention import paged_attention_nodes as nodes
from spark_engine.plugins.ops.rowwise import sigmoid_gate
from spark_engine.tensors import Array, DType, TensorSpec

NAME = "attention_decode"
OPERANDS = paged_attention.OP.inputs
PAGES = tuple(r.name for r in paged_attention.PAGES)
SIZES = ("heads", "kv_heads", "head_dim", "eps", "kv_dtype")


def _attention(attrs: Attrs) -> Attrs:
    return {"tile": attrs.get("tile", 1), **{n: attrs[n] for n in SIZES}}


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands, [scales] -> k_pages', v_pages', [y], quantised…"""
    o, *pages = paged_attention.reference(_attention(attrs), arrays[: len(OPERANDS)])
    y = sigmoid_gate.evaluate(attrs, o, arrays[0])
    kept = [y] if attrs["keep"] else []
    scales = arrays[-1] if quantised.takes_scales(attrs) else None
    return (*pages, *kept, *quantised.reference(attrs, y, scales))


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The fragments of the fused ops in sequence."""
    f, node = Text(), OP.named(attrs, specs)
    outs = [s.name for s in OP.infer(attrs, specs)]
    free = iter(outs[len(PAGES) :])
    o = paged_attention.fragment(f, node)
    y = sigmoid_gate.fragment(f, attrs, fr.widen(f, o), fr.widen(f, "qkv"))
    y = f.cast(y, node["qkv"].dtype, next(free) if attrs["keep"] else "")
    k = node.dim("nq·D")
    quantised.body(f, attrs, fr.widen(f, y), k, "scales", list(free))
    return f.function(NAME, [*OPERANDS, "scales"][: len(specs)], outs)


def parts(attrs: Attrs) -> Chain:
    """The chain that the op replaces: attention, gate, quantisers."""
    sizes = {name: attrs[name] for name in ("heads", "head_dim")}
    attention = Part("paged_attention", OPERANDS, ("o", *PAGES), _attention(attrs))
    gate = Part("sigmoid_gate", ("o", "qkv"), ("y",), sizes)
    return quantised.chain(attrs, (attention, gate), before=PAGES)


def tolerance(attrs: Attrs) -> Tolerance:
    """Over bf16 pages the error of y is 3e-3, as of paged_attention. A step of e4m3 is a tenth of
    the value, so one value in thirty of the usual size changes its code. Values near zero have fine
    steps and may change by many: `blur` covers those. Measured: 0.03 % of the codes beyond the
    blur; 2.1 % where the error of a block's scale (2.5e-3) moves all codes of the block.

    Over e4m3 pages q and the softmax's weights are f16, with an eighth of the error: 7e-4 for y,
    mostly from rounding it to bf16; 0.8 % of the codes differ, each by one step."""
    if attrs["kv_dtype"] == DType.F8E4M3.value:
        return Tolerance(codes=0.02)
    return Tolerance(element=6 * 2.0**-7, exact=4e-3, codes=0.03, blur=2.0**-7)


Y = Result("y", "A[tokens,nq·D]", When("keep"))
OP = serve(
    Op(
        name=NAME,
        operands=(*paged_attention.OPERANDS, operands.SCALES),
        results=(
            *paged_attention.PAGES,
            quantised.several("[y A[tokens,nq·D] if keep], quantised…", "nq·D", Y),
        ),
        attrs={"tile": 1, **dict.fromkeys((*SIZES, "keep", "quant", "n"))},
        dims=nodes.DIMS,
        legal={**nodes.LEGAL, **quantised.LEGAL},
        check=lambda node: quantised.check(node) or nodes.check(node),
        reference=reference,
        body=body,
        fuses=parts,
        tolerance=tolerance,
    ),
    attention_round_kernels.FUSED,
)
