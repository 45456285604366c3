"""Chunked prefill: how many tiles of it a step takes next to decode.

Decode runs in every step; what prefill adds to the step delays each next token. So a launch is
chosen by its time, not by its tokens: the build's table, corrected by measured launches, and a term
that grows with the position in the context. Knows buckets, times and positions; no choice here
changes a token.

- Prefill runs in every step in which some waits, at least the smallest bucket: it never starves.
- The tower is launched for one image at a time, and counts as what a step has of prefill.
- `line` decides which requests' tiles fill a launch; `prefill_split` divides what waits into
  launches.
"""

import enum
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from spark_engine.errors import OptionError
from spark_engine.interface import DECODE, PREFILL
from spark_engine.runtime.engine.plan import Batch
from spark_engine.runtime.engine.policy.prefill_split import PrefillSplit
from spark_engine.runtime.engine.policy.step_costs import RUN_RANGE, RUN_WEIGHT, StepCosts
from spark_engine.runtime.engine.sequence import Sequence as Request
from spark_engine.runtime.executors.memory import BucketKey
from spark_engine.vision import VISION


@dataclass(frozen=True)
class PacingTuning:
    """Constants of pacing."""

    min_rate_share: float = 0.9  # of prefill's best rate, which a balanced launch must reach
    max_step_in_decode_steps: float = 12.5  # longest balanced step, in one-row decode steps
    max_step_us: float = 55_000.0  # the same; in longer ones a reader sees the text stutter
    latency_step_in_decode_steps: float = 2.0  # longest latency step, in decode steps of its rows
    max_wait_us: float = 1e6  # a prompt without a launch for longer is not delayed for latency
    max_held_steps: int = 8  # that a throughput launch waits to be fuller; a balanced one half
    arrival_window_us: float = 0.5e6  # of the rate at which prompts arrive
    busy_share: float = 0.6  # of the rate of balanced steps; above it only the rate counts
    max_lone_launch_us: float = 100_000.0  # while no request decodes, unless the pace needs more
    min_live_share: float = 0.75  # of a bucket's tiles, in a launch that corrects its cost
    far_tokens: int = 32_768  # where half of a launch's error is attributed to its context
    resplit_change: float = 0.05  # of a bucket's cost, above which the split is computed again


TUNING = PacingTuning()


class Pace(enum.StrEnum):
    """Named settings of pacing.

    LATENCY: a step with prefill takes at most twice as long as one without, or has the smallest
    bucket, until a prompt has waited for its next launch for a second. BALANCED: the smallest
    launch that keeps 90 % of prefill's rate, in a step of at most 12.5 one-row decode steps and
    55 ms; each further waiting prompt may add as much, and where prompts arrive faster than such
    steps prefill them, only the rate counts. THROUGHPUT: the largest launch. Where only the rate
    counts, a launch that would not be full waits for a few steps.
    """

    LATENCY = "latency"
    BALANCED = "balanced"
    THROUGHPUT = "throughput"


