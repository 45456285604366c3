"""Laws of kernels from measured times, and the time of a step from laws.

Times are of two kinds: `time_step --per-launch` times every launch of a bucket by itself, and
`time_step` gives sums by part. A kind of kernel is looked up by its op and tactic,
else by its op, else by its part, apart in prefill and in decode: what was not measured goes by what
is nearest to it, and a kind with nothing near by its bytes and its tactic's own cost; `fitted_by`
tells which. Launches outside a graph take longer: one figure, the same for all launches and found
from the buckets alone that laws are fitted to, is taken off each.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.rehearsal.gb10.card_model import (
    Counted,
    Law,
    Machine,
    Point,
    Times,
    fitted,
    h200,
    times_of,
)
from benchmarks.steps.launch_parts import part_of
from benchmarks.weightless_plan import Bucket, Node, grouped
from spark_engine.interface import DECODE, PREFILL, PREFILL_TILE

Row = Mapping[str, Any]
Key = tuple[str, ...]
Plan = Mapping[tuple[str, int], Bucket]
BY = ("tactic", "op", "part")  # what a law may be of, the most exact first, as `keys_of`
OTHER_WORK = 2.0
EMULATED = ("nvfp4",)  # products that a Hopper has no instruction for
LARGE = 16 << 20  # bytes of a node from which the speed of DRAM is measured
SHORTEST = 0.2e-6  # seconds: what a launch takes at least when the gap is taken off


@dataclass(frozen=True)
class Measured:
    """One bucket's times."""

    model: str  # its name
    bucket: Bucket  # its nodes
    # Times by the kind of kernel, most exact kind first.
    points: tuple[tuple[tuple[Key, ...], Point], ...]
    seconds: float  # of the whole bucket in its graph
    launches: int = 0  # how many were timed one by one
    alone: float = 0.0  # what they took together then


@dataclass(frozen=True)
class Laws:
    """Laws by kind of kernel, fitted to times of `machine`."""

    machine: Machine
    found: Mapping[Key, Law]

    def of(self, node: Node, prefills: bool) -> Law:
        """The nearest that was measured; of none, a mere launch."""
        return next((self.found[k] for k in keys_of(node, prefills) if k in self.found), Law())

    def fitted_by(self, node: Node, prefills: bool) -> str:
        """What of the node the nearest law is of, one of `BY`; empty where nothing was measured."""
        pairs = zip(BY, keys_of(node, prefills), strict=True)
        return next((by for by, key in pairs if key in self.found), "")

    def exact(self, node: Node, prefills: bool) -> bool:
        return self.fitted_by(node, prefills) == BY[0]


def keys_of(node: Node, prefills: bool) -> tuple[Key, ...]:
    """Kinds that a node belongs to, most exact first."""
    phase = PREFILL if prefills else DECODE
    return (
        (phase, node.op, node.tactic),
        (phase, node.op),
        (phase, "part", part_of(node.symbols[0], node.label)),
    )


def laws_of(measured: Sequence[Measured], machine: Machine) -> Laws:
    """The laws that fit the times of these buckets."""
    gap = gap_of(measured)
    points: dict[Key, list[Point]] = defaultdict(list)
    for one in measured:
        for keys, point in one.points:
            launches = sum(n.launches * n.count for n in point.nodes)
            seconds = point.seconds - gap * launches if one.launches else point.seconds
            kept = Point(point.nodes, max(seconds, SHORTEST * launches))
            for key in keys:
                points[key].append(kept)
    return Laws(machine, _Fitted(points, machine))


class _Fitted(Mapping[Key, Law]):
    """Laws by kind, each fitted when it is first asked for; to equal points once."""

    def __init__(self, points: Mapping[Key, Sequence[Point]], machine: Machine) -> None:
        self._points = {key: tuple(found) for key, found in points.items()}
        self._machine, self._known = machine, dict[tuple[Point, ...], Law]()

    def __getitem__(self, key: Key) -> Law:
        points = self._points[key]
        if points not in self._known:
            self._known[points] = fitted(points, self._machine)
        return self._known[points]

    def __contains__(self, key: object) -> bool:
        return key in self._points

    def __iter__(self) -> Iterator[Key]:
        return iter(self._points)

    def __len__(self) -> int:
        return len(self._points)


