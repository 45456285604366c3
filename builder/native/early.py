"""Overlaps the launches of a bucket, so that weights are fetched during other launches.

Short launches, and the sums of several ranks, leave a GPU's memory idle. So a short kernel triggers
the next launch before its own wait (`griddepcontrol.wait`), if that launch's reads before its wait
do not depend on launches that still run; a GEMM that starts so early prefetches as many weights as
shared memory holds; and a small projection runs concurrently with the large one of the same input.
Knows `Early`; knows no op. Does not change the bits of results: every launch still waits for all
before it, before it reads what they write or writes what they read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from spark_engine.builder.graph.nodes import producer
from spark_engine.builder.native.program import BucketTactics
from spark_engine.builder.native.tactics import Chooser, TacticChoice
from spark_engine.builder.plan.buckets import Size
from spark_engine.kernel import MOST_OPEN, Launch, Target

if TYPE_CHECKING:
    import onnx_graphsurgeon as gs

Pairs = list[tuple["gs.Node", TacticChoice]]
MOST_SMALL = 256  # the most rows of weights of a projection that runs concurrently with another
MOST_TOKENS = 128  # of a bucket that is timed in several forms; larger ones have long launches
UNTIMED_TOKENS = 32  # up to so many, untimed launches begin early: H200, log/runtime.md


def may_gain(bucket: BucketTactics) -> bool:
    """True if the bucket's launches are short enough that fetching ahead may shorten them."""
    return bucket.size.rows * bucket.size.tile <= MOST_TOKENS


def untimed(size: Size, target: Target) -> bool:
    """True if launches begin early where nothing is timed."""
    return target.large_shared and size.rows * size.tile <= UNTIMED_TOKENS


def small_behind(
    given: Sequence[tuple[gs.Node, TacticChoice]], late: Callable[[gs.Node], TacticChoice | None]
) -> Pairs:
    """The nodes in order, each small projection after the large one of the same input, if that is
    the next node and `late` has a tactic that does not wait for it."""
    pairs = list(given)
    for i in range(len(pairs) - 1):
        (small, _), (large, _) = pairs[i : i + 2]
        if _projects(small) and _projects(large) and _rows(small) <= MOST_SMALL < _rows(large):
            known = {id(producer(t)) for t in large.inputs} - {id(None)}
            choice = late(small) if {id(producer(small.inputs[0]))} == known else None
            if choice is not None:
                pairs[i : i + 2] = pairs[i + 1], (small, choice)
    return pairs


def begin_early(bucket: BucketTactics, chooser: Chooser, deep: bool = True) -> BucketTactics:
    """The bucket with each launch started as early as `Early` allows, and small projections behind
    large ones; `deep`: with `Early.stages`."""
    behind = small_behind(bucket.nodes, partial(chooser.late, size=bucket.size))
    bucket = replace(bucket, nodes=tuple(behind))
    launches = list(_launches(bucket))
    found: list[list[Launch]] = [[] for _ in bucket.nodes]
    open_ = 0  # launches before the previous one that may still run when a launch starts
    for i, (at, launch) in enumerate(launches):
        after = launches[i + 1][1] if i + 1 < len(launches) else None
        late = launch.early.late and not open_ and _older(bucket, at, launches, i)
        lets = launch.early.lets and after is not None and after.pdl and after.early.begins
        if deep and open_ and launch.early.stages is not None:
            macros, shared = launch.early.stages
            launch = replace(_defined(launch, dict(macros)), shared=shared)
        if launch.pdl and lets and open_ + 2 <= MOST_OPEN:
            launch = _defined(launch, {"EARLY": "1"} | ({"LATE": "1"} if late else {}))
            open_ += 1
        else:
            open_ = 0
        found[at].append(launch)
    made: dict[tuple[int, tuple[Launch, ...]], TacticChoice] = {}
    pairs = []
    for (node, choice), mine in zip(bucket.nodes, found, strict=True):
        assert choice.plan is not None
        key = id(choice), tuple(mine)  # nodes that share a decision share the new one
        if key not in made:
            made[key] = replace(choice, plan=replace(choice.plan, launches=key[1]))
        pairs.append((node, made[key]))
    return replace(bucket, nodes=tuple(pairs))


def _launches(bucket: BucketTactics) -> Iterator[tuple[int, Launch]]:
    for at, (_, choice) in enumerate(bucket.nodes):
        assert choice.plan is not None
        for launch in choice.plan.launches:
            yield at, launch


def _older(bucket: BucketTactics, at: int, launches: list[tuple[int, Launch]], i: int) -> bool:
    """True if the node's first input was written before the launch that precedes its launch `i`."""
    source = producer(bucket.nodes[at][0].inputs[0])
    if source is None or i == 0:
        return False
    made = next(n for n, (node, _) in enumerate(bucket.nodes) if node is source)
    return made < launches[i - 1][0]


def _defined(launch: Launch, macros: dict[str, str]) -> Launch:
    """The launch with these macros, which replace those of the same names."""
    kept = tuple(pair for pair in launch.defines if pair[0] not in macros)
    return replace(launch, defines=(*kept, *macros.items()))


def _projects(node: gs.Node) -> bool:
    return bool(node.op.endswith("linear"))


def _rows(node: gs.Node) -> int:
    """The largest number of rows of the node's weights."""
    return int(node.outputs[0].shape[-1])
