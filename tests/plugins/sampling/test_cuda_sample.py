"""Sampling on the GPU: many draws against the reference, at served and at small widths."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native import nvrtc  # noqa: E402
from spark_engine.kernel import TARGETS  # noqa: E402
from spark_engine.op import Case  # noqa: E402
from spark_engine.plugins.ops.sampling import philox, sample
from spark_engine.tensors import Array  # noqa: E402
from tests.plugins import cuda_node  # noqa: E402
from tests.plugins.cases.sampling import sample as sample_cases

OP = sample.OP
NEAR = 1e-6  # from a step of the distribution: there the draw may give either token
SETTINGS = (
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 64, "top_p": 0.8, "presence": 1.5, "bias": True},
    {"temperature": 1.3},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.9, "top_p": 0.998, "presence": 0.5},
    {"temperature": 1.1, "top_k": 200, "top_p": 0.97, "repetition": 1.2, "frequency": 0.3},
    {"temperature": 2.0, "min_p": 0.02},
    {"temperature": 1.0, "mask": 0.4, "bias": True},
    {"temperature": 1.0, "top_p": 0.9, "mask": 0.2},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "mask": 0.01},
    {"temperature": 0.0, "presence": 0.7, "mask": 0.5},
)


def case_of(
    settings: dict[str, float], rows: int, width: int, spread: float, tile: int = 0
) -> Case:
    """`rows` rows over the slots, each at its own position."""
    slots = tuple(int(s) for s in np.arange(rows) % sample_cases.UNITS)
    launch = sample_cases.Launch(
        **settings, width=width, vocab=width - 7, spread=spread, slots=slots, tile=tile
    )  # type: ignore[arg-type]

    def make(rng: np.random.Generator) -> tuple[Array, ...]:
        arrays = list(launch.inputs(rng))
        arrays[9] = rng.permutation(1 << 20)[:rows].astype(np.int32)
        arrays[11] = np.zeros(rows, np.int32)  # rows share slots: none may store
        return tuple(arrays)

    return Case(f"{settings} {rows}x{width}", launch.attrs, make)


def margin(case: Case, arrays: tuple[Array, ...], row: int) -> float:
    """Distance of the row's uniform from the nearest step of its distribution."""
    logits, token_counts, floats, integers, bias_ids, bias_values, until, allow = arrays[:8]
    slots, starts, counts = arrays[8:11]
    slot = slots[row]
    clean = logits[row].astype(np.float64)
    used = until[slot] > starts[row] + counts[row]
    bias = (bias_ids[slot][used], bias_values[slot][used])
    z = sample.penalised_row(clean, token_counts[slot], floats[slot], bias)[
        : int(case.attrs["vocab"])
    ]
    z = sample.masked(z, allow[slot]) if integers[slot, 3] == 1 else z
    total = np.cumsum(sample.kept_weights(z, floats[slot], int(integers[slot, 0])))
    u = philox.uniform(int(starts[row] + counts[row]), [int(s) for s in integers[slot, 1:3]])
    return float(np.abs(total / total[-1] - u).min())


def check(bench: cuda_node.Bench, case: Case, seed: int) -> tuple[int, int]:
    """Compares one launch; how many draws there were and how many differ near a step."""
    arrays = case.inputs(np.random.default_rng(seed))
    want = OP.reference(case.attrs, arrays)
    (work,) = cuda_node.planned(OP, case, bench.target)
    got = cuda_node.run(bench, work, arrays)
    off = np.flatnonzero(got[0] != want[0])
    for row in off:
        assert margin(case, arrays, row) < NEAR, (case.label, row, got[0][row], want[0][row])
    same = got[0] == want[0]
    np.testing.assert_allclose(got[1][same], want[1][same], rtol=1e-5, atol=2e-5)
    np.testing.assert_array_equal(got[2], want[2])
    np.testing.assert_allclose(got[3], want[3], rtol=1e-5, atol=2e-5)
    np.testing.assert_array_equal(got[4], want[4])
    return len(same), len(off)


SERVED = [
    ("sm_90a", 1, 0, 1),
    ("sm_121a", 128, 0, 1),
    ("sm_90a", 128, 4, 1),
    *((name, 128, tile, ranks) for name in TARGETS for tile, ranks in product((0, 4), (2, 4, 8))),
]


@pytest.mark.kernels
@pytest.mark.parametrize(("name", "rows", "tile", "ranks"), SERVED)
def test_served_width_compiles_and_spills_nothing(
    name: str, rows: int, tile: int, ranks: int, cache: Path
) -> None:
    """`rows` of logits; with a tile they are of so many tokens each. Also of ranks that share the
    vocabulary, which no case of the op has: a case is what one rank alone can run."""
    target = TARGETS[name]
    case = case_of({}, 1, 248_320, 3.0, tile)
    arrays = case.inputs(np.random.default_rng(0))
    arrays = (np.zeros((rows, 248_320 // ranks), np.float32), *arrays[1:])
    attrs = case.attrs
    if ranks > 1:
        attrs, arrays = {**attrs, "ranks": ranks}, (*arrays, np.zeros(1, np.int32))
    specs = cuda_node.specs_of(OP, attrs, arrays)
    (tactic,) = OP.cuda.tactics
    assert tactic.refuse(attrs, specs, target) is None
    plan = tactic.plan(attrs, specs, target)
    for launch in plan.launches:
        assert (("RANKS", str(ranks)) in launch.defines) == (ranks > 1)
        job = nvrtc.Job(launch.source or tactic.source, launch.defines, (launch.symbol,))
        cubin = nvrtc.compile(job, target, cache)
        usage, launch = cubin.usage[launch.symbol], cubin.launched(launch)
        assert (usage.spills, usage.stack) == (0, 0), (launch.symbol, usage)
        assert usage.shared + launch.shared <= target.shared_bytes, (launch.symbol, usage)
        assert launch.block[0] * usage.registers <= 65536, (launch.symbol, usage)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: " ".join(map(str, s.values())))
def test_draws_equal_the_references(settings: dict[str, float], bench: cuda_node.Bench) -> None:
    draws = near = 0
    for rows, width, spread in ((1800, 600, 2.0), (30, 20_000, 3.0), (3, 248_320, 2.5)):
        more, off = check(bench, case_of(settings, rows, width, spread), SETTINGS.index(settings))
        draws, near = draws + more, near + off
    print(f"{draws} draws, {near} differ where the uniform is within {NEAR} of a step")
    assert draws >= 1_800 and near <= 2
