"""Parts of the sampling body: parameters, penalties, raw log-probabilities, the draw.

Sums that choose a token run in float64, sequentially along the vocabulary, so that they do not
depend on other rows or on the number of sorted entries.
"""

from dataclasses import dataclass

import numpy as np

from spark_engine.interface import MASK_BITS, SAMPLING_I
from spark_engine.op import Attrs
from spark_engine.plugins.common.onnx_nodes import LOOP_TYPES, Text
from spark_engine.plugins.common.sequence_tiles import over, positions, read_rows, valid_tokens
from spark_engine.plugins.ops.sampling import philox
from spark_engine.tensors import Array, DType

FLOOR = 3.0e38  # z is clamped to ±FLOOR; ids beyond the vocabulary have −FLOOR and no weight
NEVER = -3.3e38  # z of an id that its row's mask excludes: below every other, without weight
LEAST = -3.4e38  # below every z
MASKED = SAMPLING_I.index("masked")
FIRST_SORT, GROWTH, SORTS = 64, 8, 16  # entries sorted for top_p without top_k, then ×8 each time
_NEUTRAL = np.asarray([[0, 1, 0, 1, 0, 0, 0, 0]], np.float32)


@dataclass(frozen=True)
class Sampled:
    """Names of values by row of logits, all [rows]; with drafts each token has a row.

    Attributes:
        slots: int64, −1 if inert. position: int64, of the new token.
        live, emits: bool, the row has a sequence; it samples.
        token_counts: i32 [rows,V], unspecified if inert.
    """

    slots: str
    position: str
    live: str
    emits: str
    token_counts: str


def sampled_rows(f: Text, attrs: Attrs) -> Sampled:
    """The values of the rows of logits."""
    rows = read_rows(f, "slots", "starts", "counts")
    if not attrs.get("drafts", 0):
        emits = f("And", rows.live, f("Greater", "emit", np.int32(0)))
        known = f("Gather", "token_counts", rows.slots)
        return Sampled(rows.slots, f("Add", rows.starts, rows.counts), rows.live, emits, known)
    tile = int(attrs["tile"])
    valid = valid_tokens(f, rows, tile)
    live = f("Reshape", valid, [-1])
    slots = f("Reshape", f("Where", valid, over(f, rows.slots, [1]), -1), [-1])
    position = f("Reshape", f("Add", positions(f, rows, tile), 1), [-1])
    known = f("Gather", "token_counts", slots)
    # For each token j, ids[1 … j] of the row count as generated.
    ids = f.long(f("Where", valid, f("Reshape", "ids", [-1, tile]), np.int32(0)))
    ids = f("Reshape", f("Expand", over(f, ids, [1]), [1, tile, 1]), [-1, tile])
    up_to = np.tril(np.ones((tile, tile), np.int32))
    up_to[:, 0] = 0
    each = f("Concat", f.length("slots"), [1, 1], axis=0)
    twos = f("Reshape", f("Expand", (2 * up_to)[None], each), [-1, tile])
    known = f("ScatterElements", known, ids, twos, axis=1, reduction="add")
    return Sampled(slots, position, live, live, known)


@dataclass(frozen=True)
class Parameters:
    """Names of the parameters of each row, [rows,1]; neutral if the row is inert.

    `samples` and `masked` are bool: the row draws; it has a mask. `seed` is int64 [rows,2],
    `token_counts` i32 [rows,V].
    """

    temperature: str
    top_p: str
    min_p: str
    repetition: str
    presence: str
    frequency: str
    top_k: str
    seed: str
    position: str
    samples: str
    masked: str
    live: str
    slots: str
    token_counts: str


def parameters(f: Text, rows: Sampled) -> Parameters:
    """Gathers the slots' parameters."""
    live = over(f, rows.live, [1])
    floats = f("Where", live, f("Gather", "sampling_f", rows.slots), _NEUTRAL)
    heat, top_p, min_p, repetition, presence, frequency = f.many(
        6, "Split", f("Slice", floats, [0], [6], [1]), axis=1, num_outputs=6
    )
    integers = f("Where", live, f.long(f("Gather", "sampling_i", rows.slots)), 0)
    hot = f("Greater", heat, 0.0)
    return Parameters(
        temperature=heat,
        top_p=top_p,
        min_p=min_p,
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        top_k=f("Slice", integers, [0], [1], [1]),
        seed=f("Slice", integers, [1], [3], [1]),
        position=over(f, rows.position, [1]),
        samples=f("And", hot, over(f, rows.emits, [1])),
        masked=f("Equal", f("Slice", integers, [MASKED], [MASKED + 1], [1]), 1),
        live=live,
        slots=rows.slots,
        token_counts=rows.token_counts,
    )


