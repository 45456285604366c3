"""Chooses the tactic of each node: the fastest one that supports it.

Knows the contract of tactics and no single op. Nodes of one op with equal attributes and shapes
share one decision. Times are predicted by `plugins/launch.py`, from `plugins/tuning/recorded.py` or
a kernel's formula; with a GPU, a `Timer` measures them. An invariant build first chooses one
reduction key for all buckets of prefill, and one for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from spark_engine.builder.graph.nodes import Ops, attrs_of, spec_of
from spark_engine.builder.plan.buckets import Size
from spark_engine.interface import DRAFT_STEP, HEADS, MOST_DRAFTS
from spark_engine.kernel import Attrs, Cuda, Plan, Specs, Tactic, Target
from spark_engine.manifest import Json
from spark_engine.op import DOMAIN, Op
from spark_engine.plugins.registry import STANDARD

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

CONTEXT = 1024  # tokens of context of a decode row, and of a prefilled sequence
PREFILLS = (16_384, 65_536)  # longer sequences; a launch prefills their end
# Weights of the contexts. Of four steps, three have CONTEXT tokens in each row and one has as many
# as fit; of 16 prefills, twelve have CONTEXT tokens and one has the most. Most sequences are short,
# and a long launch takes more time anyway.
SHARES = (3, 1)
PREFILL_SHARES = (12, 3, 1)
OTHER_BITS = "excluded by --invariant: its reduction order is not available in all buckets"


@dataclass(frozen=True)
class Work:
    """One packed node of fixed shapes."""

    name: str  # the op's
    op: Op | None  # None for a standard ONNX operator
    attrs: Attrs
    # ins and outs: specs of operands and results.
    ins: Specs
    outs: Specs
    # Indices of operands that no node of the graph writes: weights, states, steps.
    cold: frozenset[int]
    context: int = CONTEXT  # tokens of each sequence when it is timed

    @property
    def contexts(self) -> tuple[int, ...]:
        """The contexts to be timed at: CONTEXT; for decode over pages also the longest for which
        the page table and the pool hold all rows, if that is at least twice as long; for prefill
        those of PREFILLS that fit and are no shorter than the launch."""
        given = self.op.given(self.attrs) if self.op is not None else ()
        paged = [s.dims for o, s in zip(given, self.ins, strict=False) if o.unit == "page"]
        if not paged:
            return (CONTEXT,)
        named = {o.name: s.dims for o, s in zip(given, self.ins, strict=False)}
        pool, _, size, _ = paged[0]
        longest, rows = named["page_table"][1] * size, named["slots"][0]
        tile = int(self.attrs.get("tile", 1))
        if self.prefills:
            most = min(longest, (pool - 1) * size)
            return (CONTEXT, *(c for c in PREFILLS if rows * tile <= c <= most))
        most = min(longest, (pool - 1) // rows * size)  # of a row; one page is scratch
        return (CONTEXT, most - tile) if most >= 2 * CONTEXT else (CONTEXT,)  # the new tokens fit

    @property
    def prefills(self) -> bool:
        return int(self.attrs.get("tile", 1)) > 1 + MOST_DRAFTS

    @property
    def shares(self) -> tuple[int, ...]:
        return (PREFILL_SHARES if self.prefills else SHARES)[: len(self.contexts)]

    @cached_property
    def key(self) -> tuple[object, ...]:
        """Equal for nodes that share a decision."""
        attrs = sorted(self.attrs.items())
        return self.name, *attrs, *((s.dtype, s.shape) for s in self.ins)


Timer = Callable[[Work, Tactic, Plan], float | None]  # seconds; None: it cannot be timed
Chosen = tuple[Work, Tactic, Plan]  # a node of a bucket with what runs it
Able = tuple[list[tuple[Tactic, Plan]], dict[str, str]]  # tactics, and why others refuse


@dataclass(frozen=True)
class TacticChoice:
    """The decision for one op with operands of one shape."""

    # tactic and plan: the chosen tactic; None if every tactic refuses.
    tactic: Tactic | None
    plan: Plan | None
    seconds: float  # of the chosen tactic, measured or predicted
    refused: Mapping[str, str]  # reasons by tactic name
    # Seconds by name, of tactics that do not refuse; weighted by their shares where they are
    # measured at several contexts.
    candidates: Mapping[str, float] = field(default_factory=dict)
    timed: bool = False  # the seconds are measured, not predicted
    # Measured seconds by context and name, where there are several contexts.
    at: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


def choose(
    cuda: Cuda, work: Work, target: Target, timer: Timer | None = None, able: Able | None = None
) -> TacticChoice:
    """The tactic of least time; the first of several. `able`: which there are, if that is known.

    A single candidate is not timed. If a candidate cannot be timed, all are predicted.
    """
    plans, refused = able or _plans(cuda, work, target, None)
    if not plans:
        return TacticChoice(None, None, 0.0, refused)
    seconds, measured = _seconds(work, plans, target, timer)
    tactic, plan = min(plans, key=lambda pair: seconds[pair[0].name])
    at = measured if len(measured) > 1 else {}
    return TacticChoice(tactic, plan, seconds[tactic.name], refused, seconds, bool(measured), at)


def _plans(cuda: Cuda, work: Work, target: Target, order: str | None) -> Able:
    """`order` excludes tactics with another `Tactic.order`."""
    plans, refused = [], {}
    for tactic in cuda.tactics:
        reason = tactic.refuse(work.attrs, work.ins, target)
        if reason is None and order is not None:
            same = tactic.reduction_key(work.attrs, work.ins, target) == order
            reason = None if same else OTHER_BITS
        if reason is None:
            plans.append((tactic, tactic.plan(work.attrs, work.ins, target)))
        else:
            refused[tactic.name] = reason
    return plans, refused


def _seconds(
    work: Work, plans: Sequence[tuple[Tactic, Plan]], target: Target, timer: Timer | None
) -> tuple[dict[str, float], dict[int, dict[str, float]]]:
    """Seconds by tactic name, and measured seconds by context (empty if they are predicted).

    A context is left out if one of the tactics cannot be timed at it. Tactics are timed in the
    order of their predictions, and then of their times at the context before, since a timer leaves
    a tactic early that is far slower than another one.
    """
    measured: dict[int, dict[str, float]] = {}
    names = [tactic.name for tactic, _ in plans]
    predicted = {t.name: t.cost(work.attrs, work.ins, target) for t, _ in plans}
    last = predicted
    for context in work.contexts if timer is not None and len(plans) > 1 else ():
        assert timer is not None
        order = sorted(plans, key=lambda pair: last[pair[0].name])
        found = _timed(replace(work, context=context), order, timer)
        if found is None:
            break
        measured[context] = last = {name: found[name] for name in names}
    if not measured:
        return predicted, {}
    shares = work.shares[: len(measured)]
    totals = {
        name: sum(
            share * times[name] for share, times in zip(shares, measured.values(), strict=True)
        )
        for name in names
    }
    return {name: total / sum(shares) for name, total in totals.items()}, measured


def _timed(
    work: Work, plans: Sequence[tuple[Tactic, Plan]], timer: Timer
) -> dict[str, float] | None:
    """Seconds by tactic name; None if one of them cannot be timed."""
    found: dict[str, float] = {}
    for tactic, plan in plans:
        seconds = timer(work, tactic, plan)
        if seconds is None:
            return None
        found[tactic.name] = seconds
    return found


@dataclass
class Chooser:
    """Decides the nodes of all graphs and buckets, and keeps its decisions."""

    ops: Ops
    target: Target
    timer: Timer | None = None
    _known: dict[tuple[object, ...], TacticChoice] = field(default_factory=dict)
    _orders: dict[tuple[object, ...], str] = field(default_factory=dict)
    _shapes: dict[object, tuple[gs.Node, int]] = field(default_factory=dict)  # of nodes and shapes
    _works: dict[tuple[int, int, int], tuple[Cuda, Work]] = field(default_factory=dict)
    _plans: dict[tuple[object, ...], Able] = field(default_factory=dict)

    def node(self, node: gs.Node, size: Size) -> TacticChoice:
        cuda, work = self.work(node, size)
        order = self._orders.get((size.family, node.name))
        key = (order, *work.key)
        if key not in self._known:
            able = self._able(cuda, work, order)
            self._known[key] = choose(cuda, work, self.target, self.timer, able)
        return self._known[key]

    def late(self, node: gs.Node, size: Size) -> TacticChoice | None:
        """The node's decision for a place behind a launch that it does not read (`Early.late`);
        None without a tactic for that."""
        cuda, work = self.work(node, size)
        order = self._orders.get((size.family, node.name))
        key = ("late", order, *work.key)
        if key not in self._known:
            plans, _ = self._able(cuda, work, order)
            found = [(t, p) for t, p in plans if all(one.early.late for one in p.launches)]
            if not found:
                return None
            tactic, plan = found[0]
            self._known[key] = replace(self.node(node, size), tactic=tactic, plan=plan)
        return self._known[key]

    def candidates(
        self, graphs: Iterable[tuple[gs.Graph, Sequence[Size]]]
    ) -> list[tuple[str, Plan]]:
        """(source, plan) of every tactic: of nodes that have several, in the order of timing, and
        then of the others."""
        found, single = list[tuple[str, Plan]](), list[tuple[str, Plan]]()
        seen: set[tuple[object, ...]] = set()
        for graph, sizes in graphs:
            for size in sizes:
                for node in graph.nodes:
                    cuda, work = self.work(node, size)
                    if work.key not in seen:
                        seen.add(work.key)
                        plans, _ = self._able(cuda, work)
                        into = found if len(plans) > 1 else single
                        into += [(t.source, plan) for t, plan in plans]
        return found + single

    def agree(self, graphs: Iterable[tuple[gs.Graph, Sequence[Size]]]) -> dict[str, str]:
        """Chooses one `Tactic.order` for each node, for every bucket of all `graphs`.

        Nodes of one name are one node. Of the orders that all buckets have, takes the one with the
        least total time. Returns, by op, the reason if there is none, for nodes that each bucket
        has a tactic for. The draft head's nodes are excluded, since drafts do not decide the
        generated tokens.
        """
        failed = {}
        known: dict[tuple[object, ...], str | None] = {}
        found: dict[str, list[tuple[gs.Node, Size]]] = {}
        for graph, sizes in graphs:
            for node in graph.nodes:
                if not node.name.startswith((*HEADS, DRAFT_STEP)):
                    found.setdefault(node.name, []).extend((node, size) for size in sizes)
        for name, nodes in found.items():
            works = [self.work(node, size) for node, size in nodes]
            if any(not self._able(cuda, work)[0] for cuda, work in works):
                continue  # no tactic at all: `no_tactic.py` reports it
            key = tuple(work.key for _, work in works)
            if key not in known:
                known[key] = self._common(works)
            order, op = known[key], nodes[0][0].op
            if order is None:
                failed[op] = (
                    f"no tactic of {op} gives a token the same bits in "
                    f"{', '.join(size.file for _, size in nodes)}"
                )
            else:
                self._orders |= {(size.family, name): order for _, size in nodes}
        return failed

    def _common(self, works: Sequence[tuple[Cuda, Work]]) -> str | None:
        """The `Tactic.order` that every bucket has, with the least total time."""
        buckets = [self._by_order(cuda, work) for cuda, work in works]
        common = [o for o in buckets[0] if all(o in bucket for bucket in buckets)]
        totals = {order: sum(bucket[order] for bucket in buckets) for order in common}
        return min(totals, key=lambda order: totals[order]) if totals else None

    def _by_order(self, cuda: Cuda, work: Work) -> dict[str, float]:
        """Seconds of the fastest tactic of each order."""
        plans, _ = self._able(cuda, work)
        seconds, _ = _seconds(work, plans, self.target, self.timer)
        found: dict[str, float] = {}
        for tactic, _ in plans:
            order = tactic.reduction_key(work.attrs, work.ins, self.target)
            if order is not None:
                found[order] = min(seconds[tactic.name], found.get(order, seconds[tactic.name]))
        return found

    def _able(self, cuda: Cuda, work: Work, order: str | None = None) -> Able:
        key = order, *work.key
        if key not in self._plans:
            self._plans[key] = _plans(cuda, work, self.target, order)
        return self._plans[key]

    def work(self, node: gs.Node, size: Size) -> tuple[Cuda, Work]:
        """The tactics of a node's op, and the node in a bucket of this size; the same for all nodes
        of its shape."""
        at = self._shape(node), size.rows, size.tile
        if at not in self._works:
            self._works[at] = self._work(node, size)
        return self._works[at]

    def _shape(self, node: gs.Node) -> int:
        """The number of the node's op with its attributes and unbound operands."""
        if id(node) not in self._shapes:
            specs = [(s.dtype, s.shape) for s in map(spec_of, (*node.inputs, *node.outputs))]
            cold = [not tensor.inputs for tensor in node.inputs]
            shape = node.domain, node.op, *sorted(node.attrs.items()), *specs, *cold
            _, number = self._shapes.setdefault(shape, (node, len(self._shapes)))
            self._shapes[id(node)] = node, number  # kept, so that no other node has this identity
        return self._shapes[id(node)][1]

    def _work(self, node: gs.Node, size: Size) -> tuple[Cuda, Work]:
        ins = tuple(spec_of(t).bind(size.dims) for t in node.inputs)
        outs = tuple(spec_of(t).bind(size.dims) for t in node.outputs)
        cold = frozenset(i for i, t in enumerate(node.inputs) if not t.inputs)
        if node.domain == DOMAIN:
            op = self.ops[node.op]
            return op.cuda, Work(node.op, op, attrs_of(node, op), ins, outs, cold)
        cuda = STANDARD.get(node.op, Cuda())
        return cuda, Work(node.op, None, dict(node.attrs), ins, outs, cold)


def report(file: str, decided: Iterable[tuple[gs.Node, TacticChoice]]) -> tuple[Json, ...]:
    """Rows of the manifest's `tactics`: equal decisions of one bucket are one row."""
    rows: dict[tuple[str, int], Json] = {}
    for node, choice in decided:
        key = (node.op, id(choice))
        if key not in rows:
            rows[key] = {
                "op": node.op,
                "bucket": file,
                "node": node.name,
                "nodes": 0,
                "chosen": choice.tactic.name if choice.tactic else None,
                "timed": choice.timed,
                "microseconds": _microseconds(choice.candidates),
                "refused": dict(choice.refused),
            }
            if choice.at:
                at = {str(context): _microseconds(t) for context, t in choice.at.items()}
                rows[key]["microseconds_at"] = at
        rows[key]["nodes"] += 1
    return tuple(rows.values())


def _microseconds(candidates: Mapping[str, float]) -> Json:
    return {name: round(seconds * 1e6, 2) for name, seconds in candidates.items()}
