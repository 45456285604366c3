"""One sequence through rounds of drafts, launch by launch, between rows that are inert.

Plays the host of docs/graph.md: prefills in chunks, then rounds that take positions, last token
and drafts from the states. Knows the step inputs, and what runs a launch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spark_engine import interface
from spark_engine.interface import Limits, tile_of, verify_family

Array = NDArray[Any]
KNOWN = -1  # of a step: the state knows
ROWS, ROW = 3, 1  # of a round, and which of them is the sequence's


class Runs(Protocol):
    """What runs launches, debug outputs included: op references, or an engine's executors."""

    limits: Limits
    tables: dict[str, Array]
    states: dict[str, Array]

    def run(self, family: str, steps: Mapping[str, Array]) -> Mapping[str, Array]: ...


@dataclass(frozen=True)
class Round:
    """What a round made of the sequence: `fed` tokens, of which `accepted` hold, the logits behind
    each of those [accepted, V], and what it drafted with its logits [k, V]."""

    fed: list[int]
    accepted: int
    logits: Array
    drafts: list[int]
    draft_logits: Array


class DraftRun:
    """`tokens` are all known ones, the last of them sampled and not read yet."""

    def __init__(self, engine: Runs, slot: int = 1) -> None:
        self.engine, self.slot = engine, slot
        self.pages = list(range(engine.limits.pages))[::-1][: engine.limits.pages_per_seq]
        engine.tables["page_table"][slot, : len(self.pages)] = self.pages
        self.tokens: list[int] = []
        self.prompt = 0  # of them, how many
        self.held = 0  # drafts in the state
        self.placed = False  # whether the state knows the position

    def prefill(self, prompt: Sequence[int], ends: Sequence[int] = ()) -> None:
        """The prompt in launches that end at these positions and at its own end."""
        self.engine.tables["prompt_lens"][self.slot] = len(prompt)
        sampled = 0
        for begin, end in zip([0, *ends], [*ends, len(prompt)], strict=True):
            sampled = self._prefill(prompt, begin, end)
        self.tokens, self.held, self.placed = [*prompt, sampled], 0, False
        self.prompt = len(prompt)

    def _prefill(self, prompt: Sequence[int], begin: int, end: int) -> int:
        tiles = -(-(end - begin) // interface.PREFILL_TILE)
        steps = self._inert(interface.PREFILL, tiles + 1)
        for i in range(tiles):
            start = begin + 64 * i
            stop = min(start + 64, end)
            steps["token_ids"][64 * i : 64 * i + stop - start] = prompt[start:stop]
            steps["slots"][i], steps["starts"][i] = self.slot, start
            steps["sources"][i] = self.slot
            steps["counts"][i] = stop - start
            steps["next_ids"][i] = prompt[stop] if stop < len(prompt) else KNOWN
        steps["emit"][tiles - 1] = end == len(prompt)
        return int(self.engine.run(interface.PREFILL, steps)["next_tokens"][tiles - 1])

    def round(self, drafts: int, given: Sequence[int] | None = None) -> Round:
        """One round of `verify_k{drafts}`, or of decode for none.

        `given`: drafts of the host in place of those that the state holds.
        """
        family = verify_family(drafts) if drafts else interface.DECODE
        tile, steps = tile_of(family), self._inert(family, ROWS)
        here = self.engine.states["drafts"][self.slot][: min(self.held, drafts)]
        verified = [int(t) for t in here] if given is None else [*given]
        count, first = 1 + len(verified), ROW * tile
        steps["token_ids"][first : first + count] = KNOWN
        if given is not None:
            steps["token_ids"][first + 1 : first + count] = given
        steps["slots"][ROW], steps["counts"][ROW] = self.slot, count
        steps["starts"][ROW] = KNOWN if self.placed else len(self.tokens) - 1
        made = self.engine.run(family, steps)
        fed = [self.tokens[-1], *verified]
        accepted = int(made["accepted"][ROW]) if drafts else 1
        self.tokens += [*fed[1:accepted], int(made["next_tokens"][first + accepted - 1])]
        self.held, self.placed = drafts, True
        assert made["ok"][first : first + count].all()
        if "draft.logits" in made:  # of a block's tokens, of which the first drafts nothing
            found = [*made["draft.logits"][first + 1 : first + tile]]
        else:
            found = [made[f"draft.{i}.logits"][ROW] for i in range(drafts)]
        drafted = [int(t) for t in self.engine.states["drafts"][self.slot][:drafts]]
        return Round(
            fed, accepted, made["logits"][first : first + accepted], drafted, np.array(found)
        )

    def pages_of(self, name: str) -> Array:
        """[tokens, kv_heads, D] of a page state, as far as the sequence has pages."""
        pages = self.engine.states[name][self.pages]
        return np.moveaxis(pages, 2, 1).reshape(-1, pages.shape[1], pages.shape[3])

    def _inert(self, family: str, rows: int) -> dict[str, Array]:
        """Steps of a launch without a live row; tokens are wild."""
        dims = {"rows": rows, "tokens": rows * tile_of(family)}
        specs = interface.steps(family, self.engine.limits.drafts)
        steps = {s.name: np.zeros(s.bind(dims).dims, np.int32) for s in specs}
        for name in {"slots", "sources", "saves"} & {*steps}:
            steps[name].fill(-1)
        return steps
