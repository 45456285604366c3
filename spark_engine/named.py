"""A node's operands and dimensions by the names that its op declares. Knows no op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from spark_engine import dims as formulas
from spark_engine.errors import GraphError
from spark_engine.kernel import Attrs
from spark_engine.operand import DTYPES, Operand, Result
from spark_engine.tensors import Dim, DType, TensorSpec


@dataclass(frozen=True)
class Named:
    """A node."""

    op: str  # its op's name
    # Operands that a node with these attributes has, optional ones among them.
    given: tuple[Operand, ...]
    attrs: Attrs  # with the op's defaults
    specs: tuple[TensorSpec, ...]  # of its operands, in order
    rules: Rules  # names of dimensions (`Op.dims`)
    # Operands in the layout of the kernels: only their first dimension is declared.
    packed: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> TensorSpec:
        return self.by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self.by_name

    @cached_property
    def by_name(self) -> Mapping[str, TensorSpec]:
        return {o.name: spec for o, spec in self._pairs()}

    def number(self, attr: str) -> int:
        """An attribute; 0 where it is not given."""
        return int(self.attrs.get(attr, 0))

    def text(self, attr: str) -> str:
        return str(self.attrs[attr])

    def real(self, attr: str) -> float:
        return float(self.attrs[attr])

    def dim(self, name: str) -> int:
        """A dimension by its name or formula. Raises ValueError where it has no number."""
        size = formulas.evaluated(name, self._look)
        if not isinstance(size, int):
            raise ValueError(f"{self.op}: {name} is {size}, not a number")
        return size

    def shape(self, *names: str) -> tuple[int, ...]:
        return tuple(map(self.dim, names))

    # ---- what the declaration says -----------------------------------------------------------

    def _pairs(self) -> Iterator[tuple[Operand, TensorSpec]]:
        return zip(self.given, self.specs, strict=False)

    @cached_property
    def _solved(self) -> dict[str, Dim]:
        """The dimensions that follow from the shapes, the first operand's first."""
        found: dict[str, Dim] = {}
        asked = {name for name, rule in self.rules.items() if callable(rule)}

        def look(name: str) -> Dim | None:
            ruled = self._ruled(name, look)
            return found.get(name) if ruled is None else ruled

        whole = [(o, s) for o, s in self._pairs() if o.name not in self.packed]
        pairs = [pair for o, s in whole for pair in zip(o.dims, s.shape, strict=False)]
        pairs += [pair for pair in pairs if not pair[0].isidentifier()]  # of what was found since
        pairs += [(o.dims[0], s.shape[0]) for o, s in self._pairs() if o.name in self.packed]
        for formula, size in pairs:
            if formula in found or asked.intersection(formulas.names(formula)):
                continue
            try:
                known = formulas.solved(formula, size, look)
            except ValueError:  # `verify_shapes` says so
                continue
            if known is not None:
                found.setdefault(*known)
        return found

    @cached_property
    def _known(self) -> dict[str, Dim | None]:
        """The names that were asked for."""
        return {}

    def _look(self, name: str) -> Dim | None:
        if name not in self._known:
            rule = self.rules.get(name)
            ruled = rule(self) if callable(rule) else self._ruled(name, self._look)
            self._known[name] = self._solved.get(name) if ruled is None else ruled
        return self._known[name]

    def _ruled(self, name: str, look: formulas.Look) -> Dim | None:
        """The value of a dimension by the attributes."""
        rule = self.rules.get(name, name)
        if callable(rule):
            return None
        if isinstance(value := self.attrs.get(rule), int):
            return value
        return None if rule == name else formulas.evaluated(rule, look)

    def verify_types(self) -> None:
        """Raises GraphError unless all operands are there, with the declared dtypes and ranks."""
        least = sum(not o.optional for o in self.given)
        if not least <= len(self.specs) <= len(self.given):
            count = f"{least} to {len(self.given)}" if least < len(self.given) else least
            raise GraphError(f"{self.op} takes {count} operands, not {len(self.specs)}")
        for operand, spec in self._pairs():
            if len(spec.shape) != len(operand.dims) or spec.dtype not in self._legal(operand):
                raise self._unlike(operand, spec, (None,) * len(operand.dims))

    def verify_shapes(self) -> None:
        """Raises GraphError unless dimensions are as declared, of operands with such ranks."""
        for operand, spec in self._pairs():
            pairs = zip(operand.dims, spec.shape, strict=True)
            wanted = tuple(self._wanted(formula, size) for formula, size in pairs)
            if any(w is not None and w != got for w, got in zip(wanted, spec.shape, strict=True)):
                raise self._unlike(operand, spec, wanted)

    def result(self, result: Result) -> TensorSpec:
        """The spec of one, named. Raises GraphError where operands leave it open."""
        if result.updates:
            return replace(self[result.updates], name=result.name)
        if result.dtype == "A":
            dtype = DType(self.text("dtype")) if "dtype" in self.attrs else self._activation
        else:
            (dtype,) = DTYPES[result.dtype]
        return TensorSpec(result.name, dtype, tuple(map(self._made, result.dims)))

    @cached_property
    def _activation(self) -> DType:
        """The dtype of all operands that are `A`."""
        return next(spec.dtype for o, spec in self._pairs() if o.dtype == "A")

    def _made(self, formula: str) -> Dim:
        size = self._wanted(formula, 0)
        if size is None:
            raise GraphError(f"{self.op}: {formula} does not follow from its operands' shapes")
        return size

    def _wanted(self, formula: str, size: Dim) -> Dim | None:
        """What a dimension must be; None: anything. Raises GraphError for what cannot be whole."""
        try:
            wanted = formulas.evaluated(formula, self._look)
            if wanted is None:
                formulas.solved(formula, size, self._look)
        except ValueError:
            of = set(formulas.names(formula))
            uneven = next(s for o, s in self._pairs() if of & {*formulas.names(o.dims[-1])})
            raise GraphError(
                f"{self.op}: operand {uneven.name} has shape {list(uneven.shape)}; its last "
                f"dimension must be a number divisible by {formulas.divisor(formula)}"
            ) from None
        return wanted

    def _legal(self, operand: Operand) -> tuple[DType, ...]:
        """Its dtypes: all that are `A` have the first one's."""
        legal = operand.dtypes
        if operand.dtype == "A" and self._activation in legal:
            return (self._activation,)
        return legal

    def _unlike(
        self, operand: Operand, spec: TensorSpec, shape: tuple[Dim | None, ...]
    ) -> GraphError:
        wanted = f"{'/'.join(self._legal(operand))} {['any' if d is None else d for d in shape]}"
        got = f"{spec.dtype} {list(spec.shape)}"
        return GraphError(f"{self.op}: operand {spec.name} is {got}, expected {wanted}")


Rules = Mapping[str, str | Callable[[Named], Dim]]  # `Op.dims`
