"""The shipped limits: what each row of the table lets pass, and what it rejects."""

import json

import pytest

from spark_engine.check.verdicts.report import Finding
from spark_engine.check.verdicts.thresholds import PATH, load

ROUNDED = ("f32 quantised", "bf16", "bf16 quantised")
NODES = ("f32 node", "bf16 node")


def _passes(name: str, outliers: int, rows: int = 100) -> bool:
    finding = Finding("x", rows=rows, outliers=outliers)
    finding.settle(load(name).outliers)
    return finding.passed


def test_the_rows_are_these() -> None:
    assert set(json.loads(PATH.read_text())) == {"f32", *ROUNDED, *NODES}


@pytest.mark.parametrize("name", ROUNDED)
def test_a_tenth_of_the_rows_may_be_outliers_and_no_more(name: str) -> None:
    assert _passes(name, 10) and not _passes(name, 15) and not _passes(name, 11)


def test_no_row_of_an_unrounded_engine_may_be_an_outlier() -> None:
    assert _passes("f32", 0) and not _passes("f32", 1, 10_000)


@pytest.mark.parametrize("name", ["f32", *ROUNDED])
def test_limits_are_of_a_size_that_sees_an_error(name: str) -> None:
    limits = load(name)
    assert 0.97 <= limits.cosine < 1 and 0 < limits.rel_l2 <= 0.25
    assert 0 < limits.kl <= 0.1 and 0 < limits.tie < 0.1


@pytest.mark.parametrize("name", NODES)
def test_a_nodes_limits_see_two_percent(name: str) -> None:
    """A scale that is off by 2 % is found in every row; the other figures bound honest rounding."""
    row = json.loads(PATH.read_text())[name]
    assert row["scale"] <= 0.01 and row["exact"] <= row["rel_l2"] < 0.02
    assert row["noise"] <= row["rel_l2"] and row["coded_noise"] < row["coded"] <= 0.2
