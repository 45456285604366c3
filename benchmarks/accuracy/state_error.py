"""The error of the delta rule's states in f32, bf16 and f16 against float64, token after token.

A few heads of 128 x 128 with drawn keys, values and decays; sums are f32 everywhere, and a value
row is rounded when it folds into the stored state: every eighth token behind the replay ring, as
in `recurrence`, or after each token, as in servers without a ring. Knows no engine.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from spark_engine.plugins.state.replay_ring import FOLD_ROWS, narrowed

DIM, RING = 128, 8
# Logarithms of decays are -c e^N(0, 1): tokens that a state lasts, about 1/c; and the share of a
# direction that all keys have in common.
HEADS = ((0.05, 0.0), (0.005, 0.0), (0.0003, 0.0), (0.0003, 0.7))
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
KINDS = (*((name, RING) for name in DTYPES), ("bf16", 1))  # (dtype, tokens between roundings)
DRAWN = 512  # tokens at a time


@dataclass
class Run:
    """States [heads, DIM, DIM] that are stored as `dtype`; `every`: tokens between a row's
    roundings. The sums of squares are over the tokens since the last mark."""

    dtype: np.dtype[Any]
    every: int
    state: NDArray[Any]
    wrong: NDArray[np.float64]
    largest: float = 0.0

    def token(
        self, at: int, k: NDArray[Any], v: NDArray[Any], q: NDArray[Any], rates: NDArray[Any]
    ) -> NDArray[Any]:
        """The output [heads, DIM] of token `at`."""
        s, (beta, decay) = self.state, rates[..., None].astype(self.state.dtype)
        k, v, q = (x.astype(s.dtype)[..., None] for x in (k, v, q))
        s *= decay[..., None]
        delta = beta[..., None] * (v - s @ k)
        s += delta * k.swapaxes(1, 2)
        if self.dtype.itemsize < s.dtype.itemsize:
            due = (at + np.arange(DIM) // FOLD_ROWS) % self.every == self.every - 1
            s[:, due] = narrowed(s[:, due], self.dtype)
        return (s @ q)[..., 0]


def state_errors(marks: Sequence[int], seed: int = 0) -> list[dict[str, object]]:
    """Rows: at each mark, by kind and head, |o - o64| / |o64| over the tokens since the mark
    before, the same of the state there, and the largest |S| so far."""
    rng = np.random.default_rng(seed)
    shape = (len(HEADS), DIM, DIM)
    none = np.zeros(len(HEADS))
    runs = [Run(np.dtype(DTYPES[d]), n, np.zeros(shape, np.float32), none.copy()) for d, n in KINDS]
    true = Run(np.dtype(np.float64), 1, np.zeros(shape), none.copy())
    shared = rng.standard_normal((len(HEADS), DIM))
    c, common = np.array(HEADS).T[..., None]
    found: list[dict[str, object]] = []
    before = 0
    for end in marks:
        size = none.copy()
        for run in runs:
            run.wrong[:] = 0
        for start in range(before, end, DRAWN):
            n = min(DRAWN, end - start)
            k, v, q = rng.standard_normal((3, n, len(HEADS), DIM))
            k = common * shared + np.sqrt(1 - common**2) * k
            k /= np.linalg.norm(k, axis=-1, keepdims=True)
            q /= np.linalg.norm(q, axis=-1, keepdims=True)
            beta = 1 / (1 + np.exp(-1.5 * rng.standard_normal((n, len(HEADS)))))
            decay = np.exp(-c[:, 0] * np.exp(rng.standard_normal((n, len(HEADS)))))
            for t in range(n):
                given = k[t], v[t], q[t], np.stack((beta[t], decay[t]))
                o = true.token(start + t, *given)
                size += (o**2).sum(-1)
                for run in runs:
                    run.wrong += ((run.token(start + t, *given) - o) ** 2).sum(-1)
            for run in runs:
                run.largest = max(run.largest, float(np.abs(run.state).max()))
        before = end
        for (name, every), run in zip(KINDS, runs, strict=True):
            off = np.linalg.norm(run.state - true.state, axis=(1, 2))
            found.append({
                "tokens": end, "state": name, "every": every, "largest": run.largest,
                "output": np.sqrt(run.wrong / size).tolist(),
                "error": (off / np.linalg.norm(true.state, axis=(1, 2))).tolist(),
            })  # fmt: skip
    return found
