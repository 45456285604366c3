"""Philox4x32-10 (Salmon et al., 2011), in numpy and in integer ONNX nodes, bit for bit equal.

A counter-based generator: the same key and counter give the same four words on every executor.
"""

from collections.abc import Sequence

import numpy as np

from spark_engine.plugins.common.onnx_nodes import Text
from spark_engine.tensors import Array

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 1 << 32
_HALF = 1 << 16


def words(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """The four words of one counter (4 words) and key (2 words)."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = divmod(_MULTIPLIERS[0] * x0, _WORD)
        high1, low1 = divmod(_MULTIPLIERS[1] * x2, _WORD)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) % _WORD, (k1 + _WEYL[1]) % _WORD
    return x0, x1, x2, x3


def uniform(position: int, seed: Sequence[int]) -> float:
    """In (0, 1): counter (position, 0, 0, 0), u = ((x₀ >> 8) + 0.5) · 2⁻²⁴."""
    x0 = words((position % _WORD, 0, 0, 0), [s % _WORD for s in seed])[0]
    return ((x0 >> 8) + 0.5) * 2.0**-24


def words_text(f: Text, even: str, odd: str, key: str) -> tuple[str, str]:
    """int64 [rows,2] words (x₀,x₂) and (x₁,x₃); counters in the same form, key [rows,2].

    int64 does not hold an unsigned product of 32 × 32 bits, so one factor is split in halves of 16
    bits.
    """
    for i in range(ROUNDS):
        weyl = np.asarray([i * w % _WORD for w in _WEYL])
        high, low = _multiply(f, even)
        round_key = f("Mod", f("Add", key, weyl), _WORD)
        even = f("BitwiseXor", f("BitwiseXor", _swap(f, high), odd), round_key)
        odd = _swap(f, low)
    return even, odd


def _multiply(f: Text, x: str) -> tuple[str, str]:
    """High and low words of x · multiplier."""
    factor: Array = np.asarray(_MULTIPLIERS)
    lower = f("Mul", f("Mod", x, _HALF), factor)
    upper = f("Add", f("Mul", f("Div", x, _HALF), factor), f("Div", lower, _HALF))
    low = f("Add", f("Mul", f("Mod", upper, _HALF), _HALF), f("Mod", lower, _HALF))
    return f("Div", upper, _HALF), low


def _swap(f: Text, pair: str) -> str:
    return f("Gather", pair, [1, 0], axis=1)


def uniform_text(f: Text, position: str, seed: str) -> str:
    """float64 [rows,1], as `uniform`: position int64 [rows,1], seed int64 [rows,2]."""
    none = f("Sub", position, position)
    even = f("Concat", f("Mod", position, _WORD), none, axis=1)
    odd = f("Concat", none, none, axis=1)
    words_even, _ = words_text(f, even, odd, f("Mod", seed, _WORD))
    top = f("Div", f("Slice", words_even, [0], [1], [1]), 256)
    return f("Mul", f("Add", f.double(top), np.float64(0.5)), np.float64(2.0**-24))
