"""The rewriting engine: applies rules in order, counts them, and records refusals with reasons.

Knows how rules are applied; knows no rule. A rule finds a match, and either refuses it with a
readable reason or rewrites it.
"""

from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_graphsurgeon as gs

from spark_engine.builder.graph.nodes import Ops
from spark_engine.errors import GraphError
from spark_engine.manifest import Refusal
from spark_engine.models.weights.recipes import Reads, Weight

MAX_ROUNDS = 100  # a rule that still finds matches after so many sweeps does not converge


@dataclass(frozen=True)
class RewriteContext:
    """The data that a rule may read and change: the graph, and the recipes of its weights.

    `checkpoint`: to read scalars from, when a rule compares them.
    """

    graph: gs.Graph
    weights: MutableMapping[str, Weight]
    checkpoint: Reads
    ops: Ops


@dataclass(frozen=True)
class Match:
    """A place where a rule applies: its root node, and what the pattern found around it."""

    root: gs.Node
    parts: dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """One rewrite.

    Attributes:
        name: its name in the manifest's counts.
        pattern: (context, node) -> the match if the graph around the node fits, else None.
        check: (context, match) -> None, or the reason why the rule refuses this match.
        replace: (context, match) rewires the graph; dead nodes are swept afterwards.
    """

    name: str
    pattern: Callable[[RewriteContext, gs.Node], Match | None]
    check: Callable[[RewriteContext, Match], str | None]
    replace: Callable[[RewriteContext, Match], None]


@dataclass(frozen=True)
class Rewritten:
    """How often each rule applied (0 included), and what was refused."""

    counts: dict[str, int]
    refusals: tuple[Refusal, ...]


def rewrite(context: RewriteContext, rules: Sequence[Rule]) -> Rewritten:
    """Applies each rule until it finds no further match, then the next. Changes the context.

    Raises GraphError when a rule does not converge (it recreates its own pattern).
    """
    counts: dict[str, int] = {}
    refusals: dict[tuple[str, str], Refusal] = {}
    for rule in rules:
        counts[rule.name] = 0
        for _ in range(MAX_ROUNDS):
            done = _sweep(context, rule, refusals)
            counts[rule.name] += done
            if not done:
                break
        else:
            raise GraphError(f"rule {rule.name} does not converge")
    return Rewritten(counts, tuple(refusals.values()))


def _sweep(context: RewriteContext, rule: Rule, refusals: dict[tuple[str, str], Refusal]) -> int:
    """One pass over the nodes in graph order; skips nodes that a replacement removed."""
    done = 0
    for node in list(context.graph.nodes):
        match = rule.pattern(context, node) if node.outputs else None
        if match is None:
            continue
        reason = rule.check(context, match)
        if reason is not None:
            refusals[rule.name, node.name] = Refusal(rule.name, node.name, reason)
            continue
        rule.replace(context, match)
        refusals.pop((rule.name, node.name), None)
        done += 1
    if done:
        _clean(context.graph)
        _drop_unused_weights(context)
    return done


def _clean(graph: gs.Graph) -> None:
    """Removes nodes without readers, and sorts the others.

    Inputs stay, and are detached during the cleanup: GraphSurgeon searches a list of all tensors
    for each of them, and there are a thousand weights.
    """
    inputs, graph.inputs = graph.inputs, []
    graph.cleanup()
    graph.inputs = inputs
    graph.toposort()


def _drop_unused_weights(context: RewriteContext) -> None:
    graph, weights = context.graph, context.weights
    graph.inputs = [t for t in graph.inputs if t.outputs or t.name not in weights]
    kept = {t.name for t in graph.inputs}
    for name in [n for n in weights if n not in kept]:
        del weights[name]
