"""Measures the distance of two arrays. Knows numpy; knows no threshold, no name, no engine.

Rows are what axis 0 counts (tokens, slots). Every figure is that of the worst row: an average over
a thousand good tokens hides one bad token.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from spark_engine.tensors import Array

F64 = NDArray[np.float64]
COLUMNS = 32  # that are measured together for a common factor: fewer than a projection has
SIGMAS = 4
SMALL_ROW = 0.1  # smaller rows are measured relative to this part of the typical row's norm


@dataclass(frozen=True)
class Distance:
    """`rel_l2` is relative to the reference row's norm; `outliers` of `rows` rows are beyond the
    given limits."""

    cosine: float
    rel_l2: float
    max_abs: float
    worst_row: int
    rows: int
    outliers: int


@dataclass(frozen=True)
class LogitDistance:
    """`kl` in nats, reference to candidate, of the worst row.

    `flips`: rows with the greatest logit at another id; `near_ties`: those of them with a
        difference of the two in the reference below the tolerance.
    """

    kl: float
    flips: int
    near_ties: int
    rows: int
    outliers: int  # rows that chose another token without a near tie, or are beyond the limit of KL

    @property
    def wrong_flips(self) -> int:
        """Rows that chose another token without a near tie."""
        return self.flips - self.near_ties


def distance(
    candidate: Array, reference: Array, rel_l2: float = np.inf, cosine: float = -np.inf
) -> Distance:
    """Compares two arrays of one shape; rows beyond `rel_l2` or below `cosine` are outliers.

    Raises ValueError if the shapes differ.
    """
    a, b = _rows(candidate), _rows(reference)
    if a.shape != b.shape:
        raise ValueError(f"shapes {candidate.shape} and {reference.shape} differ")
    if a.size == 0:
        return Distance(1.0, 0.0, 0.0, 0, len(a), 0)
    length = np.linalg.norm(b, axis=1)
    floor = SMALL_ROW * np.sqrt(np.mean(length**2))
    unit = np.maximum(np.maximum(length, floor), np.finfo(np.float64).tiny)
    error = np.linalg.norm(a - b, axis=1) / unit
    alike = _cosine(a, b, floor)
    worst = int(np.argmax(error))
    outliers = int(((error > rel_l2) | (alike < cosine)).sum())
    figures = (float(alike.min()), float(error[worst]), float(np.abs(a - b).max()))
    return Distance(*figures, worst, len(a), outliers)


def scale_error(error: F64, reference: F64, rounded: F64, noise: float) -> float:
    """The largest relative error that neighbouring columns share over all rows.

    Per COLUMNS columns, and over all of them, the share of `error` that is proportional to
    `reference`. Rounding leaves some of it by chance. What SIGMAS standard deviations explain is
    subtracted, with `noise` as the relative error of each value of `rounded`. All three have one
    shape.
    """
    error, reference, rounded = _rows(error), _rows(reference), _rows(rounded)
    if error.size == 0:
        return 0.0
    starts = np.arange(0, error.shape[1], COLUMNS)
    along = np.add.reduceat((error * reference).sum(axis=0), starts)
    square = np.add.reduceat((reference**2).sum(axis=0), starts)
    mixed = np.add.reduceat((reference**2 * rounded**2).sum(axis=0), starts)
    small = SMALL_ROW**2 * square.mean()
    along, square, mixed = (np.append(x, x.sum()) for x in (along, square, mixed))
    kept = square > small
    along, square, mixed = along[kept], square[kept], mixed[kept]
    chance = SIGMAS * noise * np.sqrt(mixed) / square  # falls as more values count
    return float(np.max(np.abs(along) / square - chance, initial=0.0))


def logit_distance(
    candidate: Array, reference: Array, tie: float, kl_limit: float = np.inf
) -> LogitDistance:
    """Compares logits [rows, V]. `tie`: relative to the reference row's range of logits."""
    a, b = _rows(candidate), _rows(reference)
    p, q = _log_softmax(b), _log_softmax(a)
    kl = np.sum(np.exp(p) * (p - q), axis=1)
    chosen, truth = np.argmax(a, axis=1), np.argmax(b, axis=1)
    row = np.arange(len(b))
    gap = b[row, truth] - b[row, chosen]
    flipped = chosen != truth
    near = flipped & (gap <= tie * np.ptp(b, axis=1))
    worst = float(max(kl.max(initial=0.0), 0.0))
    outliers = int(((flipped & ~near) | (kl > kl_limit)).sum())
    return LogitDistance(worst, int(flipped.sum()), int(near.sum()), len(b), outliers)


def near_tie_rows(reference_logits: Array, chosen: Array, tie: float) -> NDArray[np.bool_]:
    """bool [rows]: whether `chosen` has a near tie (`tie`) with the reference's own choice."""
    b = _rows(reference_logits)
    picked = b[np.arange(len(b)), np.clip(chosen.astype(np.int64), 0, b.shape[1] - 1)]
    return np.asarray(b.max(axis=1) - picked <= tie * np.ptp(b, axis=1))


def _rows(x: Array) -> F64:
    x = np.atleast_1d(x)
    return np.asarray(x.reshape(len(x), -1 if x.size else 0), np.float64)


def _cosine(a: F64, b: F64, floor: float) -> F64:
    """The cosine of each row; 1 for rows with a norm too small to compare directions."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    long_enough = np.linalg.norm(b, axis=1) > floor
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = np.sum(a * b, axis=1) / lengths
    return np.where(long_enough, np.where(lengths > 0, cosine, 0.0), 1.0)


def _log_softmax(x: F64) -> F64:
    shifted = x - x.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
