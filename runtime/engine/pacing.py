"""Chunked prefill: how much of it a step takes next to decode.

Decode runs in every step; what prefill adds to the step is what everybody's next token waits for.
So a launch is chosen by its time, not by its tokens: the build's table, corrected by what launches
took, and for a sequence far into its context by what that adds. Knows buckets, times and positions;
never moves a slot or a page, and no choice here changes a token.

- Prefill runs in every step in which some waits, at least the smallest bucket: it never starves.
- Whose tiles fill a launch is the business of `line`.
- What the chosen launches are cut into is `prefill_split`'s business.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_engine.errors import OptionError
from spark_engine.interface import DECODE, PREFILL
from spark_engine.runtime.engine.plan import Batch
from spark_engine.runtime.engine.prefill_split import PrefillSplit
from spark_engine.runtime.engine.sequence import Sequence as Request
from spark_engine.runtime.engine.step_costs import RUN_RANGE, RUN_WEIGHT, StepCosts
from spark_engine.runtime.executors.memory import BucketKey

KEPT = 0.9  # of prefill's best rate, which a balanced chunk must reach
CALM = 12.5  # steps of one lone row: the longest balanced step
READ = 55_000.0  # microseconds: as well, so that even a large model is read as one stream
STRETCH = 2.0  # idle steps: the longest step for the sake of latency
PATIENCE = 1e6  # microseconds: who gets nothing for longer is not held back for latency's sake
HELD = 8  # steps that a launch waits at most to be fuller; half as many where balance is asked for
WINDOW = 0.5e6  # microseconds: what came lately
BUSY = 0.6  # of what calm steps prefill: where more comes, and goes, they are not for calm
ALONE = 100_000.0  # microseconds: the longest launch, where it need not be, while nobody decodes
FULL = 0.75  # of a bucket's tiles that are live in a launch which says what the bucket costs
FAR = 32_768  # positions: there half of a launch's error is laid to its context
MOVED = 0.05  # of a bucket's cost, beyond which the split is found anew


class Pace(enum.StrEnum):
    """Named settings of pacing.

    LATENCY: a step with prefill takes at most twice as long as one without, or carries the
    smallest bucket, until a prompt has waited for its next launch for a second. BALANCED: the
    smallest launch that keeps 90 % of prefill's rate, in a step of at most 12.5 times a lone row's
    and 55 ms; of several prompts that wait each may add as much, and where they come faster than
    such steps prefill them, the rate alone counts. THROUGHPUT: the largest launch. A launch for the
    rate's sake waits for a few steps where it would not be full.
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
        self.clock = 0.0  # microseconds of all steps so far
        self._held, self._lost = 0, 0.0  # steps of the present wait, and microseconds it has cost
        self._coming: list[tuple[float, Request]] = []  # when each prompt was first seen
        self._came: list[tuple[float, int]] = []  # the same of those that were prefilled: tokens
        self._context = 0.0  # microseconds of a token for each position before it
        self._bases: list[float] = []  # of a launch at the beginning of a sequence; 0: not known
        self._version = -1  # of the costs that `_bases` were made from
        self._split_by: list[float] = []  # the bases that `_split` was found from
        self._split = PrefillSplit(buckets, {})
        self._refresh()

    def room(self, started: Sequence[Request], rows: int, more: int = 0, since: float = 0.0) -> int:
        """Tiles that the next launch may take, next to a decode launch of `rows` (0: none).

        `started` and the rest as for `tiles`.
        """
        self._refresh()
        return self._most(started, (DECODE, rows) if rows else None, more, since)[0]

    def tiles(
        self, order: Sequence[Request], beside: Batch | None, more: int = 0, since: float = 0.0
    ) -> int:
        """How many tiles this step prefills of the sequences in `order`, whose prompts wait.

        `beside`: the round of those who decode in the same step, if any do; `more` prompts wait for
        their slots, the first of them `since` then, by the clock.
        """
        self._refresh()
        self._settle()
        for seq in order:
            if seq.since is None:
                seq.since = self.clock
                if seq.launched <= seq.cached:
                    self._coming.append((self.clock, seq))
        waiting = sum(-(-(s.prefill_end - s.launched) // self._tile) for s in order)
        key = None if beside is None else (beside.family, beside.bucket)
        most, steps = self._most(order, key, more, since)
        taken = self._split.first(min(waiting, most))
        if beside is not None and self._held < steps:
            self._held += 1
            idle = self._costs.of((beside.family, beside.bucket))
            self._lost += idle * (len(order) + more) / beside.live
            if self._lost < self._saved(taken, most):
                return 0
        self._held, self._lost = 0, 0.0
        return taken

    @property
    def bounded(self) -> bool:
        """Whether somebody asked that no step with prefill be long."""
        return self.policy.pace is Pace.LATENCY or self.policy.itl_ms is not None

    def launched(self, taken: Iterable[Request]) -> None:
        """Tiles of these are launched."""
        for seq in taken:
            seq.since = None
        self._settle()  # nobody holds on to them: a prompt's tokens are long to free

    def took(self, batches: Sequence[Batch], microseconds: float) -> None:
        """A step of these batches took so long from its start, or from the end of the one before.

        What prefill took of it is the rest beside the decode launch, which is timed in steps of its
        own.
        """
        self.clock += microseconds
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

    def _most(
        self, order: Sequence[Request], beside: BucketKey | None, more: int, since: float
    ) -> tuple[int, int]:
        """The largest bucket, in tiles, that this step should take, and for how many steps it may
        wait to be fuller."""
        at = order[0].launched if order else 0
        costs = [self.cost(b, at) for b in self._buckets]
        idle = self._costs.of(beside) if beside is not None else 1.0
        best, pace = self._buckets[-1], self.policy.pace
        if not all((*costs, idle)):
            return best, 0
        if pace is not Pace.THROUGHPUT:
            best = self._brisk(costs)
        if beside is None:
            alone = math.inf if pace is Pace.THROUGHPUT else ALONE
            return max(best, self._within(alone, costs)), 0
        if self.policy.itl_ms is not None:
            return min(best, self._within(self.policy.itl_ms * 1e3 - idle, costs)), 0
        if pace is Pace.THROUGHPUT:
            return best, HELD
        swift = (STRETCH - 1) * idle
        share = max(min(CALM * self._costs.of(self._lone), READ) - idle, swift)
        if pace is Pace.LATENCY:
            late = sum(self.clock - (seq.since or 0.0) > PATIENCE for seq in order)
            late += more * (self.clock - since > PATIENCE)
            return min(best, self._within(max(swift, share * late), costs)), 0
        calm = min(best, self._within(share, costs))
        if self._lately() > BUSY * calm * self._tile / (idle + costs[self._buckets.index(calm)]):
            return best, HELD // 2
        return min(best, self._within(share * (len(order) + more), costs)), 0

    def _lately(self) -> float:
        """Tokens a microsecond of the prompts that came in the last WINDOW and are prefilled."""
        return sum(tokens for _, tokens in self._came) / WINDOW

    def _settle(self) -> None:
        """Of prompts that are prefilled the tokens are kept, and of none for longer than WINDOW."""
        done = ((at, s.prefill_end - s.cached) for at, s in self._coming if not s.prefilling)
        begin, came = self.clock - WINDOW, [*self._came, *done]
        self._came = [one for one in came if one[0] >= begin]
        self._coming = [(at, s) for at, s in self._coming if s.prefilling and at >= begin]

    def _within(self, limit: float, costs: list[float]) -> int:
        """The largest bucket that takes no longer, or else the smallest."""
        fitting = [b for b, c in zip(self._buckets, costs, strict=True) if c <= limit]
        return max(fitting, default=self._buckets[0])

    def _brisk(self, costs: list[float]) -> int:
        """The smallest bucket of nearly the best rate."""
        rates = [b / c for b, c in zip(self._buckets, costs, strict=True)]
        pairs = zip(self._buckets, rates, strict=True)
        return next(b for b, rate in pairs if rate >= KEPT * max(rates))

    def _saved(self, taken: int, most: int) -> float:
        """Microseconds that so many tiles would take less as part of a launch of `most`. A launch
        waits while that is more than what the prompts that wait would have decoded so far."""
        bucket = next(b for b in self._buckets if b >= taken)
        return self.cost(bucket) - self.cost(most) * taken / most

    # What launches take.

    def _prefilled(self, batch: Batch, microseconds: float) -> None:
        """Lays what a launch took beside the estimate to its bucket and to its context."""
        key = PREFILL, batch.bucket
        base = self._costs.of(key)
        if not base or batch.live < FULL * batch.bucket:
            return
        tokens = sum(batch.counts)
        reach = sum(n * (at + n / 2) for at, n in zip(batch.starts, batch.counts, strict=True))
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
        now, built = self._costs.of, self._costs.built
        keys = [(PREFILL, b) for b in self._buckets]
        shares = [now(key) / built(key) for key in keys if now(key) != built(key)]
        share = sum(shares) / len(shares) if shares else 1.0
        self._bases = [now(k) if now(k) != built(k) else built(k) * share for k in keys]
        pairs = list(zip(self._bases, self._split_by, strict=False))
        if not pairs or any(abs(now - then) > MOVED * then for now, then in pairs):
            known = dict(zip(self._buckets, self._bases, strict=True))
            self._split_by, self._split = self._bases, PrefillSplit(self._buckets, known)
