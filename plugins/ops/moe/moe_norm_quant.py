"""The experts and the norm that follows: the fusion of grouped_moe and norm_quant (see those).

y = grouped_moe(x, …), s = y + residual, then the norm of s and its quantised copies. Each
intermediate is rounded to the activation dtype as if it were stored. Written with the fragments of
the ops it replaces, so that the CPU's bits do not change. The norm's operands are before the
experts'; their number depends on the format.
"""

from spark_engine.op import Attrs, Chain, Op, Part, Tolerance
from spark_engine.operand import Result, When
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.shapes import LEGAL, activation
from spark_engine.plugins.formats import expert_packs, quantised
from spark_engine.plugins.kernels.moe import moe_norm_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.moe import grouped_moe
from spark_engine.plugins.ops.norm import norm_quant
from spark_engine.tensors import Array, TensorSpec

NAME = "moe_norm_quant"
EXPERTS = ("format", "dtype")
FIRST = 5  # operands before the experts' params


def _experts(attrs: Attrs) -> Attrs:
    return {name: attrs[name] for name in EXPERTS}


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> [y], sum, quantised…"""
    inner, residual, weight, scales = _split(attrs, arrays)
    (y,) = grouped_moe.reference(_experts(attrs), inner)
    return norm_quant.reference(norm_quant.added(attrs), (y, weight, residual, *scales))


def _split(
    attrs: Attrs, arrays: tuple[Array, ...]
) -> tuple[tuple[Array, ...], Array, Array, tuple[Array, ...]]:
    """grouped_moe's operands, residual, the norm's weight, scales if there are any."""
    end = FIRST + len(grouped_moe.PARAMS[str(attrs["format"])])
    return (*arrays[:3], *arrays[FIRST:end]), arrays[3], arrays[4], arrays[end:]


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The bodies of the parts, one after the other."""
    f, node = Text(), OP.named(attrs, specs)
    outs, names = [s.name for s in OP.infer(attrs, specs)], OP.names(attrs, len(specs))
    y = f.cast(grouped_moe.fragment(f, node), activation(attrs))
    total = f("Add", fr.widen(f, y), fr.widen(f, "residual"))
    norm_quant.fragment(
        f, norm_quant.added(attrs), node["residual"], (total, "norm_weight", names[-1]), outs
    )
    return f.function(NAME, names, outs)


def parts(attrs: Attrs) -> Chain:
    """The experts, the addition, the norm, the quantisers."""
    routed = ("x", "ids", "weights", *grouped_moe.PARAMS[str(attrs["format"])])
    experts = Part("grouped_moe", routed, ("routed",), _experts(attrs))
    add = Part("Add", ("residual", "routed"), ("sum",))
    norm = Part("rms_norm", ("sum", "norm_weight"), ("y",), {"eps": attrs["eps"]})
    return quantised.chain(attrs, (experts, add, norm), after=("sum",))


def tolerance(attrs: Attrs) -> Tolerance:
    """The rounding of grouped_moe, then codes of it: numpy with that one rounding has 4.4 % of the
    codes of a case elsewhere, those near zero by many steps. tests/plugins/moe compares the bits
    with those of grouped_moe and norm_quant."""
    return Tolerance(element=2.0**-5, codes=0.05, blur=2.0**-7)


KEPT = (Result("y", "A[tokens,H]", When("keep")), Result("sum", "A[tokens,H]"))
OP = serve(
    Op(
        name=NAME,
        operands=(
            *grouped_moe.ROUTED,
            operands.x("A[tokens,H]", name="residual"),
            operands.weight("norm_weight", "f32[H]"),
            *grouped_moe.PARAM_OPERANDS,
            operands.SCALES,
        ),
        results=(quantised.several("[y A[tokens,H] if keep], sum, quantised…", "H", *KEPT),),
        attrs=dict.fromkeys((*EXPERTS, *norm_quant.NORM)),
        legal={"format": tuple(grouped_moe.PARAMS), **LEGAL, **quantised.LEGAL},
        check=quantised.check,
        reference=reference,
        body=body,
        fuses=parts,
        tolerance=tolerance,
    ),
    moe_norm_kernels.candidates(grouped_moe.OP, norm_quant.OP),
    expert_packs.PACKS,
)
