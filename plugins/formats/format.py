"""What linear layers and experts need to know of a weight format, declared once.

    y[t,n] = Π rows[n] · Σ_k x[t,k] · w[n,k]

`decode` makes w of codes and of the scales that differ along k; scales of whole rows multiply the
sum. What is computed has two forms: numpy in float64 for references, a fragment of an ONNX body.
Values are known by the names of the linear op's operands. Knows no op and no kernel.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from spark_engine.kernel import Attrs
from spark_engine.operand import Operand, Role, When
from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.plugins.formats.numpy_codecs import F32, U8
from spark_engine.tensors import Array, DType

F64 = NDArray[np.float64]
Values = Mapping[str, Array]
Names = Mapping[str, str]  # of values of a body: u8, or widened to f32
SUFFIXES = ("", "_scale", "_scale2")  # of an expert's weight and its scales
EXPERT_WEIGHTS = {"w13": ("2I", "H"), "w2": ("H", "I")}  # [N, K] of each
INPUT_SCALES = {"w13": "x_scale", "w2": "h_scale"}  # static scales of their inputs
LinearSizes = tuple[tuple[int, int, int], ...]  # rows of x, N, K
ExpertSizes = tuple[tuple[int, int, int, int, int], ...]  # rows, experts, chosen of them, H, I


@dataclass(frozen=True)
class Inputs:
    """How a format quantises activations."""

    quant: str  # its name in the attribute `quant` of fused ops
    op: str  # the op that does so alone
    makes: tuple[str, ...]  # the linear op's operands that it writes
    # (x f32 [rows,K], static scale f32 [], if it is) -> `makes`.
    quantise: Callable[[F32, F32], tuple[Array, ...]]
    # (f, f32 x, static scale, K, names for the results) -> `makes`.
    quantise_body: Callable[[Text, str, str, int, Sequence[str]], tuple[str, ...]]
    decode: Callable[[Values], F64]  # values -> float64 [rows, K]
    decode_body: Callable[[Text, Names, int], str]  # (f, values, K) -> f32 [rows, K]
    # The operand of the linear op that has the static scale, alone or, where merging joins it,
    # times the weight's own scales of rows; "": quantisation is dynamic.
    scale: str = ""
    largest: float = 0.0  # what a static scale of 1 can represent
    attrs: Attrs = field(default_factory=dict)  # of the op's nodes


@dataclass(frozen=True)
class ExpertKernels:
    """How the kernels of the experts read a format."""

    weights: int  # macro WEIGHTS of experts_common.cuh, which decodes so
    quant: int  # macro QUANT of experts_quantise.cuh
    dtype: DType  # of a weight that is packed
    pack: Callable[[U8], U8]  # rows as bytes -> fragments (expert_layout.py)
    pack_scales: Callable[[U8], U8] | None = None  # the same of `w_scale`; None: it is not packed


@dataclass(frozen=True)
class Format:
    """A number format of weights."""

    name: str  # the attribute `format` of `grouped_moe`
    op: str  # the linear op; formats may share one
    # Of the linear op; those that merging joins are the weight and its scales.
    operands: tuple[Operand, ...]
    bits: float  # of a weight, with the scales that are packed with it
    # f32 [N,K] -> the weight and its scales, those of rows f32 [N].
    quantise: Callable[[F32], tuple[Array, ...]]
    decode: Callable[[Values], F64]  # values -> w float64 [N,K], without the scales of rows
    # (f, values, [N,K]) -> w f32 [N,K], the same.
    decode_body: Callable[[Text, Names, tuple[int, int]], str]
    # linear_sizes and expert_sizes: of the ops' cases, by the activations' dtype.
    linear_sizes: Mapping[DType, LinearSizes]
    expert_sizes: Mapping[DType, ExpertSizes]
    # Dtypes of the weights of these linear cases, where the format leaves it open.
    weights: tuple[DType, ...] = ()
    rows: tuple[str, ...] = ()  # the operands that multiply the sum
    inputs: Inputs | None = None  # how activations are quantised; None: they are as they are
    attrs: Attrs = field(default_factory=dict)  # of the linear op's nodes, besides `dtype`
    # How the experts' kernels read it; None: only the CPU serves such experts.
    experts: ExpertKernels | None = None

    @cached_property
    def stored(self) -> tuple[Operand, ...]:
        """The linear op's weight and its scales."""
        return tuple(o for o in self.operands if o.joins)

    def matrix(self, *stored: Array) -> F32:
        """f32 [N,K] of the values of `stored`."""
        values = {o.name: array for o, array in zip(self.stored, stored, strict=True)}
        rows = (values[name][:, None] for name in self.rows if name in values)
        whole: F32 = prod(rows, start=self.decode(values)).astype(np.float32)
        return whole

    @property
    def static(self) -> bool:
        """Whether the checkpoint has a scale of the input."""
        return self.inputs is not None and bool(self.inputs.scale)

    @cached_property
    def expert_operands(self) -> tuple[Operand, ...]:
        """Those of `grouped_moe` with this format: E experts stacked."""
        when = When("format", (self.name,))
        found = [
            Operand(own, operand.role, _stacked(operand.spec, n, k), when)
            for weight, (n, k) in EXPERT_WEIGHTS.items()
            for own, operand in zip(self.names_of(weight), self.stored, strict=True)
        ]
        given = INPUT_SCALES.values() if self.static else ()
        return (*found, *(Operand(name, Role.SCALE, "f32[E]", when) for name in given))

    @cached_property
    def params(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(o.name for o in self.expert_operands)

    def names_of(self, weight: str) -> tuple[str, ...]:
        """What the experts call `stored` of the weight `w13` or `w2`."""
        return tuple(weight + suffix for suffix, _ in zip(SUFFIXES, self.stored, strict=False))


def _stacked(spec: str, n: str, k: str) -> str:
    """`spec` of a weight [N,K], with E of them."""
    spec = re.sub(r"\bK\b", k, re.sub(r"\bN\b", n, spec))
    return spec.replace("[", "[E,", 1)
