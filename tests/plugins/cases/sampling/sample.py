"""The seeded cases of sample."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spark_engine.interface import MASK_BITS
from spark_engine.op import Attr, Case
from spark_engine.tensors import Array

UNITS = 8
BIASES = 6
TOP = 20
SLOTS = (3, -1, 0, 7, 5, -1, 1)
SILENT = 4
UNMASKED = 5  # the slot without a mask in a launch with masks
Edit = Callable[[np.random.Generator, Array], None]


WILD = 1 << 30  # an illegal id: the op must not use it
ALWAYS = (1 << 31) - 1  # as `bias_until`


@dataclass(frozen=True)
class Launch:
    """A launch; `edit` changes the drawn logits. With a `tile` each token of a row samples, else
    its last one."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    top_k: int = 0
    width: int = 300
    vocab: int = 300
    spread: float = 3.0
    bias: bool = False
    slots: tuple[int, ...] = SLOTS
    edit: Edit | None = None
    tile: int = 0
    mask: float = 0.0  # share of the ids that masked rows allow; 0: no row is masked

    @property
    def attrs(self) -> dict[str, Attr]:
        drafted = {"drafts": 1, "tile": self.tile} if self.tile else {}
        return {"vocab": self.vocab, "top": TOP, **drafted}

    @property
    def idle(self) -> NDArray[np.bool_]:
        """bool [rows]: inert rows."""
        flags: NDArray[np.bool_] = np.asarray(self.slots) < 0
        return flags

    @property
    def silent(self) -> NDArray[np.bool_]:
        """bool [rows]: rows that must not sample (emit 0)."""
        flags: NDArray[np.bool_] = np.arange(len(self.slots)) == SILENT
        return flags

    @property
    def live(self) -> NDArray[np.bool_]:
        """bool [rows, tile]: existing tokens; rows are full, shorter, or empty."""
        counts = (self.tile - np.arange(len(self.slots))) % (self.tile + 1)
        flags: NDArray[np.bool_] = np.arange(self.tile) < (counts * ~self.idle)[:, None]
        return flags

    def inputs(self, rng: np.random.Generator) -> tuple[Array, ...]:
        rows = len(self.slots)
        shape = (rows * max(self.tile, 1), self.width)
        logits = (rng.standard_normal(shape) * self.spread).astype(np.float32)
        if self.edit is not None:
            self.edit(rng, logits)
        token_counts = rng.integers(0, 8, (UNITS + 1, self.width))
        token_counts *= rng.integers(0, 2, token_counts.shape)
        token_counts[-1] = -(1 << 31)
        starts, counts = rng.integers(0, 5000, rows), rng.integers(1, 65, rows)
        counts[self.idle] = 0
        rest: tuple[object, ...] = (
            ~self.idle & ~self.silent,
            rng.integers(0, self.width, UNITS + 1),
        )
        if self.tile:
            logits[np.flatnonzero(~self.live)[::2]] = np.nan
            counts = self.live.sum(axis=1)
            ids = rng.integers(0, self.vocab, 3)[rng.integers(0, 3, self.live.shape)]  # repeated
            rest = (np.where(self.live, ids, WILD).reshape(-1),)
        tables = self._tables(rng, starts + (1 if self.tile else counts))
        ints = [np.asarray(x, np.int32) for x in (self.slots, starts, counts, *rest)]
        return (logits, token_counts.astype(np.int32), *tables, *ints)

    def _tables(self, rng: np.random.Generator, position: Array) -> tuple[Array, ...]:
        """The tables of slots. `position`: of each row's first new token, near which biases end."""
        floats = np.full((UNITS + 1, 8), np.nan, np.float32)
        floats[:-1, :6] = (
            *(self.temperature, self.top_p, self.min_p),
            *(self.repetition, self.presence, self.frequency),
        )
        integers = rng.integers(-(1 << 31), 1 << 31, (UNITS + 1, 4)).astype(np.int32)
        integers[:-1, 0] = self.top_k
        integers[:-1, 3] = 0
        ids = np.full((UNITS + 1, BIASES), -1, np.int32)
        values = np.full((UNITS + 1, BIASES), np.nan, np.float32)
        if self.bias:
            ids[:-1, : BIASES - 1] = rng.integers(0, self.vocab, (UNITS, BIASES - 1))
            ids[0, 1] = ids[0, 0]  # two biases of one id: both count
            values[:-1, : BIASES - 1] = rng.uniform(-4, 9, (UNITS, BIASES - 1))
            values[1, 2] = -np.inf
        ids[-1] = 1 << 30
        until = np.full((UNITS + 1, BIASES), ALWAYS)
        for slot, first in zip(self.slots, position, strict=True):
            until[slot] = first + rng.permutation([0, 0, 1, 2, 3, ALWAYS - first])
        allow = self._masks(rng, integers, ids[1, 2])
        return floats, integers, ids, values, until.astype(np.int32), allow

    def _masks(self, rng: np.random.Generator, integers: Array, banned: int) -> Array:
        """u32 [slots, words]; sets the flags in `integers`, except of UNMASKED, which has random
        words. Ids beyond the vocabulary have bits too. One slot is masked by whole cells, one
        allows a single id, and with biases one allows only `banned`, an id of bias −∞."""
        words = -(-self.width // MASK_BITS)
        wild = rng.integers(0, 1 << 32, (UNITS + 1, words), np.uint32)
        if not self.mask:
            return wild
        bits = rng.random((UNITS, words * MASK_BITS)) < self.mask
        cells = np.arange(bits.shape[1]) // 256
        bits[7] = np.where(cells % 3 == 2, bits[7], cells % 3 == 1)
        bits[:2, : self.width] = False
        bits[1, banned if self.bias else 1] = bits[0, rng.integers(0, self.vocab)] = True
        bits[np.arange(UNITS), rng.integers(0, self.vocab, UNITS)] |= np.arange(UNITS) > 1
        bits[:, self.vocab :] = True
        allow = np.packbits(bits, axis=1, bitorder="little").view("<u4").astype(np.uint32)
        masked = np.arange(UNITS) != UNMASKED
        integers[:-1, 3] = masked
        wild[:-1][masked] = allow[masked]
        return wild

    def ignore(self, outputs: tuple[Array, ...]) -> None:
        for output in outputs[:5]:
            assert np.isfinite(output.astype(np.float64)).all()
        if self.tile:
            for output in outputs[1:4]:
                output[~self.live.reshape(-1)] = 0
            return
        for output in outputs[:5]:
            output[self.idle] = 0
        for output in outputs[:2]:
            output[self.silent] = 0
        outputs[5][-1] = 0


def ties(rng: np.random.Generator, logits: Array) -> None:
    logits[...] = np.round(logits)  # many equal logits


def broken(rng: np.random.Generator, logits: Array) -> None:
    logits[0, 5], logits[2, 9], logits[3, :] = np.nan, np.inf, -np.inf


def flat(rng: np.random.Generator, logits: Array) -> None:
    logits[...] = 0.25


def _plateau(rng: np.random.Generator, logits: Array) -> None:
    """A few large logits, a third of them equal, the rest negligible."""
    place = rng.random(logits.shape)
    logits[place > 0.05] = 0.25
    logits[place > 0.35] = -40.0


def _case(label: str, launch: Launch) -> Case:
    return Case(label, launch.attrs, launch.inputs, 1e-5, 2e-5, ignore=launch.ignore)


_PENALISED = Launch(1.7, 0.9, 0.01, 1.3, 0.7, 0.2, top_k=30, bias=True)

_CUT = replace(_PENALISED, width=308, vocab=301, mask=0.4)  # the last word of a mask is not full

CASES = (
    _case("greedy", Launch(0.0)),
    _case("greedy, penalties and bias", replace(_PENALISED, temperature=0.0)),
    _case("greedy, ties", Launch(0.0, edit=ties)),
    _case("greedy, flat", Launch(0.0, edit=flat)),
    _case("plain draw", Launch()),
    _case("one row", Launch(0.8, top_k=20, top_p=0.95, slots=(2,))),
    _case("all inert", Launch(slots=(-1, -1))),
    _case("hot", Launch(3.0)),
    _case("cold", Launch(1e-4)),
    _case("top_k 1", Launch(top_k=1, edit=ties)),
    _case("top_k", Launch(1.5, top_k=20)),
    _case("top_k beyond the vocabulary", Launch(1.5, top_k=100000)),
    _case("top_k, ties", Launch(2.0, top_k=7, edit=ties)),
    _case("top_p", Launch(1.0, 0.9)),
    _case("top_p, hot", Launch(8.0, 0.97)),
    _case("top_p 0", Launch(1.0, 0.0)),
    _case("top_p, ties", Launch(2.0, 0.5, edit=ties)),
    _case("top_p, flat and wide", Launch(1.0, 0.5, width=8192, vocab=8190, edit=flat)),
    _case("top_p, nearly flat and wide", Launch(1.0, 0.9, width=8192, vocab=8190, spread=1e-3)),
    _case("top_p, ends on a plateau", Launch(1.0, 0.7, width=8192, vocab=8190, edit=_plateau)),
    _case("top_k 100, flat and wide", Launch(1.0, top_k=100, width=8192, vocab=8190, edit=flat)),
    _case("min_p", Launch(1.0, min_p=0.1)),
    _case("all three", Launch(1.7, 0.9, 0.01, top_k=30)),
    _case("everything", _PENALISED),
    _case("unused rows of the vocabulary", Launch(4.0, 0.99, vocab=40)),
    _case("greedy, unused rows", Launch(0.0, vocab=21)),
    _case("not finite", Launch(1.0, 0.9, edit=broken)),
    _case("large", Launch(6.0, 0.999, width=4096, vocab=4090)),
    *(
        _case(f"masked, {label}", launch)
        for label, launch in (
            ("greedy", Launch(0.0, mask=0.3)),
            ("greedy, everything, a cut word", replace(_CUT, temperature=0.0)),
            ("plain draw", Launch(mask=0.5)),
            ("plain draw, wide", Launch(2.0, width=4096, vocab=4090, mask=0.02)),
            ("few", Launch(1.0, top_k=20, mask=0.02)),
            ("top_k 100", Launch(1.5, top_k=100, width=4096, vocab=4090, mask=0.1)),
            ("top_p", Launch(1.0, 0.9, width=4096, vocab=4090, mask=0.5)),
            ("min_p, ties", Launch(2.0, min_p=0.1, edit=ties, mask=0.3)),
            ("everything, a cut word", _CUT),
            ("not finite", Launch(1.0, 0.9, edit=broken, mask=0.5)),
            ("all inert", Launch(slots=(-1, -1), mask=0.5)),
            ("4 tokens a row, everything", replace(_CUT, tile=4)),
            ("2 tokens a row, greedy", Launch(0.0, mask=0.1, tile=2)),
        )
    ),
    *(
        _case(f"{tile} tokens a row, {label}", replace(launch, tile=tile))
        for tile, label, launch in (
            (4, "greedy, penalties and bias", replace(_PENALISED, temperature=0.0)),
            (4, "everything", _PENALISED),
            (2, "top_p", Launch(1.0, 0.9, presence=1.5, bias=True)),
            (3, "not finite", Launch(1.0, 0.9, edit=broken)),
            (8, "all ids", Launch(1.3, frequency=0.7, width=1024, vocab=1020, bias=True)),
            (1, "plain draw", Launch(bias=True)),
            (4, "all inert", Launch(slots=(-1, -1))),
            (4, "one row", Launch(0.8, top_k=20, repetition=1.2, slots=(2,), width=4096)),
        )
    ),
    replace(_case("served sizes", Launch(1.0, 0.95, top_k=20, width=4096, vocab=4090)), bench=True),
)
