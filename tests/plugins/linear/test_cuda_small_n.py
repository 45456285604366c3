"""`linear` of a small n: the cut of k over a cluster, and which nodes it takes."""

import pytest

from spark_engine.kernel import GB10, H200, TARGETS, Target
from spark_engine.plugins.kernels.gemm import linear_small_n_kernels
from spark_engine.plugins.registry import REGISTRY
from spark_engine.tensors import DType, TensorSpec

BF16 = {"dtype": "bf16"}
LINEAR = REGISTRY["linear"]
(SMALL_N,) = (t for t in LINEAR.cuda.tactics if t.name == "small n")


def specs(m: int, n: int, k: int, dtype: DType = DType.BF16) -> tuple[TensorSpec, ...]:
    return TensorSpec("x", dtype, (m, k)), TensorSpec("w", dtype, (n, k))


@pytest.mark.parametrize("k", [16, 80, 2048, 5120, 6144])
def test_the_slices_cover_k(k: int) -> None:
    (launch,) = SMALL_N.plan(BF16, specs(3, 96, k), H200).launches
    steps = int(dict(launch.defines)["STEPS"])
    assert steps * linear_small_n_kernels.SPLITS * 16 >= k
    assert launch.grid == (8, 6, 1) and launch.cluster == (8, 1, 1)


def test_what_it_refuses() -> None:
    assert "257 rows" in str(SMALL_N.refuse(BF16, specs(1, 257, 64), H200))
    assert "k = 6160" in str(SMALL_N.refuse(BF16, specs(1, 8, 6160), H200))
    assert "only bf16" in str(SMALL_N.refuse(BF16, specs(1, 8, 64, DType.F32), H200))
    assert SMALL_N.refuse(BF16, specs(1, 256, 6144), H200) is None


def test_it_is_chosen_in_decode_and_left_for_a_prefill() -> None:
    cheapest = []
    for m in (1, 8, 64, 128, 2048):
        given = specs(m, 96, 5120)
        taken = [t for t in LINEAR.cuda.tactics if t.refuse(BF16, given, H200) is None]
        cheapest.append(min(taken, key=lambda t: t.cost(BF16, given, H200)).name)
    assert cheapest == ["small n"] * 4 + ["stream-k"]


def test_without_clusters_others_take_them() -> None:
    for m in (1, 8, 64, 2048):
        refusals = {t.name: t.refuse(BF16, specs(m, 96, 5120), GB10) for t in LINEAR.cuda.tactics}
        assert refusals.pop("small n") == "clusters of sm_121a are not relied on"
        assert None in refusals.values()


TAKERS = [t for t in TARGETS.values() if t.clusters]


@pytest.mark.parametrize("target", TAKERS, ids=lambda t: t.name)
def test_compiles_without_spills(target: Target) -> None:
    pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
    from spark_engine.builder.native import nvrtc

    for k in (2048, 5120, 6144):
        plan = SMALL_N.plan(BF16, specs(8, 96, k), target)
        for job in nvrtc.jobs_of([(SMALL_N.source, plan)]):
            usage = nvrtc.compile(job, target).usage["linear_small_n"]
            assert (usage.spills, usage.stack) == (0, 0), usage
