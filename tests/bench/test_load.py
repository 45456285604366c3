"""Arrivals by hand; conversations that are drawn as asked, and again by their seed."""

import random
from pathlib import Path

import pytest

from spark_engine.bench.load import Arrivals, Turn
from spark_engine.bench.prompts import ConversationShape, Ids, draw, span
from spark_engine.errors import OptionError
from spark_engine.runtime.text.tokenizer import Tokenizer
from tests.runtime import small_tokenizer

TURNS = [(Turn([1], 1),)] * 7


def test_arrivals_by_hand() -> None:
    def times(arrivals: Arrivals, seed: int = 0) -> list[float | None]:
        load = arrivals.spread(TURNS, {"a": 1}, random.Random(seed))
        assert all(script.more == {"a": 1} for script in load.scripts)
        return [script.at_s for script in load.scripts]

    assert times(Arrivals(closed=3)) == [None] * 7
    assert Arrivals(closed=3).spread(TURNS, {}, random.Random()).width == 3
    own = [{"n": i} for i in range(len(TURNS))]
    scripts = Arrivals(closed=3).spread(TURNS, own, random.Random()).scripts
    assert [script.more for script in scripts] == own, "each conversation has its own tools"
    bursts = Arrivals(burst=3, every_s=2.0, stagger_s=0.25)
    assert times(bursts) == [0, 0.25, 0.5, 2, 2.25, 2.5, 4]
    assert bursts.words == "bursts of 3, 0.25 s apart, every 2 s"
    random_times = times(Arrivals(rate=4.0))
    assert random_times == times(Arrivals(rate=4.0)) != times(Arrivals(rate=4.0), 1)
    many = Arrivals(rate=4.0).spread([TURNS[0]] * 4000, {}, random.Random(0)).scripts
    gaps = [b.at_s - a.at_s for a, b in zip(many, many[1:], strict=False)]  # type: ignore[operator]
    assert sum(gaps) / len(gaps) == pytest.approx(0.25, rel=0.05)
    assert sum(g < 0.25 for g in gaps) / len(gaps) == pytest.approx(1 - 2.718281828**-1, abs=0.03)


@pytest.mark.parametrize("arrivals", [Arrivals(), Arrivals(closed=1, rate=2.0)])
def test_one_kind_of_arrivals(arrivals: Arrivals) -> None:
    with pytest.raises(OptionError, match="one of --closed, --rate and --bursts"):
        arrivals.check()


def test_conversations_are_as_asked() -> None:
    shape = ConversationShape((20, 30), (5, 6), (7, 9), turns=3, shared=10, pause_s=1.5)
    found = draw(shape, 50, Ids(1000), False, random.Random(3))
    assert found == draw(shape, 50, Ids(1000), False, random.Random(3))
    firsts = [turns[0].new for turns in found]
    assert {tuple(new[:10]) for new in firsts} == {tuple(firsts[0][:10])}
    assert len({tuple(new[10:20]) for new in firsts}) == 50
    assert {len(new) for new in firsts} == set(range(30, 41))
    assert {len(turn.new) for turns in found for turn in turns[1:]} == {5, 6}
    assert {turn.most for turns in found for turn in turns} == {7, 8, 9}
    assert {tuple(t.pause_s for t in turns) for turns in found} == {(0.0, 1.5, 1.5)}
    assert shape.longest == 10 + 30 + 2 * 6 + 3 * 9
    assert all(0 <= i < 1000 for new in firsts for i in new)


def test_prompts_of_a_tokenizer(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(small_tokenizer.write(tmp_path))
    ids = Ids(len(tokenizer), tokenizer)
    drawn = ids.draw(random.Random(0), 5000)
    assert tokenizer.special and not tokenizer.special & set(drawn)
    (turns,) = draw(ConversationShape((40, 40)), 1, ids, True, random.Random(1))
    assert isinstance(turns[0].new, str) and turns[0].new == ids.text(
        draw(ConversationShape((40, 40)), 1, ids, False, random.Random(1))[0][0].new  # type: ignore[arg-type]
    )
    with pytest.raises(OptionError, match="--tokenizer"):
        Ids(1000).text([1])
    with pytest.raises(OptionError, match="give a larger --vocab"):
        Ids(0, tokenizer)


@pytest.mark.parametrize(("text", "found"), [("5", (5, 5)), ("5-9", (5, 9)), ("7-7", (7, 7))])
def test_spans(text: str, found: tuple[int, int]) -> None:
    assert span(text, "--input") == found


@pytest.mark.parametrize("text", ["", "0", "9-5", "a", "5-", "-5", "1-2-3"])
def test_wrong_spans(text: str) -> None:
    with pytest.raises(OptionError, match="--input is"):
        span(text, "--input")
