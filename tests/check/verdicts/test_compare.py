"""Verdicts: what passes, what fails, and with which words."""

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spark_engine.check.verdicts.compare import Compare, Verdict
from spark_engine.check.verdicts.defined_values import defined_values, place
from spark_engine.check.verdicts.report import Finding
from spark_engine.check.verdicts.thresholds import PATH, Thresholds, load
from spark_engine.errors import InternalError
from spark_engine.manifest import StateInfo
from spark_engine.tensors import DType, TensorSpec

LIMITS = Thresholds("test", cosine=0.999, rel_l2=0.01, kl=0.01, tie=0.01, outliers=0)


def _results(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    results = {
        "emitted": np.array([0, 2], np.int32),
        "layers.0.gdn_state": rng.normal(size=(3, 2, 4)).astype(np.float32),
        "logits": np.array([[3, 2.999, 0], [0, 1, 0], [0, 0, 9]], np.float32),
        "next_tokens": np.array([0, 2], np.int32),
        "logprobs": np.array([-0.7, -0.001], np.float32),
    }
    return results | changes


def test_equal_results_pass() -> None:
    assert all(Compare(LIMITS)(_results(), _results()).values())


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("layers.0.gdn_state", lambda a: a * 1.02, "relative L2"),
        ("layers.0.gdn_state", lambda a: a[:2], "shape"),
        ("layers.0.gdn_state", lambda a: a * np.nan, "NaN"),
        ("logits", lambda a: a[:, ::-1], "rows choose another token"),
        ("next_tokens", lambda a: np.array([0, 1], np.int32), "1 tokens differ"),
        ("next_tokens", lambda a: np.array([2, 2], np.int32), "1 tokens differ"),
        ("logprobs", lambda a: a - 0.1, "probabilities differ"),
        ("emitted", lambda a: a + 1, "integers differ"),
    ],
)
def test_a_difference_is_reported(name: str, change: Any, words: str) -> None:
    wrong = _results(**{name: change(_results()[name])})
    verdicts = Compare(LIMITS)(wrong, _results())
    assert not verdicts[name] and words in verdicts[name].reason
    assert all(v for n, v in verdicts.items() if n != name)


def test_a_near_tie_excuses_another_token() -> None:
    other = _results(
        logits=np.array([[2.999, 3, 0], [0, 1, 0], [0, 0, 9]], np.float32),
        next_tokens=np.array([1, 2], np.int32),
    )
    verdicts = Compare(LIMITS)(other, _results())
    assert all(verdicts.values())
    assert verdicts["logits"].figures["near_ties"] == 1


def test_outliers_of_logits_are_those_of_either_measure() -> None:
    """Row 1 is too far off and chooses alike; row 2 chooses another token by a hair."""
    truth = np.array([[9, 0, 0], [0, 9, 0], [5, 4.8, 0]], np.float32)
    x = np.array([[9, 0, 0], [0, 10, 0], [4.86, 4.94, 0]], np.float32)
    limits = replace(LIMITS, rel_l2=0.05, kl=9)
    verdict = Compare(limits)({"logits": x}, {"logits": truth})["logits"]
    assert (verdict.rows, verdict.outliers) == (3, 1)
    assert "1 of 3 rows choose another token" in verdict.reason and "in row 1" in verdict.reason
    verdict = Compare(limits)({"logits": x[[0, 2]]}, {"logits": truth[[0, 2]]})["logits"]
    assert verdict.outliers == 1


def test_one_wrong_probability_of_many_is_the_rows() -> None:
    truth = np.log(np.full((2, 20), 0.05))
    x = truth.copy()
    x[1, 7] = np.log(0.08)
    verdict = Compare(LIMITS)({"top_logprobs": x}, {"top_logprobs": truth})["top_logprobs"]
    assert not verdict and (verdict.rows, verdict.outliers) == (2, 1)


def test_rows_of_the_table() -> None:
    assert load("f32").rel_l2 < load("f32 quantised").rel_l2
    with pytest.raises(InternalError, match=PATH.name):
        load("f64")


def test_only_what_has_a_value_is_observed() -> None:
    """A launch of two tiles of one sequence and an inert one; all else is poison."""
    nan = np.full((4, 1, 64, 2), np.nan, np.float32)
    pages, state = nan.copy(), np.full((4, 3), np.nan, np.float32)
    pages[2], pages[0, :, :5], state[1] = 1, 2, 7
    table = np.full((4, 3), -1, np.int32)
    table[1, :2] = 2, 0
    buffers = {
        "token_ids": np.zeros(192, np.int32),
        "slots": np.array([1, 1, -1], np.int32),
        "starts": np.array([0, 64, 0], np.int32),
        "counts": np.array([64, 5, 0], np.int32),
        "emit": np.array([0, 1, 0], np.int32),
        "page_table": table,
        "layers.1.k_pages": pages,
        "layers.0.gdn_state": state,
        "layers.0.out": np.where(np.arange(192) < 69, 1.0, np.nan)[:, None],
        "next_tokens": np.array([-9, 5, -9], np.int32),
    }
    infos = [
        StateInfo(TensorSpec("layers.1.k_pages", DType.F32, pages.shape), "page"),
        StateInfo(TensorSpec("layers.0.gdn_state", DType.F32, state.shape), "slot"),
    ]
    seen = defined_values(buffers, ["next_tokens", "layers.0.out"], infos)
    assert all(np.isfinite(a).all() for a in seen.values())
    assert seen["layers.1.k_pages"].shape == (69, 1, 2)
    np.testing.assert_array_equal(seen["layers.1.k_pages"][:, 0, 0], [1] * 64 + [2] * 5)
    np.testing.assert_array_equal(seen["layers.0.gdn_state"], [[7, 7, 7]])
    np.testing.assert_array_equal(seen["next_tokens"], [5])
    np.testing.assert_array_equal(seen["emitted"], [1])


def test_the_order_is_that_of_the_network() -> None:
    names = ["logits", "layers.10.out", "layers.2.out", "layers.2.conv_state", "next_tokens"]
    wanted = ["layers.2.conv_state", "layers.2.out", "layers.10.out", "logits", "next_tokens"]
    assert sorted(["token_counts", *names], key=place) == ["token_counts", *wanted]


def test_a_few_outliers_are_tolerated_where_the_thresholds_say_so() -> None:
    finding = Finding("layers.0.out")
    finding.add(Verdict("layers.0.out", rows=95), "launch 0")
    finding.add(Verdict("layers.0.out", "far off", rows=5, outliers=5), "launch 1")
    strict, lenient = copy.copy(finding), copy.copy(finding)
    strict.settle(0.04)
    lenient.settle(0.05)
    assert not strict.passed and strict.where == "launch 1" and "5 of 100 rows" in strict.reason
    assert lenient.passed and lenient.reason == ""
    finding.add(Verdict("layers.0.out", "NaN", rows=1, hard=True), "launch 2")
    finding.settle(1)
    assert not finding.passed