@dataclass(frozen=True)
class PrefillPolicy:
    """How prefill is paced next to decode.

    Attributes:
        pace: decides where `itl_ms` leaves a choice.
        itl_ms: most milliseconds of a step in which others decode (inter-token latency); the
            smallest bucket runs even above it. None: the pace alone decides.
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
    """The prefill pacing of an engine.

    `buckets`: rows (tiles) of the prefill buckets, ascending; `tile`: tokens of a row; `lone`: the
    bucket of a decode step of one row. `clock`: microseconds of all steps so far.
    """

    def __init__(
        self, policy: PrefillPolicy, buckets: tuple[int, ...], tile: int, costs: StepCosts,
        lone: int = 1,
    ) -> None:  # fmt: skip
        self.policy, self._buckets, self._tile, self._costs = policy, buckets, tile, costs
        self._lone: BucketKey = (DECODE, lone)
        self.clock = 0.0
        self._towers, self._budget = costs.rows(VISION), math.inf  # µs of prefill in this step
        self._held, self._lost = 0, 0.0  # steps of the present wait, and microseconds it has cost
        self._arriving: list[tuple[float, Request]] = []  # unfinished prompts by arrival
        self._arrived: list[tuple[float, int]] = []  # tokens of prefilled prompts by arrival
        self._context = 0.0  # microseconds of a token for each position before it
        self._bases: list[float] = []  # of a launch at position 0 by bucket; 0: not known
        self._version = -1  # of the costs that `_bases` were computed from
        self._split_by: list[float] = []  # the bases that `_split` was computed from
        self._split = PrefillSplit(buckets, {})
        self._refresh()

    def most_tiles(
        self, started: Sequence[Request], rows: int, more: int = 0, since: float = 0.0
    ) -> int:
        """Most tiles of the next launch, next to a decode launch of `rows` rows (0: none).

        `started`: sequences with unfinished prefill; the rest as for `tiles`.
        """
        self._refresh()
        return self._most(started, (DECODE, rows) if rows else None, more, since)[0]

    def starts_waiting(self, seq: Request) -> float:
        """Registers a sequence that waits for its next launch; returns the clock."""
        if seq.launched <= seq.cached:
            self._arriving.append((self.clock, seq))
        return self.clock

    def tiles(
        self, order: Sequence[Request], decode: Batch | None, more: int = 0, since: float = 0.0
    ) -> int:
        """How many tiles this step prefills of the sequences in `order`, which all wait.

        `decode`: the decode or verify batch of the same step, if there is one; `more` prompts wait
        for their slots, the first of them since `since`, by the clock.
        """
        self._refresh()
        self.forget_prefilled()
        waiting = sum(-(-(s.prefill_end - s.launched) // self._tile) for s in order)
        key = None if decode is None else decode.key
        most, steps = self._most(order, key, more, since)
        self._budget = math.inf
        if decode is not None:
            within = (self.policy.itl_ms or 0.0) * 1e3 - self._costs.of(decode.key)
            self._budget = max(self.cost(most, order[0].launched if order else 0), within)
        taken = self._split.first(min(waiting, most))
        if decode is not None and self._held < steps:
            self._held += 1
            idle = self._costs.of(decode.key)
            self._lost += idle * (len(order) + more) / decode.live
            if self._lost < self._saved(taken, most):
                return 0
        self._held, self._lost = 0, 0.0
        return taken

    def fits(self, tiles: int, images: Iterable[int]) -> bool:
        """Whether the step that `tiles` was asked for last has the time for so many tiles and for
        images of so many rows. False where that is not known and others decode."""
        if self._budget == math.inf:
            return True
        keys = [(VISION, next((n for n in self._towers if n >= rows), 0)) for rows in images]
        costs = [self.cost(next(b for b in self._buckets if b >= tiles))]
        costs += map(self._costs.of, keys)
        return all(costs) and sum(costs) <= self._budget

    @property
    def bounded(self) -> bool:
        """True if the policy limits the length of a step with prefill."""
        return self.policy.pace is Pace.LATENCY or self.policy.itl_ms is not None

    def took(
        self, batches: Sequence[Batch], microseconds: float, towers: Sequence[BucketKey] = ()
    ) -> None:
        """Measures a step of these batches, and of the tower's launches before them, from its start
        or from the end of the one before.

        Prefill's part is the rest next to the decode launch, which is timed in steps without
        prefill.
        """
        self.clock += microseconds
        rest = microseconds
        if towers:
            costs = [self._costs.of(key) for key in (*towers[1:], *(b.key for b in batches))]
            if all(costs):
                self._costs.ran(towers[0], rest - sum(costs))
            return
        for batch in batches:
            if batch.family == PREFILL:
                self._prefilled(batch, rest)
            elif len(batches) == 1:
                self._costs.ran(batch.key, microseconds)
            elif known := self._costs.of(batch.key):
                rest -= known
            else:
                return

    def cost(self, bucket: int, context: float = 0.0) -> float:
        """Microseconds of a full launch at position `context` of one sequence; 0: not known."""
        self._refresh()
        base = self._bases[self._buckets.index(bucket)]
        return base + self._context * bucket * self._tile * context if base else 0.0

    def _most(
        self, order: Sequence[Request], decode: BucketKey | None, more: int, since: float
    ) -> tuple[int, int]:
        """The largest bucket, in tiles, that this step should take, and for how many steps it may
        wait to be fuller."""
        tuning = TUNING
        at = order[0].launched if order else 0
        costs = [self.cost(b, at) for b in self._buckets]
        idle = self._costs.of(decode) if decode is not None else 1.0
        best, pace = self._buckets[-1], self.policy.pace
        if not all((*costs, idle)):
            return best, 0
        if pace is not Pace.THROUGHPUT:
            best = self._smallest_fast(costs)
        if decode is None:
            alone = math.inf if pace is Pace.THROUGHPUT else tuning.max_lone_launch_us
            return max(best, self._within(alone, costs)), 0
        if self.policy.itl_ms is not None:
            return min(best, self._within(self.policy.itl_ms * 1e3 - idle, costs)), 0
        if pace is Pace.THROUGHPUT:
            return best, tuning.max_held_steps
        least = (tuning.latency_step_in_decode_steps - 1) * idle
        step = tuning.max_step_in_decode_steps * self._costs.of(self._lone)
        share = max(min(step, tuning.max_step_us) - idle, least)
        if pace is Pace.LATENCY:
            late = sum(self.clock - (seq.since or 0.0) > tuning.max_wait_us for seq in order)
            late += more * (self.clock - since > tuning.max_wait_us)
            return min(best, self._within(max(least, share * late), costs)), 0
        short = min(best, self._within(share, costs))
        step = idle + costs[self._buckets.index(short)]
        # tokens per microsecond of the prompts that arrived in the window and are prefilled
        rate = sum(tokens for _, tokens in self._arrived) / tuning.arrival_window_us
        if rate > tuning.busy_share * short * self._tile / step:
            return best, tuning.max_held_steps // 2
        return min(best, self._within(share * (len(order) + more), costs)), 0

    def forget_prefilled(self) -> None:
        """Keeps token counts instead of prefilled sequences, since prompts take long to free; drops
        both after the window."""
        done = ((at, s.prefill_end - s.cached) for at, s in self._arriving if not s.prefilling)
        start, arrived = self.clock - TUNING.arrival_window_us, [*self._arrived, *done]
        self._arrived = [one for one in arrived if one[0] >= start]
        self._arriving = [(at, s) for at, s in self._arriving if s.prefilling and at >= start]

    def _within(self, limit: float, costs: list[float]) -> int:
        """The largest bucket of at most `limit` microseconds, or else the smallest."""
        fitting = [b for b, c in zip(self._buckets, costs, strict=True) if c <= limit]
        return max(fitting, default=self._buckets[0])

    def _smallest_fast(self, costs: list[float]) -> int:
        """The smallest bucket of nearly the best rate."""
        rates = [b / c for b, c in zip(self._buckets, costs, strict=True)]
        pairs = zip(self._buckets, rates, strict=True)
        return next(b for b, rate in pairs if rate >= TUNING.min_rate_share * max(rates))

    def _saved(self, taken: int, most: int) -> float:
        """Microseconds that `taken` tiles would save as part of a launch of `most` tiles. A launch
        waits while the waiting prompts have lost less decode time than that."""
        bucket = next(b for b in self._buckets if b >= taken)
        return self.cost(bucket) - self.cost(most) * taken / most

    def _prefilled(self, batch: Batch, microseconds: float) -> None:
        """Attributes the error of a launch's estimate to its bucket and to its context."""
        base = self._costs.of(batch.key)
        if not base or batch.live < TUNING.min_live_share * batch.bucket:
            return
        tokens = sum(batch.counts)
        reach = sum(n * (at + n / 2) for at, n in zip(batch.starts, batch.counts, strict=True))
        error = microseconds - base - self._context * reach
        error = min(max(error, base / RUN_RANGE - base), base * RUN_RANGE - base)
        far = (reach / (TUNING.far_tokens * tokens)) ** 2
        far /= 1 + far
        self._costs.ran(batch.key, base + error * (1 - far))
        self._context = max(0.0, self._context + RUN_WEIGHT * error * far / reach)

    def _refresh(self) -> None:
        """Recomputes the bases: buckets that have not run get the mean correction of the others."""
        if self._version == self._costs.version:
            return
        self._version = self._costs.version
        now, built = self._costs.of, self._costs.built
        keys = [(PREFILL, b) for b in self._buckets]
        shares = [now(key) / built(key) for key in keys if now(key) != built(key)]
        share = sum(shares) / len(shares) if shares else 1.0
        self._bases = [now(k) if now(k) != built(k) else built(k) * share for k in keys]
        pairs = list(zip(self._bases, self._split_by, strict=False))
        if not pairs or any(abs(now - then) > TUNING.resplit_change * then for now, then in pairs):
            known = dict(zip(self._buckets, self._bases, strict=True))
            self._split_by, self._split = self._bases, PrefillSplit(self._buckets, known)
