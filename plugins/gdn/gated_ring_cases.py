"""The seeded cases of the delta rule with a replay ring. Knows its operands, not its maths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from spark_engine.op import Attr, Case
from spark_engine.plugins.gdn import gated_delta_cases as plain
from spark_engine.plugins.gdn.gated_delta_nodes import Heads
from spark_engine.plugins.gdn.replay_ring import Ring
from spark_engine.tensors import Array, DType

LAGS = (3, 1 << 20, 0, 5, 1)  # tokens since all was folded, of one slot after another


@dataclass(frozen=True)
class Launch:
    """A launch of the plain rule, and rings behind its states."""

    delta: plain.Launch
    length: int = 8
    lags: tuple[int, ...] = field(default=LAGS)

    @property
    def ring(self) -> Ring:
        d = self.delta
        return Ring(self.length, Heads(d.tile, d.keys, d.values, d.key_dim, d.value_dim))

    @property
    def attrs(self) -> dict[str, Attr]:
        return {**self.delta.attrs, "ring": self.length}

    def inputs(self, rng: np.random.Generator) -> tuple[Array, ...]:
        c, ba, a_log, dt_bias, state, *steps = self.delta.inputs(rng)
        return (c, ba, a_log, dt_bias, state, self.records(rng), *steps)

    def records(self, rng: np.random.Generator) -> Array:
        """f32 [units+1, L, width]: NaN but for what a sequence at its row's position may read."""
        d, ring = self.delta, self.ring
        held = np.full((d.units + 1, ring.length, ring.width), np.nan, np.float32)
        firsts = {s: start for s, start in zip(d.slots[::-1], d.starts[::-1], strict=True)}
        for i, slot in enumerate(sorted(s for s in firsts if s >= 0)):
            start = firsts[slot]
            if start == 0:
                continue
            base = max(0, start - self.lags[i % len(self.lags)])
            behind = np.minimum(start - base, ring.phases(start))
            for age in range(1, min(start - base, ring.length - 1) + 1):
                record = held[slot, (start - age) % ring.length]
                record[: ring.decays + d.values] = self._record(rng, behind >= age)
            held[slot, 0, -1] = base
        return held

    def _record(self, rng: np.random.Generator, live: Array) -> Array:
        d = self.delta
        delta = np.where(live, rng.standard_normal(live.shape), np.nan)
        k = rng.standard_normal((d.keys, d.key_dim))
        k /= np.linalg.norm(k, axis=1, keepdims=True)
        g = -rng.uniform(0, 0.6, d.values) * np.exp(d.speed)
        return np.concatenate([x.reshape(-1) for x in (delta, k, g)])

    def ignore(self, outputs: tuple[Array, ...]) -> None:
        self.delta.ignore(outputs)
        outputs[2][-1] = 0


def _case(label: str, launch: Launch, rtol: float = 1e-5, atol: float = 3e-6) -> Case:
    ignore: Callable[[tuple[Array, ...]], None] = launch.ignore
    return Case(label, launch.attrs, launch.inputs, rtol, atol, ignore=ignore)


_DECODE = (
    (3, -1, 0, 2, 5, 4, 1),
    (69, 1 << 30, 0, 1, 8, 1031, 14),
    (1, 0, 1, 1, 0, 1, 1),
)
_TILES = (
    (3, 3, 3, -1, 1, 5, -1, 0),
    (0, 64, 128, 1 << 30, 0, 131, 0, 7),
    (64, 64, 2, 0, 1, 64, 0, 5),
)


def _step(length: int = 8, **sizes: object) -> Launch:
    return Launch(plain.Launch(1, *_DECODE, **sizes), length)  # type: ignore[arg-type]


def _chunk(length: int = 8, **sizes: object) -> Launch:
    return Launch(plain.Launch(64, *_TILES, **sizes), length)  # type: ignore[arg-type]


def _phase(start: int) -> Launch:
    return Launch(plain.Launch(1, (4,), (start,), (1,), 1, 2, 32, 64), 4, (99,))


_SERVED = {"key_dim": 128, "value_dim": 128}

STEP = (
    replace(_case("served sizes", _step(**_SERVED)), bench=True),
    _case("rows", _step()),
    _case("sixteen records", _step(16)),
    _case("two records", _step(2)),
    _case("one value head per key head", _step(keys=3, values=3)),
    _case("three value heads per key head", _step(keys=2, values=6)),
    _case("key and value sizes differ", _step(key_dim=16, value_dim=48)),
    _case("strong decay", _step(speed=3.0, strength=6.0)),
    *(_case(f"position {start}", _phase(start)) for start in range(1, 10)),
    _case("bf16 state", _step(state=DType.BF16), 1e-2, 1e-3),
    _case("bf16", _step(dtype=DType.BF16, state=DType.BF16), 1e-2, 1e-2),
)

CHUNK = (
    replace(_case("served sizes", _chunk(**_SERVED)), bench=True),
    _case("tiles", _chunk()),
    _case("sixteen records", _chunk(16)),
    _case("one value head per key head", _chunk(keys=3, values=3)),
    _case("three value heads per key head", _chunk(keys=2, values=6)),
    _case("key and value sizes differ", _chunk(key_dim=16, value_dim=48)),
    _case("strong decay", _chunk(speed=3.0)),
    _case("bf16 state", _chunk(state=DType.BF16), 1e-2, 1e-3),
    _case("bf16", _chunk(dtype=DType.BF16, state=DType.BF16), 1e-2, 1e-2),
)
