"""Runs one sequence through an engine, launch by launch, with everything else poisoned.

Knows the step inputs of docs/graph.md and an opened engine; no scheduler takes part.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spark_engine.check.engines.prompts import default_tables
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.executors.memory import EngineMemory

Floats = NDArray[Any]


class Solo:
    """One sequence in `slot`, on pages that are neither first nor in order.

    `logits` grows by a row [V] per token where the engine is a debug build, else per launch, and
    has then the ids of one rank; `tokens` by what each launch samples.
    """

    def __init__(self, engine: Loaded, slot: int = 1) -> None:
        specs = {key: executor.specs for key, executor in engine.executors.items()}
        self.engine, self.slot = engine, slot
        self.memory = EngineMemory(engine.states, engine.tables, specs)
        self.pages = list(range(engine.limits.pages))[::-1][: engine.limits.pages_per_seq]
        self.length = 0
        self.logits: list[Floats] = []
        self.tokens: list[int] = []
        self._poison()

    def _poison(self) -> None:
        for state in self.memory.states.values():
            state[...] = np.nan if state.dtype.kind not in "iu" else 0x7F
        for name, table in default_tables(self.engine.limits).items():
            self.memory.tables[name][...] = table
        self.memory.tables["page_table"][self.slot, : len(self.pages)] = self.pages

    def prefill(self, ids: Sequence[int], rows: int) -> None:
        """One launch of the prefill bucket of `rows` tiles."""
        self._launch("prefill", rows, ids, 64)

    def decode(self, token: int, rows: int = 1) -> None:
        """One launch of a decode bucket; the sequence is in its last row."""
        self._launch("decode", rows, [token], 1)

    def read(self, ids: Sequence[int]) -> "Solo":
        """A long prompt in two parts, or a short one, and two tokens behind it."""
        for start in range(0, len(ids) - 2, 64):
            self.prefill(ids[start : min(start + 64, len(ids) - 2)], 1)
        for token in ids[-2:]:
            self.decode(token)
        return self

    def _launch(self, family: str, rows: int, ids: Sequence[int], tile: int) -> None:
        b = self.memory.buffers(family, rows, 0)
        used = -(-len(ids) // tile)
        first = rows - used if family == "decode" else 0
        for name, value in (("token_ids", 0), ("slots", -1), ("starts", 0), ("counts", 0)):
            b[name].fill(value)
        b["emit"].fill(0)
        for name in {"sources", "saves"} & {*b}:
            b[name].fill(-1)
        b["token_ids"][first * tile : first * tile + len(ids)] = ids
        for i in range(used):
            b["slots"][first + i] = self.slot
            b["starts"][first + i] = self.length + i * tile
            if family == "prefill":
                b["sources"][first + i] = self.slot
            b["counts"][first + i] = min(tile, len(ids) - i * tile)
        b["emit"][first + used - 1] = 1
        self.engine.executors[family, rows].run(b)
        self.tokens.append(int(b["next_tokens"][first + used - 1]))
        shown = b["logits_all"] if "logits_all" in b else b["logits"]
        start = first * tile if "logits_all" in b else first + used - 1
        count = len(ids) if "logits_all" in b else 1
        self.logits += [row.copy() for row in shown[start : start + count]]
        self.length += len(ids)

    def state(self, layer: int, name: str) -> Floats:
        """The sequence's row of a slot state."""
        return self.memory.states[f"layers.{layer}.{name}"][self.slot]

    def pages_of(self, layer: int, name: str) -> Floats:
        """[tokens, kv_heads, D] of a page state."""
        pages = self.memory.states[f"layers.{layer}.{name}"][self.pages]
        tokens = np.moveaxis(pages, 2, 1).reshape(-1, pages.shape[1], pages.shape[3])
        return tokens[: self.length]
