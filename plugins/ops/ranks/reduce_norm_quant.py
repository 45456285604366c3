"""The sum over ranks and the norm of it: the fusion of all_reduce and norm_quant.

y = x of rank 0 + x of rank 1 + …, rounded once, s = y + residual, then the norm of s and its
quantised copies. Reference and body are those of one rank. CPU ranks exchange between nodes, so
there the two ops are not fused (builder/rules).
"""

from spark_engine.op import Attrs, Chain, Op, Part
from spark_engine.operand import Result, When
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import quantised
from spark_engine.plugins.kernels.ranks import reduce_norm_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.norm import norm_quant
from spark_engine.plugins.ops.ranks import all_reduce
from spark_engine.tensors import Array, TensorSpec

NAME = "reduce_norm_quant"


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, norm_weight, residual, …) -> [y], sum, quantised… of a single rank."""
    total = all_reduce.reference(attrs, arrays[:1])
    return norm_quant.reference(norm_quant.added(attrs), (*total, *arrays[1:]))


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The addition and the norm."""
    f = Text()
    outs = [s.name for s in OP.infer(attrs, specs)]
    names = OP.names(attrs, len(specs))
    total = f("Add", fr.widen(f, "x"), fr.widen(f, "residual"))
    norm_quant.fragment(
        f, norm_quant.added(attrs), OP.named(attrs, specs)["x"], (total, "weight", names[-1]), outs
    )
    return f.function(NAME, names, outs)


def parts(attrs: Attrs) -> Chain:
    """The sum over ranks, the addition, the norm, the quantisers."""
    total = Part("all_reduce", ("x",), ("total",), {"ranks": attrs["ranks"]})
    add = Part("Add", ("total", "residual"), ("sum",))
    norm = Part("rms_norm", ("sum", "weight"), ("y",), {"eps": attrs["eps"]})
    return quantised.chain(attrs, (total, add, norm), after=("sum",))


KEPT = (Result("y", "A[tokens,H]", When("keep")), Result("sum", "A[tokens,H]"))
OP = serve(
    Op(
        name=NAME,
        operands=(
            operands.x("A[tokens,H]"),
            operands.weight("weight", "f32[H]"),
            operands.x("A[tokens,H]", name="residual"),
            operands.SCALES,
        ),
        results=(quantised.several("[y A[tokens,H] if keep], sum, quantised…", "H", *KEPT),),
        attrs=dict.fromkeys(("ranks", *norm_quant.NORM)),
        legal=quantised.LEGAL,
        check=quantised.check,
        reference=reference,
        body=body,
        fuses=parts,
    ),
    reduce_norm_kernels.candidates(all_reduce.OP, norm_quant.OP),
)
