"""How much prefill a step takes while others wait for their next token, and whose comes first.

Decode runs in every step; what prefill adds to the step is what everybody's next token waits for.
So a launch is chosen by its time, not by its tokens: the build's table, corrected by what launches
took, and for a sequence far into its context by what that adds. Knows buckets, times and positions;
never moves a slot or a page, and no choice here changes a token.

- Prefill runs in every step in which some waits, at least the smallest bucket: it never starves.
- Shorter prompts go first, but one lets others pass only until they have taken as many tiles as
  it has left itself: none takes more than about twice the time that it would take alone.
- What the chosen launches are cut into is `prefill_split`'s business.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_engine.errors import OptionError
from spark_engine.interface import DECODE, PREFILL
from spark_engine.runtime.engine.plan import Batch
from spark_engine.runtime.engine.prefill_split import first_launch
from spark_engine.runtime.engine.sequence import Sequence as Request
from spark_engine.runtime.engine.step_costs import RUN_RANGE, RUN_WEIGHT, StepCosts
from spark_engine.runtime.executors.memory import BucketKey

KEPT = 0.9  # of prefill's best rate, which a balanced chunk must reach
CALM = 12.0  # steps of one lone row: the longest balanced step
STRETCH = 2.0  # idle steps: the longest step for the sake of latency
ALONE = 100_000.0  # microseconds: the longest launch, where it need not be, while nobody decodes
FULL = 0.75  # of a bucket's tiles that are live in a launch which says what the bucket costs
FAR = 32_768  # positions: there half of a launch's error is laid to its context
MOVED = 0.05  # of a bucket's cost, beyond which the split is found anew


class Pace(enum.StrEnum):
    """Named settings of pacing.

    LATENCY: a step with prefill takes at most twice as long as one without, or carries the
    smallest bucket. BALANCED: the smallest launch that keeps 90 % of prefill's rate, in a step of
    at most twelve times a lone row's. THROUGHPUT: the largest.
    """

    LATENCY = "latency"
    BALANCED = "balanced"
    THROUGHPUT = "throughput"


@dataclass(frozen=True)
class PrefillPolicy:
    """How prefill is paced beside decode.

    Attributes:
        pace: what decides where `itl_ms` leaves a choice.
        itl_ms: most milliseconds of a step in which others decode, so that a token waits no longer
            for the one before it; the smallest bucket runs even so. None: as the pace says.
    """

    pace: Pace = Pace.BALANCED
    itl_ms: float | None = None

    def __post_init__(self) -> None:
        if self.itl_ms is not None and not 0 < self.itl_ms < float("inf"):
            raise OptionError(f"--itl-ms {self.itl_ms:g}: give milliseconds above 0, e.g. 20")


LATENCY = PrefillPolicy(Pace.LATENCY)
BALANCED = PrefillPolicy(Pace.BALANCED)
THROUGHPUT = PrefillPolicy(Pace.THROUGHPUT)


class Pacing:
    """Chooses for one engine.

    `buckets`: rows (tiles) of the prefill buckets, ascending; `tile`: tokens of a row; `lone`: the
    bucket of a decode step of one row.
    """

    def __init__(
        self, policy: PrefillPolicy, buckets: tuple[int, ...], tile: int, costs: StepCosts,
        lone: int = 1,
    ) -> None:  # fmt: skip
        self.policy, self._buckets, self._tile, self._costs = policy, buckets, tile, costs
        self._lone: BucketKey = (DECODE, lone)
        self._context = 0.0  # microseconds of a token for each position before it
        self._bases: list[float] = []  # of a launch at the beginning of a sequence; 0: not known
        self._version = -1  # of the costs that `_bases` were made from
        self._split_by: list[float] = []  # the bases that `_split` was found from
        self._split: tuple[int, ...] = ()
        self._refresh()

    def tiles(self, order: Sequence[Request], beside: BucketKey | None, live: int = 0) -> int:
        """How many tiles this step prefills of the sequences in `order`, whose prompts wait.

        `beside`: the bucket in which others decode in the same step, if any do.
        """
        self._refresh()
        waiting = sum(-(-(s.prefill_end - s.launched) // self._tile) for s in order)
        most = self._most(order[0].launched, beside, len(order))
        if self._hold(min(waiting, most), len(order), beside, live):
            return 0
        return self._split[min(waiting, most)]

    def _hold(self, tiles, count, beside, live):
        import os

        K = int(os.environ.get("HOLD", 0))
        if (
            beside is None
            or self.policy.pace is not Pace.THROUGHPUT
            or not K
            or not all(self._bases)
        ):
            self._held = self._skipped = 0
            return False
        rate = max(b / c for b, c in zip(self._buckets, self._bases))
        bucket = next(b for b in self._buckets if b >= self._split[tiles])
        waste = self.cost(bucket) - self._split[tiles] / rate
        self._held = getattr(self, "_held", 0) + self._costs.of(beside) * count / live
        self._skipped = getattr(self, "_skipped", 0) + 1
        if self._held >= waste or self._skipped > K:
            self._held = self._skipped = 0
            return False
        return True

    def order(self, behind: Iterable[Request]) -> list[Request]:
        """Whose tiles come first: the urgent, then who was passed over long enough, then the
        shortest."""
        return sorted(behind, key=self._urgency)

    def pass_over(self, behind: Iterable[Request], taken: Iterable[Request]) -> None:
        """Those who are still behind let the tiles pass that were `taken` of later arrivals."""
        ranks = [seq.rank for seq in taken]  # one a tile
        for seq in behind:
            if seq.launched < seq.prefill_end:
                seq.passed += sum(rank > seq.rank for rank in ranks)

    def took(self, batches: Sequence[Batch], microseconds: float) -> None:
        """A step of these batches took so long from its start, or from the end of the one before.

        What prefill took of it is the rest beside the decode launch, which is timed in steps of its
        own.
        """
        rest = microseconds
        for batch in batches:
            key = batch.family, batch.bucket
            if batch.family == PREFILL:
                self._prefilled(batch, rest)
            elif len(batches) == 1:
                self._costs.ran(key, microseconds)
            elif known := self._costs.of(key):
                rest -= known
            else:
                return

    def cost(self, bucket: int, context: float = 0.0) -> float:
        """Microseconds of a full launch at this position of one sequence; 0 where not known."""
        self._refresh()
        base = self._bases[self._buckets.index(bucket)]
        return base + self._context * bucket * self._tile * context if base else 0.0

    # What a step may take.

    def _most(self, context: float, beside: BucketKey | None, count: int = 1) -> int:
        """The largest bucket, in tiles, that this step should take."""
        costs = [self.cost(b, context) for b in self._buckets]
        if not all(costs):
            return self._buckets[-1]
        limit, best = self._limit(beside, count), self._buckets[-1]
        if self.policy.pace is not Pace.THROUGHPUT:
            best = self._brisk(costs)
        if beside is None:
            most = [b for b, c in zip(self._buckets, costs, strict=True) if c <= limit]
            return max([best, *most])
        fitting = [b for b, c in zip(self._buckets, costs, strict=True) if c <= limit and b <= best]
        return max(fitting, default=self._buckets[0])

    def _brisk(self, costs: list[float]) -> int:
        """The smallest bucket of nearly the best rate."""
        rates = [b / c for b, c in zip(self._buckets, costs, strict=True)]
        return next(b for b, r in zip(self._buckets, rates, strict=True) if r >= KEPT * max(rates))

    def _limit(self, beside: BucketKey | None, count: int = 1) -> float:
        """Microseconds that prefill may add to the step; infinite where there is no such limit."""
        if beside is None:
            return float("inf") if self.policy.pace is Pace.THROUGHPUT else ALONE
        idle = self._costs.of(beside)
        limits = [float("inf")]
        if self.policy.itl_ms is not None:
            limits.append(self.policy.itl_ms * 1e3 - idle)
        elif self.policy.pace is Pace.LATENCY and idle:
            limits.append((STRETCH - 1) * idle)
        elif self.policy.pace is Pace.BALANCED and (lone := self._costs.of(self._lone)):
            limits.append(
                (CALM * lone - idle) * (count if __import__("os").environ.get("EACH") else 1)
            )
        return min(limits)

    # What launches take.

    def _prefilled(self, batch: Batch, microseconds: float) -> None:
        """Lays what a launch took beside the estimate to its bucket and to its context."""
        if batch.live < FULL * batch.bucket or microseconds <= 0:
            return
        tokens = sum(batch.counts)
        reach = sum(n * (at + n / 2) for at, n in zip(batch.starts, batch.counts, strict=True))
        key = PREFILL, batch.bucket
        base = self._costs.of(key) or microseconds
        error = microseconds - base - self._context * reach
        error = min(max(error, base / RUN_RANGE - base), base * RUN_RANGE - base)
        far = (reach / (FAR * tokens)) ** 2
        far /= 1 + far
        self._costs.ran(key, base + error * (1 - far))
        self._context = max(0.0, self._context + RUN_WEIGHT * error * far / reach)

    def _refresh(self) -> None:
        """Follows the costs: buckets that have not run share the correction of those that have."""
        if self._version == self._costs.version:
            return
        self._version = self._costs.version
        ran = [b for b in self._buckets if self._costs.measured((PREFILL, b))]
        shares = [
            self._costs.of((PREFILL, b)) / built
            for b in ran
            if (built := self._costs.built((PREFILL, b)))
        ]
        share = sum(shares) / len(shares) if shares else 1.0
        self._bases = [self._base(b, ran, share) for b in self._buckets]
        pairs = list(zip(self._bases, self._split_by, strict=False))
        if not pairs or any(abs(now - then) > MOVED * then for now, then in pairs):
            known = dict(zip(self._buckets, self._bases, strict=True))
            self._split_by, self._split = self._bases, first_launch(self._buckets, known)

    def _base(self, bucket: int, ran: list[int], share: float) -> float:
        """Of one bucket; without a table, between those that have run, or by tokens from one."""
        if bucket in ran:
            return self._costs.of((PREFILL, bucket))
        if built := self._costs.built((PREFILL, bucket)):
            return built * share
        if not ran:
            return 0.0
        low = max((b for b in ran if b < bucket), default=min(ran))
        high = min((b for b in ran if b > bucket), default=low)
        at_low, at_high = (self._costs.of((PREFILL, b)) for b in (low, high))
        if low == high:
            return at_low * bucket / low
        return at_low + (at_high - at_low) * (bucket - low) / (high - low)

    def _urgency(self, seq: Request) -> tuple[int, bool, int, int]:
        left = seq.prefill_end - seq.launched
        waited = seq.passed * self._tile >= left
        return (-seq.request.priority, not waited, 0 if waited else left, seq.id)
