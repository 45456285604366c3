"""The vision tower's attention on the host, thread by thread, beside NaN in what is not live."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from spark_engine.kernel import GB10, H200, Target
from spark_engine.plugins.ops.vision.vision_attention import OP
from spark_engine.tensors import Array
from tests.plugins import cuda_node, emulated

TACTICS = {tactic.name: tactic for tactic in OP.cuda.tactics}
FORMS = pytest.mark.parametrize(
    ("name", "target"),
    [("tiles", GB10), ("groups_2", H200), ("groups_3", H200)],
    ids=["tiles", "groups_2", "groups_3"],
)
pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++")


def drawn(count: int, live: int, heads: int, dim: int, size: float = 1.5) -> tuple[Array, ...]:
    """Operands: NaN and far places beyond the live patches."""
    rng = np.random.default_rng(live)
    qkv = rng.standard_normal((count, 3 * heads * dim)) * size
    coords = rng.integers(0, 1200, (count, 2))
    qkv[live:], coords[live:] = np.nan, 1 << 30
    inv_freq = 10_000.0 ** (-np.arange(dim // 4) / (dim // 4))
    return (
        qkv.astype(ml_dtypes.bfloat16), coords.astype(np.int32), inv_freq.astype(np.float32),
        np.asarray([live], np.int32),
    )  # fmt: skip


def run(
    name: str, target: Target, heads: int, arrays: tuple[Array, ...], cache: Path, late: bool
) -> Array:
    """The live rows of the result."""
    attrs, tactic = {"heads": heads}, TACTICS[name]
    specs = cuda_node.specs_of(OP, attrs, arrays)
    assert tactic.refuse(attrs, specs, target) is None
    plan, outs = tactic.plan(attrs, specs, target), OP.infer(attrs, specs)
    (y,) = emulated.run(plan, tactic.source, arrays, outs, cache, late)
    assert (y[arrays[3][0] :].view(np.uint16) == 0xFFFF).all(), "a row beyond the live is written"
    return y[: arrays[3][0]]


@FORMS
@pytest.mark.parametrize(
    ("count", "live", "heads", "dim", "late"),
    [
        (132, 130, 2, 72, True),
        (132, 130, 2, 72, False),
        (400, 385, 1, 64, True),  # the rings of tiles turn
        (132, 65, 1, 64, False),
        (64, 63, 1, 72, True),
        (4, 1, 2, 72, False),
    ],
)
def test_what_the_reference_says(
    name: str, target: Target, count: int, live: int, heads: int, dim: int, late: bool, cache: Path
) -> None:
    arrays = drawn(count, live, heads, dim)
    got = run(name, target, heads, arrays, cache, late)
    (want,) = OP.reference({"heads": heads}, arrays)
    limits = OP.tolerance({"heads": heads})
    assert cuda_node.compare("y", got, want[:live], limits, False) == ""


