"""The seeded cases of the gated delta rule, with a replay ring and without. Knows its operands and
the ring's layout, not its maths."""

from dataclasses import dataclass, replace

import numpy as np

from spark_engine.interface import PREFILL_TILE
from spark_engine.op import Attr, Case
from spark_engine.plugins.state.replay_ring import Heads, Ring
from spark_engine.tensors import Array, DType
from tests.plugins.cases.delta_rule.tiles import Tiles

UNITS = 6
LAGS = (3, 1 << 20, 0, 5, 1)  # tokens since all was folded, of one slot after another


@dataclass(frozen=True)
class Launch:
    """Row lists of one launch and the size of the heads."""

    tile: int
    slots: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    keys: int = 2
    values: int = 4
    key_dim: int = 32
    value_dim: int = 32
    dtype: DType = DType.F32
    state: DType = DType.F32
    speed: float = 0.0  # added to a_log: 3 decays by e^-20 and more per token
    strength: float = 0.0  # added to b: 6 makes beta nearly 1
    units: int = UNITS
    loud: float = 1.0  # times v: 1e6 for states beyond f16
    same: bool = False  # all keys nearly equal: the hard case of the triangular solve
    ring: int = 0  # records behind each state
    lags: tuple[int, ...] = LAGS
    drafts: int = 0  # most of a round; 0: a ring without header
    sources: tuple[tuple[int, int], ...] = ()  # (slot, row that it begins from)
    saves: tuple[tuple[int, int], ...] = ()  # (tile, row that it saves to)

    @property
    def attrs(self) -> dict[str, Attr]:
        sizes = {"key_heads": self.keys, "value_heads": self.values}
        dims = {"key_dim": self.key_dim, "value_dim": self.value_dim}
        more = {"drafts": self.drafts} if self.drafts else {}
        return {"tile": self.tile, **sizes, **dims, "ring": self.ring, **more}

    @property
    def layout(self) -> Ring:
        heads = Heads(self.tile, self.keys, self.values, self.key_dim, self.value_dim)
        return Ring(self.ring, heads, self.drafts)

    @property
    def tiles(self) -> Tiles:
        """Which rows are read."""
        return Tiles(self.slots, self.starts, dict(self.sources), dict(self.saves))

    def inputs(self, rng: np.random.Generator) -> tuple[Array, ...]:
        c, ba = self._tokens(rng)
        shape = (self.units + 1, self.values, self.value_dim, self.key_dim)
        state = rng.standard_normal(shape) * 0.3
        state[-1] = np.nan
        state[self.tiles.unread] = np.nan
        a_log = rng.uniform(-3, 1, self.values) + self.speed
        dt_bias = rng.uniform(-5, 0, self.values)
        rows = (self.slots, self.starts, self.counts)
        steps: list[Array] = [np.asarray(s, np.int32) for s in rows]
        steps += self.tiles.operands if self.tile == PREFILL_TILE else []
        floats = (a_log.astype(np.float32), dt_bias.astype(np.float32))
        rings = [self.records(rng)] if self.ring else []
        return (c, ba, *floats, state.astype(self.state.numpy), *rings, *steps)

    def records(self, rng: np.random.Generator) -> Array:
        """f32 [units+1, rows, width]: NaN but for what a sequence at its row's position may read.

        With drafts the slots' states were left one token after another behind the position.
        """
        ring = self.layout
        held = np.full((self.units + 1, ring.rows, ring.width), np.nan, np.float32)
        for i, (slot, start) in enumerate(sorted(self.tiles.origins.items())):
            if start == 0:
                continue
            done = max(1, start - i % (self.drafts + 1)) if self.drafts else start
            base = max(0, done - self.lags[i % len(self.lags)])
            if self.drafts:
                held[slot, -1, : self.values], held[slot, -1, self.values : 2 * self.values] = (
                    done,
                    base,
                )
            else:
                held[slot, 0, -1] = base
            behind = start - ring.since(held[slot], start)
            for age in range(1, int(behind.max(initial=0)) + 1):
                record = held[slot, (start - age) % ring.records]
                record[: ring.used] = self._record(rng, behind >= age)
        return held

    def _record(self, rng: np.random.Generator, live: Array) -> Array:
        delta = np.where(live, rng.standard_normal(live.shape), np.nan)
        k = rng.standard_normal((self.keys, self.key_dim))
        k /= np.linalg.norm(k, axis=1, keepdims=True)
        g = -rng.uniform(0, 0.6, self.values) * np.exp(self.speed)
        return np.concatenate([x.reshape(-1) for x in (delta, k, g)])

    def _tokens(self, rng: np.random.Generator) -> tuple[Array, Array]:
        rows, size = len(self.slots), self.keys * self.key_dim
        c = rng.standard_normal((rows, self.tile, 2 * size + self.values * self.value_dim))
        c[..., 2 * size :] *= self.loud
        if self.same:
            c[..., size : 2 * size] = c[:1, :1, size : 2 * size] + c[..., size : 2 * size] * 0.02
        ba = rng.standard_normal((rows, self.tile, 2 * self.values)) * 2
        ba[..., : self.values] += self.strength
        for row, n in enumerate(self.counts):
            c[row, n:], ba[row, n:] = np.nan, np.nan
        flat = rows * self.tile
        numpy = self.dtype.numpy
        return c.reshape(flat, -1).astype(numpy), ba.reshape(flat, -1).astype(numpy)

    def ignore(self, outputs: tuple[Array, ...]) -> None:
        o = outputs[0].reshape(len(self.slots), self.tile, -1)
        assert np.isfinite(o.astype(np.float32)).all(), "an inert row's output is not finite"
        for row, n in enumerate(self.counts):
            o[row, n:] = 0
        for state in outputs[1:]:
            state[-1] = 0


