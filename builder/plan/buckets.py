"""Buckets: the fixed launch sizes an engine is compiled for, and binding a graph to one.

Knows the families and their file names; knows no op and no executor.
"""

from dataclasses import dataclass

from spark_engine.errors import OptionError
from spark_engine.interface import (
    DECODE,
    MOST,
    PREFILL,
    PREFILL_TILE,
    Limits,
    drafts_of,
    families,
    tile_of,
    verify_family,
)
from spark_engine.vision import ROW_PATCHES, VISION

DEFAULT_PREFILL = (64, 256)
FINER_PREFILL = (192, 384, 768, 1536, 3072)  # tokens; added if their cost pays
# Up to this many rows, more numbers of drafts than `TWOFOLD` are compiled: there a step's time is
# that of reading the weights, and depends little on the number of tokens.
FEW_ROWS = 16
STEPWISE = (1, 2, 3, 5, 7)
TWOFOLD = (1, 3, 7)  # drafts with 2, 4 or 8 tokens a row, which suit the kernels
# On the CPU, a round's time grows with its tokens: with more rows, drafts no longer pay.
CPU_VERIFY_ROWS = 4


@dataclass(frozen=True)
class Size:
    """One bucket: `rows` rows of up to `tile` tokens, of the tower of patches."""

    family: str
    rows: int

    @property
    def tile(self) -> int:
        return tile_of(self.family)

    @property
    def dims(self) -> dict[str, int]:
        return {"rows": self.rows, "tokens": self.rows * self.tile}

    @property
    def file(self) -> str:
        """The engine file's name: `decode_b{rows}.engine`, `verify_b{rows}_k{drafts}.engine`,
        `prefill_t{tokens}.engine` or `vision_p{patches}.engine`."""
        if letter := {PREFILL: "t", VISION: "p"}.get(self.family):
            return f"{self.family}_{letter}{self.dims['tokens']}.engine"
        drafts = drafts_of(self.family)
        return f"verify_b{self.rows}_k{drafts}.engine" if drafts else f"decode_b{self.rows}.engine"


@dataclass(frozen=True)
class Buckets:
    """The bucket sizes of every family, ascending; `verify` has those of all numbers of drafts."""

    decode: tuple[Size, ...]
    prefill: tuple[Size, ...]
    verify: tuple[Size, ...] = ()
    vision: tuple[Size, ...] = ()

    @property
    def all(self) -> tuple[Size, ...]:
        return (*self.decode, *self.prefill, *self.verify, *self.vision)

    def of(self, family: str) -> tuple[Size, ...]:
        return tuple(s for s in self.all if s.family == family)

    def families(self, drafts: int) -> tuple[str, ...]:
        """The families with a bucket, of an engine with up to `drafts` drafts."""
        return tuple(family for family in families(drafts, len(self.vision)) if self.of(family))

    def __len__(self) -> int:
        return len(self.all)


Rounds = tuple[tuple[int, int], ...]  # rows and drafts of each bucket that verifies


