"""How long a card takes for what a kernel moves and computes, and how that is learnt from times.

A launch takes its latency, and the longest of three things: its bytes of DRAM, its operations on
the tensor cores at the rate that a library reaches, and the work of its multiprocessors (issuing,
unpacking, their own loads), which is counted in cycles and so carried from card to card. What a
kernel costs there, its `Law`, is fitted to measured times. Knows no model and no file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from benchmarks.node_work import Amounts

LAUNCH = 1.0e-6  # seconds of a launch in a graph that nothing overlaps: benchmarks/log/runtime.md
Column = NDArray[np.float64]
STEPS = (4.0, 2.0, 1.4, 1.1, 1.03)  # by which a fit tries to change a coefficient


@dataclass(frozen=True)
class Machine:
    """A card, or some multiprocessors of it.

    Attributes:
        sms: multiprocessors that launches have.
        clock: of each, a second.
        bandwidth: bytes of DRAM a second that the card gives to all its multiprocessors.
        draw: bytes of DRAM a second that one multiprocessor can ask for.
        l2_bytes: the cache.
        rates: operations a second of these multiprocessors by what is multiplied; a kind that is
            not there is bound by nothing but the kernels' own work.
    """

    name: str
    sms: int
    clock: float
    bandwidth: float
    l2_bytes: int
    draw: float = math.inf
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
    """An H200, or a partition of it, whose multiprocessors read `read` bytes a second at most.

    The tensor cores' time is in the laws, which are fitted here: there is no rate of its own.
    """
    draw = read / sms if read else math.inf
    return Machine(f"H200, {sms} SMs", sms, clock, H200_BANDWIDTH, H200_L2, draw)


@dataclass(frozen=True)
class Law:
    """What one kind of kernel costs beside DRAM and tensor cores.

    Attributes:
        launch: seconds of each launch: its start, its waits, its end.
        byte, op: cycles of one multiprocessor for each byte that it moves, for each operation.
    """

    launch: float = LAUNCH
    byte: float = 0.0
    op: float = 0.0

    def work(self, amounts: Amounts, machine: Machine) -> float:
        """Seconds of the multiprocessors' own work."""
        return (self.byte * amounts.moved + self.op * amounts.ops) / machine.cycles


@dataclass(frozen=True)
class Times:
    """Seconds of a node by what takes them."""

    launch: float
    dram: float
    tensor: float
    work: float

    @property
    def seconds(self) -> float:
        """With everything overlapped but the launch."""
        return self.launch + max(self.dram, self.tensor, self.work)

    @property
    def apart(self) -> float:
        """With nothing overlapped: no kernel is slower than this."""
        return self.launch + self.dram + self.tensor + self.work

    @property
    def bound(self) -> str:
        """What takes longest."""
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
    fit = _Fit(points, machine)
    return min((fit.searched(start) for start in fit.starts()), key=fit.error)


class _Fit:
    """The points of one kind of kernel as columns, a row for each `Counted`."""

    def __init__(self, points: Sequence[Point], machine: Machine) -> None:
        rows = [(i, n) for i, point in enumerate(points) for n in point.nodes]
        self._point = np.array([i for i, _ in rows])
        self._count = np.array([float(n.count) for _, n in rows])
        self._launches = np.array([float(n.launches) for _, n in rows])
        self._dram = np.array([n.amounts.dram(machine.l2_bytes) for _, n in rows])
        self._dram = self._dram / machine.dram_rate
        self._moved = np.array([n.amounts.moved for _, n in rows]) / machine.cycles
        self._ops = np.array([n.amounts.ops for _, n in rows]) / machine.cycles
        self._seconds = np.array([point.seconds for point in points])
        self._units = (1e-8, 1e-3 * machine.cycles / machine.dram_rate, 1e-14 * machine.cycles)

    def error(self, law: Law) -> float:
        """The sum of squared relative errors."""
        work = law.byte * self._moved + law.op * self._ops
        each = law.launch * self._launches + np.maximum(self._dram, work)
        return float(((self._summed(each) / self._seconds - 1) ** 2).sum())

    def starts(self) -> list[Law]:
        """Laws to search from: every non-negative one of least squares where nothing is bound by
        DRAM, and a mere launch."""
        least = self._seconds / self._summed(self._launches)
        found = [Law(float(least.min())), Law()]
        sums = (self._summed(c) for c in (self._launches, self._moved, self._ops))
        columns = np.stack([column / self._seconds for column in sums], axis=1)
        for used in product((False, True), repeat=3):
            at = [i for i, use in enumerate(used) if use]
            solved = np.zeros(3)
            solved[at] = np.linalg.lstsq(columns[:, at], np.ones(len(columns)), rcond=None)[0]
            if (solved >= 0).all():
                found.append(Law(*solved.tolist()))
        return found

    def searched(self, law: Law) -> Law:
        """The law with one coefficient after the other changed while that lowers the error."""
        error = self.error(law)
        for step in STEPS:
            while True:
                tried = min(self._beside(law, step), key=self.error)
                if self.error(tried) >= error * (1 - 1e-9):
                    break
                law, error = tried, self.error(tried)
        return law

    def _beside(self, law: Law, step: float) -> list[Law]:
        found = []
        for name, unit in zip(("launch", "byte", "op"), self._units, strict=True):
            now = getattr(law, name)
            found += [replace(law, **{name: new}) for new in (now * step or unit, now / step, 0.0)]
        return found

    def _summed(self, column: Column) -> Column:
        """Over the nodes of each point."""
        return np.bincount(self._point, column * self._count, len(self._seconds))
