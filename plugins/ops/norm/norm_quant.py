"""[x + residual ->] RMSNorm -> quantisation, the fusion of Add, rms_norm and *_quant.

s = x + residual (if `add`), y = rms_norm(s), then `n` quantised copies of y (quantised.py).
The body consists of the fragments of the fused ops, so the CPU's bits do not change.
"""

from collections.abc import Sequence

import numpy as np

from spark_engine.op import Attrs, Chain, Op, Part
from spark_engine.operand import Operand, Result, Role, When
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats import quantised
from spark_engine.plugins.kernels.rowwise import norm_quant_kernels
from spark_engine.plugins.launch import serve
from spark_engine.plugins.ops.norm import rms_norm
from spark_engine.tensors import Array, TensorSpec

NORM = ("eps", "keep", "quant", "n")


def added(attrs: Attrs) -> Attrs:
    """The attributes of the norm in a fusion with the sum before it."""
    return {"add": 1, **{name: attrs[name] for name in NORM}}


def _operands(attrs: Attrs) -> list[str]:
    """The names of the operands after x and weight."""
    residual = ["residual"] if attrs["add"] else []
    return residual + (["scales"] if quantised.takes_scales(attrs) else [])


def parts(attrs: Attrs) -> Chain:
    """[Add], rms_norm, the quantisers."""
    add = (Part("Add", ("x", "residual"), ("sum",)),) if attrs["add"] else ()
    norm = Part("rms_norm", ("sum" if add else "x", "weight"), ("y",), {"eps": attrs["eps"]})
    return quantised.chain(attrs, (*add, norm), after=("sum",) if add else ())


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, weight, …) -> [y], [sum], quantised…"""
    named = dict(zip(["x", "weight", *_operands(attrs)], arrays, strict=True))
    total = named["x"]
    if attrs["add"]:
        wide = total.astype(np.float32) + named["residual"].astype(np.float32)
        total = wide.astype(total.dtype)
    y = rms_norm.normalise(total, named["weight"], float(attrs["eps"]))
    kept = ([y] if attrs["keep"] else []) + ([total] if attrs["add"] else [])
    return (*kept, *quantised.reference(attrs, y, named.get("scales")))


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """Add, then rms_norm's body, then the quantisers'."""
    f = Text()
    inputs = ["x", "weight", *_operands(attrs)]
    outs = [s.name for s in OP.infer(attrs, specs)]
    total = f("Add", fr.widen(f, "x"), fr.widen(f, "residual")) if attrs["add"] else "x"
    fragment(f, attrs, OP.named(attrs, specs)["x"], (total, "weight", inputs[-1]), outs)
    return f.function("norm_quant", inputs, outs)


def fragment(
    f: Text, attrs: Attrs, x: TensorSpec, given: tuple[str, str, str], outs: Sequence[str]
) -> None:
    """The norm and the quantisers: writes `outs`, in the op's order.

    `given`: the f32 sum (x itself without `add`), the norm's weight, the scales.
    """
    total, weight, scales = given
    free = iter(outs)
    y_out = next(free) if attrs["keep"] else ""
    if attrs["add"]:
        total = f.cast(total, x.dtype, next(free))
    k = int(x.shape[-1])
    scaled = fr.rms_norm(f, fr.widen(f, total), weight, k, float(attrs["eps"]))
    y = fr.widen(f, f.cast(scaled, x.dtype, y_out))
    quantised.body(f, attrs, y, k, scales, list(free))


KEPT = (Result("y", "A[tokens,K]", When("keep")), Result("sum", "A[tokens,K]", When("add")))
RESIDUAL = Operand("residual", Role.ACTIVATION, "A[tokens,K]", When("add"))
OP = serve(
    Op(
        name="norm_quant",
        operands=(operands.x(), operands.weight("weight", "f32[K]"), RESIDUAL, operands.SCALES),
        results=(quantised.several("[y if keep], [sum if add], quantised…", "K", *KEPT),),
        attrs={"eps": None, "add": None, "keep": None, "quant": None, "n": None},
        legal=quantised.LEGAL,
        check=quantised.check,
        reference=reference,
        body=body,
        fuses=parts,
    ),
    norm_quant_kernels.CANDIDATES,
)
