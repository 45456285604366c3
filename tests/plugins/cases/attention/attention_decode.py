"""The seeded cases of attention_decode."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from spark_engine.op import Attrs, Case
from spark_engine.plugins.common import random_arrays
from spark_engine.plugins.formats import quantised
from spark_engine.tensors import Array, DType
from tests.plugins.cases.attention import paged_attention as attention


@dataclass(frozen=True)
class Launch:
    """Rows over pages, and the form of y: kept, quantised or both."""

    attention: attention.Launch
    quant: str = "none"
    n: int = 1
    keep: int = 1

    @property
    def attrs(self) -> Attrs:
        one = self.attention.tile == 1
        sizes = {k: v for k, v in self.attention.attrs.items() if k != "tile" or not one}
        return {**sizes, "keep": self.keep, "quant": self.quant, "n": self.n}

    @property
    def dead(self) -> NDArray[np.bool_]:
        """[tokens]: those beyond their row's count."""
        counts = np.asarray(self.attention.counts)[:, None]
        return (np.arange(self.attention.tile) >= counts).reshape(-1)

    def inputs(self, rng: np.random.Generator) -> tuple[Array, ...]:
        a = self.attention
        qkv, *rest = a.inputs(rng)
        pairs = qkv[:, : 2 * a.heads * a.dim].reshape(-1, a.heads, 2, a.dim)
        # the op reads the gates of every token
        pairs[self.dead, :, 1] = rng.standard_normal((a.heads, a.dim))
        qkv[:, : 2 * a.heads * a.dim] = pairs.reshape(len(qkv), -1)
        operands = (qkv, *rest)
        scales = random_arrays.positive(rng, self.n, low=3e-3, high=3e-2)
        return (*operands, scales) if quantised.takes_scales(self.attrs) else operands

    def ignore(self, outputs: tuple[Array, ...]) -> None:
        for pages in outputs[:2]:
            pages[-1] = 0
        for result in outputs[2:]:
            if result.dtype != np.uint8:
                assert np.isfinite(result.astype(np.float32)).all(), "an inert row is not finite"
            result[self.dead] = np.zeros((), result.dtype)


def _case(label: str, launch: Launch, rtol: float = 1e-5, atol: float = 2e-6) -> Case:
    bench = label.startswith("served")
    return Case(label, launch.attrs, launch.inputs, rtol, atol, bench, launch.ignore)


_EDGES = attention.Launch(
    1, (3, -1, 0, 2, 5, 7, 1, 4), (62, 1 << 30, 0, 63, 64, 126, 127, 128), (1, 0) + (1,) * 6
)
_ROUND = attention.Launch(4, *attention.ROUNDS[4])
_SERVED = replace(_EDGES, heads=6, dim=256, half=32)
_F8, _B16 = DType.F8E4M3, DType.BF16

CASES = (
    _case("served sizes", Launch(_SERVED, "fp8", keep=0), atol=1e-5),
    _case("plain", Launch(_EDGES)),
    _case("alone", Launch(attention.Launch(1, (4,), (100,), (1,)))),
    _case("fp8", Launch(_EDGES, "fp8", keep=0)),
    _case("fp8 twice and kept", Launch(_EDGES, "fp8", n=2)),
    _case("fp8_block", Launch(replace(_EDGES, dim=128), "fp8_block", keep=0)),
    _case("nvfp4", Launch(_EDGES, "nvfp4", keep=0)),
    _case("nvfp4, no sharing", Launch(replace(_EDGES, heads=3, kv_heads=3), "nvfp4")),
    _case("sixteen share", Launch(replace(_EDGES, heads=32, kv_heads=2), "nvfp4", n=2)),
    _case("served sizes, round", Launch(replace(_ROUND, heads=6, dim=256, half=32), "fp8", keep=0)),
    _case("round", Launch(_ROUND)),
    _case("round, sixteen share", Launch(replace(_ROUND, heads=16, dim=128), "fp8_block")),
    _case("round of 8", Launch(attention.Launch(8, *attention.ROUNDS[8]))),
    _case("round, fp8 twice and kept", Launch(_ROUND, "fp8", n=2)),
    _case("round, fp8_block", Launch(replace(_ROUND, dim=128), "fp8_block", keep=0)),
    _case("round, nvfp4, no sharing", Launch(replace(_ROUND, heads=3, kv_heads=3), "nvfp4")),
    _case("round, far, fp8 pages", Launch(replace(_ROUND, starts=(1000,) * 8, kv=_F8), "fp8")),
    _case("far, fp8 pages", Launch(replace(_EDGES, starts=(900,) * 8, kv=_F8), "fp8"), atol=1e-5),
    _case("bf16", Launch(replace(_EDGES, kv=_B16, dtype=_B16)), 1e-2, 1e-2),
)
