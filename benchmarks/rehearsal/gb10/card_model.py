"""How long a card takes for what a kernel moves and computes, and how that is learnt from times.

A launch takes its latency, and the longest of three things: its bytes of DRAM, its operations on
the tensor cores at the rate that a library reaches, and the work of its multiprocessors (issuing,
unpacking, their own loads), which is counted in cycles and so carried from card to card. What a
kernel costs there, its `Law`, is fitted to measured times. Knows no model and no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.node_work import Amounts

LAUNCH = 1.0e-6  # seconds of a launch in a graph that nothing overlaps: benchmarks/log/runtime.md
Column = NDArray[np.float64]
STEPS = (4.0, 2.0, 1.4, 1.1, 1.03)  # by which a fit tries to change a coefficient
MOST_STEPS = 200  # of one size
POWERS = (1.0, 2.0, 4.0)  # of `Law`
# Of laws that explain the times as well, the likelier: a launch takes some microseconds at most,
# and a kernel's work grows with what its floor is of. A part of the time that is explained
# otherwise counts as an error with the square UNLIKELY.
UNLIKELY, LONG_LAUNCH = 1e-4, 10e-6
OPS_A_CYCLE = 4096.0  # of a multiprocessor's tensor cores, dense bf16, of the cards that are timed


@dataclass(frozen=True)
class Machine:
    """A card, or some multiprocessors of it."""

    name: str
    sms: int  # multiprocessors that launches have
    clock: float  # of each, a second
    bandwidth: float  # bytes of DRAM a second that the card gives to all its multiprocessors
    l2_bytes: int  # the cache
    draw: float = math.inf  # bytes of DRAM a second that one multiprocessor can ask for
    # Operations a second of these multiprocessors by what is multiplied; a kind that is not there
    # is bound by nothing but the kernels' own work.
    rates: Mapping[str, float] = field(default_factory=dict)

    @property
    def dram_rate(self) -> float:
        """Bytes of DRAM a second that these multiprocessors reach together."""
        return min(self.bandwidth, self.sms * self.draw)

    @property
    def cycles(self) -> float:
        """Cycles of all multiprocessors together, a second."""
        return self.sms * self.clock


# Library rates and clock as measured on others' GB10: bf16, e4m3 and NVFP4 with f32 sums.
GB10 = Machine(
    "GB10", 48, 2.4e9, 243e9, 24 << 20, rates={"bf16": 100e12, "e4m3": 213e12, "nvfp4": 356e12}
)
H200_CLOCK, H200_L2 = 1.98e9, 50 << 20
H200_SMS, H200_BANDWIDTH = 132, 4.3e12


def h200(sms: int = H200_SMS, clock: float = H200_CLOCK, read: float | None = None) -> Machine:
    """An H200, or a partition of it, of which the multiprocessors read at most `read` bytes/s.

    The tensor cores' time is in the laws, which are fitted here: there is no separate rate.
    """
    draw = read / sms if read else math.inf
    return Machine(f"H200, {sms} SMs", sms, clock, H200_BANDWIDTH, H200_L2, draw)


@dataclass(frozen=True)
class Law:
    """What one kind of kernel costs in addition to DRAM and tensor cores.

    Attributes:
        launch: seconds of each launch: its start, its waits, its end.
        byte, op: cycles of one multiprocessor for each byte that it moves, for each operation.
        power: how these two overlap, as the power of their norm: 1 not at all, 2 in part (weights
            are unpacked by some warps while others multiply), many entirely.
    """

    launch: float = LAUNCH
    byte: float = 0.0
    op: float = 0.0
    power: float = 1.0

    def work(self, amounts: Amounts, machine: Machine) -> float:
        """Seconds of the multiprocessors' own work."""
        return normed(self.byte * amounts.moved, self.op * amounts.ops, self.power) / machine.cycles


def normed(first: Any, second: Any, power: float) -> Any:
    """The norm of two times: their sum (1), or less."""
    return first + second if power == 1 else (first**power + second**power) ** (1 / power)


@dataclass(frozen=True)
class Times:
    """Seconds of a node by what takes them."""

    launch: float
    dram: float
    tensor: float
    work: float

    @property
    def seconds(self) -> float:
        return self.launch + max(self.dram, self.tensor, self.work)

    @property
    def apart(self) -> float:
        """With nothing overlapped: no kernel is slower than this."""
        return self.launch + self.dram + self.tensor + self.work

    @property
    def bound(self) -> str:
        found = {"bytes": self.dram, "tensor": self.tensor, "issue": self.work}
        found["launch"] = self.launch
        return max(found, key=lambda name: found[name])

    def __add__(self, other: Times) -> Times:
        pairs = zip(_parts(self), _parts(other), strict=True)
        return Times(*(a + b for a, b in pairs))


def _parts(times: Times) -> tuple[float, float, float, float]:
    return times.launch, times.dram, times.tensor, times.work


def times_of(amounts: Amounts, launches: float, law: Law, machine: Machine) -> Times:
    """What a node's launches take on a machine."""
    dram = amounts.dram(machine.l2_bytes) / machine.dram_rate
    rate = machine.rates.get(amounts.kind, math.inf)
    return Times(launches * law.launch, dram, amounts.ops / rate, law.work(amounts, machine))


