"""The sum over ranks and the norm behind it: the fusion of all_reduce and norm_quant (see those).

y = x of rank 0 + x of rank 1 + …, rounded once, s = y + residual, then the norm of s and its
quantised copies. A node by itself knows one rank, as `all_reduce` does. On the CPU, whose ranks
meet between nodes, the two ops stay apart (builder/rules).
"""

from __future__ import annotations

from dataclasses import replace

from spark_engine.errors import GraphError
from spark_engine.op import Attrs, Case, Chain, Op, Part
from spark_engine.operand import Result
from spark_engine.plugins.common import fragments as fr
from spark_engine.plugins.common import operands, quantised
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.ranks import all_reduce, reduce_norm_quant_cuda
from spark_engine.plugins.rowwise import norm_quant
from spark_engine.tensors import Array, TensorSpec

NAME = "reduce_norm_quant"
NORM = ("eps", "keep", "quant", "n")


def norm_attrs(attrs: Attrs) -> Attrs:
    """Those of the norm_quant that stands behind the sum."""
    return {"add": 1, **{name: attrs[name] for name in NORM}}


def infer(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """(x A[tokens,H], norm_weight f32[H], residual A[tokens,H], [scales f32[n]]) ->
    [y A], sum A, quantised…"""
    try:
        (y,) = all_reduce.infer(attrs, specs[:1])
        return norm_quant.OP.infer(norm_attrs(attrs), (y, *specs[1:]))
    except GraphError as error:  # of a part, which names itself
        words = str(error).removeprefix("norm_quant ").removeprefix("all_reduce ")
        raise GraphError(f"{NAME} {words}") from error


def reference(attrs: Attrs, arrays: tuple[Array, ...]) -> tuple[Array, ...]:
    """(x, norm_weight, residual, …) -> [y], sum, quantised… of a single rank."""
    total = all_reduce.reference(attrs, arrays[:1])
    return norm_quant.reference(norm_attrs(attrs), (*total, *arrays[1:]))


def body(attrs: Attrs, specs: tuple[TensorSpec, ...]) -> str:
    """The addition and the norm over the same values."""
    f = Text()
    outs = [s.name for s in infer(attrs, specs)]
    names = OP.names(attrs, len(specs))
    total = f("Add", fr.widen(f, "x"), fr.widen(f, "residual"))
    norm_quant.fragment(f, norm_attrs(attrs), specs[0], (total, "weight", names[-1]), outs)
    return f.function(NAME, names, outs)


def parts(attrs: Attrs) -> Chain:
    """The sum over ranks, the addition, the norm, the quantisers."""
    total = Part("all_reduce", ("x",), ("total",), {"ranks": attrs["ranks"]})
    add = Part("Add", ("total", "residual"), ("sum",))
    norm = Part("rms_norm", ("sum", "weight"), ("y",), {"eps": attrs["eps"]})
    return quantised.chain(attrs, (total, add, norm), after=("sum",))


def _case(case: Case) -> Case:
    own = {name: case.attrs[name] for name in NORM}
    label = case.label.replace(" add1", "")
    return replace(case, label=label, attrs={"ranks": 1, **own})


CASES = tuple(_case(case) for case in norm_quant.CASES if case.attrs["add"])

OP = Op(
    name=NAME,
    operands=(
        operands.x("A[tokens,H]"),
        operands.weight("weight", "f32[H]"),
        operands.x("A[tokens,H]", name="residual"),
        operands.SCALES,
    ),
    results=(Result("result*", "[y A[tokens,H] if keep], sum, quantised…"),),
    attrs=dict.fromkeys(("ranks", *NORM)),
    infer_by=infer,
    reference=reference,
    body=body,
    cases=CASES,
    fuses=parts,
    cuda=reduce_norm_quant_cuda.CUDA,
)
