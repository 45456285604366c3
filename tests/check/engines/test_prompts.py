"""The sessions follow the contract's rules and have lengths on both sides of every edge."""

import numpy as np
import pytest

from spark_engine.check.engines.prompts import (
    DECODED,
    LENGTHS,
    CheckLaunch,
    CheckSession,
    CheckText,
    next_launches,
    sessions,
)
from spark_engine.interface import Limits, tile_of

LIMITS = Limits(max_seqs=8, max_context=192, pages=24, vocab=97)
BUCKETS = [("decode", 1), ("decode", 4), ("decode", 8), ("prefill", 1), ("prefill", 4)]


def _replay(session: CheckSession) -> dict[int, list[int]]:
    """The tokens that every slot was given, by position; fails on a gap or a repetition."""
    given: dict[int, list[int]] = {}
    for launch in session.launches:
        _check_rules(launch)
        tile = tile_of(launch.family)
        for row in range(launch.rows):
            slot, start, count = (int(a[row]) for a in (launch.slots, launch.starts, launch.counts))
            if slot >= 0:
                ids = given.setdefault(slot, [])
                assert len(ids) == start
                ids += launch.token_ids[row * tile :][:count].tolist()
    return given


def _check_rules(launch: CheckLaunch) -> None:
    tile = tile_of(launch.family)
    assert launch.token_ids.shape == (launch.rows * tile,)
    for row in range(launch.rows):
        if launch.slots[row] < 0:
            assert launch.counts[row] == launch.emit[row] == 0
            continue
        assert 0 < launch.counts[row] <= tile
        later = np.flatnonzero(launch.slots[row + 1 :] == launch.slots[row])
        if later.size:  # adjacent, and full because it is not the last
            assert later[0] == 0 and launch.counts[row] == tile


@pytest.mark.parametrize("session", sessions(LIMITS, BUCKETS), ids=lambda s: s.label)
def test_every_token_is_given_once_and_in_order(session: CheckSession) -> None:
    assert _replay(session) == {t.slot: list(t.ids) for t in session.texts}


@pytest.mark.parametrize("session", sessions(LIMITS, BUCKETS), ids=lambda s: s.label)
def test_pages_are_owned_by_one_and_suffice(session: CheckSession) -> None:
    pages = [page for text in session.texts for page in text.pages]
    assert len(pages) == len(set(pages)) and max(pages) < LIMITS.pages
    table = session.tables["page_table"]
    for text in session.texts:
        held = table[text.slot][table[text.slot] >= 0]
        np.testing.assert_array_equal(held, text.pages)
        assert len(held) * LIMITS.page_size >= len(text.ids)


def test_every_bucket_and_every_edge_is_visited() -> None:
    found = sessions(LIMITS, BUCKETS)
    assert {(x.family, x.rows) for s in found for x in s.launches} == set(BUCKETS)
    assert {t.prompt for s in found for t in s.texts} >= set(LENGTHS)
    assert any((x.slots < 0).any() for s in found for x in s.launches), "no inert row"
    assert any(len(set(x.starts[x.slots >= 0] % 64)) > 1 for s in found for x in s.launches)


def test_a_split_prefill_continues_at_an_odd_position() -> None:
    starts = [s for x in sessions(LIMITS, BUCKETS)[-1].launches for s in x.starts.tolist()]
    assert 37 in starts


def test_recorded_prompts_are_run_and_cut_to_the_context() -> None:
    long = list(range(90)) * 3
    found = sessions(LIMITS, BUCKETS, recorded=[[5, 6, 7], long])
    prompts = [list(t.ids[: t.prompt]) for s in found for t in s.texts]
    assert [5, 6, 7] in prompts and long[: LIMITS.max_context - DECODED] in prompts


def test_small_engines_get_smaller_sessions() -> None:
    tiny = Limits(max_seqs=2, max_context=70, pages=2, vocab=11)
    for session in sessions(tiny, [("decode", 2), ("prefill", 1)]):
        assert _replay(session)
        assert max(len(t.ids) for t in session.texts) <= 70


def test_a_launch_emits_from_the_prompts_last_token_on() -> None:
    for session in sessions(LIMITS, BUCKETS):
        prompts = {text.slot: text.prompt for text in session.texts}
        for launch in session.launches:
            rows = zip(launch.slots, launch.starts, launch.counts, launch.emit, strict=True)
            for slot, start, count, emit in rows:
                assert emit == (slot >= 0 and start + count >= prompts[int(slot)])


def test_texts_continue_until_their_space_is_used() -> None:
    text = CheckText(slot=3, pages=(0,), ids=(1, 2, 3, 0, 0), prompt=3)  # space for two tokens
    session = CheckSession("s", (text,), {}, ())
    steps = [list(next_launches(session, {3: said}, 2)) for said in ([7], [7, 8], [7, 8, 9])]
    assert [len(launches) for launches in steps] == [1, 1, 0]
    (launch,) = steps[1]
    assert launch.token_ids.tolist() == [8, 0] and launch.slots.tolist() == [3, -1]
    assert launch.starts[0] == 4 and launch.emit.tolist() == [1, 0]


def test_seeds_decide() -> None:
    one, same, other = (sessions(LIMITS, BUCKETS, seed=s)[0].texts for s in (1, 1, 2))
    assert one == same != other
