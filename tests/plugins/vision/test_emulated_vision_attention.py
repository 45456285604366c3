"""The vision tower's attention on the host, thread by thread, with NaN in what is not live."""

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
    (y,) = emulated.results(OP, name, {"heads": heads}, arrays, target, cache, late)
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


@FORMS
def test_the_bucket_does_not_change_bits(name: str, target: Target, cache: Path) -> None:
    small = drawn(8, 5, 2, 72)
    large = (*(np.concatenate([a, a[5:].repeat(70, 0)]) for a in small[:2]), *small[2:])
    got = [run(name, target, 2, arrays, cache, False) for arrays in (small, large)]
    assert got[0].tobytes() == got[1].tobytes()


def test_heads_that_no_matrix_instruction_takes_are_refused() -> None:
    def refusal(name: str, dim: int, target: Target = H200) -> str:
        specs = cuda_node.specs_of(OP, {"heads": 2}, drawn(8, 5, 2, dim))
        return TACTICS[name].refuse({"heads": 2}, specs, target) or ""

    assert refusal("tiles", 128) == "" and "heads of 132 dimensions" in refusal("tiles", 132)
    assert "heads of 36 dimensions" in refusal("tiles", 36)
    assert "heads of 96 dimensions are not of 49 to 80" in refusal("groups_2", 96)
    assert "sm_121a has no warpgroup" in refusal("groups_3", 72, GB10)