def _case(label: str, launch: Launch, rtol: float = 1e-5, atol: float = 2e-6) -> Case:
    return Case(label, launch.attrs, launch.inputs, rtol, atol, ignore=launch.ignore)


DECODE = ((3, -1, 0, 2, 5), (69, 1 << 30, 0, 1, 8), (1, 0, 1, 1, 0))
_TILES = ((3, 3, 3, -1, 1, 5, -1), (0, 64, 128, 1 << 30, 0, 131, 0), (64, 64, 2, 0, 1, 64, 0))


def _bench(launch: Launch) -> Case:
    served = replace(launch, keys=2, values=4, key_dim=128, value_dim=128)
    return replace(_case("served sizes", served), bench=True)


# With a ring: also a row of a full ring, and one that has fewer tokens than its ring.
RING_DECODE = ((3, -1, 0, 2, 5, 4, 1), (69, 1 << 30, 0, 1, 8, 1031, 14), (1, 0, 1, 1, 0, 1, 1))
_RING_TILES = (
    (3, 3, 3, -1, 1, 5, -1, 0),
    (0, 64, 128, 1 << 30, 0, 131, 0, 7),
    (64, 64, 2, 0, 1, 64, 0, 5),
)


# Two that begin from one row, and a fresh one; saved are a first tile, the last ones, one of one
# token.
_FROM = ((3, 3, 3, -1, 1, 0, 0), (40, 104, 168, 1 << 30, 0, 40, 104), (64, 64, 2, 0, 1, 64, 5))


def _saved(launch: Launch) -> Launch:
    saves = ((0, 4), (2, 5), (4, 6), (5, 7), (6, 8))
    return replace(launch, units=9, sources=((3, 2), (0, 2)), saves=saves)


def _ringed(
    label: str, tile: int, ring: int = 8, rtol: float = 1e-5, atol: float = 3e-6, **sizes: object
) -> Case:
    rows = RING_DECODE if tile == 1 else _RING_TILES
    launch = replace(Launch(tile, *rows, **sizes), ring=ring)  # type: ignore[arg-type]
    return _case(f"ring of {ring}, {label}", launch, rtol, atol)


def _kept(label: str, rtol: float = 1e-5, atol: float = 3e-6, **sizes: object) -> Case:
    launch = _saved(Launch(64, *_FROM, **sizes))  # type: ignore[arg-type]
    return _case(f"begins elsewhere and saves, {label}", launch, rtol, atol)


