"""A tiny executor whose every answer is a hash of every state it is given.

It writes what it is fed into pages, slots and `token_counts`, reads all of it back through the page
table, and hashes that with the sampling tables into the next token: a wrong slot, a stale page,
a token dropped or doubled changes the answer. Launches run as late as the contract allows, at
the wait; tables alone are read at the launch. Inert rows scribble on the scratch rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from spark_engine.interface import Limits, common_states, outputs, steps, tables, tile_of
from spark_engine.manifest import StateInfo
from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.executors.executor import Specs, Wait
from spark_engine.tensors import Array, DType, TensorSpec

VOCAB = 61
EOS = (3, 7)
_WORD = (1 << 64) - 1
_TABLES = ("prompt_lens", "sampling_f", "sampling_i", "bias_ids", "bias_values")
_POWERS = np.cumprod(np.full(4096, 0x9E3779B97F4A7C15, np.uint64))


def fake_states(limits: Limits) -> tuple[StateInfo, ...]:
    """States of a model with one attention layer and one recurrent layer."""
    slots, pages = limits.max_seqs + 1, limits.pages + 1
    seq = (
        *common_states(limits),
        TensorSpec("layers.0.conv_state", DType.I64, (slots, 3)),
        TensorSpec("layers.0.gdn_state", DType.I64, (slots, 1)),
    )
    kv = TensorSpec("layers.1.k_pages", DType.I64, (pages, limits.page_size, 2))
    return (*(StateInfo(s, "slot") for s in seq), StateInfo(kv, "page"))


@dataclass
class Device:
    """The launches of one engine in their order, not yet run."""

    pending: list[Callable[[], None]] = field(default_factory=list)
    lazy: bool = True

    def launch(self, work: Callable[[], None]) -> Wait:
        self.pending.append(work)
        wait = lambda: self._run_through(work)  # noqa: E731
        if not self.lazy:
            wait()
        return wait

    def _run_through(self, work: Callable[[], None]) -> None:
        while work in self.pending:
            self.pending.pop(0)()


class FakeExecutor:
    """One bucket. `poison_rate` n makes about every n-th answer non-finite (0: none)."""

    def __init__(
        self, limits: Limits, family: str, rows: int, device: Device, poison_rate: int = 0
    ) -> None:
        dims = {"rows": rows, "tokens": rows * tile_of(family)}
        self._limits, self._tile, self._rows = limits, tile_of(family), rows
        self._device, self._poison_rate = device, poison_rate
        self.specs = Specs(
            tuple(s.bind(dims) for s in steps()) + tables(limits),
            tuple(info.spec for info in fake_states(limits)),
            tuple(s.bind(dims) for s in outputs(limits) if s.name != "logits"),
        )
        self.closed = 0

    def run(self, buffers: Mapping[str, Array]) -> None:
        self.launch(buffers)()

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        frozen = {spec.name: buffers[spec.name].copy() for spec in tables(self._limits)}
        for spec in self.specs.outputs:
            buffers[spec.name].fill(-99)
        return self._device.launch(lambda: self._work({**buffers, **frozen}))

    def close(self) -> None:
        self.closed += 1

    def _work(self, b: Mapping[str, Array]) -> None:
        for row in range(self._rows):
            if b["slots"][row] < 0:
                assert b["counts"][row] == 0 and b["emit"][row] == 0
                _scribble([b[i.spec.name][-1:] for i in fake_states(self._limits)])
            else:
                self._row(b, row)

    def _row(self, b: Mapping[str, Array], row: int) -> None:
        slot, start, count = (int(b[n][row]) for n in ("slots", "starts", "counts"))
        assert 0 < count <= self._tile and 0 <= slot < self._limits.max_seqs
        ids = b["token_ids"][row * self._tile :][:count].tolist()
        ids = [int(b["last_tokens"][slot]) if t < 0 else t for t in ids]
        if start == 0:
            for name in ("token_counts", "layers.0.conv_state", "layers.0.gdn_state"):
                b[name][slot] = 0
        self._write(b, slot, start, ids)
        if not b["emit"][row]:
            return
        answer = self._answer(b, slot, start + count)
        used = b["bias_until"][slot] > start + count
        token = _allowed(answer, b["bias_ids"][slot][used], b["bias_values"][slot][used])
        b["next_tokens"][row] = b["last_tokens"][slot] = token
        b["ok"][row] = not self._poison_rate or answer % self._poison_rate != 0
        b["logprobs"][row] = -(answer % 1000)
        b["top_ids"][row] = np.arange(self._limits.top_logprobs) + token
        b["top_logprobs"][row] = -np.arange(self._limits.top_logprobs) - answer % 7

    def _write(self, b: Mapping[str, Array], slot: int, start: int, ids: list[int]) -> None:
        at = np.arange(start, start + len(ids))
        pages, offsets = self._places(b, slot, at)
        b["layers.1.k_pages"][pages, offsets] = np.stack([ids, at], 1)
        state = int(b["layers.0.gdn_state"][slot, 0])
        for position, token in zip(at.tolist(), ids, strict=True):
            state = (state * 0x2545F491 + token * 977 + position) & (_WORD >> 1)
        b["layers.0.gdn_state"][slot, 0] = state
        recent = [*b["layers.0.conv_state"][slot].tolist(), *ids]
        b["layers.0.conv_state"][slot] = recent[-3:]
        token_counts, prompt = b["token_counts"][slot], int(b["prompt_lens"][slot])
        token_counts[ids[: max(0, prompt - start)]] |= 1
        np.add.at(token_counts, np.asarray(ids[max(0, prompt - start) :], np.intp), 2)

    def _places(self, b: Mapping[str, Array], slot: int, at: Array) -> tuple[Array, Array]:
        pages = b["page_table"][slot][at // self._limits.page_size]
        assert (pages >= 0).all() and (pages < self._limits.pages).all(), pages
        return pages, at % self._limits.page_size

    def _answer(self, b: Mapping[str, Array], slot: int, length: int) -> int:
        history = b["layers.1.k_pages"][self._places(b, slot, np.arange(length))]
        words = history.astype(np.uint64) @ np.array([3, 0x1F123BB5], np.uint64)
        parts = [int((words * _POWERS[:length]).sum())]
        for name in ("token_counts", "layers.0.conv_state", "layers.0.gdn_state", *_TABLES):
            parts.append(zlib.crc32(np.ascontiguousarray(b[name][slot]).tobytes()))
        return _mix(parts)


def build_fake(
    limits: Limits,
    decode: tuple[int, ...],
    prefill: tuple[int, ...],
    *,
    lazy: bool = True,
    poison_rate: int = 0,
) -> Loaded:
    """An engine of fakes that share one device."""
    device = Device(lazy=lazy)
    keys = [("decode", n) for n in decode] + [("prefill", n) for n in prefill]
    executors = {k: FakeExecutor(limits, *k, device, poison_rate) for k in keys}
    return Loaded(limits, EOS, fake_states(limits), tables(limits), executors)


def poison_free(engine: Engine) -> None:
    """Overwrites every state and table row that no sequence holds with wild values."""
    scheduler, memory = engine.scheduler, engine.memory
    free = {"slot": _free(scheduler.slots), "page": _free(scheduler.pages)}
    for info in engine.loaded.states:
        rows = np.asarray([*free[info.unit], memory.states[info.spec.name].shape[0] - 1])
        memory.states[info.spec.name][rows] = -(1 << 30)
    for table in memory.tables.values():
        table[np.asarray(free["slot"], np.intp)] = -(1 << 30)


def _free(pool: object) -> list[int]:
    return list(pool._free)  # type: ignore[attr-defined]


def _scribble(rows: list[Array]) -> None:
    for row in rows:
        row[...] = -12345


def _mix(parts: list[int]) -> int:
    state = 0x9E3779B97F4A7C15
    for part in parts:
        state = ((state ^ (part & _WORD)) * 0xBF58476D1CE4E5B9) & _WORD
        state ^= state >> 29
    return state


def _allowed(answer: int, ids: Array, values: Array) -> int:
    """The answer's token, moved on past those with a bias of -inf."""
    banned = set(ids[np.isneginf(values)].tolist())
    token = answer % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token
