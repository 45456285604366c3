"""The seeded cases of the fused decode step with a replay ring: those of gdn_decode, and rings."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from spark_engine.op import Attrs, Case
from spark_engine.plugins.gdn import (
    gated_delta_cases,
    gated_ring_cases,
    gdn_decode_cases,
)
from spark_engine.tensors import Array, DType

_ROWS = ((3, -1, 0, 2, 5, 4, 1), (69, 1 << 30, 0, 1, 8, 1031, 14), (1, 0, 1, 1, 0, 1, 1))
RING = 7  # operand


@dataclass(frozen=True)
class Launch:
    """A launch of gdn_decode, and rings behind its states."""

    fused: gdn_decode_cases.Launch
    length: int = 8
    lags: tuple[int, ...] = gated_ring_cases.LAGS

    @property
    def attrs(self) -> Attrs:
        return {**self.fused.attrs, "ring": self.length}

    def inputs(self, rng: np.random.Generator) -> tuple[Array, ...]:
        arrays = self.fused.inputs(rng)
        rings = gated_ring_cases.Launch(self.fused.delta, self.length, self.lags)
        return (*arrays[:RING], rings.records(rng), *arrays[RING:])

    def ignore(self, outputs: tuple[Array, ...]) -> None:
        self.fused.ignore((*outputs[:2], *outputs[3:]))
        outputs[2][-1] = 0


def _case(label: str, launch: Launch, bench: bool = False) -> Case:
    d = launch.fused.delta
    rtol, atol = 2e-5, 3e-6
    if DType.BF16 in (d.dtype, d.state):
        rtol, atol = 1e-2, 1e-2
    return Case(label, launch.attrs, launch.inputs, rtol, atol, bench, launch.ignore)


def _launch(quant: str = "none", n: int = 1, keep: int = 1, **sizes: object) -> Launch:
    delta = gated_delta_cases.Launch(1, *_ROWS, **sizes)  # type: ignore[arg-type]
    return Launch(gdn_decode_cases.Launch(delta, quant, n, keep))


_SERVED = {"key_dim": 128, "value_dim": 128}
_ALONE = gdn_decode_cases.Launch(gated_delta_cases.Launch(1, (4,), (103,), (1,)))

CASES = (
    _case("served sizes", _launch(**_SERVED), bench=True),  # type: ignore[arg-type]
    _case("rows", _launch()),
    _case("alone", Launch(_ALONE)),
    _case("sixteen records", replace(_launch(), length=16)),
    _case("two records", replace(_launch(), length=2)),
    _case("fp8", _launch("fp8", keep=0)),
    _case("fp8 twice and kept", _launch("fp8", n=2)),
    _case("fp8_block", _launch("fp8_block", keep=0, **_SERVED)),
    _case("nvfp4", _launch("nvfp4", keep=0)),
    _case("one value head per key head", _launch("fp8", keys=3, values=3)),
    _case("three value heads per key head", _launch("fp8", keys=2, values=6)),
    _case("key and value sizes differ", _launch(key_dim=16, value_dim=48)),
    _case("strong decay", _launch(speed=3.0, strength=6.0)),
    _case("bf16 state", _launch(state=DType.BF16)),
    _case("bf16", _launch(dtype=DType.BF16, state=DType.BF16)),
)
