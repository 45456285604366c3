"""Which tactic runs each node: those that take it, and the cheapest of them.

Knows the contract of tactics and no single op. Nodes of one op, attributes and shapes are decided
once. Where a GPU can time a tactic, a `Timer` replaces the tactic's own prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import onnx_graphsurgeon as gs

from spark_engine.builder.buckets import Size
from spark_engine.builder.graph import Ops, attrs_of, spec_of
from spark_engine.kernel import Attrs, Cuda, Plan, Specs, Tactic, Target
from spark_engine.manifest import Json
from spark_engine.op import DOMAIN
from spark_engine.plugins.rows_cuda import STANDARD

Timer = Callable[[Tactic, Plan], float]  # seconds


@dataclass(frozen=True)
class Choice:
    """What was decided for one op over operands of one shape.

    Attributes:
        tactic, plan: the chosen one; None where every tactic refuses.
        seconds: by which it was chosen.
        refused: reasons by tactic name.
    """

    tactic: Tactic | None
    plan: Plan | None
    seconds: float
    refused: Mapping[str, str]


def choose(
    cuda: Cuda, attrs: Attrs, specs: Specs, target: Target, timer: Timer | None = None
) -> Choice:
    """The tactic of least time; of equal ones the first."""
    best: Choice | None = None
    refused = {}
    for tactic in cuda.tactics:
        reason = tactic.refuse(attrs, specs, target)
        if reason is not None:
            refused[tactic.name] = reason
            continue
        plan = tactic.plan(attrs, specs, target)
        seconds = timer(tactic, plan) if timer else tactic.cost(attrs, specs, target)
        if best is None or seconds < best.seconds:
            best = Choice(tactic, plan, seconds, {})
    if best is None:
        return Choice(None, None, 0.0, refused)
    return Choice(best.tactic, best.plan, best.seconds, refused)


@dataclass
class Chooser:
    """Decides nodes of one graph and bucket after another, and remembers."""

    ops: Ops
    target: Target
    timer: Timer | None = None
    _known: dict[tuple[object, ...], Choice] = field(default_factory=dict)

    def node(self, node: gs.Node, size: Size) -> Choice:
        """The decision for a node in a bucket."""
        specs = tuple(spec_of(t).bind(size.dims) for t in node.inputs)
        if node.domain == DOMAIN:
            op = self.ops[node.op]
            cuda, attrs = op.cuda, attrs_of(node, op)
        else:
            cuda, attrs = STANDARD.get(node.op, Cuda()), dict(node.attrs)
        key = (node.op, *sorted(attrs.items()), *((s.dtype, s.shape) for s in specs))
        if key not in self._known:
            self._known[key] = choose(cuda, attrs, specs, self.target, self.timer)
        return self._known[key]


def report(file: str, decided: Iterable[tuple[gs.Node, Choice]]) -> tuple[Json, ...]:
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
                "microseconds": round(choice.seconds * 1e6, 2),
                "refused": dict(choice.refused),
            }
        rows[key]["nodes"] += 1
    return tuple(rows.values())
