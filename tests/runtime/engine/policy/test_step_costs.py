"""What launches took corrects the build's table, one of them by little."""

import pytest

from spark_engine.interface import DECODE, PREFILL
from spark_engine.runtime.engine.policy.step_costs import StepCosts

BUCKET = (DECODE, 8)


def test_one_slow_launch_moves_a_cost_by_a_quarter_of_its_range() -> None:
    costs = StepCosts({BUCKET: 100.0})
    costs.ran(BUCKET, 1e6)
    assert costs.of(BUCKET) == pytest.approx(125.0)
    costs.ran(BUCKET, 0.0)
    assert costs.of(BUCKET) == pytest.approx(125.0 * 0.875)
    assert costs.built(BUCKET) == 100.0 and costs.version == 2


def test_many_launches_bring_a_cost_to_what_they_took() -> None:
    costs = StepCosts({BUCKET: 100.0, (DECODE, 1): 50.0})
    for _ in range(40):
        costs.ran(BUCKET, 370.0)
    assert costs.of(BUCKET) == pytest.approx(370.0, rel=1e-3)
    assert costs.of((DECODE, 1)) == 50.0


def test_of_what_the_build_did_not_say_nothing_is_learnt() -> None:
    costs = StepCosts({BUCKET: 0.0})
    for bucket in (BUCKET, (PREFILL, 4)):
        costs.ran(bucket, 80.0)
        assert costs.of(bucket) == costs.built(bucket) == costs.version == 0
