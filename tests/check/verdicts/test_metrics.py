"""Figures of known distances, and that no average hides the worst row."""

import numpy as np
import pytest

from spark_engine.check.verdicts.metrics import distance, logit_distance, near_tie_rows, scale_error

RNG = np.random.default_rng(0)


def test_equal_arrays_are_at_no_distance() -> None:
    x = RNG.normal(size=(5, 8))
    d = distance(x, x)
    assert (d.rel_l2, d.max_abs) == (0, 0)
    assert d.cosine == pytest.approx(1)


def test_one_bad_row_in_a_thousand_is_the_figure() -> None:
    truth = RNG.normal(size=(1000, 16))
    x = truth.copy()
    x[700] *= 1.5
    d = distance(x, truth)
    assert d.rel_l2 == pytest.approx(0.5)
    assert d.worst_row == 700


def test_a_turned_row_shows_in_the_cosine() -> None:
    truth = np.ones((3, 4))
    x = truth.copy()
    x[1] = -1
    assert distance(x, truth).cosine == pytest.approx(-1)


def test_noise_in_a_row_of_nearly_nothing_is_small() -> None:
    truth = np.ones((10, 4))
    truth[3] = 1e-9
    x = truth + 1e-7
    assert distance(x, truth).rel_l2 < 1e-5


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="differ"):
        distance(np.zeros(3), np.zeros(4))


def test_kl_is_that_of_the_worst_row() -> None:
    truth = np.log(np.array([[0.5, 0.5], [0.5, 0.5]]))
    x = np.log(np.array([[0.5, 0.5], [0.25, 0.75]]))
    wanted = 0.5 * np.log(0.5 / 0.25) + 0.5 * np.log(0.5 / 0.75)
    assert logit_distance(x, truth, 0).kl == pytest.approx(wanted)


def test_a_flip_is_excused_by_a_near_tie_of_the_reference_only() -> None:
    truth = np.array([[10.0, 9.99, 0.0], [10.0, 5.0, 0.0]])
    x = np.array([[9.99, 10.0, 0.0], [5.0, 10.0, 0.0]])
    d = logit_distance(x, truth, tie=0.01)
    assert (d.flips, d.near_ties, d.wrong_flips) == (2, 1, 1)
    np.testing.assert_array_equal(near_tie_rows(truth, np.array([1, 1]), 0.01), [True, False])


def test_a_row_is_an_outlier_by_its_length_alone_and_by_its_direction_alone() -> None:
    truth = np.ones((4, 8))
    x = truth.copy()
    x[1] *= 1.5  # has the right direction
    x[2, 0] = -1  # not much too long
    assert distance(x, truth, rel_l2=0.4, cosine=0.7).outliers == 2
    assert distance(x, truth, rel_l2=0.6, cosine=0.8).outliers == 1
    assert distance(x, truth, rel_l2=0.8, cosine=0.7).outliers == 0


def test_zeros_point_nowhere() -> None:
    truth = np.ones((3, 4))
    x = truth.copy()
    x[2] = 0
    assert distance(x, truth).cosine == 0


def test_a_row_beyond_the_limit_of_kl_is_an_outlier_though_it_chooses_alike() -> None:
    truth = np.log(np.array([[0.6, 0.4], [0.6, 0.4], [0.6, 0.4]]))
    x = np.log(np.array([[0.6, 0.4], [0.99, 0.01], [0.4, 0.6]]))
    d = logit_distance(x, truth, tie=0, kl_limit=0.5)
    assert (d.flips, d.outliers) == (1, 2)


def test_a_candidates_own_near_tie_excuses_nothing() -> None:
    truth, x = np.array([[10.0, 5.0, 0.0]]), np.array([[9.99, 10.0, 0.0]])
    assert logit_distance(x, truth, tie=0.01).wrong_flips == 1


def test_a_common_factor_is_distinguished_from_rounding() -> None:
    """In one block of columns, larger or smaller; rounding by itself gives nothing."""
    rng = np.random.default_rng(3)
    truth = rng.standard_normal((20, 96))
    rounded = truth * (1 + 4e-3 * rng.standard_normal(truth.shape))
    assert scale_error(rounded - truth, truth, truth, 4e-3) == 0
    few = (slice(1), slice(32))
    assert scale_error((rounded - truth)[few], truth[few], truth[few], 4e-3) == 0
    for factor in (0.98, 1.02):
        scaled = rounded.copy()
        scaled[:, 32:64] *= factor
        found = scale_error(scaled - truth, truth, truth, 4e-3)
        assert 0.018 < found < 0.02
    assert scale_error(truth[:0], truth[:0], truth[:0], 4e-3) == 0
