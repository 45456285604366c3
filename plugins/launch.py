"""Resolves a kernel's arguments from names to pointers: the only module with pointer indices.

A kernel lists its arguments by name: operands and results of the op, scratch memory of the plan,
numbers. A planner receives a `Node`, which has these names and the op's dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from functools import lru_cache

from spark_engine.errors import InternalError
from spark_engine.kernel import (
    NULL,
    Arg,
    Attr,
    Attrs,
    Cuda,
    Early,
    Launch,
    Pack,
    Plan,
    Pointer,
    Rank,
    Scalar,
    Scratch,
    Specs,
    Tactic,
    Target,
)
from spark_engine.named import Named
from spark_engine.op import Op
from spark_engine.operand import Operand, Role
from spark_engine.plugins.tuning import recorded
from spark_engine.tensors import TensorSpec

Grid = int | tuple[int, int] | tuple[int, int, int]
Macros = Mapping[str, int | float]
Whole = Callable[[Attrs], Attrs]
PEERS, RANK = Pointer("peers", 0), Rank()
ALONE = Scalar("i32", 0)  # the rank of an engine of one rank
LATER = Pointer("scratch", -1)


@dataclass(frozen=True)
class Node(Named):
    """A node that a kernel is planned for; `by_name` and `given` are by the kernel's names."""

    target: Target = field(kw_only=True)  # the architecture and card
    # Arguments by name: operands, results, scratch memory, others.
    places: Mapping[str, Arg] = field(kw_only=True)
    scratch: tuple[Scratch, ...] = ()  # sizes of scratch memory, in order
    # Tensors in scratch memory, by name.
    held: Mapping[str, TensorSpec] = field(default_factory=dict)

    def with_args(self, **args: Arg) -> Node:
        """The node with more arguments, by name."""
        return self._with(places={**self.places, **args})

    def with_scratch(self, **memory: int | Scratch | TensorSpec) -> Node:
        """The node with more scratch memory, by name: bytes, a `Scratch`, or a tensor's size."""
        places, scratch, held = dict(self.places), list(self.scratch), dict(self.held)
        for name, size in memory.items():
            places[name] = Pointer("scratch", len(scratch))
            if isinstance(size, TensorSpec):
                held[name] = size
                size = size.nbytes
            scratch.append(Scratch(size) if isinstance(size, int) else size)
        return self._with(places=places, scratch=tuple(scratch), held=held)

    def with_later(self, **tensors: TensorSpec) -> Node:
        """The node with tensors after all scratch memory of a plan; `behind` resolves them."""
        places = {**self.places, **dict.fromkeys(tensors, LATER)}
        return self._with(places=places, held={**self.held, **tensors})

    def _with(self, **changes: object) -> Node:
        """`replace` that keeps the cached dimensions."""
        made = copy(self)
        made.__dict__.update(changes)
        return made

    def part(self, op: Op, attrs: Attrs, **found: str) -> Node:
        """A node of another op over the memory of this one. `found`: names here of its operands
        and results, if they differ."""
        tensors = {**self.by_name, **self.held}
        given = tuple(o for o in op.given(attrs) if found.get(o.name, o.name) in tensors)
        named = op.named(attrs, tuple(tensors[found.get(o.name, o.name)] for o in given))
        names = (*(o.name for o in given), *(r.name for r in op.single(attrs)))
        places = {n: self.places[found.get(n, n)] for n in names}
        return Node(
            op.name, given, named.attrs, named.specs, named.rules, frozenset(op.cuda.packs),
            target=self.target, places=places, scratch=self.scratch,
        )  # fmt: skip

    def plan(self, *launches: Launch, symmetric: int = 0) -> Plan:
        """A plan of launches over the memory of this node."""
        return Plan(launches, self.scratch, symmetric)

    def args(self, names: str, **values: int | float | Arg) -> tuple[Arg, ...]:
        """The arguments with these names. `values`: numbers (an int as i32, a float as f32) and
        other arguments that are not in the node."""
        return tuple(self._arg(name, values) for name in names.split())

    def _arg(self, name: str, values: Mapping[str, int | float | Arg]) -> Arg:
        known = name.rstrip("?")
        value = values.get(known, self.places.get(known))
        if value is None:
            if name == known:
                raise InternalError(f"{self.op}: the node has no {name}, an argument of a kernel")
            return NULL
        if isinstance(value, int | float):
            return Scalar("f32" if isinstance(value, float) else "i32", value)
        return value


@dataclass(frozen=True)
class Kernel:
    """An `extern "C"` function."""

    symbol: str  # its name
    # Names of its arguments, in order; one that ends in `?` is null if the node lacks it.
    args: str
    source: str | None = None  # its file in `plugins/kernels/`, if it is not the candidate's
    # pdl and early: as in `Launch`.
    pdl: bool = True
    early: Early = Early()

    def launch(
        self,
        node: Node,
        grid: Grid,
        threads: int,
        macros: Macros,
        shared: int = 0,
        cluster: int = 1,
        resident: bool = False,
        **values: int | float | Arg,
    ) -> Launch:
        """A launch over a node: `grid` blocks of `threads` threads. `values`: as in `Node.args`."""
        x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
        return Launch(
            self.symbol,
            (x, y, z),
            (threads, 1, 1),
            node.args(self.args, **values),
            shared,
            (cluster, 1, 1),
            defines(macros),
            self.pdl,
            self.source,
            resident,
            self.early,
        )


