"""The experts and the norm that follows: the fusion of grouped_moe and norm_quant (see those).

y = grouped_moe(x, …), s = y + residual, then the norm of s and its quantised copies. Each
intermediate is rounded to the activation dtype as if it were stored. Written with the fragments of
the ops it replaces, so that the CPU's bits do not change. The norm's operands are before the
experts'; their number depends on the format.
"""

import numpy as np

from spark_engine.op import Attrs, Case, Chain, Op, Part, Tolerance, rtol_of
from spark_engine.operand import Result, When
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands, random_arrays
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.common.shapes import LEGAL, activation
from spark_engine.plugins.formats import expert_packs, quantised
from spark_engine.plugins.kernels.moe import moe_norm_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.moe import grouped_moe
from spark_engine.plugins.ops.norm import norm_quant
from spark_engine.tensors import Array, DType, TensorSpec

NAME = "moe_norm_quant"
EXPERTS, NORM = ("format", "dtype"), ("eps", "keep", "quant", "n")
FIRST = 5  # operands before the experts' params


def _experts(attrs: Attrs) -> Attrs:
    return {name: attrs[name] for name in EXPERTS}


def _norm(attrs: Attrs) -> Attrs:
    return {"add": 1, **{name: attrs[name] for name in NORM}}


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """The operands -> [y], sum, quantised…"""
    inner, residual, weight, scales = _split(attrs, arrays)
    (y,) = grouped_moe.reference(_experts(attrs), inner)
    return norm_quant.reference(_norm(attrs), (y, weight, residual, *scales))


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
    norm_quant.fragment(f, _norm(attrs), node["residual"], (total, "norm_weight", names[-1]), outs)
    return f.function(NAME, names, outs)


def _case(
    kind: str,
    rows: int,
    sizes: tuple[int, int, int, int],
    quant: str = "none",
    n: int = 1,
    keep: int = 0,
    dtype: DType = DType.F32,
) -> Case:
    attrs: Attrs = {"format": kind, "dtype": dtype.value, "eps": 1e-6}
    attrs = {**attrs, "keep": keep, "quant": quant, "n": n}

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x, ids, weights, *params = grouped_moe.arrays(rng, kind, rows, sizes)
        residual = random_arrays.normal(rng, rows, sizes[2], scale=3.0)
        if rows > 5:
            x[1], x[5], residual[3] = 0, np.nan, 0
        norm_weight = random_arrays.positive(rng, sizes[2])
        scales = [random_arrays.static_scales(rng, n)]
        narrow = dtype.numpy
        operands = (x.astype(narrow), ids, weights, residual.astype(narrow), norm_weight, *params)
        return (*operands, *scales[: quantised.takes_scales(attrs)])

    label = f"{kind} {rows} rows, {sizes[1]} of {sizes[0]}, {sizes[2]}x{sizes[3]} {quant} n{n}"
    ignore = random_arrays.ignore_rows(5) if rows > 5 else None
    rtol = rtol_of(dtype)
    bench = rows > 5
    return Case(f"{label} keep{keep} {dtype}", attrs, make, rtol, rtol, bench, ignore)


CASES = (
    _case("dense", 1, (8, 2, 64, 48), keep=1),
    _case("dense", 7, (4, 1, 48, 19), "fp8", keep=1),
    _case("nvfp4", 1, (8, 3, 64, 32), "fp8"),
    _case("nvfp4", 33, (16, 4, 128, 48), "fp8", n=2, keep=1),
    _case("nvfp4", 7, (4, 4, 64, 32), "nvfp4"),
    _case("nvfp4_a4", 7, (4, 2, 48, 16), "nvfp4", n=2, keep=1),
    _case("fp8", 7, (5, 3, 48, 32), "fp8"),
    _case("fp8_block", 7, (3, 2, 256, 128), "fp8_block", keep=1),
    _case("fp8_block", 1, (4, 2, 128, 128), "fp8_block"),
    _case("fp8_channel", 7, (4, 2, 64, 48), "fp8_token", keep=1),
    _case("nvfp4", 3, (4, 2, 64, 32), "fp8", keep=1, dtype=DType.BF16),
)


def parts(attrs: Attrs) -> Chain:
    """The experts, the addition, the norm, the quantisers."""
    routed = ("x", "ids", "weights", *grouped_moe.PARAMS[str(attrs["format"])])
    experts = Part("grouped_moe", routed, ("routed",), _experts(attrs))
    add = Part("Add", ("residual", "routed"), ("sum",))
    norm = Part("rms_norm", ("sum", "norm_weight"), ("y",), {"eps": attrs["eps"]})
    return quantised.chain(attrs, (experts, add, norm), after=("sum",))


def tolerance(attrs: Attrs) -> Tolerance:
    """The rounding of grouped_moe, then codes of it: numpy with that one rounding has 4.4 % of the
    codes of a case elsewhere, those near zero by many steps. test_cuda_moe holds the bits against
    those of grouped_moe and norm_quant."""
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
        attrs=dict.fromkeys((*EXPERTS, *NORM)),
        legal={"format": tuple(grouped_moe.PARAMS), **LEGAL, **quantised.LEGAL},
        check=quantised.check,
        reference=reference,
        body=body,
        cases=CASES,
        fuses=parts,
        tolerance=tolerance,
    ),
    moe_norm_kernels.candidates(grouped_moe.OP, norm_quant.OP),
    expert_packs.PACKS,
)
