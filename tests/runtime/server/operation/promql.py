"""Enough of PromQL to compute a board's panels from two scrapes of /metrics.

Follows Prometheus' documentation; refuses what a board does not use, a rate of what is no counter,
and a label that a series has not.
"""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, TypeAlias

import promql_parser
from prometheus_client.parser import text_string_to_metric_families

Labels: TypeAlias = frozenset[tuple[str, str]]
Vector: TypeAlias = dict[Labels, float]
COUNTING = ("counter", "histogram")


@dataclass(frozen=True)
class Scrape:
    """One answer of /metrics: samples by name, and the kind of each name."""

    samples: dict[str, Vector]
    kinds: dict[str, str]

    @classmethod
    def of(cls, text: str) -> Scrape:
        samples: dict[str, Vector] = defaultdict(dict)
        kinds = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples[sample.name][frozenset(sample.labels.items())] = sample.value
                kinds[sample.name] = family.type
        return cls(samples, kinds)


@dataclass(frozen=True)
class Panels:
    """Queries over two scrapes that are `seconds` apart."""

    before: Scrape
    after: Scrape
    seconds: float = 1.0

    def compute(self, query: str) -> Vector:
        """The query's value. Raises AssertionError for one that would stay empty by mistake."""
        value = self._value(promql_parser.parse(query))
        assert isinstance(value, dict), f"{query} is a number"
        return value

    def _value(self, node: Any) -> Vector | float:
        kind = type(node).__name__
        if kind == "NumberLiteral":
            return float(node.val)
        if kind == "ParenExpr":
            return self._value(node.expr)
        if kind == "VectorSelector":
            return self._select(node, self.after)
        if kind == "AggregateExpr":
            return self._aggregate(node)
        if kind == "BinaryExpr":
            return self._binary(str(node.op), self._value(node.lhs), self._value(node.rhs))
        assert kind == "Call", f"{kind} is not known"
        return self._call(node.func.name, node.args)

    def _select(self, node: Any, scrape: Scrape) -> Vector:
        assert node.name in self.after.samples, f"there is no {node.name}"
        found = dict(scrape.samples.get(node.name, {}))
        for matcher in node.matchers.matchers:
            for labels in list(found):
                known = dict(labels)
                assert matcher.name in known, f"{node.name} has no label {matcher.name}"
                exact = str(matcher.op) == "MatchOp.Equal"
                wanted = re.escape(matcher.value) if exact else matcher.value
                if not re.fullmatch(wanted, known[matcher.name]):
                    del found[labels]
        return found

    def _call(self, name: str, args: Any) -> Vector:
        if name == "histogram_quantile":
            share, vector = self._value(args[0]), self._value(args[1])
            assert isinstance(share, float) and isinstance(vector, dict)
            return _quantile(share, vector)
        assert name in ("rate", "increase"), f"{name} is not known"
        selector = args[0].vector_selector
        kind = self.after.kinds[selector.name]
        assert kind in COUNTING, f"{name} of {selector.name}, a {kind}"
        now, then = self._select(selector, self.after), self._select(selector, self.before)
        assert now.keys() == then.keys(), f"series of {selector.name} begin with their first event"
        over = self.seconds if name == "rate" else 1.0
        return {labels: (value - then[labels]) / over for labels, value in now.items()}

    def _aggregate(self, node: Any) -> Vector:
        vector = self._value(node.expr)
        assert isinstance(vector, dict)
        kept = set(node.modifier.labels) if node.modifier else set()
        groups: dict[Labels, list[float]] = defaultdict(list)
        for labels, value in vector.items():
            own = frozenset(row for row in labels if row[0] in kept)
            assert len(own) == len(kept), f"{node}: {dict(labels)} lacks one of {kept}"
            groups[own].append(value)
        reduce = {"sum": sum, "max": max}[str(node.op)]
        return {labels: reduce(values) for labels, values in groups.items()}

    def _binary(self, op: str, left: Vector | float, right: Vector | float) -> Vector:
        assert isinstance(left, dict)
        if op in (">", "=="):
            assert isinstance(right, float)
            holds = {">": operator.gt, "==": operator.eq}[op]
            return {labels: value for labels, value in left.items() if holds(value, right)}
        assert op == "/" and isinstance(right, dict), f"{op} is not known"
        shared = left.keys() & right.keys()
        return {k: left[k] / right[k] if right[k] else math.nan for k in shared}


def _quantile(share: float, vector: Vector) -> Vector:
    """By straight lines between the buckets' bounds, as Prometheus does."""
    groups: dict[Labels, list[tuple[float, float]]] = defaultdict(list)
    for labels, value in vector.items():
        known = dict(labels)
        assert "le" in known, "a quantile needs the buckets' bounds: sum by (le)"
        groups[labels - {("le", known["le"])}].append((float(known["le"]), value))
    found = {}
    for labels, rows in groups.items():
        rows.sort()
        assert rows[-1][0] == math.inf, "the last bucket is missing"
        rank, low, below = share * rows[-1][1], 0.0, 0.0
        found[labels] = math.nan
        for bound, count in rows if rows[-1][1] else ():
            if count >= rank:
                width = 0.0 if bound == math.inf else bound - low
                found[labels] = low + width * ((rank - below) / max(count - below, 1e-9))
                break
            low, below = bound, count
    return found
