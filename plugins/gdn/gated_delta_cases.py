"""The seeded cases of the gated delta rule. Knows its operands, not its maths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from spark_engine.op import Attr, Case
from spark_engine.tensors import Array, DType

UNITS = 6


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
    same: bool = False  # all keys nearly equal: the hard case of the triangular solve

    @property
    def attrs(self) -> dict[str, Attr]:
        sizes = {"key_heads": self.keys, "value_heads": self.values}
        return {"tile": self.tile, **sizes, "key_dim": self.key_dim, "value_dim": self.value_dim}

    def inputs(self, rng: np.random.Generator) -> tuple[Array, ...]:
        c, ba = self._tokens(rng)
        shape = (self.units + 1, self.values, self.value_dim, self.key_dim)
        state = rng.standard_normal(shape) * 0.3
        state[-1] = np.nan
        for slot, start in zip(self.slots, self.starts, strict=True):
            if slot >= 0 and start == 0:
                state[slot] = np.nan  # stale
        a_log = rng.uniform(-3, 1, self.values) + self.speed
        dt_bias = rng.uniform(-5, 0, self.values)
        steps = tuple(np.asarray(s, np.int32) for s in (self.slots, self.starts, self.counts))
        floats = (a_log.astype(np.float32), dt_bias.astype(np.float32))
        return (c, ba, *floats, state.astype(self.state.numpy), *steps)

    def _tokens(self, rng: np.random.Generator) -> tuple[Array, Array]:
        rows, size = len(self.slots), self.keys * self.key_dim
        c = rng.standard_normal((rows, self.tile, 2 * size + self.values * self.value_dim))
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
        outputs[1][-1] = 0


def _case(label: str, launch: Launch, rtol: float = 1e-5, atol: float = 2e-6) -> Case:
    ignore: Callable[[tuple[Array, ...]], None] = launch.ignore
    return Case(label, launch.attrs, launch.inputs, rtol, atol, ignore=ignore)


_DECODE = ((3, -1, 0, 2, 5), (69, 1 << 30, 0, 1, 8), (1, 0, 1, 1, 0))
_TILES = ((3, 3, 3, -1, 1, 5, -1), (0, 64, 128, 1 << 30, 0, 131, 0), (64, 64, 2, 0, 1, 64, 0))


def _bench(launch: Launch) -> Case:
    served = replace(launch, keys=2, values=4, key_dim=128, value_dim=128)
    return replace(_case("served sizes", served), bench=True)


STEP = (
    _bench(Launch(1, *_DECODE)),
    _case("rows", Launch(1, *_DECODE)),
    _case("alone", Launch(1, (4,), (100,), (1,))),
    _case("one value head per key head", Launch(1, *_DECODE, keys=3, values=3)),
    _case("three value heads per key head", Launch(1, *_DECODE, keys=2, values=6)),
    _case("key and value sizes differ", Launch(1, *_DECODE, key_dim=16, value_dim=48)),
    _case("strong decay", Launch(1, *_DECODE, speed=3.0, strength=6.0)),
    _case("bf16 state", Launch(1, *_DECODE, state=DType.BF16), 1e-2, 1e-3),
    _case("bf16", Launch(1, *_DECODE, dtype=DType.BF16, state=DType.BF16), 1e-2, 1e-2),
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
)
