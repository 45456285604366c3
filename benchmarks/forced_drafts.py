"""Drafts that are right as often as asked for, whatever the draft head thinks: for measurement.

A path is recorded for every sequence: what it says greedily. Before each round its certain token
is set to the path's, and the draft at place i to the path's next token with probability
`acceptance[i]`, else to another one. So rounds go along the path, the target keeps a draft where
the coin said so, and a near tie that falls the other way in another bucket costs one draft and no
more. Everything that a round computes is computed. On a GPU a small kernel does it on the engine's
stream, ahead of the round's graph; states on the host are changed by numpy. Of an engine of several
ranks every rank does it to its own states, told by rank 0 (`forced_rank`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spark_engine.interface import PREFILL
from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.ranks.leader import LeadStates
from spark_engine.runtime.ranks.messages import Table, Tables
from spark_engine.tensors import Array

HERE = Path(__file__).parent
CACHE = Path("/tmp/spark_cubins")
BLOCK = 128  # threads
ALWAYS = 2**32 - 1
SYMBOL = "force_drafts"
PATHS, PLACE = "forced.paths", "forced.place"  # what another rank is told, among its tables


class Paths:
    """What each slot is to say, and how its drafts are drawn. One without a path is left alone."""

    def __init__(self, slots: int, drafts: int, vocab: int) -> None:
        self.drafts, self.vocab = drafts, vocab
        self.path = np.zeros((slots, 1), np.int32)
        self.firsts = np.full(slots, -1, np.int32)
        self.shares = np.zeros(drafts, np.uint32)
        self.seed = np.zeros(1, np.uint32)

    def draw(self, acceptance: Sequence[float], seed: int) -> None:
        """Conditional acceptance by place; the last one holds for the places behind it."""
        rates = [acceptance[min(i, len(acceptance) - 1)] for i in range(self.drafts)]
        self.shares[:] = [min(round(rate * 2**32), ALWAYS) for rate in rates]
        self.seed[:] = seed

    def encode(self) -> bytes:
        """What `decode` takes."""
        sizes = np.array([len(self.firsts), self.drafts, self.vocab], np.int32)
        return b"".join(a.tobytes() for a in (sizes, *_rest(self), self.path))

    @classmethod
    def decode(cls, data: bytes) -> Paths:
        """The inverse, in another rank."""
        slots, drafts, vocab = np.frombuffer(data, np.int32, 3).tolist()
        made, at = cls(slots, drafts, vocab), 12
        for array in _rest(made):
            array[:] = np.frombuffer(data, array.dtype, len(array), at)
            at += array.nbytes
        made.path = np.frombuffer(data, np.int32, -1, at).reshape(slots, -1).copy()
        return made

    def clear(self, length: int) -> None:
        """No slot has a path; those to come have up to `length` tokens."""
        self.path = np.zeros((len(self.firsts), length), np.int32)
        self.firsts.fill(-1)

    def set(self, slot: int, first: int, tokens: Sequence[int]) -> None:
        """The slot's sequence says `tokens` from position `first` on."""
        self.path[slot, : len(tokens)] = tokens
        self.firsts[slot] = first

    def force(self, states: Mapping[str, Array]) -> None:
        """`force_drafts` of forced_drafts.cu over host arrays."""
        slots, length = self.path.shape
        slot, position = np.arange(slots), states["positions"].astype(np.int64)
        at = position - self.firsts
        live = (self.firsts >= 0) & (at >= 0) & (at < length)
        states["last_tokens"][live] = self.path[slot[live], at[live]]
        for i in range(self.drafts):
            on = np.flatnonzero(live & (at + 1 + i < length))
            right = self.path[on, at[on] + 1 + i]
            kept = coin(self.seed[0], on, position[on] + 1 + i) < self.shares[i]
            states["drafts"][on, i] = np.where(kept, right, (right + 1) % self.vocab)


def coin(seed: Any, slot: Array, position: Array) -> Array:
    """u32 of each pair, evenly distributed."""
    most = np.uint64(ALWAYS)

    def times(a: Any, b: int) -> Any:
        return (np.asarray(a).astype(np.uint64) * np.uint64(b)) & most

    h = times(seed, 0x9E3779B1) ^ times(slot, 0x85EBCA77) ^ times(position, 0xC2B2AE3D)
    h = times(h ^ h >> np.uint64(16), 0x7FEB352D)
    h = times(h ^ h >> np.uint64(15), 0x846CA68B)
    return np.asarray((h ^ h >> np.uint64(16)).astype(np.uint32))


class Forcing:
    """Forces what the rounds over one rank's states begin with, along `paths`. `states` are arrays,
    or with `gpu` addresses; `room`: tokens of a context."""

    def __init__(self, paths: Paths, states: Mapping[str, Any], room: int, gpu: Any = None) -> None:
        self.paths, self._states = paths, states
        self._device = None if gpu is None else _Device(gpu, room, paths, states)

    def send(self) -> None:
        """The paths are others from the next round on."""
        if self._device is not None:
            self._device.send(self.paths)

    def place(self, slot: int, position: int) -> None:
        """Where the slot's first round begins."""
        if self._device is not None:
            self._device.place(slot, position)
        else:
            self._states["positions"][slot] = position

    def go(self) -> None:
        """To be called ahead of a round."""
        if self._device is not None:
            self._device.queue()
        else:
            self.paths.force(self._states)


