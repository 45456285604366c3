"""The seeded cases of append_kv."""

from dataclasses import dataclass, replace

import numpy as np

from spark_engine.op import Attr, Case
from spark_engine.tensors import Array, DType
from tests.plugins.cases.attention import paged_attention as attention
from tests.plugins.cases.rounds import without_scratch


@dataclass(frozen=True)
class Launch:
    """Rows of an attention, with keys and values only."""

    attention: attention.Launch

    @property
    def attrs(self) -> dict[str, Attr]:
        return {k: v for k, v in self.attention.attrs.items() if k != "heads"}

    def inputs(self, rng: np.random.Generator) -> tuple[Array, ...]:
        kv, _, *rest = replace(self.attention, heads=0).inputs(rng)
        return (kv, *rest)


def _case(label: str, launch: attention.Launch, rtol: float = 1e-5, atol: float = 2e-6) -> Case:
    made = Launch(launch)
    bench, ignore = label.startswith("served"), without_scratch(0)
    return Case(label, made.attrs, made.inputs, rtol, atol, bench, ignore)


_ONE = attention.Launch(1, (3, -1, 0, 2), (62, 1 << 30, 0, 63), (1, 0, 1, 1))

_ROUND = attention.Launch(4, *attention.ROUNDS[4])

_TILES = attention.Launch(
    64, (3, 3, 3, -1, 1, 5), (0, 64, 128, 1 << 30, 0, 131), (64, 64, 2, 0, 1, 64)
)

_F8, _B16 = DType.F8E4M3, DType.BF16

CASES = (
    _case("served sizes, round", replace(_ROUND, kv_heads=4, dim=256, half=32)),
    _case("served sizes, tiles", replace(_TILES, kv_heads=2, dim=256, half=32)),
    _case("one token", _ONE),
    *(
        _case(f"round of {n}", attention.Launch(n, *rows, kv_heads=2))
        for n, rows in attention.ROUNDS.items()
    ),
    _case("small pages", replace(_ROUND, page=16)),
    _case("fp8 pages", replace(_ROUND, kv_heads=3, kv=_F8)),
    _case("fp8 pages, tiles", replace(_TILES, dim=64, half=8, kv=_F8)),
    _case("bf16 pages", replace(_ROUND, dim=128, half=16, kv=_B16), 1e-2),
    _case("bf16", replace(_ROUND, kv=_B16, dtype=_B16), 1e-2, 1e-2),
    _case("tiles, whole head turns", replace(_TILES, half=16)),
)
