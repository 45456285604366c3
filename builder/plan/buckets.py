"""Buckets: the fixed launch sizes an engine is compiled for, and binding a graph to one.

Knows the two families and their file names; knows no op and no executor.
"""

from __future__ import annotations

from dataclasses import dataclass

from spark_engine.errors import OptionError
from spark_engine.interface import PREFILL_TILE, Limits, tile_of

DEFAULT_PREFILL = (64, 256)


@dataclass(frozen=True)
class Size:
    """One bucket: `rows` rows of up to `tile` tokens."""

    family: str
    rows: int

    @property
    def tile(self) -> int:
        """Tokens of a full row."""
        return tile_of(self.family)

    @property
    def dims(self) -> dict[str, int]:
        """What the graph's named dimensions become."""
        return {"rows": self.rows, "tokens": self.rows * self.tile}

    @property
    def file(self) -> str:
        """The engine file's name: `decode_b{rows}.engine` or `prefill_t{tokens}.engine`."""
        if self.family == "decode":
            return f"decode_b{self.rows}.engine"
        return f"{self.family}_t{self.dims['tokens']}.engine"


@dataclass(frozen=True)
class Buckets:
    """The sizes of both families, ascending."""

    decode: tuple[Size, ...]
    prefill: tuple[Size, ...]

    def of(self, family: str) -> tuple[Size, ...]:
        """The sizes of one family."""
        return self.decode if family == "decode" else self.prefill


def bucket_sizes(
    decode: tuple[int, ...] | None, prefill: tuple[int, ...] | None, limits: Limits
) -> Buckets:
    """The buckets wished for, or powers of two up to max_seqs and 64 and 256 tokens.

    The largest decode bucket is always max_seqs, so that every live sequence fits in one step.
    Raises OptionError for rows outside 1…max_seqs or tokens that are no multiple of 64.
    """
    rows = decode_rows(limits.max_seqs) if decode is None else (*decode, limits.max_seqs)
    tokens = DEFAULT_PREFILL if prefill is None else prefill
    _check_decode(rows, limits.max_seqs)
    _check_prefill(tokens)
    return Buckets(
        tuple(Size("decode", r) for r in sorted(set(rows))),
        tuple(Size("prefill", t // PREFILL_TILE) for t in sorted(set(tokens))),
    )


def decode_rows(max_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, … below max_seqs, and max_seqs itself."""
    powers = [1 << i for i in range(max_seqs.bit_length()) if 1 << i < max_seqs]
    return (*powers, max_seqs)


def fine_decode_rows(max_seqs: int) -> tuple[int, ...]:
    """`decode_rows` and, from 24 on, the sizes half-way between: 24, 48, 96.

    Where a step is one graph, a bucket that is a third larger than the rows alive costs a step of
    more rows: 33 rows in a bucket of 64 pay for 64. Below 16 a step takes about as long for any
    number of rows.
    """
    between = [3 << i for i in range(3, max_seqs.bit_length()) if 3 << i < max_seqs]
    return tuple(sorted({*decode_rows(max_seqs), *between}))


def parse_sizes(option: str, text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers. Raises OptionError naming the part that is no number."""
    sizes = []
    for part in text.split(","):
        if not part.strip().isdecimal():
            raise OptionError(f"{option} {text}: {part!r} is not a number; write e.g. 1,2,4")
        sizes.append(int(part))
    return tuple(sizes)


def _check_decode(rows: tuple[int, ...], max_seqs: int) -> None:
    if not all(1 <= r <= max_seqs for r in rows):
        raise OptionError(f"--decode {_join(rows)}: rows run from 1 to --max-seqs ({max_seqs})")


def _check_prefill(tokens: tuple[int, ...]) -> None:
    tile = PREFILL_TILE
    bad = [t for t in tokens if t < tile or t % tile]
    if bad or not tokens:
        raise OptionError(f"--prefill {_join(tokens)}: give multiples of {tile}, e.g. 64,256")


def _join(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))