class Forced:
    """Forces the rounds of one engine along `paths`, which follow requests to their slots."""

    def __init__(self, engine: Engine) -> None:
        loaded, limits = engine.loaded, engine.loaded.limits
        self.engine, self.paths = engine, Paths(limits.max_seqs + 1, limits.drafts, limits.vocab)
        self._said: dict[int, tuple[int, list[int]]] = {}
        self._placed: set[int] = set()
        store: Any = loaded.device_states
        self._orders: Any = store._orders if isinstance(store, LeadStates) else None
        own: Any = store.inner if isinstance(store, LeadStates) else store
        if store is None or loaded.synchronous:
            self._own = Forcing(self.paths, engine.memory.states, limits.max_context)
        else:
            one: Any = next(iter(loaded.executors.values()))
            gpu = one.gpu if self._orders is None else one.inner.inner.gpu
            self._own = Forcing(self.paths, own.addresses, limits.max_context, gpu)

    def follow(self, said: Mapping[int, tuple[int, list[int]]], length: int) -> None:
        """Requests by id, each with the position of its first token and all its tokens."""
        self._said, self._placed = dict(said), set()
        self.paths.clear(length)
        self._send()

    def draw(self, acceptance: Sequence[float], seed: int) -> None:
        """From the next round on."""
        self.paths.draw(acceptance, seed)
        self._send()

    def before(self, family: str) -> None:
        """To be called ahead of every launch."""
        if family == PREFILL or not self._said:
            return
        if len(self._placed) < len(self._said):
            self._place()
        self._own.go()

    def _send(self) -> None:
        self._own.send()
        if self._orders is not None:
            told = Table(PATHS, [self.engine.loaded.limits.max_context], self.paths.encode())
            self._orders.add(Tables([told]))

    def _place(self) -> None:
        """Sequences that have got their slots since the last launch: their first round follows."""
        fresh = [
            seq
            for seq in self.engine.scheduler.running
            if seq.id in self._said and seq.id not in self._placed
        ]
        for seq in fresh:
            first, tokens = self._said[seq.id]
            self.paths.set(seq.slot, first, tokens)
            self._placed.add(seq.id)
            self._own.place(seq.slot, first)
            if self._orders is not None:
                self._orders.add(Tables([Table(PLACE, [seq.slot, first], b"")]))
        if fresh:
            self._send()


class _Device:
    """The paths on the device, and the kernel that reads them."""

    def __init__(self, gpu: Any, room: int, paths: Paths, states: Mapping[str, int]) -> None:
        from benchmarks.graphs import target_here
        from spark_engine.builder.native import nvrtc

        self._gpu, self._states = gpu, states
        job = nvrtc.Job("forced_drafts.cu", (), (SYMBOL,))
        cubin = nvrtc.compile(job, target_here(), CACHE, HERE)
        self._function = self._gpu.function(self._gpu.module(cubin.code), SYMBOL)
        sizes = [len(paths.firsts) * room * 4, *(x.nbytes for x in _rest(paths))]
        self._held = [self._gpu.allocate(n) for n in sizes]
        self.queue: Any = lambda: None

    def send(self, paths: Paths) -> None:
        """Copies the paths, when all that was queued is done, and prepares the kernel for them."""
        from spark_engine.kernel import Launch, Pointer, Scalar

        self._gpu.use()
        self._gpu.wait()
        for address, array in zip(self._held, (paths.path, *_rest(paths)), strict=True):
            self._gpu.upload(address, np.ascontiguousarray(array))
        self._gpu.wait()
        slots, length = paths.path.shape
        numbers = (slots, length, paths.drafts, paths.vocab)
        addresses = [self._states[n] for n in ("positions", "last_tokens", "drafts")]
        pointers = [Pointer("input", i) for i in range(len(addresses) + len(self._held))]
        grid = (-(-slots // BLOCK), 1, 1)
        scalars = [Scalar("i32", n) for n in numbers]
        launch = Launch(SYMBOL, grid, (BLOCK, 1, 1), (*pointers, *scalars))
        args = [*addresses, *self._held, *numbers]
        self.queue = self._gpu.prepare(self._function, launch.shape, args)

    def place(self, slot: int, position: int) -> None:
        """Where the slot's first round begins: the state says so only behind that round."""
        self._gpu.wait()
        self._gpu.upload(self._states["positions"] + 4 * slot, np.asarray([position], np.int32))
        self._gpu.wait()


def _rest(paths: Paths) -> tuple[Array, ...]:
    return paths.firsts, paths.shares, paths.seed
