"""The gated delta rule and its replay ring once more, in float64, from docs/graph.md's text and
the published recurrence. Whole sequences from position 0, token by token. Imports nothing of the
package.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Sizes:
    """Key heads, value heads, and their widths."""

    hk: int
    hv: int
    dk: int
    dv: int


@dataclass(frozen=True)
class History:
    """Of T tokens: o [T,Hv,Dv], what they changed, and states [T+1,Hv,Dv,Dk], the first zero."""

    o: F64
    delta: F64  # [T,Hv,Dv]
    k: F64  # [T,Hk,Dk]
    g: F64  # [T,Hv]
    states: F64


def recur(s: Sizes, c: F64, ba: F64, a_log: F64, dt_bias: F64) -> History:
    """c [T, q|k|v], ba [T, b|a]."""
    count = len(c)
    q, k, v = np.split(c.astype(np.float64), [s.hk * s.dk, 2 * s.hk * s.dk], axis=1)
    q, k = (np.apply_along_axis(_unit, 2, x.reshape(count, s.hk, s.dk)) for x in (q, k))
    v = v.reshape(count, s.hv, s.dv)
    states = np.zeros((count + 1, s.hv, s.dv, s.dk))
    o, delta = np.zeros_like(v), np.zeros_like(v)
    g = np.zeros((count, s.hv))
    for t in range(count):
        for h in range(s.hv):
            key, query = k[t, h * s.hk // s.hv], q[t, h * s.hk // s.hv]
            beta = 1 / (1 + math.exp(-float(ba[t, h])))
            rate = float(ba[t, s.hv + h]) + float(dt_bias[h])
            g[t, h] = -math.exp(float(a_log[h])) * math.log(1 + math.exp(rate))
            faded = states[t, h] * math.exp(g[t, h])
            delta[t, h] = beta * (v[t, h] - faded.dot(key))
            states[t + 1, h] = faded + np.multiply.outer(delta[t, h], key)
            o[t, h] = states[t + 1, h].dot(query) / math.sqrt(s.dk)
    return History(o, delta, k, g, states)


def _unit(x: F64) -> F64:
    return np.asarray(x / math.sqrt(float(x @ x) + 1e-6))


class Ring:
    """The contents of one slot's state and ring [length, width] by the contract, step by step."""

    def __init__(self, s: Sizes, length: int, history: History) -> None:
        self.s, self.length, self.history = s, length, history
        self.base = 0
        self.stored = np.zeros((s.hv, s.dv, s.dk))
        self.known: dict[int, F64] = {}  # by index in the ring: what a record begins with

    def group(self, head: int, row: int) -> int:
        return head * -(-self.s.dv // 16) + row // 16

    def step(self, p: int) -> None:
        """A decode step at position `p`."""
        h = self.history
        if p == 0:
            self.base = 1
        for head in range(self.s.hv):
            for row in range(self.s.dv):
                if p == 0 or (p + self.group(head, row)) % self.length == self.length - 1:
                    self.stored[head, row] = h.states[p + 1, head, row]
        parts = (h.delta[p].ravel(), h.k[p].ravel(), h.g[p])
        self.known[p % self.length] = np.concatenate(parts)

    def prefill(self, end: int) -> None:
        """A prefill of the tokens before position `end`."""
        self.base, self.stored = end, self.history.states[end].copy()

    def lags_as_stored(self, p: int) -> bool:
        """Before position p group m lags by min(p − base, (p + m) mod L) tokens."""
        for head in range(self.s.hv):
            for row in range(self.s.dv):
                n = min(p - self.base, (p + self.group(head, row)) % self.length)
                if not np.array_equal(
                    self.stored[head, row], self.history.states[p - n, head, row]
                ):
                    return False
        return True
