"""Computes figures from the clients' records: latencies, rates, goodput, and their spread over
runs.

Knows no HTTP and no output. Latencies are in milliseconds.

ttft   from sending a request to its first token
itl    between two events of an answer; with drafts an event may bring several tokens
tpot   of a request: from its first token to its last, over the tokens after the first
e2e    from sending a request to its end
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from spark_engine.bench.load import Json, Targets
from spark_engine.bench.timings import ClientShare, RequestTiming
from spark_engine.errors import OptionError

LATENCIES = ("ttft", "itl", "tpot", "e2e")
POINTS = (50, 90, 99)  # percentiles
CURVE = 101  # points of a stored distribution
MIDDLE = 0.8  # share of a run's time: excludes its start and its end
BUSY, LATE_MS = 0.8, 10.0  # beyond these limits a client process may be the bottleneck


def targets(given: Iterable[str]) -> dict[str, float]:
    """`ttft=500` and the like. Raises OptionError."""
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if name not in LATENCIES or not 0 < found[name] < math.inf:
            words = f"it must be one of {', '.join(LATENCIES)} and milliseconds, like ttft=500"
            raise OptionError(f"--target is {text!r}; {words}")
    return found


def figures(start: float, shares: Sequence[ClientShare], wanted: Targets) -> Json:
    """The figures of one run, which began at `start`."""
    took = sorted((one for share in shares for one in share.took), key=lambda one: one.start)
    good = [one for one in took if not one.error]
    end = max((one.end for one in took), default=start)
    wall = max(end - start, 1e-9)
    lists = {name: [1e3 * s for one in good for s in of(one)] for name, of in _SECONDS.items()}
    tokens_in, tokens_out = sum(one.prompt_tokens for one in good), sum(map(_tokens, good))
    cached = [one.cached_tokens for one in good if one.cached_tokens is not None]
    met = [one for one in good if _meets(one, wanted)]
    return {
        "requests": len(took),
        "failed": len(took) - len(good),
        "errors": dict(Counter(one.error for one in took if one.error)),
        "seconds": wall,
        "input_tokens": tokens_in,
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": tokens_out,
        "requests_s": len(good) / wall,
        "output_tok_s": tokens_out / wall,
        "total_tok_s": (tokens_in + tokens_out) / wall,
        "steady_tok_s": _steady(good, start, wall),
        "full_tok_s": _full(good),
        "in_flight": sum(one.end - one.start for one in took) / wall,
        "goodput_s": len(met) / wall,
        "good_share": len(met) / max(len(took), 1),
        **{name: distribution(values) for name, values in lists.items()},
        "by_turn": _by_turn(good),
        "client": client(shares, took, wall),
        "each": [
            [one.script, one.turn, one.start - start, 1e3 * (one.times[0] - one.start),
             one.end - start, one.prompt_tokens, _tokens(one)]
            for one in good
        ],
    }  # fmt: skip


def distribution(values: Sequence[float]) -> Json | None:
    """Mean, percentiles, maximum, and the curve; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    points = {f"p{p}": quantile(ordered, p / 100) for p in POINTS}
    curve = [round(quantile(ordered, i / (CURVE - 1)), 3) for i in range(CURVE)]
    return {"mean": statistics.fmean(ordered), **points, "max": ordered[-1], "curve": curve}


def quantile(ordered: Sequence[float], share: float) -> float:
    """Interpolated between the two nearest values, as in numpy."""
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def client(shares: Sequence[ClientShare], took: Sequence[RequestTiming], wall: float) -> Json:
    """True if the clients kept up over `wall` seconds. If not, `warning` says that they were the
    bottleneck."""
    late = sorted(1e3 * s for share in shares for s in share.late_s)
    sent = sorted(1e3 * (one.start - one.due) for one in took)
    busy = [round(share.busy_s / wall, 3) for share in shares]
    found: Json = {
        "processes": len(shares),
        "busy": busy,
        "late_p99_ms": quantile(late, 0.99) if late else 0.0,
        "sent_late_p99_ms": quantile(sent, 0.99) if sent else 0.0,
        "warning": None,
    }
    worst = max(found["late_p99_ms"], found["sent_late_p99_ms"])
    if max(busy, default=0.0) > BUSY or worst > LATE_MS:
        words = f"a client process was {max(busy):.0%} busy, and up to {worst:.0f} ms late"
        found["warning"] = f"{words}: give more --processes, or another machine"
    return found


def spread(rows: Sequence[Json]) -> Json:
    """[median, minimum, maximum] of every figure over the runs."""
    return {
        name: [statistics.median(values), min(values), max(values)]
        for name, values in _flat(rows).items()
    }


def _flat(rows: Sequence[Json]) -> dict[str, list[float]]:
    """Each figure's values, by name: `ttft.p50`. Leaves out a figure that a run lacks."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            parts = value if isinstance(value, dict) and name in LATENCIES else {"": value}
            for key, number in parts.items():
                if isinstance(number, int | float):
                    found.setdefault(f"{name}.{key}" if key else name, []).append(number)
    return {name: values for name, values in found.items() if len(values) == len(rows)}


def _steady(good: Sequence[RequestTiming], start: float, wall: float) -> float:
    """Tokens a second in the middle of the run."""
    return _rate(good, start + wall * (1 - MIDDLE) / 2, start + wall * (1 + MIDDLE) / 2)


def _full(good: Sequence[RequestTiming]) -> float | None:
    """Tokens a second while every request had its first token and none its last, as in a burst;
    None if there was no such time."""
    streams = [one.times for one in good if one.times]
    low = max((times[0] for times in streams), default=0.0)
    high = min((times[-1] for times in streams), default=0.0)
    return _rate(good, low, high) if low < high else None


def _rate(good: Sequence[RequestTiming], low: float, high: float) -> float:
    within = sum(
        count
        for one in good
        for when, count in zip(one.times, one.counts, strict=True)
        if low <= when < high
    )
    return within / (high - low)


def _by_turn(good: Sequence[RequestTiming]) -> list[Json]:
    """For conversations: the time to the first token of each turn, and the cached tokens."""
    rows = []
    for turn in range(1 + max((one.turn for one in good), default=-1)):
        those = [one for one in good if one.turn == turn]
        ttft = sorted(1e3 * (one.times[0] - one.start) for one in those)
        cached = [one.cached_tokens or 0 for one in those]
        if those:
            row = {"turn": turn, "requests": len(those), "ttft_p50_ms": quantile(ttft, 0.5)}
            row["prompt_tokens"] = statistics.fmean(one.prompt_tokens for one in those)
            rows.append({**row, "cached_tokens": statistics.fmean(cached)})
    return rows


def _meets(one: RequestTiming, wanted: Targets) -> bool:
    """True if the request is within every target; of its `itl` the 99th percentile counts."""
    for name, most in wanted.items():
        seconds = sorted(_SECONDS[name](one))
        if seconds and 1e3 * quantile(seconds, 0.99) > most:
            return False
    return True


def _tokens(one: RequestTiming) -> int:
    return sum(one.counts)


def _tpot(one: RequestTiming) -> list[float]:
    after = _tokens(one) - one.counts[0]
    return [(one.times[-1] - one.times[0]) / after] if after > 0 else []


_SECONDS: Mapping[str, Callable[[RequestTiming], list[float]]] = {
    "ttft": lambda one: [one.times[0] - one.start],
    "itl": lambda one: [b - a for a, b in pairwise(one.times)],
    "tpot": _tpot,
    "e2e": lambda one: [one.end - one.start],
}