@dataclass(frozen=True)
class Counted:
    """Equal nodes: what one moves and computes, its launches, and how many there are."""

    amounts: Amounts
    launches: int
    count: int = 1


@dataclass(frozen=True)
class Point:
    """Measured seconds of some nodes together, all of one kind of kernel."""

    nodes: tuple[Counted, ...]
    seconds: float


def fitted(points: Sequence[Point], machine: Machine) -> Law:
    """The law with the least sum of squared relative errors over the points of one kind of kernel.

    A time that DRAM explains says of the multiprocessors' work only that it is no longer; where
    no time says more, it is none, and a card with less bandwidth is not slowed down by it.
    """
    if not points:
        return Law()
    error, law = _Fit(points, machine, POWERS[0]).found()
    for power in POWERS[1:] if law.byte * law.op else ():  # else there is nothing to overlap
        other, found = _Fit(points, machine, power).found()
        if other < error:
            error, law = other, found
    return law


class _Fit:
    """The points of one kind of kernel as columns, a row for each `Counted`. Laws are rows of
    (launch, byte, op), many at a time."""

    def __init__(self, points: Sequence[Point], machine: Machine, power: float) -> None:
        self._power = power
        rows = [(i, n) for i, point in enumerate(points) for n in point.nodes]
        self._seconds = np.array([point.seconds for point in points])
        self._counts = np.zeros((len(rows), len(points)))  # of the nodes of each point
        for row, (i, n) in enumerate(rows):
            self._counts[row, i] = n.count
        launches = np.array([float(n.launches) for _, n in rows])
        moved = np.array([n.amounts.moved for _, n in rows]) / machine.cycles
        ops = np.array([n.amounts.ops for _, n in rows]) / machine.cycles
        self._columns = np.stack([launches, moved, ops])
        dram = np.array([n.amounts.dram(machine.l2_bytes) for _, n in rows])
        self._dram = dram / machine.dram_rate
        by_ops = ops / OPS_A_CYCLE > moved * machine.cycles / machine.dram_rate
        self._unlikely = np.stack([by_ops, ~by_ops]).astype(np.float64)  # work by bytes, by ops
        units = (1e-8, 1e-3 * machine.cycles / machine.dram_rate, 1e-14 * machine.cycles)
        self._units = np.array(units)

    def errors(self, laws: Column) -> Column:
        """The sums of squared relative errors, and what is unlikely of the laws."""
        moved, ops = (laws[..., i : i + 1] * self._columns[i] for i in (1, 2))
        work = normed(moved, ops, self._power)
        launch = laws[..., :1] * self._columns[0]
        each = launch + np.maximum(self._dram, work)
        squares = np.square(each @ self._counts / self._seconds - 1).sum(-1)
        unlikely = moved * self._unlikely[0] + ops * self._unlikely[1]
        unlikely = unlikely + launch * (laws[..., :1] > LONG_LAUNCH)
        found: Column = squares + UNLIKELY * (unlikely @ self._counts / self._seconds).sum(-1)
        return found

    def found(self) -> tuple[float, Law]:
        """The best of those that searches lead to, and its error."""
        laws = self._searched(self._starts())
        errors = self.errors(laws)
        best = int(errors.argmin())
        return float(errors[best]), Law(*laws[best].tolist(), self._power)

    def _starts(self) -> Column:
        """Laws to search from: every non-negative one of least squares where nothing is bound by
        DRAM, and a mere launch."""
        sums = self._columns @ self._counts
        found = [[float((self._seconds / sums[0]).min()), 0.0, 0.0], [LAUNCH, 0.0, 0.0]]
        columns = (sums / self._seconds).T
        for used in product((False, True), repeat=3):
            at = [i for i, use in enumerate(used) if use]
            solved = np.zeros(3)
            solved[at] = np.linalg.lstsq(columns[:, at], np.ones(len(columns)), rcond=None)[0]
            if (solved >= 0).all():
                found.append(solved.tolist())
        return np.array(found)

    def _searched(self, laws: Column) -> Column:
        """Each law with one coefficient after the other changed while that lowers its error."""
        errors = self.errors(laws)
        for step in STEPS:
            for _ in range(MOST_STEPS):
                neighbours = self._neighbours(laws, step)
                tried = self.errors(neighbours)
                best = tried.argmin(1)
                lowest = np.take_along_axis(tried, best[:, None], 1)[:, 0]
                better = lowest < errors * (1 - 1e-9)
                if not better.any():
                    break
                chosen = np.take_along_axis(neighbours, best[:, None, None], 1)[:, 0]
                laws = np.where(better[:, None], chosen, laws)
                errors = np.where(better, lowest, errors)
        return laws

    def _neighbours(self, laws: Column, step: float) -> Column:
        """Of each law nine others: a coefficient more, less, and none."""
        found = np.repeat(laws[:, None], 9, axis=1)
        for i, unit in enumerate(self._units):
            now = laws[:, i]
            found[:, 3 * i, i] = np.where(now > 0, now * step, unit)
            found[:, 3 * i + 1, i] = now / step
            found[:, 3 * i + 2, i] = 0.0
        return found
