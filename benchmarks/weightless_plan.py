"""A full-size model's launches without its weights: every node with its tactic, in order.

The stages of a build up to the choice of tactics, over the configs of a model, which
`published.folder_of` finds by its name: nothing is read, compiled or written, so that it takes
seconds for any target.
"""

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import onnx_graphsurgeon as gs

from benchmarks.node_work import Amounts, amounts
from benchmarks.published import folder_of
from spark_engine.builder.assemble import weight_specs
from spark_engine.builder.build import pack_all
from spark_engine.builder.graph.lower import facts_of, lower
from spark_engine.builder.graph.nodes import attrs_of, spec_of
from spark_engine.builder.graph.rewrite import RewriteContext, rewrite
from spark_engine.builder.native.no_tactic import check
from spark_engine.builder.native.program import BucketTactics, decide
from spark_engine.builder.native.tactics import CONTEXT, Chooser, Work
from spark_engine.builder.plan.buckets import Size
from spark_engine.builder.plan.options import Options, gpu_of, resolve
from spark_engine.builder.rules import rules_for
from spark_engine.interface import PREFILL
from spark_engine.models.drafter import with_drafter
from spark_engine.models.open_model import open_model, with_ranks
from spark_engine.models.weights.shards import TILE
from spark_engine.models.weights.stored_model import Model
from spark_engine.op import DOMAIN
from spark_engine.plugins.registry import REGISTRY

ROWS, PROMPTS, DRAFTS = (1, 8, 32, 64, 128), (4096, 8192), (1, 3)  # of the engines that are planned
LAYER = re.compile(r"(?<![a-z])(layers|draft|blocks)\.\d+\.")


@dataclass(frozen=True)
class Node:
    """One node of a bucket."""

    label: str  # its name without the number of its layer: "layers.*.mlp.gate_up"
    # op and tactic: what runs it.
    op: str
    tactic: str
    symbols: tuple[str, ...]  # the kernels of its launches
    amounts: Amounts  # what it moves and computes
    cost: float  # seconds by which the tactic was chosen


@dataclass(frozen=True)
class Bucket:
    """One bucket's nodes in their order."""

    family: str
    rows: int
    nodes: tuple[Node, ...]

    @property
    def prefills(self) -> bool:
        """Whether it is a bucket of prompts."""
        return self.family == PREFILL


def label_of(name: str) -> str:
    """A node's name without numbers of layers: equal names are nodes of equal shapes."""
    return LAYER.sub(r"\1.*.", name)


def options(target: str, **given: Any) -> Options:
    """Options of a build of the published buckets that times nothing; `given` ones replace them."""
    wanted = {
        "decode": ROWS,
        "prefill": PROMPTS,
        "verify": tuple((r, k) for r in ROWS for k in DRAFTS),
        "drafts": max(DRAFTS),
        "max_seqs": max(ROWS),
        "max_context": max(PROMPTS) + 1024,
        "kv_tokens": 163_840,
        "timing": False,
    }
    return Options(target, **wanted | given)


def plan_of(
    model: str | Path, options: Options, context: int = CONTEXT, without: Collection[str] = ()
) -> dict[tuple[str, int], Bucket]:
    """The buckets of a build with these options, by family and rows.

    In decode `context` tokens are behind each row; rules `without` do not fuse; of several ranks,
    one. Raises what a build raises.
    """
    found = (bucket_of(decided, context) for decided in decided_of(model, options, without))
    return {(b.family, b.rows): b for b in found}


def decided_of(
    name: str | Path, options: Options, without: Collection[str] = ()
) -> Iterator[BucketTactics]:
    """The buckets with their graphs; for `options.gpu` where it is given; of several ranks, one.
    Raises what a build raises."""
    model = with_ranks(opened(name), options.tp, TILE, options.across_hosts)
    if options.drafter is not None:
        model = with_drafter(model, Path(options.drafter))
    plan = resolve(replace(options, gpu=options.gpu or gpu_of(options)), facts_of(model))
    assert plan.gpu and model.checkpoint, f"--target {options.target} is no GPU"
    families = plan.buckets.families(plan.limits.drafts)
    graphs = {family: lower(model, plan, family) for family in families}
    for graph in graphs.values():
        context = RewriteContext(graph.graph, graph.weights, model.checkpoint, REGISTRY)
        rewrite(context, [rule for rule in rules_for(plan.gpu) if rule.name not in without])
    pack_all(graphs)
    weight_specs([*graphs.values()])
    chooser = Chooser(REGISTRY, plan.gpu)
    for family, graph in graphs.items():
        for size in plan.buckets.of(family):
            found = decide(graph.graph, size, chooser)
            check((found,), plan.gpu, REGISTRY)  # a node that no tactic takes would cost nothing
            yield found


@lru_cache(2)
def opened(name: str | Path) -> Model:
    """A model, which a plan does not change: of ten thousand experts' tensors it takes a while."""
    return open_model(folder_of(name))


def bucket_of(decided: BucketTactics, context: int) -> Bucket:
    """A bucket that was decided; some tactic takes each of its nodes."""
    size = decided.size
    seen = size.rows * size.tile if size.family == PREFILL else context
    nodes = []
    for node, choice in decided.nodes:
        assert choice.tactic is not None and choice.plan is not None
        symbols = tuple(launch.symbol for launch in choice.plan.launches)
        moved = amounts(work_of(node, size, seen))
        known = (label_of(node.name), node.op, choice.tactic.name, symbols)
        nodes.append(Node(*known, moved, choice.seconds))
    return Bucket(size.family, size.rows, tuple(nodes))


def work_of(node: gs.Node, size: Size, context: int) -> Work:
    """A node of a graph in a bucket, with so many tokens behind each sequence."""
    ins = tuple(spec_of(t).bind(size.dims) for t in node.inputs)
    outs = tuple(spec_of(t).bind(size.dims) for t in node.outputs)
    cold = frozenset(i for i, t in enumerate(node.inputs) if not t.inputs)
    op = REGISTRY[node.op] if node.domain == DOMAIN else None
    attrs = attrs_of(node, op) if op is not None else dict(node.attrs)
    return Work(node.op, op, attrs, ins, outs, cold, context)


def grouped(nodes: Iterable[Node]) -> dict[Node, int]:
    """Equal nodes once, with how many there are."""
    found: dict[Node, int] = {}
    for node in nodes:
        found[node] = found.get(node, 0) + 1
    return found
