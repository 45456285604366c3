"""Activation -> quantisation: the fusion of silu_mul or sigmoid_gate with *_quant.

`act` is the activation; `heads` and `head_dim` are for sigmoid_gate only.
"""

from dataclasses import replace

from spark_engine.named import Named
from spark_engine.op import Attrs, Chain, Op, Part
from spark_engine.operand import Result, When
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import quantised
from spark_engine.plugins.kernels.rowwise import act_quant_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.rowwise import sigmoid_gate, silu_mul
from spark_engine.tensors import Array, TensorSpec


def parts(attrs: Attrs) -> Chain:
    """The activation, the quantisers."""
    if attrs["act"] == "silu_mul":
        return quantised.chain(attrs, (Part("silu_mul", ("x",), ("y",)),))
    sizes = {name: attrs[name] for name in ("heads", "head_dim")}
    return quantised.chain(attrs, (Part("sigmoid_gate", ("x", "qkv"), ("y",), sizes),))


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, [qkv], [scales]) -> [y], quantised…"""
    if attrs["act"] == "silu_mul":
        y = silu_mul.evaluate(arrays[0])
    else:
        y = sigmoid_gate.evaluate(attrs, *arrays[:2])
    return (*([y] if attrs["keep"] else []), *quantised.reference(attrs, y, arrays[-1]))


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The activation's body, then the quantisers'."""
    f = Text()
    node, inputs = OP.named(attrs, specs), OP.names(attrs, len(specs))
    outs, k = [s.name for s in OP.infer(attrs, specs)], node.dim("K")
    free = iter(outs)
    if attrs["act"] == "silu_mul":
        y = silu_mul.fragment(f, fr.widen(f, "x"), k)
    else:
        y = sigmoid_gate.fragment(f, attrs, fr.widen(f, "x"), fr.widen(f, "qkv"))
    rounded = f.cast(y, node["x"].dtype, next(free) if attrs["keep"] else "")
    quantised.body(f, attrs, fr.widen(f, rounded), k, inputs[-1], list(free))
    return f.function("act_quant", inputs, outs)


def _columns(node: Named) -> int:
    return node.dim("Y/2" if node.text("act") == "silu_mul" else "Y")


def _check(node: Named) -> str | None:
    if "qkv" in node and node.dim("Y") != node.dim("nq·D"):
        return f"operand {node['x'].name} has {node.dim('Y')} columns, not {node.dim('nq·D')}"
    return quantised.check(node) or (sigmoid_gate.gates_fit(node) if "qkv" in node else None)


Y = Result("y", "A[tokens,K]", When("keep"))
QKV = replace(sigmoid_gate.QKV, when=When("act", ("sigmoid_gate",)))
OP = serve(
    Op(
        name="act_quant",
        operands=(operands.x("A[tokens,Y]"), QKV, operands.SCALES),
        results=(quantised.several("[y if keep], quantised…", "K", Y),),
        attrs={"act": None, "heads": 0, "head_dim": 0, "keep": None, "quant": None, "n": None},
        dims={"K": _columns, **sigmoid_gate.DIMS},
        legal={"act": ("silu_mul", "sigmoid_gate"), **quantised.LEGAL},
        check=_check,
        reference=reference,
        body=body,
        fuses=parts,
    ),
    act_quant_kernels.CANDIDATES,
)
