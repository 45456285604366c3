"""Clusters of blocks are launched where the target says that they may be relied on, by every op."""

import pytest

from spark_engine.kernel import GB10, H200, TARGETS, Target
from spark_engine.op import Op
from spark_engine.plugins import registry
from tests.plugins import cuda_node

OPS = [op for op in registry.OPS if op.cuda.tactics]
ONE = (1, 1, 1)
LINEARS = {"int4_linear", "linear", "nvfp4_linear"}
USERS = {"act_quant", "fp8_quant", "grouped_moe", "moe_norm_quant", "moe_router"} | LINEARS


def clusters(op: Op, target: Target) -> set[tuple[int, int, int]]:
    """The clusters that the op's cases launch."""
    works = (w for case in cuda_node.cases_of(op) for w in cuda_node.planned(op, case, target))
    return {launch.cluster for work in works for launch in work.plan.launches}


@pytest.mark.parametrize("target", TARGETS.values(), ids=lambda t: t.name)
def test_no_launch_relies_on_clusters_that_the_target_has_not(target: Target) -> None:
    found = {op.name: clusters(op, target) - {ONE} for op in OPS}
    users = {name for name, sizes in found.items() if sizes}
    assert users == (USERS if target.clusters else set())
    assert all(x * y * z <= 8 for sizes in found.values() for x, y, z in sizes)


def test_which_targets_have_them() -> None:
    assert H200.clusters and not GB10.clusters