def gap_of(measured: Iterable[Measured]) -> float:
    """Seconds that a launch takes longer by itself than in its graph: the median over the buckets,
    since in long ones the gap drowns in how steady the clocks are."""
    each = [(m.alone - m.seconds) / m.launches for m in measured if m.launches]
    return max(statistics.median(each), 0.0) if each else 0.0


def node_times(node: Node, laws: Laws, machine: Machine, prefills: bool) -> Times:
    """What a node takes on a machine, which is that of its plan or the one the laws are of.

    A tactic that was never timed, and by its own cost takes OTHER_WORK times what its op must,
    does more than its op asks for (experts read once a chunk): there that cost counts, as work.
    Operations that the laws' machine emulates say nothing of one that has the instruction.
    Of a kind without any law only the bytes are known: all of them count as from DRAM, and on
    another machine than that of the laws, for which the plan was made, its tactic's cost too.
    """
    law, foreign = laws.of(node, prefills), machine != laws.machine
    if foreign and node.amounts.kind in EMULATED:
        law = replace(law, op=0.0)
    times = times_of(node.amounts, len(node.symbols), law, machine)
    if not laws.fitted_by(node, prefills):
        moved = node.amounts.moved / machine.dram_rate
        return replace(times, dram=moved, work=node.cost if foreign else 0.0)
    if not foreign or laws.exact(node, prefills):
        return times
    return replace(times, work=node.cost) if node.cost > OTHER_WORK * times.seconds else times


def step_seconds(bucket: Bucket, laws: Laws, machine: Machine) -> float:
    """What a launch of the whole bucket takes on a machine."""
    return sum(
        count * node_times(node, laws, machine, bucket.prefills).seconds
        for node, count in grouped(bucket.nodes).items()
    )


def held_to(measured: Sequence[Measured], machine: Machine) -> list[dict[str, Any]]:
    """Of each bucket: what was measured, what laws say that were fitted to all, and what those say
    that were fitted to none of as many rows of this model, in no family of decode (None where that
    leaves none of this model and phase)."""
    whole, rows = laws_of(measured, machine), []
    for one in measured:
        bucket = one.bucket
        row: dict[str, Any] = {"model": one.model, "family": bucket.family, "rows": bucket.rows}
        row["measured_ms"] = round(one.seconds * 1e3, 3)
        others = [m for m in measured if not _together(m, one)]
        like = any((m.model, m.bucket.prefills) == (one.model, bucket.prefills) for m in others)
        for name, laws in (("seen", whole), ("unseen", laws_of(others, machine) if like else None)):
            seconds = step_seconds(bucket, laws, machine) if laws else None
            row[f"{name}_ms"] = None if seconds is None else round(seconds * 1e3, 3)
            row[f"{name}_error"] = None if seconds is None else round(seconds / one.seconds - 1, 4)
        rows.append(row)
    return rows


def _together(one: Measured, other: Measured) -> bool:
    """Whether they are of one model and of as many rows: a step, and rounds of drafts."""
    keys = [(m.model, m.bucket.prefills, m.bucket.rows) for m in (one, other)]
    return keys[0] == keys[1]


def of_launches(run: Row, plan: Plan) -> list[Measured]:
    """The buckets of a run of `launch_times` that the plan has, too.

    Launches of equal nodes are one point. Raises ValueError naming nodes that the plan lacks.
    """
    found = []
    for row in run["buckets"]:
        bucket = plan.get((row["family"], row["rows"]))
        if bucket is None:
            continue
        took = _by_node(row)
        bucket = _as_timed(bucket, took)
        points = tuple(_points(bucket, took))
        seconds = [us for launches in took.values() for _, us in launches]
        graph, alone = row["graph_ms"] * 1e-3, sum(seconds)
        found.append(Measured(run["model"], bucket, points, graph, len(seconds), alone))
    return found


Took = Mapping[tuple[str, str, str], list[tuple[str, float]]]  # symbols and seconds by node


