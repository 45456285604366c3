"""The seeded cases of the fused decode step. Knows its operands, not its maths."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from spark_engine.op import Attrs, Case
from spark_engine.plugins.common import random_arrays
from spark_engine.plugins.formats import quantised
from spark_engine.plugins.ops.delta_rule import causal_conv
from spark_engine.tensors import Array, DType
from tests.plugins.cases.delta_rule import gated_delta as gated_delta_cases

TAPS, EXTRA = 4, 8  # unused columns between v and z, and after z


@dataclass(frozen=True)
class Launch:
    """Row lists, head sizes and what becomes of y."""

    delta: gated_delta_cases.Launch
    quant: str = "none"
    n: int = 1
    keep: int = 1

    @property
    def channels(self) -> int:
        d = self.delta
        return 2 * d.keys * d.key_dim + d.values * d.value_dim

    @property
    def attrs(self) -> Attrs:
        sizes = {k: v for k, v in self.delta.attrs.items() if k != "tile"}
        made: Attrs = {"keep": self.keep, "quant": self.quant, "n": self.n}
        rounds = {"tile": self.delta.tile} if self.delta.drafts else {}
        return {**sizes, "eps": 1e-6, "offset": self.channels + EXTRA, **made, **rounds}

    def inputs(self, rng: np.random.Generator) -> tuple[Array, ...]:
        d = self.delta
        plain = replace(d, ring=0, drafts=0)
        _, ba, a_log, dt_bias, state, slots, starts, counts = plain.inputs(rng)
        inner, rows = d.values * d.value_dim, len(slots) * d.tile
        live = np.concatenate([np.arange(d.tile) < n for n in d.counts])
        qkvz = np.full((rows, self.channels + inner + 2 * EXTRA), np.nan)
        qkvz[:, : self.channels] = rng.standard_normal((rows, self.channels))
        z = slice(self.channels + EXTRA, self.channels + EXTRA + inner)
        qkvz[:, z] = rng.standard_normal((rows, inner)) * 2
        qkvz[~live, : self.channels] = np.nan  # z is read of every row (its y is not)
        weight = random_arrays.normal(rng, self.channels, TAPS, scale=0.4)
        columns = causal_conv.conv_rows(TAPS, d.drafts)
        history = rng.standard_normal((d.units + 1, columns, self.channels))
        history[-1] = np.nan
        for slot, start in zip(d.slots, d.starts, strict=True):
            if slot >= 0 and start == 0:
                history[slot] = np.nan
            elif slot >= 0 and d.drafts:
                read = np.arange(max(0, start - TAPS + 1), start) % columns
                history[slot, np.setdiff1d(np.arange(columns), read)] = np.nan
        numpy = d.dtype.numpy
        operands = (qkvz.astype(numpy), ba, weight, history.astype(numpy), a_log, dt_bias, state)
        norm = random_arrays.positive(rng, d.value_dim)
        scales = random_arrays.positive(rng, self.n, low=3e-3, high=3e-2)
        tail = (scales,) if quantised.takes_scales(self.attrs) else ()
        rings = (d.records(rng),) if d.ring else ()
        return (*operands, *rings, norm, slots, starts, counts, *tail)

    def ignore(self, outputs: tuple[Array, ...]) -> None:
        states = 3 if self.delta.ring else 2
        for state in outputs[:states]:
            state[-1] = 0
        for result in outputs[states:]:
            if result.dtype != np.uint8:
                assert np.isfinite(result.astype(np.float32)).all(), "an inert row is not finite"
            tokens = result.reshape(len(self.delta.counts), self.delta.tile, *result.shape[1:])
            for row, n in enumerate(self.delta.counts):
                tokens[row, n:] = np.zeros((), result.dtype)


def _case(label: str, launch: Launch, bench: bool = False) -> Case:
    ring = launch.delta.ring
    rtol, atol = (2e-5, 3e-6) if ring else (1e-5, 2e-6)
    if DType.BF16 in (launch.delta.dtype, launch.delta.state):
        rtol, atol = 1e-2, 1e-2
    label = f"ring of {ring}, {label}" if ring else label
    return Case(label, launch.attrs, launch.inputs, rtol, atol, bench, launch.ignore)


def _delta(ring: int, **sizes: object) -> gated_delta_cases.Launch:
    rows = gated_delta_cases.RING_DECODE if ring else gated_delta_cases.DECODE
    sizes["ring"] = ring
    return gated_delta_cases.Launch(1, *rows, **sizes)  # type: ignore[arg-type]


def _cases(ring: int) -> tuple[Case, ...]:
    """The cases over states with a ring of so many records."""
    served = _delta(ring, key_dim=128, value_dim=128)
    alone = gated_delta_cases.Launch(1, (4,), (103 if ring else 100,), (1,), ring=ring)
    return (
        _case("served sizes", Launch(served), bench=True),
        _case("rows", Launch(_delta(ring))),
        _case("alone", Launch(alone)),
        _case("fp8", Launch(_delta(ring), "fp8", keep=0)),
        _case("fp8 twice and kept", Launch(_delta(ring), "fp8", n=2)),
        _case("fp8_block", Launch(served, "fp8_block", keep=0)),
        _case("nvfp4", Launch(_delta(ring), "nvfp4", keep=0)),
        _case("one value head per key head", Launch(_delta(ring, keys=3, values=3), "fp8")),
        _case("three value heads per key head", Launch(_delta(ring, keys=2, values=6), "fp8")),
        _case("key and value sizes differ", Launch(_delta(ring, key_dim=16, value_dim=48))),
        _case("strong decay", Launch(_delta(ring, speed=3.0, strength=6.0))),
        _case("bf16 state", Launch(_delta(ring, state=DType.BF16))),
        _case("bf16", Launch(_delta(ring, dtype=DType.BF16, state=DType.BF16))),
        _case("f16 state", Launch(_delta(ring, dtype=DType.BF16, state=DType.F16))),
    )


def _rounds(label: str, tile: int, drafts: int = 3, quant: str = "none", **sizes: object) -> Case:
    """Of up to `tile` tokens, behind a ring of 8."""
    slots, starts, most = gated_delta_cases.ROUND_ROWS
    counts = tuple(min(n, tile) for n in most)
    rows = gated_delta_cases.Launch(tile, slots, starts, counts, **sizes)  # type: ignore[arg-type]
    launch = Launch(replace(rows, ring=8, drafts=drafts), quant, keep=int(quant == "none"))
    return _case(f"{drafts} drafts, {label}", launch)


_SERVED: dict[str, Any] = {"key_dim": 128, "value_dim": 128}
ROUNDS = (
    replace(_rounds("4 tokens, served sizes", 4, **_SERVED), bench=True),
    _rounds("1 token", 1),
    _rounds("2 tokens, fp8", 2, 1, "fp8"),
    _rounds("3 tokens, fp8_block", 3, 3, "fp8_block", **_SERVED),
    _rounds("4 tokens, nvfp4", 4, 3, "nvfp4"),
    _rounds("8 tokens", 8, 7),
    _rounds("three value heads per key head", 4, keys=2, values=6),
    _rounds("key and value sizes differ", 4, key_dim=16, value_dim=48),
    _rounds("bf16", 4, dtype=DType.BF16, state=DType.BF16),
    _rounds("f16 state", 4, dtype=DType.BF16, state=DType.F16),
)

CASES = (
    *_cases(0),
    *_cases(8),
    _case("rows", Launch(_delta(16))),
    _case("rows", Launch(_delta(2))),
    *ROUNDS,
)
