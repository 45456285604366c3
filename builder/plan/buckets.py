"""Buckets: the fixed launch sizes an engine is compiled for, and binding a graph to one.

Knows the families and their file names; knows no op and no executor.
"""

from __future__ import annotations

from dataclasses import dataclass

from spark_engine.errors import OptionError
from spark_engine.interface import (
    DECODE,
    PREFILL,
    PREFILL_TILE,
    Limits,
    drafts_of,
    families,
    tile_of,
    verify_family,
)

DEFAULT_PREFILL = (64, 256)
FINER_PREFILL = (192, 384, 768, 1536, 3072)  # tokens; where their cost says so
# Of rounds with so many rows at most, further numbers of drafts are compiled than `TWOFOLD`: below
# that a step's time is that of reading the weights, and how many tokens it has hardly matters.
FEW_ROWS = 16
STEPWISE = (1, 2, 3, 5, 7)
TWOFOLD = (1, 3, 7)  # drafts whose tokens are a multiple by 2, 4, 8 of the rows, as kernels want
# A round on the CPU costs by its tokens once there are a few: there drafts stop to pay.
CPU_VERIFY_ROWS = 4


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
        """The engine file's name: `decode_b{rows}.engine`, `verify_b{rows}_k{drafts}.engine` or
        `prefill_t{tokens}.engine`."""
        if self.family == PREFILL:
            return f"prefill_t{self.dims['tokens']}.engine"
        drafts = drafts_of(self.family)
        return f"verify_b{self.rows}_k{drafts}.engine" if drafts else f"decode_b{self.rows}.engine"


@dataclass(frozen=True)
class Buckets:
    """The sizes of every family, ascending; `verify` holds those of all numbers of drafts."""

    decode: tuple[Size, ...]
    prefill: tuple[Size, ...]
    verify: tuple[Size, ...] = ()

    def of(self, family: str) -> tuple[Size, ...]:
        """The sizes of one family."""
        return tuple(s for s in (*self.decode, *self.prefill, *self.verify) if s.family == family)

    def families(self, drafts: int) -> tuple[str, ...]:
        """Those families of an engine with up to `drafts` drafts that have a bucket."""
        return tuple(family for family in families(drafts) if self.of(family))

    def __len__(self) -> int:
        return len(self.decode) + len(self.prefill) + len(self.verify)


Rounds = tuple[tuple[int, int], ...]  # rows and drafts of each bucket that verifies


def bucket_sizes(
    decode: tuple[int, ...] | None,
    prefill: tuple[int, ...] | None,
    limits: Limits,
    verify: Rounds | None = None,
) -> Buckets:
    """The buckets asked for, or powers of two up to max_seqs and 64 and 256 tokens.

    The largest decode bucket is always max_seqs, so that every live sequence fits in one step;
    with drafts each decode bucket has others beside it that verify (`rounds`). Raises OptionError
    for rows outside 1…max_seqs, tokens that are no multiple of 64, or drafts that there are not.
    """
    rows = decode_rows(limits.max_seqs) if decode is None else (*decode, limits.max_seqs)
    tokens = DEFAULT_PREFILL if prefill is None else prefill
    _check_decode(rows, limits.max_seqs)
    _check_prefill(tokens)
    wanted = rounds(rows, limits.drafts) if verify is None else verify
    _check_verify(wanted, limits)
    return Buckets(
        tuple(Size(DECODE, r) for r in sorted(set(rows))),
        tuple(Size(PREFILL, t // PREFILL_TILE) for t in sorted(set(tokens))),
        tuple(Size(verify_family(k), r) for k, r in sorted({(k, r) for r, k in wanted})),
    )


def rounds(rows: tuple[int, ...], drafts: int) -> Rounds:
    """For each number of rows 1, 2, 3, 5, 7 drafts up to `drafts`, above FEW_ROWS 1, 3, 7, and
    `drafts` itself always.

    Between two of these the time of a round differs by little, and the tokens that it yields by
    less than a whole one; each number left out saves the build its kernels' timing, and a start
    its graph.
    """
    found: list[tuple[int, int]] = []
    for r in rows:
        steps = STEPWISE if r <= FEW_ROWS else TWOFOLD
        found += [(r, k) for k in sorted({*steps, drafts}) if 0 < k <= drafts]
    return tuple(found)


def cpu_rounds(rows: tuple[int, ...], drafts: int) -> Rounds:
    """`drafts` for the least rows, and for the most up to CPU_VERIFY_ROWS: each bucket is a session
    of its own, with every matrix in it."""
    few = [r for r in rows if r <= CPU_VERIFY_ROWS]
    return tuple((r, drafts) for r in sorted({min(few), max(few)})) if few and drafts else ()


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


def finer_rows(max_seqs: int) -> tuple[int, ...]:
    """Sizes that a build may add to `fine_decode_rows` where their cost says so: 3, 6, 12, and from
    16 on each quarter of the way from a power of two to the next."""
    quarters = [q << i for i in range(2, max_seqs.bit_length()) for q in (5, 6, 7)]
    wanted = {3, 6, 12, *quarters} - set(fine_decode_rows(max_seqs))
    return tuple(r for r in sorted(wanted) if r < max_seqs)


def parse_sizes(option: str, text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers. Raises OptionError naming the part that is no number from 1."""
    sizes = []
    for part in text.split(","):
        if not part.strip().isdecimal():
            raise OptionError(f"{option} {text}: {part!r} is not a number; write e.g. 1,2,4")
        sizes.append(int(part))
        if not sizes[-1]:
            raise OptionError(f"{option} {text}: a bucket of 0 holds nothing; write e.g. 1,2,4")
    return tuple(sizes)


def parse_rounds(option: str, text: str) -> Rounds:
    """`1:3,8:2` as rows and drafts. Raises OptionError naming the part that is no such pair."""
    found = []
    for part in text.split(","):
        rows, _, drafts = (word.strip() for word in part.partition(":"))
        if not (rows.isdecimal() and drafts.isdecimal()):
            raise OptionError(f"{option} {text}: {part!r} is not rows:drafts; write e.g. 1:3,8:2")
        found.append((int(rows), int(drafts)))
    return tuple(found)


def _check_verify(wanted: Rounds, limits: Limits) -> None:
    bad = [f"{r}:{k}" for r, k in wanted if not (1 <= r <= limits.max_seqs)]
    if bad:
        most = limits.max_seqs
        raise OptionError(f"--verify {','.join(bad)}: rows run from 1 to --max-seqs ({most})")
    bad = [f"{r}:{k}" for r, k in wanted if not 1 <= k <= limits.drafts]
    if bad:
        most = limits.drafts
        raise OptionError(f"--verify {','.join(bad)}: drafts run from 1 to --drafts ({most})")


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
