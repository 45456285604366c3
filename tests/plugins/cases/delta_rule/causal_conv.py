"""The seeded cases of causal_conv."""

from typing import Any

import numpy as np

from spark_engine.interface import PREFILL_TILE
from spark_engine.op import Attrs, Case, Inputs
from spark_engine.plugins.ops.delta_rule.causal_conv import conv_rows
from spark_engine.tensors import Array, DType
from tests.plugins.cases.delta_rule.tiles import Tiles


def _inputs(
    slots: tuple[int, ...],
    starts: tuple[int, ...],
    counts: tuple[int, ...],
    tile: int,
    taps: int = 4,
    dtype: DType = DType.F32,
    drafts: int = 0,
    tiles: Tiles | None = None,
    padding: int = 7,
) -> Inputs:
    channels, extra, units = 40, padding, 9

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        x = np.full((len(slots), tile, channels + extra), np.nan)
        for row, n in enumerate(counts):
            x[row, :n, :channels] = rng.standard_normal((n, channels))
        weight = rng.standard_normal((channels, taps)) * 0.4
        kept = conv_rows(taps, drafts)
        state = rng.standard_normal((units + 1, kept, channels))
        state[-1] = np.nan
        if tiles is not None:
            state[tiles.unread] = np.nan
        for slot, start in zip(slots[::-1], starts[::-1], strict=True):
            if slot >= 0 and start == 0:
                state[slot] = np.nan  # stale
            elif slot >= 0 and drafts and tile <= 1 + drafts:
                read = np.arange(max(0, start - taps + 1), start) % kept
                state[slot, np.setdiff1d(np.arange(kept), read)] = np.nan
        steps: list[Array] = [np.asarray(s, np.int32) for s in (slots, starts, counts)]
        steps += tiles.operands if tiles is not None else []
        flat = x.reshape(-1, channels + extra).astype(dtype.numpy)
        return (flat, weight.astype(np.float32), state.astype(dtype.numpy), *steps)

    return make


def _case(
    label: str,
    tile: int,
    slots: tuple[int, ...],
    starts: tuple[int, ...],
    counts: tuple[int, ...],
    taps: int = 4,
    dtype: DType = DType.F32,
    drafts: int = 0,
    sources: tuple[tuple[int, int], ...] = (),
    saves: tuple[tuple[int, int], ...] = (),
    padding: int = 7,
) -> Case:
    """`padding`: columns of x behind the channels; with 8, rows begin at whole 8 bytes."""

    def ignore(outputs: tuple[Array, ...]) -> None:
        c = outputs[0].reshape(len(slots), tile, -1)
        assert np.isfinite(c.astype(np.float32)).all()
        for row, n in enumerate(counts):
            c[row, n:] = 0
        outputs[1][-1] = 0

    tiles = Tiles(slots, starts, dict(sources), dict(saves)) if tile == PREFILL_TILE else None
    make = _inputs(slots, starts, counts, tile, taps, dtype, drafts, tiles, padding)
    attrs: Attrs = {"tile": tile, "drafts": drafts} if drafts else {"tile": tile}
    rtol, atol = (1e-5, 1e-6) if dtype is DType.F32 else (1e-2, 1e-2)
    return Case(label, attrs, make, rtol, atol, ignore=ignore)


_TILES = ((3, 3, -1, 1, 5, -1), (0, 64, 1 << 30, 0, 131, 0), (64, 2, 0, 1, 64, 0))

# Two that begin from one row, and a fresh one; saved are a first tile, one within, a last, a short.
_FROM = ((2, 2, 2, -1, 4, 1, 1), (70, 134, 198, 1 << 30, 70, 0, 64), (64, 64, 1, 0, 2, 64, 5))

_SAVED: dict[str, Any] = {
    "sources": ((2, 0), (4, 0)),
    "saves": ((0, 6), (1, 3), (2, 5), (4, 7), (5, 8)),
}

_ROUNDS = ((3, -1, 0, 2, 5, 4), (69, 1 << 30, 0, 1, 2, 9))

CASES = (
    _case("decode", 1, (3, -1, 0, 2), (69, 1 << 30, 0, 1), (1, 0, 1, 1)),
    _case("decode alone", 1, (4,), (100,), (1,)),
    _case("prefill", 64, *_TILES),
    _case("one short tile", 64, (2,), (5,), (2,)),
    _case("three tiles", 64, (2, 2, 2, 4), (7, 71, 135, 3), (64, 64, 1, 3)),
    _case("all inert", 64, (-1, -1), (0, 7), (0, 0)),
    _case("two taps", 64, *_TILES, taps=2),
    _case("bf16", 64, *_TILES, dtype=DType.BF16),
    _case("begins elsewhere", 64, *_FROM, sources=_SAVED["sources"]),
    _case("saves", 64, *_FROM, saves=_SAVED["saves"]),
    _case("begins elsewhere and saves", 64, *_FROM, **_SAVED),
    _case("two taps, begins elsewhere and saves", 64, *_FROM, taps=2, **_SAVED),
    _case("bf16, begins elsewhere and saves", 64, *_FROM, dtype=DType.BF16, **_SAVED),
    _case("bf16, rows at whole 8 bytes", 64, *_FROM, dtype=DType.BF16, padding=8, **_SAVED),
    _case("drafts, begins elsewhere", 64, *_FROM, drafts=3, sources=_SAVED["sources"]),
    _case("drafts, saves", 64, *_FROM, drafts=7, saves=_SAVED["saves"]),
    _case("drafts, begins elsewhere and saves", 64, *_FROM, drafts=3, **_SAVED),
    _case("drafts, 1 token", 1, *_ROUNDS, (1, 0, 1, 1, 1, 0), drafts=3),
    _case("drafts, 2 tokens", 2, *_ROUNDS, (2, 0, 1, 2, 2, 0), drafts=3),
    _case("drafts, 4 tokens", 4, *_ROUNDS, (4, 0, 3, 4, 1, 0), drafts=3),
    _case("drafts, 8 tokens of two taps", 8, *_ROUNDS, (8, 0, 3, 7, 1, 0), taps=2, drafts=7),
    _case("drafts, bf16", 4, *_ROUNDS, (4, 0, 3, 4, 1, 0), dtype=DType.BF16, drafts=3),
    _case("drafts, prefill", 64, *_TILES, drafts=3),
    _case("drafts, three tiles", 64, (2, 2, 2, 4), (7, 71, 135, 3), (64, 64, 1, 3), drafts=7),
    _case("bf16 decode", 1, (3, -1, 0, 2), (69, 0, 0, 1), (1, 0, 1, 1), dtype=DType.BF16),
)