def _phase(start: int) -> Case:
    launch = Launch(1, (4,), (start,), (1,), 1, 2, 32, 64, ring=4, lags=(99,))
    return _case(f"ring of 4, position {start}", launch, atol=3e-6)


# Rounds: behind a full ring and a short one, at position 0, of fewer tokens than fit, of none.
ROUND_ROWS = ((3, -1, 0, 2, 5, 4, 1), (69, 1 << 30, 0, 1, 8, 1031, 14), (9, 0, 9, 2, 0, 1, 9))


def _drafted(
    label: str,
    tile: int,
    drafts: int = 3,
    ring: int = 8,
    rtol: float = 1e-5,
    atol: float = 3e-6,
    **sizes: object,
) -> Case:
    slots, starts, most = _RING_TILES if tile > 8 else ROUND_ROWS
    counts = tuple(min(n, tile) for n in most)
    launch = Launch(tile, slots, starts, counts, **sizes)  # type: ignore[arg-type]
    launch = replace(launch, ring=ring, drafts=drafts)
    return _case(f"{drafts} drafts, ring of {ring}, {label}", launch, rtol, atol)


_BF16, _F16 = DType.BF16, DType.F16
ROUNDS = (
    replace(_drafted("4 tokens, served sizes", 4, key_dim=128, value_dim=128), bench=True),
    _drafted("1 token", 1),
    _drafted("2 tokens", 2),
    _drafted("3 tokens", 3),
    _drafted("4 tokens", 4),
    _drafted("2 tokens of 2", 2, 1),
    _drafted("8 tokens", 8, 7),
    _drafted("4 tokens behind little", 4, 3, 2),
    _drafted("4 tokens behind much", 4, 3, 16),
    _drafted("one value head per key head", 4, keys=3, values=3),
    _drafted("three value heads per key head", 4, keys=2, values=6),
    _drafted("key and value sizes differ", 4, key_dim=16, value_dim=48),
    _drafted("strong decay", 4, speed=3.0, strength=6.0),
    _drafted("bf16 state", 4, rtol=1e-2, atol=1e-3, state=_BF16),
    _drafted("bf16", 4, rtol=1e-2, atol=1e-2, dtype=_BF16, state=_BF16),
    _drafted("f16 state, full", 4, rtol=2e-3, atol=1.0, state=_F16, loud=1e6),
)

STEP = (
    _bench(Launch(1, *DECODE)),
    _case("rows", Launch(1, *DECODE)),
    _case("alone", Launch(1, (4,), (100,), (1,))),
    _case("one value head per key head", Launch(1, *DECODE, keys=3, values=3)),
    _case("three value heads per key head", Launch(1, *DECODE, keys=2, values=6)),
    _case("key and value sizes differ", Launch(1, *DECODE, key_dim=16, value_dim=48)),
    _case("strong decay", Launch(1, *DECODE, speed=3.0, strength=6.0)),
    _case("bf16 state", Launch(1, *DECODE, state=DType.BF16), 1e-2, 1e-3),
    _case("bf16", Launch(1, *DECODE, dtype=DType.BF16, state=DType.BF16), 1e-2, 1e-2),
    replace(_ringed("served sizes", 1, key_dim=128, value_dim=128), bench=True),
    _ringed("rows", 1),
    _ringed("rows", 1, 16),
    _ringed("rows", 1, 2),
    _ringed("one value head per key head", 1, keys=3, values=3),
    _ringed("three value heads per key head", 1, keys=2, values=6),
    _ringed("key and value sizes differ", 1, key_dim=16, value_dim=48),
    _ringed("strong decay", 1, speed=3.0, strength=6.0),
    *(_phase(start) for start in range(1, 10)),
    _ringed("bf16 state", 1, 8, 1e-2, 1e-3, state=DType.BF16),
    _ringed("bf16", 1, 8, 1e-2, 1e-2, dtype=DType.BF16, state=DType.BF16),
    _case("f16 state", Launch(1, *DECODE, state=_F16), 2e-3, 2e-4),
    _ringed("f16 state", 1, 8, 2e-3, 2e-4, state=_F16),
    _ringed("f16 state, full", 1, 8, 2e-3, 1.0, state=_F16, loud=1e6),
    *ROUNDS,
)

