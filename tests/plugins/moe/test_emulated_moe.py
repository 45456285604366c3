"""The experts' tiles of many tokens on the host, thread by thread, whenever copies arrive."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import GB10, H200, Target
from spark_engine.op import Attrs
from spark_engine.plugins.ops.moe import grouped_moe
from spark_engine.tensors import Array, DType
from tests.plugins import emulated

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
OP = grouped_moe.OP
SMALL = replace(GB10, card=replace(GB10.card, sms=3))  # a block has several tiles
SIZES = (5, 3, 112, 80)  # experts, chosen, H, I: no whole k-slabs, no whole panels
BY_32 = (5, 3, 96, 160)  # the same of whole groups of int4
LONG = (5, 3, 272, 208)  # more k-slabs than are copied ahead
BROKEN = 7  # the token that is NaN


def drawn(kind: str, tokens: int, sizes: tuple[int, ...]) -> tuple[Array, ...]:
    """A node's operands: one expert has every token, one none, and a token is NaN."""
    rng = np.random.default_rng(3)
    x, ids, weights, *params = grouped_moe.arrays(rng, kind, tokens, sizes)
    ids[:, 0] = 2
    ids[:, 1:] = np.where(rng.random((tokens, 1)) < 0.5, (0, 3), (3, 4))
    x[BROKEN] = np.nan
    for name, param in zip(grouped_moe.PARAMS[kind], params, strict=True):
        if param.dtype == np.float32 and not name.endswith("_scale"):
            param[1] = np.nan  # of the expert that no token chose
        elif name.endswith("_scale") and kind.startswith("nvfp4") and param.ndim == 3:
            param[0, ::3, 1] = 3 * 2.0**-9  # subnormal
    return (x.astype(DType.BF16.numpy), ids, weights, *params)


def error_of(
    kind: str, tactic: str, arrays: tuple[Array, ...], target: Target, late: bool, cache: Path
) -> float:
    """The largest relative distance of a token from the reference."""
    attrs: Attrs = {"format": kind, "dtype": "bf16"}
    # tiles of so few tokens are left to other tactics
    (y,) = emulated.results(OP, tactic, attrs, arrays, target, cache, late, forced=True)
    got, want = y.astype(np.float64), OP.reference(attrs, arrays)[0].astype(np.float64)
    assert np.isnan(got[BROKEN]).all()
    got, want = np.delete(got, BROKEN, 0), np.delete(want, BROKEN, 0)
    return float((np.linalg.norm(got - want, axis=1) / np.linalg.norm(want, axis=1)).max())


HOPPER = replace(H200, card=replace(H200.card, sms=3))
# Format, tactic, target, tokens, sizes, the largest error.
CASES = (
    ("nvfp4", "tiles", SMALL, 41, SIZES, 1e-2),
    ("int4", "tiles", SMALL, 41, BY_32, 1e-2),
    ("fp8", "tiles_128", SMALL, 25, SIZES, 4e-2),
    ("dense", "tiles_128", SMALL, 25, SIZES, 4e-2),
    ("nvfp4_a4", "tiles_128", SMALL, 41, SIZES, 4e-2),
    ("nvfp4", "tiles_128", SMALL, 89, LONG, 1e-2),
    ("nvfp4", "grouped", SMALL, 9, (5, 3, 3072, 80), 1e-2),  # six k-slabs of a warp
    ("dense", "grouped", SMALL, 9, (5, 3, 4096, 80), 1e-2),  # eight
    ("fp8_block", "grouped", SMALL, 9, (5, 3, 3072, 128), 1e-2),
    ("fp8_block", "grouped", HOPPER, 9, (5, 3, 256, 128), 1e-3),
    ("fp8_block", "grouped", HOPPER, 9, (5, 3, 208, 128), 1e-3),  # k begins within a block
    ("fp8_block", "grouped", HOPPER, 140, (5, 3, 144, 256), 1e-3),  # two n8 tiles
    ("fp8_block", "tiles_128", HOPPER, 513, (5, 3, 256, 128), 1e-2),
    ("fp8_channel", "grouped", SMALL, 41, SIZES, 4e-2),
    ("fp8_channel", "grouped", HOPPER, 9, (5, 3, 208, 144), 1e-3),
    ("fp8_channel", "tiles_128", HOPPER, 513, (5, 3, 256, 128), 1e-2),
)


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}-{c[2].name}-{c[3]}")
def test_experts_equal_the_reference(
    case: tuple[str, str, Target, int, tuple[int, ...], float], late: bool, cache: Path
) -> None:
    kind, tactic, target, tokens, sizes, most = case
    arrays = drawn(kind, tokens, sizes)
    assert error_of(kind, tactic, arrays, target, late, cache) < most


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4_a4", "int4"])
def test_tiles_have_the_bits_of_grouped(kind: str, cache: Path) -> None:
    attrs: Attrs = {"format": kind, "dtype": "bf16"}
    arrays = drawn(kind, 41, BY_32 if kind == "int4" else SIZES)
    tiles, grouped = (
        emulated.results(OP, name, attrs, arrays, SMALL, cache)[0] for name in ("tiles", "grouped")
    )
    assert tiles.tobytes() == grouped.tobytes()
