"""The seeded cases of paged attention.

Page elements beyond a row's context and the scratch page are NaN; the scratch row of the page
table holds illegal ids.
"""

from dataclasses import dataclass, replace

import numpy as np

from spark_engine.interface import PREFILL_TILE, ROPE_ROWS
from spark_engine.op import Attr, Case
from spark_engine.plugins.state.paged_kv import store
from spark_engine.tensors import Array, DType

NAN_CODE = 0x7F


@dataclass(frozen=True)
class Launch:
    """A launch over pages with each sequence's earlier positions."""

    tile: int
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    dim: int = 32
    half: int = 4
    page: int = 64
    kv: DType = DType.F32
    dtype: DType = DType.F32

    @property
    def storage(self) -> DType:
        return DType.U8 if self.kv is DType.F8E4M3 else self.kv

    @property
    def attrs(self) -> dict[str, Attr]:
        heads: dict[str, Attr] = {"heads": self.heads, "kv_heads": self.kv_heads}
        return {
            "tile": self.tile,
            **heads,
            "head_dim": self.dim,
            "eps": 1e-6,
            "kv_dtype": self.kv.value,
            **({"rope_height": 1, "rope_width": 1} if self.tile == PREFILL_TILE else {}),
        }

    def contexts(self) -> dict[int, tuple[int, int]]:
        """slot -> (first position of the launch, first position after it)."""
        found: dict[int, tuple[int, int]] = {}
        for slot, start, n in zip(self.slots, self.starts, self.counts, strict=True):
            if slot >= 0:
                first = found.get(slot, (start, 0))[0]
                found[slot] = (first, start + n)
        return found

    def inputs(self, rng: np.random.Generator) -> tuple[Array, ...]:
        width = 2 * (self.heads + self.kv_heads) * self.dim
        qkv = rng.standard_normal((len(self.slots), self.tile, width))
        for row, n in enumerate(self.counts):
            qkv[row, n:] = np.nan
        norms = [1 + 0.1 * rng.standard_normal(self.dim) for _ in range(2)]
        inv_freq = 1e4 ** (-np.arange(self.half) / self.half)
        scale = np.asarray([0.02, 0.0173]) if self.storage is DType.U8 else np.full(2, np.nan)
        table, pages = self._tables(rng)
        keys = self._pages(rng, table, pages, float(scale[0]))
        values = self._pages(rng, table, pages, float(scale[1]))
        *floats, scales = [np.asarray(x, np.float32) for x in (*norms, inv_freq, scale)]
        steps = [np.asarray(x, np.int32) for x in (self.slots, self.starts, self.counts)]
        flat = qkv.reshape(-1, width).astype(self.dtype.numpy)
        return (flat, *floats, self._offsets(), scales, keys, values, table, *steps)

    def _offsets(self) -> Array:
        """i32 [rows, turns]: of any sign; wild where there is no token."""
        prefill = self.tile == PREFILL_TILE
        shape = (len(self.slots), *((self.tile, ROPE_ROWS) if prefill else (1,)))
        found = np.random.default_rng(3).integers(-90, 90, shape)
        for row, n in enumerate(self.counts):
            found[row, n if prefill else min(n, 1) :] = 1 << 30
        return np.asarray(found.reshape(len(self.slots), -1), np.int32)

    def _tables(self, rng: np.random.Generator) -> tuple[Array, int]:
        """(page_table, number of pages without the scratch page), pages in random order."""
        used = {s: -(-end // self.page) for s, (_, end) in self.contexts().items()}
        pages = sum(used.values()) + 3
        free = sorted(rng.permutation(pages), key=bool)  # page 0 is left over: NaN
        table = np.full((max(used, default=0) + 3, max([*used.values(), 1]) + 1), -1, np.int32)
        for slot, n in used.items():
            table[slot, :n] = [free.pop() for _ in range(n)]
        table[-1] = 1 << 30
        return table, pages

    def _pages(self, rng: np.random.Generator, table: Array, pages: int, scale: float) -> Array:
        shape = (pages + 1, self.kv_heads, self.page, self.dim)
        data = np.full(shape, NAN_CODE if self.storage is DType.U8 else np.nan)
        data = data.astype(self.storage.numpy)
        for slot, (first, _) in self.contexts().items():
            at = np.arange(first)
            x = rng.standard_normal((first, self.kv_heads, self.dim))
            data[table[slot, at // self.page], :, at % self.page] = store(x, self.storage, scale)
        return data

    def ignore(self, outputs: tuple[Array, ...]) -> None:
        o = outputs[0].reshape(len(self.slots), self.tile, -1)
        assert np.isfinite(o.astype(np.float32)).all(), "an inert row's output is not finite"
        for row, n in enumerate(self.counts):
            o[row, n:] = 0
        for pages in outputs[1:]:
            pages[-1] = 0


def _case(label: str, launch: Launch, rtol: float = 1e-5, atol: float = 2e-6) -> Case:
    return Case(label, launch.attrs, launch.inputs, rtol, atol, ignore=launch.ignore)


_EDGES = ((3, -1, 0, 2, 5, 7, 1, 4), (62, 1 << 30, 0, 63, 64, 126, 127, 128), (1, 0) + (1,) * 6)
_TILES = (
    (3, 3, 3, -1, 1, 5, 6, -1),
    (0, 64, 128, 1 << 30, 0, 131, 63, 0),
    (64, 64, 2, 0, 1, 64, 63, 0),
)
# Rounds of drafts (slots, starts, counts) in which tiles, pages and chunks of keys end.
ROUNDS = {
    2: ((3, -1, 0, 2, 5), (14, 1 << 30, 0, 63, 255), (2, 0, 1, 2, 2)),
    3: ((3, 0, 2, 5, 1), (15, 0, 62, 127, 64), (3, 2, 3, 3, 0)),
    4: (
        (3, -1, 0, 2, 5, 7, 1, 4),
        (14, 1 << 30, 0, 13, 61, 126, 189, 64),
        (4, 0, 1, 4, 3, 4, 4, 0),
    ),
    5: ((0, 1), (60, 15), (5, 4)),
    6: ((1, 0), (59, 317), (6, 6)),
    7: ((2, 0), (1, 250), (7, 6)),
    8: ((0, 3, -1, 1, 2), (0, 12, 5, 378, 57), (8, 8, 0, 8, 7)),
}
_B16, _F8 = DType.BF16, DType.F8E4M3


def _bench(label: str, launch: Launch) -> Case:
    return replace(_case(label, replace(launch, dim=256, half=32)), bench=True)


CASES = (
    _bench("served sizes, decode", Launch(1, *_EDGES)),
    _bench("served sizes, tiles", Launch(64, *_TILES)),
    _case("page edges", Launch(1, *_EDGES)),
    _case("decode alone", Launch(1, (4,), (100,), (1,))),
    _case("first token", Launch(1, (0,), (0,), (1,))),
    _case("all inert", Launch(1, (-1, -1), (0, 1 << 30), (0, 0))),
    _case("decode, small pages", Launch(1, *_EDGES, page=16)),
    _case("decode, no sharing", Launch(1, *_EDGES, heads=3, kv_heads=3)),
    _case("decode, eight share", Launch(1, *_EDGES, heads=16, kv_heads=2)),
    _case("decode, far", Launch(1, (1, 0), (4000, 3), (1, 1), dim=8)),
    _case("decode, fp8 pages", Launch(1, *_EDGES, kv=_F8), atol=1e-5),
    _case("decode, bf16 pages", Launch(1, *_EDGES, kv=_B16), atol=1e-5),
    _case("decode, bf16", Launch(1, *_EDGES, kv=_B16, dtype=_B16), 1e-2, 1e-2),
    *(_case(f"round of {n}", Launch(n, *ROUNDS[n])) for n in (5, 6, 7)),
    _bench("served sizes, round", Launch(4, *ROUNDS[4], heads=6)),
    _case("round, first tokens", Launch(4, (0, 1), (0, 0), (4, 1))),
    _case("round, small pages", Launch(4, *ROUNDS[4], page=16)),
    _case("round, no sharing", Launch(2, *ROUNDS[2], heads=3, kv_heads=3)),
    _case("round, three share", Launch(3, *ROUNDS[3], heads=6, kv_heads=2, dim=128, half=16)),
    _case("round, eight share", Launch(8, *ROUNDS[8], heads=16, kv_heads=2, dim=64, half=8)),
    _case("round, fp8 pages", Launch(4, *ROUNDS[4], kv=_F8), atol=1e-5),
    _case("round, bf16", Launch(4, *ROUNDS[4], kv=_B16, dtype=_B16), 1e-2, 1e-2),
    _case("tiles", Launch(64, *_TILES)),
    _case("tiles, small pages", Launch(64, *_TILES, page=16)),
    _case("tiles, large pages", Launch(64, *_TILES, page=256)),
    _case("tiles, no sharing", Launch(64, *_TILES, heads=2, kv_heads=2)),
    _case("tiles, three share", Launch(64, *_TILES, heads=6, kv_heads=2)),
    _case("tiles, whole head turns", Launch(64, *_TILES, half=16)),
    _case("tiles, fp8 pages", Launch(64, *_TILES, kv=_F8), atol=1e-5),
    _case("tiles, bf16 pages", Launch(64, *_TILES, kv=_B16), atol=1e-5),
    *(
        _case(f"ends at {end}", Launch(64, (2,), (max(end - 64, 0),), (min(end, 64),)))
        for end in (63, 64, 65, 127, 128, 129)
    ),
)
