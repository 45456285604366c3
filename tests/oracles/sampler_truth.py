"""The sampling pipeline once more, written from docs/graph.md alone: one row at a time, in sorted
lists of Python floats. Imports nothing of the package, so that it shares no mistake with it.

An executor that works in float32 may decide otherwise where two sides of a decision nearly meet.
`Drawn.margin` is the distance of the closest decision from its border, relative to the larger
side; the order of what is kept and what is not is one too, but for equal logits (the lower id
comes first, in every precision).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Row:
    """What one row is sampled from; `seed` are the two 32-bit words, signed or not."""

    logits: Sequence[float]
    vocab: int
    token_counts: Sequence[int]
    temperature: float
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    top_k: int = 0
    seed: tuple[int, int] = (0, 0)
    bias: Sequence[tuple[int, float]] = ()
    position: int = 0
    allowed: frozenset[int] | None = None  # the ids that may be chosen; None: all


@dataclass
class Drawn:
    """The answer: the token, its raw log-probability, and how every kept id was weighted."""

    token: int = 0
    logprob: float = 0.0
    ok: bool = True
    ranked: list[tuple[int, float]] = field(default_factory=list)  # all ids, raw, descending
    chances: Mapping[int, float] = field(default_factory=dict)
    margin: float = math.inf


def uniform(position: int, seed: tuple[int, int]) -> float:
    """Philox4x32-10 as its authors describe it, of the counter (position, 0, 0, 0)."""
    c = [position & MASK, 0, 0, 0]
    k = [seed[0] & MASK, seed[1] & MASK]
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [right >> 32 ^ c[1] ^ k[0], right & MASK, left >> 32 ^ c[3] ^ k[1], left & MASK]
        k = [k[0] + 0x9E3779B9 & MASK, k[1] + 0xBB67AE85 & MASK]
    return ((c[0] >> 8) + 0.5) / (1 << 24)


def sample(row: Row) -> Drawn:
    drawn = Drawn()
    if not all(map(math.isfinite, row.logits)):
        return Drawn(ok=False)
    top = max(row.logits)
    norm = top + math.log(math.fsum(math.exp(x - top) for x in row.logits))
    raw = [x - norm for x in row.logits]
    drawn.ranked = sorted(enumerate(raw), key=lambda pair: (-pair[1], pair[0]))
    ids = range(row.vocab) if row.allowed is None else sorted(row.allowed)
    order = sorted((-_penalised(row, i), i) for i in ids if i < row.vocab)
    if row.temperature == 0:
        drawn.token = order[0][1]
        best = [-z for z, _ in order if z != order[0][0]][:1]
        drawn.margin = min([_gap(-order[0][0], z) for z in best], default=math.inf)
    else:
        _draw(row, order, drawn)
    drawn.logprob = raw[drawn.token]
    return drawn


def _penalised(row: Row, i: int) -> float:
    """Bias, then the three penalties of the id `i`."""
    z = row.logits[i] + math.fsum(value for token, value in row.bias if token == i)
    times, prompted = divmod(row.token_counts[i], 2)
    if times or prompted:
        z = z / row.repetition if z > 0 else z * row.repetition
    if times:
        z -= row.frequency * times + row.presence
    return z


def _draw(row: Row, order: list[tuple[float, int]], drawn: Drawn) -> None:
    """`order` holds (−z, id), best first; fills in the token, the chances and the margin."""
    best = order[0][0]
    kept = [(math.exp((best - z) / row.temperature), i, z) for z, i in order]
    margins = [_gap(w, row.min_p) for w, _, _ in kept if row.min_p > 0 and w < 1]
    kept = [entry for entry in kept if entry[0] >= row.min_p]
    if 0 < row.top_k < len(kept):
        margins.append(_order(kept, row.top_k))
        kept = kept[: row.top_k]
    goal = row.top_p * math.fsum(w for w, _, _ in kept)
    exact = all(w in (0.0, 1.0) for w, _, _ in kept)  # whole numbers are exact in every precision
    short: list[tuple[float, int, float]] = []
    for entry in kept if row.top_p < 1 else ():
        short.append(entry)
        reached = math.fsum(w for w, _, _ in short)
        if not (exact and reached == goal):
            margins.append(_gap(reached, goal))
        if reached >= goal:
            break
    if 0 < len(short) < len(kept):
        margins.append(_order(kept, len(short)))
    kept = short or kept
    total = math.fsum(w for w, _, _ in kept)
    goal = uniform(row.position, row.seed) * total
    by_id = sorted((i, w) for w, i, _ in kept)
    drawn.chances = {i: w / total for i, w in by_id}
    sums = list(accumulate(w for _, w in by_id))
    drawn.token = next(i for (i, _), reached in zip(by_id, sums, strict=True) if reached > goal)
    margins += [_gap(reached, goal) for reached in sums]
    # An error of a logit grows by 1 / temperature before it is one of a weight.
    drawn.margin = min(margins, default=math.inf) * min(1.0, row.temperature)


def _order(kept: list[tuple[float, int, float]], cut: int) -> float:
    """How clearly what is before `cut` comes before what is behind; equal logits do by their id."""
    last, first = kept[cut - 1], kept[cut]
    others = [(last, behind) for behind in kept[cut:] if behind[2] != last[2]][:1]
    others += [(before, first) for before in kept[:cut] if before[2] != first[2]][-1:]
    return min((_gap(x[0], y[0]) if x[0] > 0 else 0.0 for x, y in others), default=math.inf)


def _gap(a: float, b: float) -> float:
    if a == b:
        return 0.0
    return abs(a - b) / max(abs(a), abs(b)) if math.isfinite(a - b) else math.inf
