"""Gated attention over an FP8 (or raw) cache once more, in float64, from docs/graph.md alone.

Whole sequences from position 0, head by head; no pages, no tiles, no blocks. Imports nothing of
the package. e4m3 is spelled out from its bits. Decisions on codes are taken on float32 values, as
an engine takes them; `Attended.margin` is the distance of the nearest one from its border, in
steps of the code.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
U8 = NDArray[np.uint8]


def e4m3_value(code: int) -> float:
    """sign, 4 bits of exponent (bias 7), 3 of mantissa; exponent 0 is subnormal."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if code & 128 else size


POSITIVE = np.asarray([e4m3_value(code) for code in range(127)])  # 127 is NaN


def encode(x: NDArray[np.float32]) -> tuple[U8, float]:
    """(codes, margin): to nearest, ties to the even code, ±448 beyond, −0 as +0."""
    size = np.minimum(np.abs(x.astype(np.float64)), POSITIVE[-1])
    gaps = np.abs(size[..., None] - POSITIVE)
    nearest = gaps.min(axis=-1, keepdims=True)
    tied = gaps == nearest
    even = tied & (np.arange(127) % 2 == 0)
    codes = np.where(even.any(axis=-1), even.argmax(axis=-1), tied.argmax(axis=-1))
    second = np.where(tied, np.inf, gaps).min(axis=-1)
    steps = nearest[..., 0] + second
    distance = np.where(np.abs(x) >= POSITIVE[-1], 1.0, (second - nearest[..., 0]) / 2 / steps)
    signed = codes + 128 * (x < 0)
    return signed.astype(np.uint8), float(distance.min())


def decode(codes: U8) -> F64:
    return np.asarray([e4m3_value(c) for c in range(256)])[codes]


@dataclass(frozen=True)
class Heads:
    """Sizes, norms and scales of one attention; `scales` (k's, v's) None: raw pages. `places`
    [T, pairs]: the position by which each pair of a token turns."""

    queries: int
    keys: int
    dim: int
    eps: float
    q_norm: F64
    k_norm: F64
    inv_freq: NDArray[np.float32]
    scales: tuple[float, float] | None
    places: NDArray[np.int64]


@dataclass(frozen=True)
class Attended:
    """o [T,queries,D] before the gate, the gate, what the pages hold [T,keys,D], the margin."""

    o: F64
    gate: F64
    k: NDArray[np.generic]
    v: NDArray[np.generic]
    margin: float


def attend(h: Heads, packed: F64) -> Attended:
    """packed [T, 2·queries·D + 2·keys·D]: per head q then gate; then k; then v."""
    cuts = np.cumsum([2 * h.queries * h.dim, h.keys * h.dim])
    first, k, v = np.split(packed.astype(np.float64), cuts, axis=1)
    pairs = first.reshape(-1, h.queries, 2, h.dim)
    q, gate = pairs[:, :, 0], pairs[:, :, 1]
    k, v = k.reshape(-1, h.keys, h.dim), v.reshape(-1, h.keys, h.dim)
    q, k = turned(h, normed(h, q, h.q_norm)), turned(h, normed(h, k, h.k_norm))
    stored_k, stored_v, margin = k, v, np.inf
    if h.scales is not None:
        stored_k, near_k = encode(k.astype(np.float32) / np.float32(h.scales[0]))
        stored_v, near_v = encode(v.astype(np.float32) / np.float32(h.scales[1]))
        k, v = decode(stored_k) * h.scales[0], decode(stored_v) * h.scales[1]
        margin = min(near_k, near_v)
    o = np.zeros_like(q)
    for t in range(len(packed)):
        for head in range(h.queries):
            mine = head * h.keys // h.queries
            scores = [float(q[t, head] @ k[s, mine]) / h.dim**0.5 for s in range(t + 1)]
            weights = np.exp(np.asarray(scores) - max(scores))
            o[t, head] = (weights / weights.sum()) @ v[: t + 1, mine]
    return Attended(o, gate, stored_k, stored_v, float(margin))


def normed(h: Heads, x: F64, weight: F64) -> F64:
    return np.asarray(x * weight / np.sqrt((x**2).mean(axis=-1, keepdims=True) + h.eps))


def turned(h: Heads, x: F64) -> F64:
    """Element i of the first half of the rotated part goes with element i of its second half."""
    y, half = x.copy(), len(h.inv_freq)
    for t in range(len(x)):
        for i, frequency in enumerate(h.inv_freq):
            angle = float(np.float32(h.places[t, i]) * frequency)
            turn = complex(np.cos(angle), np.sin(angle))
            z = (x[t, :, i] + 1j * x[t, :, i + half]) * turn
            y[t, :, i], y[t, :, i + half] = z.real, z.imag
    return y
