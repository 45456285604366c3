"""Recorded times of tactics by architecture, for builds without a GPU.

A row of `<architecture>.json` has an op, its tokens, its size (N * K of linear ops, value heads of
`gdn_decode`, else 0) and microseconds by tactic; rounds of drafts have other rows.
Logarithms are interpolated between rows and extrapolated beyond them, first along tokens, then
along sizes.
"""

import json
import math
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from spark_engine.interface import MOST_DRAFTS
from spark_engine.op import Attrs

IN_ROUNDS = " in rounds"  # behind an op's name: rounds of four tokens, by their rows
FAR = 1.5  # times a recorded size: beyond it the formula of `cost` is more accurate
Point: TypeAlias = tuple[float, float]
Curve: TypeAlias = tuple[float, tuple[Point, ...]]  # log size; points: log tokens, log seconds


@cache
def _rows(architecture: str) -> tuple[tuple[str, int, int, MappingProxyType[str, float]], ...]:
    path = Path(__file__).with_name(f"{architecture}.json")
    rows = json.loads(path.read_text())["rows"] if path.is_file() else []
    return tuple((r["op"], r["tokens"], r["size"], MappingProxyType(r["us"])) for r in rows)


def op_of(op: str, attrs: Attrs) -> str:
    """The op of a node's rows; a round of two tokens is taken as a single one."""
    return op + IN_ROUNDS if 2 < int(attrs.get("tile", 1)) <= 1 + MOST_DRAFTS else op


@cache
def best(architecture: str) -> frozenset[tuple[str, str]]:
    """The (op, tactic) pairs that are the fastest in some row."""
    pairs = ((op, min(us, key=us.__getitem__)) for op, _, _, us in _rows(architecture))
    return frozenset((op.removesuffix(IN_ROUNDS), tactic) for op, tactic in pairs)


@cache
def _curves(architecture: str, op: str, tactic: str) -> tuple[Curve, ...]:
    """The recorded points of a tactic, by size."""
    found: dict[float, list[Point]] = {}
    for name, tokens, size, us in _rows(architecture):
        if name == op and size and tactic in us:
            point = math.log(tokens), math.log(us[tactic] * 1e-6)
            found.setdefault(math.log(size), []).append(point)
    return tuple((size, tuple(sorted(points))) for size, points in sorted(found.items()))


@cache
def _range(architecture: str, op: str) -> tuple[float, float]:
    """The least and the greatest size for which times are used."""
    sizes = [size for name, _, size, _ in _rows(architecture) if name == op and size]
    return (min(sizes) / FAR, max(sizes) * FAR) if sizes else (math.inf, 0.0)


def seconds(architecture: str, op: str, tactic: str, size: int, tokens: int) -> float | None:
    """Seconds of a tactic; None if it has no times, or none near this size."""
    least, most = _range(architecture, op)
    curves = _curves(architecture, op, tactic)
    if not curves or not least <= size <= most:
        return None
    at = math.log(tokens)
    points = [(s, _between(curve, at, slope=(0.0, 1.0))) for s, curve in curves]
    return math.exp(_between(points, math.log(size), slope=(1.0, 1.0)))


def _between(points: Sequence[Point], x: float, slope: tuple[float, float]) -> float:
    """Linear interpolation between the points around x. Before the first point the slope is the
    least of `slope`; after the last it is that of the last two, clamped to `slope`."""
    least, most = slope
    (x0, y0), (x1, y1) = points[0], points[-1]
    if x <= x0:
        return y0 + least * (x - x0)
    if x >= x1:
        rise = (y1 - points[-2][1]) / (x1 - points[-2][0]) if len(points) > 1 else least
        return y1 + min(most, max(least, rise)) * (x - x1)
    (x0, y0), (x1, y1) = next(p for p in pairwise(points) if p[1][0] > x)
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
