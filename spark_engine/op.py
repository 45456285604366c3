"""The contract of one op: its operands, its formula as reference and body, its cases, its kernels.

An op is in `plugins/ops/<family>/<stem>.py`, its kernels are in `plugins/kernels/<family>/`. This
module knows no op.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from spark_engine.errors import GraphError
from spark_engine.kernel import Attr as Attr
from spark_engine.kernel import Attrs as Attrs
from spark_engine.kernel import Cuda
from spark_engine.named import Named, Rules
from spark_engine.operand import Operand, Result, Role
from spark_engine.tensors import Array, DType, TensorSpec

DOMAIN = "spark"

Reference = Callable[[Attrs, tuple[Array, ...]], tuple[Array, ...]]
Body = Callable[[Attrs, tuple[TensorSpec, ...]], str]
Inputs = Callable[[np.random.Generator], tuple[Array, ...]]


@dataclass(frozen=True)
class Case:
    """One seeded example of an op, used by every executor's test and by the benchmarks.

    `inputs(rng)` returns the arrays in the op's input order. An element that no correct
    implementation may read is NaN (floats) or a wild value (integers). `ignore(outputs)`
    may overwrite, in place, output elements with an unspecified value.
    """

    label: str
    attrs: Attrs
    inputs: Inputs
    rtol: float = 1e-5
    atol: float = 1e-6
    bench: bool = False
    ignore: Callable[[tuple[Array, ...]], None] | None = None


def rtol_of(activation: DType) -> float:
    """What the CPU's results of a case are held to: f32 sums, or one rounding to bf16."""
    return 1e-5 if activation is DType.F32 else 1e-2


@dataclass(frozen=True)
class Tolerance:
    """How far a kernel's result may be from the reference's."""

    norm: float = 1e-2  # relative L2 distance of a bf16 result
    # Distance of one bf16 element, relative to it and to the result's spread.
    element: float = 2.0**-7
    exact: float = 1e-5  # relative L2 distance of an f32 result
    codes: float = 0.01  # share of quantised codes that may be one step off
    # e4m3 codes of values that differ by less than this share of the largest count as equal: steps
    # are fine near zero, where rounding before the quantiser is coarse.
    blur: float = 0.0


@dataclass(frozen=True)
class Part:
    """One node of the chain that a fused op replaces."""

    op: str  # one of ours, or a standard ONNX operator
    # inputs and outputs: names of values: the fused op's operands, or what another part makes.
    # `scales[1]` is one element of an operand.
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Attrs = field(default_factory=dict)


@dataclass(frozen=True)
class Chain:
    """The nodes that a fused node replaces, in order, and their values that are its results."""

    parts: tuple[Part, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Op:
    """One op of the `spark` domain.

    Attributes:
        name: the node's op_type.
        operands, results: in order, those that only some nodes have among them. `infer` follows
            from them.
        attrs: every attribute with its default (None: required).
        reference: (attrs, arrays) -> arrays; float64 inside, written to be read.
        body: (attrs, input specs) -> one ONNX function in ONNX's textual syntax (opset 23),
            named like the op in domain `spark`; its formal inputs and outputs are in the op's
            order and have its names (a repeated result is numbered `x0, x1`).
        cases: seeded examples, if a few lines make them; else `tests/plugins/cases/` has them.
        dims: names of dimensions: an attribute, a formula, or what a node has there. Other names
            are attributes of that name, or what the first operand with them has; `tokens` are
            rows·tile where rows have tiles.
        legal: values that an attribute may have.
        check: what else is illegal of a node's attributes and shapes, in a sentence.
        fuses: attrs -> the chain that it replaces, with the same bits; None: it is no fusion.
        quantises: whether it is a stand-alone quantiser, which fusion must remove.
        tolerance: attrs -> the error allowed to its kernels; a coarse one has its reason.
        cuda: tactics and weight layouts for CUDA targets.
    """

    name: str
    operands: tuple[Operand, ...]
    results: tuple[Result, ...]
    attrs: Mapping[str, Attr | None]
    reference: Reference
    body: Body
    cases: tuple[Case, ...] = ()
    dims: Rules = field(default_factory=dict)
    legal: Mapping[str, tuple[Attr, ...]] = field(default_factory=dict)
    check: Callable[[Named], str | None] | None = None
    fuses: Callable[[Attrs], Chain] | None = None
    quantises: bool = False
    tolerance: Callable[[Attrs], Tolerance] = lambda attrs: Tolerance()
    cuda: Cuda = field(default_factory=Cuda)

    def named(self, attrs: Attrs, specs: tuple[TensorSpec, ...]) -> Named:
        defaults = {name: value for name, value in self.attrs.items() if value is not None}
        whole = {**defaults, **attrs}
        rows = {"tokens": "rows·tile"} if "tile" in self.attrs else {}
        return Named(self.name, self.given(attrs), whole, specs, {**rows, **self.dims})

    def infer(self, attrs: Attrs, specs: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
        """Output specs; raises GraphError naming a bad operand or attribute.

        Shapes may hold named dimensions ("rows", "tokens").
        """
        for name, legal in self.legal.items():
            if attrs.get(name, self.attrs[name]) not in legal:
                listed = " or ".join(map(str, legal))
                if len(legal) > 2:
                    listed = f"one of {', '.join(map(str, legal))}"
                raise GraphError(f"{self.name}: {name} is {attrs[name]!r}, expected {listed}")
        node = self.named(attrs, specs)
        if "tile" in node.attrs and node.number("tile") < 1:
            raise GraphError(f"{self.name}: tile is {attrs['tile']}; it must be at least 1")
        node.verify_types()
        if self.check is not None and (reason := self.check(node)):
            raise GraphError(f"{self.name}: {reason}")
        node.verify_shapes()
        fixed = sum(r.each is None for r in self.made(attrs))
        made = tuple(node.result(r) for r in self.single(attrs))
        stem = self.results[-1].name.rstrip("*")
        numbered = (replace(s, name=f"{stem}{i}") for i, s in enumerate(made[fixed:]))
        return (*made[:fixed], *numbered)

    def single(self, attrs: Attrs) -> tuple[Result, ...]:
        """The results of a node with these attributes, each of those that are several."""
        return tuple(x for r in self.made(attrs) for x in (r.each(attrs) if r.each else (r,)))

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the operands that every node has."""
        return tuple(o.name for o in self.operands if o.when is None and not o.optional)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the results that every node has; a last one ending in `*` repeats."""
        return tuple(r.name for r in self.results if r.when is None)

    @property
    def stateful(self) -> bool:
        return any(r.updates for r in self.results)

    def given(self, attrs: Attrs) -> tuple[Operand, ...]:
        """The operands of a node with these attributes, optional ones among them."""
        return tuple(o for o in self.operands if o.when is None or o.when.holds(attrs))

    def made(self, attrs: Attrs) -> tuple[Result, ...]:
        """The results of a node with these attributes."""
        return tuple(r for r in self.results if r.when is None or r.when.holds(attrs))

    def names(self, attrs: Attrs, count: int) -> list[str]:
        return [o.name for o in self.given(attrs)][:count]

    def aliases(self, attrs: Attrs) -> dict[int, int]:
        """Output index -> input index that may share memory: a state, updated in place."""
        at = {o.name: i for i, o in enumerate(self.given(attrs))}
        return {i: at[r.updates] for i, r in enumerate(self.made(attrs)) if r.updates}

    def states(self) -> tuple[Operand, ...]:
        """The operands that are kept from launch to launch."""
        return tuple(o for o in self.operands if o.role is Role.STATE)
