"""Random automata as grammars, and what binds the requests of generated traces.

A grammar's text is "states,seed": each state allows some ids, or all of them, and leads on by the
token; the last state of an automaton with a seed divisible by 3 is the end.
"""

import random
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
from hypothesis import strategies as st

from spark_engine.errors import InternalError
from spark_engine.runtime.engine.constraint import ConstraintSpec, Words
from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.engine.token_constraint_state import MaskResult
from tests.runtime.fake_executor import VOCAB

MARK, CLOSE = 13, (4, 13, 5)  # the end of a thought, and what closes one that is too long
# Barred: an odd id behind an even one below 40, and one behind two others.
_ROWS = (*((a, b) for a in range(0, 40, 2) for b in range(1, VOCAB, 2)), (1, 2, 3), (7,))


class Automaton:
    """One sequence's walk. `allowed` are the ids of each state, None for all."""

    def __init__(self, text: str, vocab: int = VOCAB) -> None:
        self.vocab = vocab
        states, seed = map(int, text.split(","))
        rng = random.Random(seed)
        shares = [rng.choice((0.0, 0.03, 0.3, 1.0)) for _ in range(states)]
        self.allowed = [None if s == 1.0 else self._some(rng, s) for s in shares]
        self.steps = [rng.randrange(1, states) if states > 1 else 0 for _ in range(8)]
        self.end = states - 1 if seed % 3 == 0 else -1
        self.at = 0

    def _some(self, rng: random.Random, share: float) -> frozenset[int]:
        some = {i for i in range(self.vocab) if rng.random() < share}
        return frozenset(some | {rng.randrange(self.vocab)})

    def fill(self, row: Words) -> bool:
        ids = self.allowed[self.at]
        if ids is None:
            return False
        row[:] = 0
        if self.vocab % 32:  # bits of ids that are not there
            row[-1] = 0xFFFFFFFF << self.vocab % 32 & 0xFFFFFFFF
        for i in ids:
            row[i // 32] |= np.uint32(1 << i % 32)
        return True

    def advance(self, token: int) -> None:
        ids = self.allowed[self.at]
        if self.done or (ids is not None and token not in ids):
            raise InternalError(f"state {self.at} does not allow {token}")
        self.at = (self.at + self.steps[token % 8]) % len(self.allowed)

    @property
    def done(self) -> bool:
        return self.at == self.end


def follows(spec: ConstraintSpec, tokens: list[int], vocab: int = VOCAB) -> None:
    """Asserts that the tokens obey their constraint, by another method than the engine's."""
    forced = spec.forced[: len(tokens)]
    assert tuple(tokens[: len(forced)]) == forced
    rest = tokens[len(forced) :]
    if spec.end_of_thought >= 0:
        thought = rest.index(MARK) + 1 if MARK in rest else len(rest)
        if spec.budget is not None and thought > spec.budget:
            closing = rest[spec.budget : spec.budget + len(CLOSE)]
            assert tuple(closing) == CLOSE[: len(closing)]
            thought = min(len(rest), spec.budget + len(CLOSE))
        rest = rest[thought:]
    said = tokens[len(forced) :]
    for row in spec.barred:
        for end in range(len(row), len(said) + 1):
            closed = spec.budget is not None and spec.budget < end <= spec.budget + len(CLOSE)
            assert closed or tuple(said[end - len(row) : end]) != row
    if spec.grammar:
        walk = Automaton(spec.grammar, vocab)
        for token in rest:
            walk.advance(token)  # raises where it is not allowed


def specs() -> st.SearchStrategy[ConstraintSpec]:
    grammars = st.builds(
        lambda states, seed: f"{states},{seed}", st.integers(1, 6), st.integers(0, 99)
    )
    thoughts = st.sampled_from((None, None, 0, 1, 5, 30))
    return st.builds(
        lambda grammar, thinks, budget, forced, barred: ConstraintSpec(
            grammar=grammar,
            close=CLOSE if thinks else (),
            end_of_thought=MARK if thinks else -1,
            budget=budget if thinks else None,
            forced=forced,
            barred=() if grammar else barred,
        ),
        st.one_of(st.just(""), grammars, grammars),
        st.booleans(),
        thoughts,
        st.sampled_from(((), (), (), (3,), (9, 7, 3, 60, 0, 3))),
        st.sampled_from(((), tuple((i,) for i in range(20, 50)), _ROWS)),
    )


def at_once(engine: Engine) -> Engine:
    """The engine; its grammars now work in the engine's thread."""

    def submit(job: Callable[[], MaskResult]) -> Future[MaskResult]:
        made: Future[MaskResult] = Future()
        made.set_running_or_notify_cancel()
        try:
            made.set_result(job())
        except Exception as error:
            made.set_exception(error)
        return made

    engine._masks._make = engine._masks._fill = submit
    return engine
