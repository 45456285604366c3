"""The seeded cases of block_attention."""

import numpy as np

from spark_engine.op import Case
from spark_engine.tensors import Array, DType
from tests.plugins.cases.attention import paged_attention as attention


def _case(
    label: str, launch: attention.Launch, window: int, rtol: float = 1e-5, bench: bool = False
) -> Case:
    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        qkv, *rest = launch.inputs(rng)
        both = qkv.reshape(len(qkv), -1, launch.dim)
        gates = np.arange(launch.heads) * 2 + 1
        return (np.delete(both, gates, axis=1).reshape(len(qkv), -1), *rest)

    def ignore(outputs: tuple[Array, ...]) -> None:
        o = outputs[0].reshape(len(launch.slots), -1)
        o[np.asarray(launch.counts) == 0] = 0

    atol = 5e-6 if launch.dtype is DType.F32 else 1e-2
    return Case(label, {**launch.attrs, "window": window}, make, rtol, atol, bench, ignore)


def _whole(tile: int, **more: object) -> attention.Launch:
    """Rows with a whole block or none."""
    slots, starts = (3, -1, 0, 6, 5, 1), (62, 1 << 30, 0, 130, 18, 7)
    counts = (tile, 0, tile, tile, 0, tile)
    return attention.Launch(tile, slots, starts, counts, **more)  # type: ignore[arg-type]


_B16, _F8 = DType.BF16, DType.F8E4M3

CASES = (
    _case("blocks of 8", _whole(8, half=16), 2048),
    _case("window within a page", _whole(8, half=16), 9),
    _case("window over pages", _whole(5, half=16, page=16), 70),
    _case("window of one", _whole(4), 1),
    _case("four share", _whole(8, heads=8, kv_heads=2, dim=64, half=32), 100),
    _case("parts of two loads", attention.Launch(8, (1,), (4100,), (8,), half=16), 4200),
    _case("fp8 pages", _whole(8, heads=4, kv_heads=2, half=16, kv=_F8), 100),
    _case("bf16", _whole(8, heads=4, dim=128, half=64, kv=_B16, dtype=_B16), 100, 1e-2),
    _case("bf16, fp8 pages", _whole(3, heads=4, dim=64, half=32, kv=_F8, dtype=_B16), 64, 1e-2),
    _case(
        "served sizes",
        attention.Launch(8, (1, -1, 0), (2100, 1 << 30, 70), (8, 0, 8), 32, 8, 128, 64),
        2048,
        bench=True,
    ),
    _case("all inert", attention.Launch(2, (-1, -1), (0, 1 << 30), (0, 0)), 64),
)