@dataclass(frozen=True)
class Span:
    """The ids of the columns of a row of logits: `width` ids from `first` on. `first`: the name of
    an int64 [1], or None for 0."""

    width: int
    first: str | None = None

    def ids(self, f: Text) -> str | Array:
        """int64 [1,width]."""
        own = np.arange(self.width)[None]
        return own if self.first is None else f("Add", own, self.first)

    def column(self, f: Text, ids: str) -> str:
        """The column of each id; it may be outside of the span."""
        return ids if self.first is None else f("Sub", ids, self.first)

    def of(self, f: Text, row: str) -> str:
        """The columns of [rows,V] of the whole vocabulary."""
        if self.first is None:
            return f("Slice", row, [0], [self.width], [1])
        return f("Slice", row, self.first, f("Add", self.first, self.width), [1])


@dataclass(frozen=True)
class Top:
    """Names: ids int64, their logits and logprobs f32 [rows,top]; the largest logit, Σ e^(x −
    largest) and its log, f32 [rows,1]."""

    ids: str
    values: str
    logprobs: str
    largest: str
    sum: str
    log_sum: str


def log_probabilities(f: Text, logits: str, top: int) -> Top:
    """The top entries of the raw log-softmax."""
    values, ids = f.many(2, "TopK", logits, [top])
    largest = f("Slice", values, [0], [1], [1])
    weights = f.double(f("Exp", f("Sub", logits, largest)))
    total = f("ReduceSum", weights, [1], keepdims=1)
    log_sum = f.cast(f("Log", total), DType.F32)
    logprobs = f("Sub", f("Sub", values, largest), log_sum)
    return Top(ids, values, logprobs, largest, f.cast(total, DType.F32), log_sum)


def penalised(f: Text, p: Parameters, logits: str, vocab: int, span: Span, whole: int) -> str:
    """f32 [rows,V]: logits of `span` after bias and penalties, within ±FLOOR. `p.token_counts` has
    the same ids; `whole`: the width of the whole vocabulary."""
    z = _biased(f, p, logits, span)
    known = f("And", p.live, f("Greater", p.token_counts, np.int32(0)))
    scaled = f("Where", f("Greater", z, 0.0), f("Div", z, p.repetition), f("Mul", z, p.repetition))
    z = f("Where", known, scaled, z)
    generated = f.cast(
        f("Div", f("Where", p.live, p.token_counts, np.int32(0)), np.int32(2)), DType.F32
    )
    z = f("Sub", z, f("Mul", generated, p.frequency))
    z = f("Sub", z, f("Mul", f("Min", generated, 1.0), p.presence))
    z = f("Clip", z, -FLOOR, FLOOR)
    if vocab < whole:
        z = f("Where", f("Less", span.ids(f), vocab), z, -FLOOR)
    return z


def _biased(f: Text, p: Parameters, logits: str, span: Span) -> str:
    ids = f.long(f("Gather", "bias_ids", p.slots))  # [rows, NB]
    ids = span.column(f, ids)
    inside = f("And", f("GreaterOrEqual", ids, 0), f("Less", ids, span.width))
    until = f.long(f("Gather", "bias_until", p.slots))
    used = f("And", f("And", p.live, inside), f("Less", p.position, until))
    values = f("Where", used, f("Gather", "bias_values", p.slots), 0.0)
    target = f("Where", used, ids, 0)
    return f("ScatterElements", logits, target, values, axis=1, reduction="add")


def within_mask(f: Text, p: Parameters, z: str, vocab: int, span: Span, whole: int) -> str:
    """f32 [rows,V]: z, with NEVER for ids that the row's mask excludes. In an If: without masked
    rows no mask is unpacked."""

    def then(g: Text) -> tuple[str]:
        words = over(g, g("Gather", "allow", p.slots), [2])  # u32 [rows, V / 32, 1]
        bits = g(
            "BitShift", words, np.arange(MASK_BITS, dtype=np.uint32)[None, None], direction="RIGHT"
        )
        bits = g("Reshape", g("BitwiseAnd", bits, np.uint32(1)), [0, -1])
        allowed = g.cast(span.of(g, bits), DType.BOOL)
        if vocab < whole:
            allowed = g("And", allowed, g("Less", span.ids(g), vocab))
        return (g("Where", g("Or", allowed, g("Not", p.masked)), z, NEVER),)

    def otherwise(g: Text) -> tuple[str]:
        return (g("Identity", z),)

    any_row = f.cast(f("ReduceMax", f.cast(p.masked, DType.I32), [0, 1], keepdims=0), DType.BOOL)
    return f("If", any_row, then_branch=f.graph(0, then), else_branch=f.graph(0, otherwise))