def bucket_sizes(
    decode: tuple[int, ...] | None,
    prefill: tuple[int, ...] | None,
    limits: Limits,
    verify: Rounds | None = None,
    vision: tuple[int, ...] = (),
) -> Buckets:
    """The requested buckets, or powers of two up to max_seqs and 64 and 256 tokens; `vision` are
    the patches of the tower's.

    The largest decode bucket is always max_seqs, so that every live sequence fits in one step;
    with drafts there are verify buckets for each decode bucket (`rounds`). Raises OptionError for
    rows outside 1…max_seqs, tokens that are no multiple of 64, or more drafts than `drafts`.
    """
    tokens, most = DEFAULT_PREFILL if prefill is None else prefill, limits.max_seqs
    rows = decode_rows(most) if decode is None else (*decode, most)
    if not all(1 <= r <= most for r in rows):
        raise OptionError(f"--decode {listed(rows[:-1])}: rows run from 1 to --max-seqs ({most})")
    _check_prefill(tokens)
    wanted = rounds(rows, limits.drafts) if verify is None else verify
    _check_verify(wanted, limits)
    return Buckets(
        tuple(Size(DECODE, r) for r in sorted(set(rows))),
        tuple(Size(PREFILL, t // PREFILL_TILE) for t in sorted(set(tokens))),
        tuple(Size(verify_family(k), r) for k, r in sorted({(k, r) for r, k in wanted})),
        tuple(Size(VISION, patches // ROW_PATCHES) for patches in vision),
    )


def rounds(rows: tuple[int, ...], drafts: int) -> Rounds:
    """(rows, drafts) of the verify buckets: 1, 2, 3, 5, 7 drafts up to `drafts`, above FEW_ROWS
    rows 1, 3, 7, and always `drafts` itself.

    Between two of these numbers a round's time differs little, and its yield by less than a token.
    Each number left out saves timing during the build and a graph at each start.
    """
    found: list[tuple[int, int]] = []
    for r in rows:
        steps = STEPWISE if r <= FEW_ROWS else TWOFOLD
        found += [(r, k) for k in sorted({*steps, drafts}) if 0 < k <= drafts]
    return tuple(found)


def cpu_rounds(rows: tuple[int, ...], drafts: int) -> Rounds:
    """`drafts` for the fewest rows, and for the most up to CPU_VERIFY_ROWS. No other numbers of
    drafts, since each is a session with its own copy of every matrix."""
    few = [r for r in rows if r <= CPU_VERIFY_ROWS]
    return tuple((r, drafts) for r in sorted({min(few), max(few)})) if few and drafts else ()


def decode_rows(max_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, … below max_seqs, and max_seqs itself."""
    powers = [1 << i for i in range(max_seqs.bit_length()) if 1 << i < max_seqs]
    return (*powers, max_seqs)


def fine_decode_rows(max_seqs: int) -> tuple[int, ...]:
    """`decode_rows` and, from 24 on, the midpoints between them: 24, 48, 96.

    A step costs as much as its bucket's rows: 33 rows in a bucket of 64 cost as much as 64. Below
    16 rows a step takes about the same time for any number of rows.
    """
    between = [3 << i for i in range(3, max_seqs.bit_length()) if 3 << i < max_seqs]
    return tuple(sorted({*decode_rows(max_seqs), *between}))


def finer_rows(max_seqs: int) -> tuple[int, ...]:
    """Sizes that are added if they pay: 3, 6, 12, and quarters between powers of two from 16."""
    quarters = [q << i for i in range(2, max_seqs.bit_length()) for q in (5, 6, 7)]
    wanted = {3, 6, 12, *quarters} - set(fine_decode_rows(max_seqs))
    return tuple(r for r in sorted(wanted) if r < max_seqs)


def parse_sizes(option: str, text: str) -> tuple[int, ...]:
    """`1,2,4` as numbers. Raises OptionError naming the part that is no number from 1."""
    sizes = []
    for part in text.split(","):
        if not part.strip().isdecimal() or not int(part):
            raise OptionError(f"{option} {text}: {part!r} is no number from 1; write e.g. 1,2,4")
        sizes.append(int(part))
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
    of = ("rows", "--max-seqs", limits.max_seqs), ("drafts", "--drafts", limits.drafts)
    for at, (what, option, most) in enumerate(of):
        if bad := [f"{pair[0]}:{pair[1]}" for pair in wanted if not 1 <= pair[at] <= most]:
            words = f"{what} run from 1 to {option} ({most})"
            raise OptionError(f"--verify {','.join(bad)}: {words}")


def _check_prefill(tokens: tuple[int, ...]) -> None:
    tile, most = PREFILL_TILE, MOST["max_context"]
    if not tokens or not all(tile <= t <= most and t % tile == 0 for t in tokens):
        words = f"give multiples of {tile}, up to {most}, e.g. 64,256"
        raise OptionError(f"--prefill {listed(tokens)}: {words}")


def listed(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))