CHUNK = (
    _bench(Launch(64, *_TILES)),
    _case("tiles", Launch(64, *_TILES)),
    _case("one full tile", Launch(64, (4,), (37,), (64,))),
    _case("one token", Launch(64, (4,), (0,), (1,))),
    _case("63 tokens", Launch(64, (4,), (5,), (63,))),
    _case("all inert", Launch(64, (-1, -1), (0, 9), (0, 0))),
    _case("one value head per key head", Launch(64, *_TILES, keys=3, values=3)),
    _case("three value heads per key head", Launch(64, *_TILES, keys=2, values=6)),
    _case("key and value sizes differ", Launch(64, *_TILES, key_dim=16, value_dim=48)),
    _case("strong decay", Launch(64, *_TILES, speed=3.0)),
    _case("extreme decay", Launch(64, *_TILES, speed=6.0, strength=6.0)),
    _case("equal keys", Launch(64, *_TILES, speed=-5.0, strength=6.0, same=True), atol=1e-5),
    _case("equal keys, strong decay", Launch(64, *_TILES, speed=2.0, strength=6.0, same=True)),
    _case("bf16 state", Launch(64, *_TILES, state=DType.BF16), 1e-2, 1e-3),
    _case("bf16", Launch(64, *_TILES, dtype=DType.BF16, state=DType.BF16), 1e-2, 1e-2),
    replace(_ringed("served sizes", 64, key_dim=128, value_dim=128), bench=True),
    _ringed("tiles", 64),
    _ringed("tiles", 64, 16),
    _ringed("one value head per key head", 64, keys=3, values=3),
    _ringed("three value heads per key head", 64, keys=2, values=6),
    _ringed("key and value sizes differ", 64, key_dim=16, value_dim=48),
    _ringed("strong decay", 64, speed=3.0),
    _ringed("bf16 state", 64, 8, 1e-2, 1e-3, state=DType.BF16),
    _ringed("bf16", 64, 8, 1e-2, 1e-2, dtype=DType.BF16, state=DType.BF16),
    _case("f16 state, full", Launch(64, *_TILES, state=_F16, loud=1e6), 2e-3, 1.0),
    _ringed("f16 state", 64, 8, 2e-3, 2e-4, state=_F16),
    _drafted("tiles, f16", 64, 3, 8, 1e-2, 1e-2, dtype=_BF16, state=_F16),
    _drafted("tiles, served sizes", 64, key_dim=128, value_dim=128),
    _drafted("tiles", 64),
    _drafted("tiles", 64, 7, 4),
    _drafted("tiles, sizes differ", 64, 1, key_dim=16, value_dim=48),
    _drafted("tiles, bf16", 64, 3, 8, 1e-2, 1e-2, dtype=_BF16, state=_BF16),
    _case("begins elsewhere", replace(_saved(Launch(64, *_FROM)), saves=())),
    _case("saves", replace(_saved(Launch(64, *_FROM)), sources=())),
    _kept("tiles"),
    _kept("served sizes", key_dim=128, value_dim=128),
    _kept("sizes differ", key_dim=16, value_dim=48),
    _kept("bf16", 1e-2, 1e-2, dtype=_BF16, state=_BF16),
    _kept("ring of 8", ring=8),
    _kept("ring of 16, bf16", 1e-2, 1e-2, dtype=_BF16, state=_BF16, ring=16),
    _kept("3 drafts, ring of 8", ring=8, drafts=3),
    _kept("7 drafts, ring of 4, sizes differ", key_dim=16, value_dim=48, ring=4, drafts=7),
    _kept("3 drafts, bf16", 1e-2, 1e-2, dtype=_BF16, state=_BF16, ring=8, drafts=3),
)
CASES = {"gated_delta_step": STEP, "gated_delta_chunk": CHUNK}