def draw(f: Text, p: Parameters, z: str, greatest: str, width: int) -> str:
    """int64 [rows,1]: an id for each row; undefined if the row does not sample."""
    heat = f("Where", p.samples, p.temperature, 1.0)
    weights = f("Exp", f("Div", f("Sub", z, greatest), heat))
    weights = f("Where", f("Less", weights, p.min_p), 0.0, weights)
    least, last = _limits(f, p, z, weights, width)
    ids = np.arange(width)[None]
    tie = f("And", f("Equal", z, least), f("LessOrEqual", ids, last))
    kept = f("Where", f("Or", f("Greater", z, least), tie), weights, 0.0)
    sums = f("CumSum", f.double(kept), 1)
    total = f("Slice", sums, [width - 1], [width], [1])
    target = f("Mul", total, philox.uniform_text(f, p.position, p.seed))
    below = f.long(f("LessOrEqual", sums, target))
    return f("Clip", f("ReduceSum", below, [1], keepdims=1), 0, width - 1)


def _limits(f: Text, p: Parameters, z: str, weights: str, width: int) -> tuple[str, str]:
    """(z f32, id int64) [rows,1] of the last entry that top_k and top_p keep.

    Sorts no more entries than the rows need: top_k, or increasing numbers until the prefix has
    top_p. (LEAST, 0) keeps all entries. The order is that of z: rounded weights may be equal, and
    then a part of the row would be in another order than the whole.
    """
    by_count = f("And", p.samples, f("Greater", p.top_k, 0))
    by_mass = f("And", p.samples, f("Less", p.top_p, 1.0))
    needed = f("Or", by_count, by_mass)
    total = f("ReduceSum", f.double(weights), [1], keepdims=1)
    only_mass = f("Where", needed, FIRST_SORT, 1)
    wanted = f("Where", by_count, p.top_k, only_mass)
    first = f("Min", f("ReduceMax", wanted, [0], keepdims=0), width)
    nothing = f("Where", needed, LEAST, LEAST)
    zero = f("Sub", p.top_k, p.top_k)
    start = f.cast(f("ReduceMax", f.cast(needed, DType.I32), [0, 1], keepdims=0), DType.BOOL)

    def step(g: Text, _: str, __: str, size: str, least: str, last: str) -> tuple[str, ...]:
        sorted_z, ids = g.many(2, "TopK", z, size)
        values = g("GatherElements", weights, ids, axis=1)
        allowed = g("Or", g("Not", by_count), g("Less", _ranks(g, size), p.top_k))
        exact = g("Where", allowed, g.double(values), np.float64(0))
        sums = g("CumSum", exact, 1)
        end = g("Slice", sums, [-1], [np.iinfo(np.int64).max], [1])
        mass = g("Mul", g("Where", by_count, end, total), g.double(p.top_p))
        inside = g("Less", g("Sub", sums, exact), mass)
        keep = g("And", allowed, g("Or", g("Not", by_mass), inside))
        at = g("Sub", g("Max", g("ReduceSum", g.long(keep), [1], keepdims=1), 1), 1)
        enough = g("Or", g("Or", g("Not", needed), by_count), g("GreaterOrEqual", end, mass))
        enough = g.cast(g("ReduceMin", g.cast(enough, DType.I32), [0, 1], keepdims=0), DType.BOOL)
        more = g("And", g("Not", enough), g("Less", g("Squeeze", size, [0]), width))
        new = g("Where", needed, g("GatherElements", sorted_z, at, axis=1), least)
        return (
            more,
            g("Min", g("Mul", size, GROWTH), width),
            new,
            g("Where", needed, g("GatherElements", ids, at, axis=1), last),
        )

    loop = f.graph(5, step, LOOP_TYPES)
    _, least, last = f.many(3, "Loop", SORTS, start, first, nothing, zero, body=loop)
    return least, last


def _ranks(f: Text, size: str) -> str:
    """int64 [1,size]: 0, 1, 2, …"""
    return over(f, f("Range", 0, f("Squeeze", size, [0]), 1), [0])