def _by_node(row: Row) -> Took:
    """Launches of equal nodes, by label, op and tactic."""
    took: dict[tuple[str, str, str], list[tuple[str, float]]] = defaultdict(list)
    for kind, us in row["launches"]:
        label, op, tactic, symbol = row["kinds"][kind]
        took[label, op, tactic].append((symbol, us * 1e-6))
    return took


def _as_timed(bucket: Bucket, took: Took) -> Bucket:
    """The bucket with the tactics and kernels that were timed; as planned where none was."""
    counts = Counter((node.label, node.op) for node in bucket.nodes)

    def timed(node: Node) -> Node:
        tactics = [t for label, op, t in took if (label, op) == (node.label, node.op)]
        if not tactics:
            return node
        tactic = node.tactic if node.tactic in tactics else tactics[0]
        launches = took[node.label, node.op, tactic]
        each = max(round(len(launches) / counts[node.label, node.op]), 1)
        symbols = tuple(symbol for symbol, _ in launches[:each])
        return replace(node, tactic=tactic, symbols=symbols)

    return replace(bucket, nodes=tuple(map(timed, bucket.nodes)))


def _points(bucket: Bucket, took: Took) -> Iterator[tuple[tuple[Key, ...], Point]]:
    """A point for all nodes of one label and tactic."""
    nodes = grouped(bucket.nodes)
    for (label, op, tactic), launches in took.items():
        if not any((n.label, n.op) == (label, op) for n in nodes):
            raise ValueError(f"{bucket.family} {bucket.rows}: no node {label} of {op} is planned")
        known = (label, op, tactic)
        same = [(n, c) for n, c in nodes.items() if (n.label, n.op, n.tactic) == known]
        if same:
            counted = tuple(Counted(n.amounts, len(n.symbols), count) for n, count in same)
            seconds = sum(seconds for _, seconds in launches)
            yield keys_of(same[0][0], bucket.prefills), Point(counted, seconds)


def of_parts(rows: Iterable[Row], plan: Plan) -> list[Measured]:
    """The buckets of rows of `time_step`, with times summed by part."""
    found = []
    for row in rows:
        whole = [(plan.get((DECODE, row["npl"])), row["parts_ms"], row["step_ms"])]
        if split := row.get("prefill_split"):
            bucket = plan.get((PREFILL, split["tokens"] // PREFILL_TILE))
            whole.append((bucket, split["parts_ms"], split["alone_ms"]))
        found += [_by_part(row["model"], b, parts, ms) for b, parts, ms in whole if b is not None]
    return found


def _by_part(model: str, bucket: Bucket, parts_ms: Mapping[str, float], step_ms: float) -> Measured:
    points = []
    nodes: dict[Key, list[Counted]] = defaultdict(list)
    for node, count in grouped(bucket.nodes).items():
        key = keys_of(node, bucket.prefills)[-1]
        nodes[key].append(Counted(node.amounts, len(node.symbols), count))
    for key, counted in nodes.items():
        if (ms := parts_ms.get(key[-1], 0.0)) > 0:
            points.append(((key,), Point(tuple(counted), ms * 1e-3)))
    return Measured(model, bucket, tuple(points), step_ms * 1e-3)


def machine_of(run: Row, measured: Sequence[Measured]) -> Machine:
    """The card, or the part of it, that a run of `launch_times` was measured on.

    Its multiprocessors draw what the plain kernel read, or more where a launch of the run did.
    """
    known, gap = run["machine"], gap_of(measured)
    l2_bytes, read = known["l2_bytes"], float(known["read"])
    for one in measured:
        for _, point in one.points:
            nodes = sum(n.count for n in point.nodes)
            moved = sum(n.count * n.amounts.dram(l2_bytes) for n in point.nodes)
            launches = sum(n.count * n.launches for n in point.nodes)
            if moved > nodes * LARGE:
                read = max(read, moved / (point.seconds - gap * launches))
    return replace(h200(known["sms"], known["sm_mhz"] * 1e6, read), l2_bytes=l2_bytes)