def behind(launches: tuple[Launch, ...], scratch: tuple[Scratch, ...], later: int) -> Plan:
    """A plan of launches over `scratch`, followed by `later` bytes for `with_later`."""
    at = Pointer("scratch", len(scratch))
    moved = (
        replace(n, args=tuple(at if arg == LATER else arg for arg in n.args)) for n in launches
    )
    return Plan(tuple(moved), (*scratch, Scratch(later)))


def defines(macros: Macros) -> tuple[tuple[str, str], ...]:
    """Macros in the form of `Launch.defines`."""
    return tuple((n, repr(v) if isinstance(v, float) else str(int(v))) for n, v in macros.items())


@dataclass(frozen=True)
class Candidate:
    """A `Tactic` before it is bound to an op; it names the operands of its nodes.

    `recorded`: the size and tokens of a node, for `tuning.recorded`; `times_of`: of which op it has
    times, if not of the node's own.
    """

    name: str
    source: str
    plan: Callable[[Node], Plan]
    cost: Callable[[Node], float]
    refuse: Callable[[Node], str | None] = lambda node: None
    reduction: Callable[[Node], str | None] | None = None
    why: str = ""
    form: str = ""
    recorded: Callable[[Node], tuple[int, int] | None] = lambda node: None
    times_of: str = ""


def _same(attrs: Attrs) -> Attrs:
    return attrs


def node_of(
    op: Op,
    attrs: Attrs,
    specs: Specs,
    target: Target,
    whole: Whole = _same,
    called: Mapping[str, str] | None = None,
) -> Node:
    """A node of an op, with packed weights. `whole` and `called`: as in `serve`."""

    def name(own: str) -> str:
        return (called or {}).get(own, own)

    named = op.named(attrs, specs)
    given = tuple(replace(o, name=name(o.name)) for o in named.given[: len(specs)])
    places: dict[str, Arg] = {o.name: Pointer("input", i) for i, o in enumerate(given)}
    places |= {name(r.name): Pointer("output", i) for i, r in enumerate(op.single(attrs))}
    packed = frozenset(map(name, op.cuda.packs))
    all_attrs = whole(named.attrs)
    return Node(op.name, given, all_attrs, specs, named.rules, packed, target=target, places=places)


def serve(
    op: Op,
    candidates: tuple[Candidate, ...],
    packs: Mapping[str, Pack] | None = None,
    whole: Whole = _same,
    called: Mapping[str, str] | None = None,
) -> Op:
    """The op with tactics. `packs`: of operands, by name. `whole` completes a node's attributes to
    those of the candidates; `called` maps names of the op to theirs."""
    packed = replace(op, cuda=Cuda(packs=packs or {}))

    @lru_cache(maxsize=1)  # callers go over the tactics of one node, then of the next
    def made(attrs: tuple[tuple[str, Attr], ...], specs: Specs, target: Target) -> Node:
        return node_of(packed, dict(attrs), specs, target, whole, called)

    def view(attrs: Attrs, specs: Specs, target: Target) -> Node:
        return made(tuple(attrs.items()), specs, target)

    return replace(op, cuda=Cuda(tuple(_bound(c, view) for c in candidates), packs or {}))


def _seconds(candidate: Candidate, node: Node) -> float:
    """The recorded time at the candidate's size and tokens, if it has them; else its `cost`."""
    at, architecture = candidate.recorded(node), node.target.architecture
    name = architecture.rehearses or architecture.name
    op = recorded.op_of(candidate.times_of or node.op, node.attrs)
    return (at and recorded.seconds(name, op, candidate.name, *at)) or candidate.cost(node)


def _bound(candidate: Candidate, view: Callable[[Attrs, Specs, Target], Node]) -> Tactic:
    reduction = candidate.reduction
    return Tactic(
        candidate.name,
        candidate.source,
        lambda attrs, specs, target: candidate.refuse(view(attrs, specs, target)),
        lambda attrs, specs, target: candidate.plan(view(attrs, specs, target)),
        lambda attrs, specs, target: _seconds(candidate, view(attrs, specs, target)),
        (lambda attrs, specs, target: reduction(view(attrs, specs, target))) if reduction else None,
        candidate.why,
        candidate.form or candidate.name,
        lambda attrs, specs, target: candidate.recorded(view(attrs, specs, target)),
    )


def standard(
    op: str,
    candidates: tuple[Candidate, ...],
    operands: Callable[[int], tuple[str, ...]],
    result: str,
) -> Cuda:
    """The tactics of a standard operator of ONNX; `operands(n)`: the names of n operands."""

    def view(attrs: Attrs, specs: Specs, target: Target) -> Node:
        given = tuple(Operand(n, Role.ACTIVATION, "") for n in operands(len(specs)))
        places: dict[str, Arg] = {o.name: Pointer("input", i) for i, o in enumerate(given)}
        places[result] = Pointer("output", 0)
        return Node(op, given, attrs, specs, {}, target=target, places=places)

    return Cuda(tuple(_bound(c, view) for c in candidates))
