"""How many drafts the next round verifies: the k with the most expected tokens per microsecond.

Knows the cost of a round of each bucket (`step_costs`) and how often drafts were accepted; knows no
scheduler and no tensor. The choice changes speed only, never a token.

- A draft counts only when those before it were accepted, so each position has its own conditional
  probability. A request starts from the engine's mean and moves to its own acceptance.
- Drafts from the text, those of the head and those of a block drafter have their own. Rounds of few
  drafts make the head's, those of more the drafter's, so a choice of k is one between them. The
  last round that was read says whether a slot is expected to have a text's next, and what the next
  round keeps counts for the expected ones, which may be no longer there. Without head and drafter,
  slots without a match expect one token.
- A slot without drafts gets one token of its next round, which makes its first drafts, so a choice
  is judged by the next round and AHEAD more.
- Another k must promise MARGIN more than the one before it.
- Depths that are not used are not measured. Every EVERY rounds or more, two rounds of the largest k
  probe, by turns that of each maker: the first makes the drafts, the second verifies them. Their
  expected loss is limited to SHARE of all time. Where a step's length is bounded and prefill is in
  it, a probe waits, LATE rounds at most, and one in progress ends.
- What drafts lost is not left to estimates: an account in decode steps pays what a round takes
  more, and gets what it kept and SHARE of all time. Once it is empty no round has drafts until it
  pays for TRIAL of the largest k, so in all an engine is behind one without drafts by no more than
  SHARE of the time and CREDIT steps.
- With a fixed depth: the largest k that a request can use.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from spark_engine.interface import BLOCKS, COPIED, DECODE, MTP, SOURCES, verify_family
from spark_engine.runtime.engine.policy.step_costs import StepCosts
from spark_engine.runtime.engine.sequence import Sequence as Request

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]

HEAD, TEXT, BLOCK = map(SOURCES.index, (MTP, COPIED, BLOCKS))  # where drafts are from
PRIOR, PRIOR_WEIGHT = 0.75, 8.0  # before the first measurement: probability, weight in drafts
MEAN_WEIGHT = 6.0  # of the engine's mean in a request's estimate, as a number of own drafts
FADE, MEAN_FADE = 0.95, 0.98  # weight of a measurement after the next one of its position
AHEAD = 7  # rounds
MARGIN = 0.03
SHARE, EVERY = 0.01, 32  # of time, and the fewest rounds between two probes
LATE = 32 * EVERY
CREDIT, MOST_CREDIT = 8.0, 32.0  # decode steps: of the account at first; beyond a trial at most
TRIAL = 4  # rounds


class DraftDepth:
    """Chooses k for every round of one engine.

    `buckets`: rows of each k's buckets, ascending, those of decode first; if the build has no cost
    of one, costs are numbers of tokens. `fixed`: always the largest k. `makers`: of `EngineSizes`.
    """

    def __init__(
        self,
        buckets: Sequence[tuple[int, ...]],
        costs: StepCosts,
        slots: int,
        fixed: bool = False,
        makers: Sequence[str] = (),
    ) -> None:
        self.most = len(buckets) - 1
        self._fixed, self._headless = fixed, COPIED in makers
        own = [SOURCES.index(m) for m in makers] or [HEAD]
        own = [HEAD if m == TEXT else m for m in own]  # of the few drafts that no text made
        self._maker = np.array([*own, *own[-1:] * self.most][: self.most + 1])
        self._buckets, self._costs = buckets, costs
        self._cost_of: dict[int, Floats] = {}
        self._version = costs.version  # that `_cost_of` was made from
        self._index = np.arange(self.most)
        self._depths = np.arange(self.most + 1)
        self._source = np.full(slots, self._maker[0])
        self._drafted = np.full(slots, self.most)  # the number of these drafts
        self._made = self._source.copy()  # what made them, or will in a round in flight
        self._expected = np.full((2, slots), HEAD)  # for the last rounds in flight, the last first
        self._in_flight = np.zeros(slots, np.int64)  # rounds of a slot
        self._seen = np.zeros((len(SOURCES), slots, self.most))
        self._kept = np.zeros((len(SOURCES), slots, self.most))
        self._all_seen = np.full((len(SOURCES), self.most), PRIOR_WEIGHT)
        self._all_kept = self._all_seen * PRIOR
        self._last = 0
        self._probing = 0  # rounds of the present probe that are left
        self._unbounded = True  # the last probe started where a step's length was not bounded
        self._turn = 0  # probes so far
        self._since = 0  # rounds since the last probe, or the last round of the largest k
        self._budget = 0.0  # microseconds
        self._credit, self._stopped, self._rows = CREDIT, False, 1

    def forget(self, slot: int) -> None:
        self._seen[:, slot] = self._kept[:, slot] = 0
        self._source[slot] = self._made[slot] = self._expected[:, slot] = self._maker[0]
        self._drafted[slot], self._in_flight[slot] = self.most, 0

    def held(self, request: Request) -> int:
        """Drafts that its slot holds for its next round."""
        return self.most if self._source[request.slot] == TEXT else request.held_drafts

    def makers_of(self, slots: Sequence[int]) -> Ints:
        """What made the drafts that these slots hold, as far as rounds were read."""
        return np.full(len(slots), TEXT) if self._headless else self._source[slots]

    def drafted(self, slots: Ints, drafts: int, matched: Ints) -> None:
        """A round of so many drafts left each slot new ones, from the text where ids `matched`."""
        self._source[slots] = np.where(matched, TEXT, self._maker[drafts])
        self._drafted[slots] = np.where(matched, self.most, 0 if self._headless else drafts)
        self._in_flight[slots] -= 1

    def observe(self, slots: Ints, offered: Ints, kept: Ints) -> None:
        """Measures a round: of each slot's `offered` drafts the first `kept` were accepted."""
        source = self._expected[np.clip(self._in_flight[slots] - 1, 0, 1), slots]
        made = np.where(source == TEXT, offered, np.minimum(offered, self._drafted[slots]))
        self._credit += float(kept.sum()) / self._rows
        hit = self._index < kept[:, None]
        seen = hit | ((self._index == kept[:, None]) & (self._index < made[:, None]))
        fade = np.where(seen, FADE, 1)
        self._seen[source, slots] = self._seen[source, slots] * fade + seen
        self._kept[source, slots] = self._kept[source, slots] * fade + hit
        for of in {*source.tolist()}:
            total = seen[source == of].sum(axis=0)
            fade = np.where(total, MEAN_FADE, 1)
            self._all_seen[of] = self._all_seen[of] * fade + total
            self._all_kept[of] = self._all_kept[of] * fade + hit[source == of].sum(axis=0)

    def choose(self, requests: Sequence[Request], bounded: bool = False) -> int:
        """The k of the next round of these requests; there is a bucket for their number.
        `bounded`: prefill runs in a step of bounded length, so probes wait."""
        if not self.most:
            return 0
        cost = self.cost(len(requests))
        slots = [r.slot for r in requests]
        source = np.where(self._source[slots] == TEXT, TEXT, self._made[slots])
        now, later, usable = self._tokens(requests, source)
        known = np.flatnonzero(np.isfinite(cost[: usable + 1]))
        deepest = int(known[-1])
        self._expect(slots, source)
        if self._fixed:
            return self._launched(slots, deepest)
        rates = (now + AHEAD * later) / cost
        best = int(rates.argmax())
        if rates[best] <= rates[self._last] * (1 + MARGIN):
            best = self._last
        self._last = best
        pace = float(cost[best] / later[best])
        probed = self._probed(best, known)
        loss = 2 * float(cost[probed]) - float(now[probed] + later[probed]) * pace
        every = LATE if bounded else EVERY
        if bounded and self._unbounded:
            self._probing = 0
        k = self._probe(best, probed, loss, float(cost[best]), every)
        more = cost[[k, deepest]] / cost[0] - 1
        return self._launched(slots, k if self._pay(*more.tolist()) else 0)

    def _probed(self, best: int, known: Ints) -> int:
        """What a probe tries: by turns the largest k of each maker that is more than `best`, or is
        another maker's; `best` where there is none. `known`: the k that can be used, ascending."""
        last = {int(self._maker[k]): int(k) for k in known if k}
        maker = self._maker[best] if best else -1
        tried = [k for of, k in last.items() if k > best or of != maker]
        return tried[self._turn % len(tried)] if tried else best

    def _launched(self, slots: Sequence[int], k: int) -> int:
        """k, of which a round of these slots is launched."""
        self._made[slots] = self._maker[k]
        return k

    def _expect(self, slots: Sequence[int], source: Ints) -> None:
        """Notes what a round of these slots is launched for."""
        self._expected[1, slots] = self._expected[0, slots]
        self._expected[0, slots] = source
        self._in_flight[slots] += 1
        self._rows = len(slots)

    def _pay(self, more: float, most: float) -> bool:
        """Whether the account pays for a round that takes `more` decode steps than one; `most`: of
        the largest k."""
        trial = TRIAL * most
        self._credit = min(self._credit + SHARE, MOST_CREDIT + trial)
        self._stopped = self._credit < (trial if self._stopped else 0)
        self._credit -= 0 if self._stopped else more
        return not self._stopped

    def _probe(self, best: int, probed: int, loss: float, cost: float, every: int) -> int:
        """`best`, or in the two rounds of a probe `probed`, which loses `loss` microseconds."""
        if self._probing:
            self._probing -= 1
            self._turn += 1
            return probed
        if best == probed:
            self._since = 0
            return best
        self._since += 1
        self._budget = min(self._budget + SHARE * cost, max(loss, 0.0))
        if self._since < every or self._budget < loss:
            return best
        self._since, self._probing = 0, 1
        self._unbounded = every == EVERY
        self._budget -= max(loss, 0.0)
        return probed

    def _tokens(self, requests: Sequence[Request], source: Ints) -> tuple[Floats, Floats, int]:
        """Expected tokens of the next round and of each later one, by k, and the largest k of
        which any request can use all drafts. `source`: of the drafts that each will hold."""
        slots = [r.slot for r in requests]
        remaining = np.array([r.limit - r.launched for r in requests])
        own = np.array([r.drafts for r in requests])
        held = np.where(source == TEXT, self.most, [r.held_drafts for r in requests])
        if self._headless:
            own = np.where(source == TEXT, own, 0)
        later = np.minimum(own, np.maximum(remaining - 3, 0))  # after at least one more token
        now = np.minimum(np.minimum(own, remaining - 2), held)
        found = np.zeros(self.most + 1)
        for maker in {*self._maker.tolist()}:
            held_then = np.where(source == TEXT, TEXT, maker)
            tokens = self._gains(slots, held_then, later)
            found = np.where(self._maker == maker, tokens, found)
        return self._gains(slots, source, now), found, int(later.max())

    def _gains(self, slots: Sequence[int], source: Ints, usable: Ints) -> Floats:
        """Expected tokens of a round of these slots by k, with drafts of these sources."""
        mean = (self._all_kept / self._all_seen)[source]
        rates = self._kept[source, slots] + MEAN_WEIGHT * mean
        rates /= self._seen[source, slots] + MEAN_WEIGHT
        gains = np.ones((len(slots), self.most + 1))
        gains[:, 1:] = rates
        gains = gains.cumprod(axis=1).cumsum(axis=1)  # tokens of a row with 0, 1, … drafts
        used = np.minimum(usable[:, None], self._depths)
        tokens: Floats = gains[np.arange(len(slots))[:, None], used].sum(axis=0)
        return tokens

    def cost(self, rows: int) -> Floats:
        """Microseconds of a round of `rows` sequences by k; infinite where there is no bucket."""
        if self._version != self._costs.version:
            self._cost_of.clear()
            self._version = self._costs.version
        if rows not in self._cost_of:
            fitting = [next((b for b in bs if b >= rows), 0) for bs in self._buckets]
            names = [DECODE, *map(verify_family, range(1, self.most + 1))]
            known = [self._costs.of(key) for key in zip(names, fitting, strict=True)]
            if not all(c or not b for c, b in zip(known, fitting, strict=True)):
                known = [b * (k + 1) for k, b in enumerate(fitting)]
            found = [c if b else np.inf for c, b in zip(known, fitting, strict=True)]
            self._cost_of[rows] = np.array(found, np.float64)
        return self._cost_of[rows]
