"""Gated RMSNorm -> quantisation, the fusion of gated_norm and *_quant (see those)."""

from spark_engine.op import Attrs, Chain, Op, Part
from spark_engine.operand import Result, When
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import quantised
from spark_engine.plugins.kernels.delta_rule import gated_norm_quant_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.delta_rule import gated_norm
from spark_engine.tensors import Array, TensorSpec


def parts(attrs: Attrs) -> Chain:
    """The norm, the quantisers."""
    norm = {name: attrs[name] for name in ("eps", "heads", "offset")}
    part = Part("gated_norm", ("o", "packed", "weight"), ("y",), norm)
    return quantised.chain(attrs, (part,))


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(o, packed, weight, [scales]) -> [y], quantised…"""
    y = gated_norm.evaluate(attrs, *arrays[:3])
    kept = [y] if attrs["keep"] else []
    return (*kept, *quantised.reference(attrs, y, arrays[3] if len(arrays) > 3 else None))


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """gated_norm's body, then the quantisers'."""
    f = Text()
    node, outs = OP.named(attrs, specs), [s.name for s in OP.infer(attrs, specs)]
    free, k = iter(outs), node.dim("K")
    y = gated_norm.fragment(f, attrs, k, node["o"].dtype, next(free) if attrs["keep"] else "")
    quantised.body(f, attrs, fr.widen(f, y), k, "scales", list(free))
    names = ["o", "packed", "weight", "scales"][: len(specs)]
    return f.function("gated_norm_quant", names, outs)


Y = Result("y", "A[tokens,K]", When("keep"))
OP = serve(
    Op(
        name="gated_norm_quant",
        operands=(*gated_norm.OPERANDS, operands.SCALES),
        results=(quantised.several("[y if keep], quantised…", "K", Y),),
        attrs={"eps": None, "heads": None, "offset": None, "keep": None, "quant": None, "n": None},
        dims=gated_norm.DIMS,
        legal=quantised.LEGAL,
        check=lambda node: quantised.check(node) or gated_norm.gates_fit(node),
        reference=reference,
        body=body,
        fuses=parts,
    ),
    gated_norm_quant_kernels.CANDIDATES,
)
