"""The experts' tiles of many tokens on the host, thread by thread, whenever copies arrive."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.kernel import GB10, H200, Tactic, Target
from spark_engine.op import Attrs
from spark_engine.plugins.ops.moe import grouped_moe
from spark_engine.tensors import Array, DType
from tests.plugins import cuda_node, emulated

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")
OP = grouped_moe.OP
TACTICS = {t.name: t for t in OP.cuda.tactics}
SMALL = replace(GB10, card=replace(GB10.card, sms=3))  # a block has several tiles
SIZES = (5, 3, 112, 80)  # experts, chosen, H, I: no whole k-slabs, no whole panels
BY_32 = (5, 3, 96, 160)  # the same of whole groups of int4
LONG = (5, 3, 272, 208)  # more k-slabs than are copied ahead
BROKEN = 7  # the token that is NaN
FEW = {"tiles": 41, "tiles_128": 25, "tiles_fp4": 41}  # tokens


def drawn(kind: str, tokens: int, sizes: tuple[int, ...] = SIZES) -> tuple[Array, ...]:
    """A node's operands: one expert has every token, one none, and a token is NaN."""
    rng = np.random.default_rng(3)
    sizes = BY_32 if kind == "int4" else sizes
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


def run(
    tactic: Tactic,
    attrs: Attrs,
    arrays: tuple[Array, ...],
    cache: Path,
    late: bool,
    target: Target = SMALL,
) -> Array:
    given = cuda_node.specs_of(OP, attrs, arrays)
    plan = tactic.plan(attrs, cuda_node.packed_specs(OP, attrs, given), target)
    packed = cuda_node.packed_arrays(OP, attrs, arrays)
    (y,) = emulated.run(plan, tactic.source, packed, OP.infer(attrs, given), cache, late)
    return y


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
@pytest.mark.parametrize(
    ("tactic", "kind"),
    [
        (TACTICS["tiles"], "nvfp4"),
        (TACTICS["tiles"], "int4"),
        (TACTICS["tiles_128"], "fp8"),
        (TACTICS["tiles_128"], "dense"),
        (TACTICS["tiles_fp4"], "nvfp4_a4"),
    ],
    ids=lambda v: getattr(v, "name", v),
)
def test_tiles_equal_the_reference(tactic: Tactic, kind: str, late: bool, cache: Path) -> None:
    attrs: Attrs = {"format": kind, "dtype": "bf16"}
    arrays = drawn(kind, FEW[tactic.name])
    got = run(tactic, attrs, arrays, cache, late)
    (want,) = OP.reference(attrs, arrays)
    wide, true = got.astype(np.float64), want.astype(np.float64)
    assert np.isnan(wide[BROKEN]).all()
    wide, true = np.delete(wide, BROKEN, 0), np.delete(true, BROKEN, 0)
    error = np.linalg.norm(wide - true, axis=1) / np.linalg.norm(true, axis=1)
    assert error.max() < (1e-2 if kind in ("nvfp4", "int4") else 4e-2), error.max()


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
def test_tiles_of_many_slabs_equal_the_reference(late: bool, cache: Path) -> None:
    attrs: Attrs = {"format": "nvfp4", "dtype": "bf16"}
    arrays = drawn("nvfp4", 89, LONG)
    got = run(TACTICS["tiles_128"], attrs, arrays, cache, late).astype(np.float64)
    true = OP.reference(attrs, arrays)[0].astype(np.float64)
    assert np.isnan(got[BROKEN]).all()
    got, true = np.delete(got, BROKEN, 0), np.delete(true, BROKEN, 0)
    assert (np.linalg.norm(got - true, axis=1) < 1e-2 * np.linalg.norm(true, axis=1)).all()


@pytest.mark.parametrize(
    ("kind", "hidden", "inner"),
    [("nvfp4", 3072, 80), ("dense", 4096, 80), ("fp8_block", 3072, 128)],
)
def test_long_rows_of_few_tokens_equal_the_reference(
    kind: str, hidden: int, inner: int, cache: Path
) -> None:
    """A warp has six or eight k-slabs of a dot product."""
    attrs: Attrs = {"format": kind, "dtype": "bf16"}
    arrays = drawn(kind, BROKEN + 2, (5, 3, hidden, inner))
    got = run(TACTICS["grouped"], attrs, arrays, cache, True).astype(np.float64)
    true = OP.reference(attrs, arrays)[0].astype(np.float64)
    assert np.isnan(got[BROKEN]).all()
    got, true = np.delete(got, BROKEN, 0), np.delete(true, BROKEN, 0)
    assert (np.linalg.norm(got - true, axis=1) < 1e-2 * np.linalg.norm(true, axis=1)).all()


@pytest.mark.parametrize("kind", ["nvfp4", "nvfp4_a4", "int4"])
def test_tiles_have_the_bits_of_grouped(kind: str, cache: Path) -> None:
    attrs: Attrs = {"format": kind, "dtype": "bf16"}
    arrays = drawn(kind, FEW["tiles"])
    tiles, grouped = (
        run(t, attrs, arrays, cache, True) for t in (TACTICS["tiles"], TACTICS["grouped"])
    )
    assert tiles.tobytes() == grouped.tobytes()


@pytest.mark.parametrize("late", [False, True], ids=["at_once", "late"])
@pytest.mark.parametrize(
    ("kind", "tactic", "tokens", "sizes"),
    [
        ("fp8_block", "grouped", 9, (5, 3, 256, 128)),
        ("fp8_block", "grouped", 9, (5, 3, 208, 128)),  # parts of k that begin within a block
        ("fp8_block", "grouped", 140, (5, 3, 144, 256)),  # two n8 tiles
        ("fp8_block", "wide_128", 513, (5, 3, 256, 128)),
        ("fp8_channel", "grouped", 9, (5, 3, 208, 144)),
        ("fp8_channel", "wide_128", 513, (5, 3, 256, 128)),
    ],
    ids=str,
)
def test_fp8_equals_the_reference(
    kind: str, tactic: str, tokens: int, sizes: tuple[int, ...], late: bool, cache: Path
) -> None:
    attrs: Attrs = {"format": kind, "dtype": "bf16"}
    arrays = drawn(kind, tokens, sizes)
    target = replace(H200, card=replace(H200.card, sms=3))
    got = run(TACTICS[tactic], attrs, arrays, cache, late, target).astype(np.float64)
    true = OP.reference(attrs, arrays)[0].astype(np.float64)
    assert np.isnan(got[BROKEN]).all()
    got, true = np.delete(got, BROKEN, 0), np.delete(true, BROKEN, 0)
    error = np.linalg.norm(got - true, axis=1) / np.linalg.norm(true, axis=1)
    assert error.max() < (1e-3 if tactic == "grouped" else 1e-2), error.max()
