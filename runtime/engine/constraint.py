"""Constraints on a request's tokens (grammar, forced ids, reasoning budget), and their protocol.

The frontend makes a `ConstraintSpec`, plain values sent with the request; the engine's process
makes a `Constraint` of it (`token_constraint_state`). Knows no grammar's text and no tokenizer.
"""

from collections.abc import Callable
from typing import Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from spark_engine.errors import RequestError

Words: TypeAlias = NDArray[np.uint32]


class ConstraintSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What restricts one request's tokens, in the order of its answer.

    Attributes:
        grammar: of the answer, in llguidance's text form, checked by the frontend; "" for none.
        close: ids that close a thought, usually with its mark; the answer follows.
        end_of_thought: the id that ends a thought, after which the grammar starts; -1: there is no
            thought, the grammar starts with the first token that is not forced.
        budget: most tokens of a thought, its mark included; then `close` is forced. None: no limit.
        calls: ids that start a call. In a thought they end it, as models call without closing it;
            where a grammar follows the thought they are not allowed.
        forced: the first tokens, whatever is sampled. They count as the prompt does: no id among
            them ends the sequence, and `min_tokens` counts only tokens after them; `max_tokens`
            counts them.
        barred: rows of ids, the last of which is not sampled directly after the others.
    """

    grammar: str = ""
    close: tuple[int, ...] = ()
    end_of_thought: int = -1
    budget: int | None = None
    calls: tuple[int, ...] = ()
    forced: tuple[int, ...] = ()
    barred: tuple[tuple[int, ...], ...] = ()

    def check(self, vocab: int) -> None:
        """Raises RequestError when an id is not below `vocab`, or the thought's parts disagree."""
        if () in self.barred:
            raise RequestError("barred has a row without ids; each must have one")
        barred = tuple(i for row in self.barred for i in row)
        rows = (
            *(("close", self.close), ("calls", self.calls), ("forced", self.forced)),
            ("barred", barred),
        )
        for name, ids in rows:
            unknown = [i for i in ids if not 0 <= i < vocab]
            if unknown:
                raise RequestError(f"{name} has the id {unknown[0]}; ids go from 0 to {vocab - 1}")
        if not -1 <= self.end_of_thought < vocab:
            raise RequestError(
                f"end_of_thought is {self.end_of_thought}; it must be an id from 0 to {vocab - 1}, "
                "or -1 for none"
            )
        if self.budget is None:
            return
        if self.budget < 0:
            raise RequestError(f"budget is {self.budget}; it must be 0 or more tokens")
        if self.end_of_thought < 0 or not self.close:
            raise RequestError(
                f"a budget of {self.budget} tokens needs end_of_thought and the ids of close"
            )


class Constraint(Protocol):
    """The constraint of a sequence, in the engine's process; used by one thread at a time."""

    def fill(self, row: Words) -> bool:
        """Writes the allowed ids of the next token: bit i % 32 of word i // 32, at least one.

        `row` is u32 [ceil(vocab / 32)], every word of which is written. False: all ids are allowed,
        and the row is not written.
        """

    def advance(self, token: int) -> None:
        """Adds a sampled token. Raises InternalError for one that is not allowed."""

    @property
    def done(self) -> bool:
        """No token can follow: the sequence ends with STOP."""


Grammars: TypeAlias = Callable[[str], Constraint]  # a grammar's text -> a sequence's own
