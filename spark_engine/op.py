"""The contract of one op: its maths three times, and its cases.

An op lives in `plugins/<stem>.py` beside `plugins/<stem>.cu`. This module knows no op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from spark_engine.kernel import Attr as Attr
from spark_engine.kernel import Attrs as Attrs
from spark_engine.kernel import Cuda
from spark_engine.tensors import Array, TensorSpec

DOMAIN = "spark"

Infer = Callable[[Attrs, tuple[TensorSpec, ...]], tuple[TensorSpec, ...]]
Reference = Callable[[Attrs, tuple[Array, ...]], tuple[Array, ...]]
Body = Callable[[Attrs, tuple[TensorSpec, ...]], str]
Inputs = Callable[[np.random.Generator], tuple[Array, ...]]


@dataclass(frozen=True)
class Case:
    """One seeded example of an op, used by every executor's test and by the benchmarks.

    `inputs(rng)` returns the arrays in the op's input order. An element that no correct
    implementation may read is NaN (floats) or a wild value (integers). `ignore(outputs)`
    may overwrite, in place, output elements whose value is unspecified.
    """

    label: str
    attrs: Attrs
    inputs: Inputs
    rtol: float = 1e-5
    atol: float = 1e-6
    bench: bool = False
    ignore: Callable[[tuple[Array, ...]], None] | None = None


@dataclass(frozen=True)
class Op:
    """One op of the `spark` domain.

    Attributes:
        name: the node's op_type.
        inputs, outputs: their names in order. A last name ending in `*` repeats 0..n times.
        attrs: every attribute with its default (None: required).
        infer: (attrs, input specs) -> output specs; raises GraphError naming a bad operand.
            Shapes may hold named dimensions ("rows", "tokens").
        reference: (attrs, arrays) -> arrays; float64 inside, written to be read.
        body: (attrs, input specs) -> one ONNX function in ONNX's textual syntax (opset 23),
            named like the op in domain `spark`, whose formal inputs and outputs stand in
            the op's order (a repeated name numbered `x0, x1`).
        cases: seeded examples.
        aliases: output index -> input index that may share memory (state, updated in place).
        quantises: True for a stand-alone quantise node, which fusion must remove.
        cuda: tactics and weight layouts for CUDA targets.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Attr | None]
    infer: Infer
    reference: Reference
    body: Body
    cases: tuple[Case, ...]
    aliases: Mapping[int, int] = field(default_factory=dict)
    quantises: bool = False
    cuda: Cuda = field(default_factory=Cuda)
