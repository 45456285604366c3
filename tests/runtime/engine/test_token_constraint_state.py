"""What restricts a sequence's next token: phases, dependencies and masks, worked out by hand."""

import gc
import random
import weakref
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import pytest

from spark_engine.errors import InternalError, RequestError
from spark_engine.runtime.engine.constraint import ConstraintSpec, Words
from spark_engine.runtime.engine.token_constraint_state import (
    ConstraintState,
    MaskDependency,
    MaskResult,
    Phase,
    Submit,
)

VOCAB, MARK, STOP = 70, 40, 3
CLOSE = (41, MARK, 42)
NOTHING, KNOWN, TOKENS = MaskDependency


def ids_of(mask: Words | None) -> set[int] | None:
    if mask is None:
        return None
    assert mask.dtype == np.uint32 and mask.shape == (3,)
    return {i for i in range(96) if mask[i // 32] >> np.uint32(i % 32) & 1}


def make(drafts: int = 0, **settings: object) -> ConstraintState:
    return ConstraintState(ConstraintSpec(**settings), VOCAB, {STOP}, drafts)  # type: ignore[arg-type]


def walk(one: ConstraintState, *tokens: int) -> Phase:
    for token in tokens:
        one.advance(token)
    return one.phase


class Word:
    """Spells `ids`; nothing follows. Its masks have bits of ids that are not there."""

    def __init__(self, *ids: int) -> None:
        self.ids, self.at = ids, 0

    def fill(self, row: Words) -> bool:
        row[:] = (0, 0, 0xFFFFFFFF << VOCAB % 32 & 0xFFFFFFFF)
        row[self.ids[self.at] // 32] |= np.uint32(1 << self.ids[self.at] % 32)
        return True

    def advance(self, token: int) -> None:
        if token != self.ids[self.at]:
            raise InternalError(f"{token} is not {self.ids[self.at]}")
        self.at += 1

    @property
    def done(self) -> bool:
        return self.at == len(self.ids)


def later(jobs: list[Callable[[], MaskResult]]) -> Submit:
    """Keeps the jobs, and never does them."""

    def submit(job: Callable[[], MaskResult]) -> Future[MaskResult]:
        jobs.append(job)
        return Future()

    return submit


def test_forced_ids_are_known_before_anything_is_read() -> None:
    one = make(forced=(7, STOP, 69), drafts=5)
    assert [one.dependency(i) for i in range(4)] == [KNOWN] * 3 + [NOTHING]
    assert [ids_of(one.mask(i)) for i in range(4)] == [{7}, {STOP}, {69}, None]
    assert walk(one, 7, STOP) is Phase.FORCED and walk(one, 69) is Phase.ANSWER
    assert one.mask(3) is None and one.taken == 3
    assert one.drafts_from(2, 7) == 0 and one.drafts_from(3, 6) == 5


def test_another_token_than_the_forced_one_is_a_bug() -> None:
    with pytest.raises(InternalError, match="token 8 was sampled where 7 was forced"):
        make(forced=(7,)).advance(8)


def test_a_budget_binds_from_its_end_on() -> None:
    """Three tokens of thought, then the three that close it."""
    one = make(end_of_thought=MARK, close=CLOSE, budget=3)
    assert [one.dependency(i) for i in range(5)] == [NOTHING] * 3 + [TOKENS] * 2
    assert walk(one, 1, 2) is Phase.THOUGHT and one.mask(2) is None
    assert walk(one, 5) is Phase.CLOSE
    for i, token in enumerate(CLOSE):
        assert ids_of(one.mask(3 + i)) == {token}
        one.advance(token)
    assert one.phase is Phase.ANSWER and one.mask(6) is None and one.dependency(6) is NOTHING


def test_a_thought_that_ends_in_time_is_left_alone() -> None:
    one = make(end_of_thought=MARK, close=CLOSE, budget=3, drafts=5)
    assert one.drafts_from(1, 2) == 0 and one.drafts_from(0, 2) == 5
    assert walk(one, 1, 2, MARK) is Phase.ANSWER  # the mark is the third
    assert one.mask(3) is None and one.drafts_from(3, 497) == 5


def test_a_budget_of_nothing_closes_at_once_and_counts_behind_what_is_forced() -> None:
    one = make(end_of_thought=MARK, close=CLOSE, budget=0)
    assert one.phase is Phase.CLOSE and ids_of(one.mask(0)) == {41}
    two = make(end_of_thought=MARK, close=CLOSE, budget=1, forced=(MARK, 9))
    assert [two.dependency(i) for i in range(4)] == [KNOWN] * 2 + [NOTHING, TOKENS]
    assert walk(two, MARK, 9) is Phase.THOUGHT and walk(two, 1) is Phase.CLOSE


def test_a_grammar_starts_behind_the_thought_and_hears_only_of_the_answer() -> None:
    one, jobs = make(end_of_thought=MARK, grammar="g"), list[Callable[[], MaskResult]]()
    one.compile(later(jobs), lambda text: Word(11, 68))
    assert not one.ready and one.dependency(0) is TOKENS and not one.asks
    assert ids_of(one.mask(0)) == set(range(96)) - {STOP}, "no end within the thought"
    assert walk(one, 1, MARK) is Phase.ANSWER and one.asks and not one.has_pending
    first = jobs.pop()()
    assert ids_of(first.mask) == {11} and not first.done
    one.advance(11)
    assert one.has_pending
    one.ask(later(jobs))
    assert ids_of(jobs.pop()().mask) == {68} and not one.has_pending
    one.advance(68)
    one.ask(later(jobs))
    last = jobs.pop()()
    assert last.done and last.mask is None


def test_what_closes_a_thought_goes_past_the_grammar() -> None:
    one, jobs = make(end_of_thought=MARK, close=CLOSE, budget=0, grammar="g"), list[object]()
    one.compile(later(jobs), lambda text: Word(11))  # type: ignore[arg-type]
    assert walk(one, *CLOSE) is Phase.ANSWER and one.asks and not one.has_pending


def test_a_grammar_that_allows_only_ids_that_are_not_there_is_a_bug() -> None:
    one, jobs = make(grammar="g"), list[Callable[[], MaskResult]]()
    one.compile(later(jobs), lambda text: Word(VOCAB))
    with pytest.raises(InternalError, match="allows no token and is not done"):
        jobs.pop()()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"forced": (1, 70)}, "forced has the id 70; ids go from 0 to 69"),
        ({"close": (-1,)}, "close has the id -1"),
        ({"end_of_thought": 70}, "end_of_thought is 70; it must be an id from 0 to 69, or -1"),
        ({"budget": -1}, "budget is -1; it must be 0 or more"),
        ({"budget": 5}, "a budget of 5 tokens needs end_of_thought and the ids of close"),
        ({"budget": 5, "end_of_thought": 1}, "a budget of 5 tokens needs"),
        ({"calls": (VOCAB,)}, "calls has the id 70"),
        ({"barred": ((1,), ())}, "a row without ids"),
        ({"barred": ((1, VOCAB),)}, "barred has the id"),
    ],
)
def test_what_cannot_be_meant_is_named(settings: dict[str, object], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        ConstraintSpec(**settings).check(VOCAB)  # type: ignore[arg-type]
    ConstraintSpec(budget=5, end_of_thought=1, close=(1,), forced=(0, 69)).check(VOCAB)


def test_a_call_in_an_open_thought_ends_it() -> None:
    """So that no budget cuts the call in two."""
    one = make(end_of_thought=MARK, close=CLOSE, budget=4, calls=(50,))
    assert walk(one, 7, 50) is Phase.ANSWER
    assert walk(one, *range(10, 20)) is Phase.ANSWER and one.mask(12) is None
    assert one.dependency(12) is NOTHING
    late = make(end_of_thought=MARK, close=CLOSE, budget=2, calls=(50,))
    assert walk(late, 7, 8) is Phase.CLOSE


def test_no_call_comes_in_a_thought_that_a_grammar_waits_behind() -> None:
    one = make(end_of_thought=MARK, grammar="g", calls=(50,))
    assert ids_of(one.mask(0)) == set(range(96)) - {STOP, 50}


def test_a_thought_may_end_with_its_mark_where_that_ends_the_sequence() -> None:
    spec = ConstraintSpec(end_of_thought=MARK, grammar="g")
    assert ids_of(ConstraintState(spec, VOCAB, {STOP, MARK}).mask(0)) == set(range(96)) - {STOP}


def test_the_last_of_a_barred_row_cannot_follow_the_others() -> None:
    one = make(barred=((5,), (1, 2), (1, 1, 9)), forced=(1,), drafts=5)
    rest = set(range(VOCAB)) - {5}
    assert one.dependency(0) is KNOWN and ids_of(one.mask(0)) == {1}
    assert one.dependency(1) is one.dependency(7) is TOKENS and one.drafts_from(1, 1) == 0
    one.advance(1)
    assert _within(one.mask(1)) == rest, "forced ids are no part of a row"
    one.advance(1)
    assert _within(one.mask(2)) == rest - {2}
    one.advance(1)
    assert _within(one.mask(3)) == rest - {2, 9}
    one.advance(3)
    assert _within(one.mask(4)) == rest


def test_of_many_barred_rows_those_count_that_were_started() -> None:
    rng = random.Random(3)
    rows = tuple(tuple(rng.choices(range(4), k=rng.randint(1, 5))) for _ in range(60))
    one, said = make(barred=rows), []
    for number in range(200):
        ends = {row[-1] for row in rows if tuple(said[len(said) - len(row) + 1 :]) == row[:-1]}
        assert _within(one.mask(number)) == set(range(VOCAB)) - ends
        said.append(rng.randrange(4))
        one.advance(said[-1])


def test_single_barred_ids_are_known_before_anything_is_read() -> None:
    one = make(barred=((5,), (6,)), end_of_thought=MARK, close=CLOSE, budget=2, forced=(7,))
    assert [one.dependency(i) for i in range(4)] == [KNOWN] * 3 + [TOKENS]
    assert _within(one.mask(2)) == set(range(VOCAB)) - {5, 6}
    walk(one, 7, 1, 2)
    assert ids_of(one.mask(3)) == {CLOSE[0]}, "what is forced is not barred"


def test_a_grammar_has_its_ids_without_those_that_are_barred() -> None:
    one = make(grammar="g", barred=((68,), (11, 7)))
    grammar, both = np.zeros(3, np.uint32), np.zeros(3, np.uint32)
    grammar[68 // 32], both[0] = 1 << 68 % 32, 1 << 7 | 1 << 8
    with pytest.raises(RequestError, match="every token that its form allows here is banned"):
        one.without_barred(grammar)
    walk(one, 11)
    assert ids_of(one.without_barred(both)) == {8}
    assert ids_of(make(grammar="g").without_barred(both)) == {7, 8}
    assert _within(one.without_barred(None)) == set(range(VOCAB)) - {68, 7}


def _within(mask: Words | None) -> set[int]:
    found = ids_of(mask)
    assert found is not None
    return {i for i in found if i < VOCAB}


def test_a_guide_is_gone_with_the_last_that_holds_it() -> None:
    """Its masks and its grammar do not wait for the collection of cycles."""
    gc.disable()
    try:
        one = make(grammar="g")
        one.compile(at_once, lambda text: Word(11, 68))
        walk(one, 11)
        one.ask(at_once)
        assert one.job is not None and ids_of(one.job.result().mask) == {68}
        left = weakref.ref(one)
        del one
        assert left() is None
    finally:
        gc.enable()


def at_once(job: Callable[[], MaskResult]) -> Future[MaskResult]:
    done: Future[MaskResult] = Future()
    done.set_result(job())
    return done
