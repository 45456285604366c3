"""The grid by which owners of DGX Sparks compare servers (Spark Arena): prompts behind contexts.

A cell: `streams` requests at once, each a new prompt of PROMPT tokens behind a context of `depth`
tokens that the server saw before, answered with OUTPUT tokens. llama-benchy measures the same
(docs/operate/bench.md). Prompts are random ids.
"""

import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table

from spark_engine.bench.load import Json, Load, Script, Turn
from spark_engine.bench.prompts import Ids
from spark_engine.bench.timings import ClientShare, RequestTiming
from spark_engine.errors import OptionError

if TYPE_CHECKING:
    from spark_engine.bench.clients import Clients  # needs an extra, which --help does not

PROMPT, OUTPUT = 2048, 128
DEPTHS = (0, 4096, 8192, 16384, 32768, 65536, 100_000)
STREAMS = (1, 2, 5, 10)
FIGURES = {  # name in JSON: heading
    "prefill_tok_s": "prefill tokens/s",
    "decode_tok_s": "decode tokens/s, all",
    "stream_tok_s": "decode tokens/s, each",
    "ttft_ms": "ms to the first token",
    "cached_tokens": "cached tokens, each",
}


@dataclass(frozen=True)
class Grid:
    """Cells to measure, each `repeats` times. Prompts of a cell are those of `seed`."""

    depths: tuple[int, ...]
    streams: tuple[int, ...]
    repeats: int
    seed: int

    def cells(self, most: int | None) -> list[tuple[int, int]]:
        """(depth, streams) of the cells that a server of `most` tokens a request holds. Raises
        OptionError if it holds none."""
        least = PROMPT + OUTPUT
        held = [d for d in self.depths if most is None or d + least <= most]
        if not held:
            words = f"every cell takes {least:,} tokens or more; the server holds {most:,}"
            raise OptionError(f"{words}: build with a larger --max-context")
        return [(depth, streams) for depth in held for streams in self.streams]


def measured(clients: "Clients", ids: Ids, grid: Grid, most: int | None) -> Iterator[Json]:
    """Each cell: `depth`, `streams` and the medians of FIGURES; decode rates count tokens after
    the first. Raises OptionError where a request fails."""
    for depth, streams in grid.cells(most):
        rows = [
            _once(clients, ids, depth, streams, random.Random(f"{grid.seed} {depth} {streams} {i}"))
            for i in range(grid.repeats)
        ]
        medians = {name: statistics.median(row[name] for row in rows) for name in FIGURES}
        yield {"depth": depth, "streams": streams, **medians}


def table(cells: Sequence[Json], title: str) -> Table:
    """The cells, a row each."""
    shown = Table(title=title, title_justify="left")
    for heading in ("context", "streams", *FIGURES.values()):
        shown.add_column(heading, justify="right")
    for cell in cells:
        shown.add_row(*(f"{cell[name]:,.0f}" for name in ("depth", "streams", *FIGURES)))
    return shown


def _once(clients: "Clients", ids: Ids, depth: int, streams: int, rng: random.Random) -> Json:
    contexts = [ids.draw(rng, depth) for _ in range(streams)]
    if depth:
        _run(clients, [Turn(context, 1) for context in contexts])
    whole = [Turn(context + ids.draw(rng, PROMPT), OUTPUT) for context in contexts]
    start, took = _run(clients, whole)
    first, end = [one.times[0] for one in took], max(one.times[-1] for one in took)
    after = sum(sum(one.counts[1:]) for one in took)
    waits = [when - one.start for when, one in zip(first, took, strict=True)]
    each = [sum(one.counts[1:]) / max(one.times[-1] - one.times[0], 1e-9) for one in took]
    return {
        "prefill_tok_s": streams * PROMPT / (max(first) - start),
        "decode_tok_s": after / max(end - min(first), 1e-9),
        "stream_tok_s": statistics.fmean(each),
        "ttft_ms": 1e3 * statistics.median(waits),
        "cached_tokens": statistics.fmean(one.cached_tokens or 0 for one in took),
    }


def _run(clients: "Clients", turns: Sequence[Turn]) -> tuple[float, list[RequestTiming]]:
    """One request of each turn, all at once: when the first was sent, and their times."""
    scripts = tuple(Script((turn,)) for turn in turns)
    shares: Sequence[ClientShare]
    _, shares = clients.run(Load(scripts, len(scripts), "at once"))
    took = [one for share in shares for one in share.took]
    if failed := next((one.error for one in took if one.error), ""):
        raise OptionError(f"a request failed: {failed}")
    return min(one.start for one in took), took
