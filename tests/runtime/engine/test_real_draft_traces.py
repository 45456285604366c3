"""Generated traces with drafts on onnxruntime: from the text, a head with a shortlist, a block
drafter, and several of these, in rounds of any k. Every request gets its undrafted tokens."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.engine.request import Request
from tests.runtime.generated import tried
from tests.runtime.random_engines import (
    OPTIONS,
    compare,
    load_random,
    play,
    random_request,
    run_solo,
)

LISTED = 256  # of 512 ids
INSIDE, OUTSIDE = range(20, 26), range(300, 306)
BUILD = replace(OPTIONS, decode=(4,), prefill=(64,), max_seqs=4, verify=((4, 1), (4, 4)), drafts=4)
BLOCK, BOTH = "block", "both"  # a block drafter in place of the head, or next to it
KINDS = {  # a head, BLOCK, BOTH or none; fewest ids of a match; ids that may be drafted
    "text": (False, 3, "auto"),
    "list": (True, 0, LISTED),
    "text and list": (True, 2, LISTED),
    "block": (BLOCK, 0, "auto"),
    "block, text and list": (BLOCK, 2, LISTED),
    "head and block": (BOTH, 0, "auto"),
    "head, block, text and list": (BOTH, 2, LISTED),
}


# An engine; of each trace the drafts that were kept, or verified where no text drafts.
Drafting = tuple[Loaded, list[int]]


@pytest.fixture(scope="module", params=KINDS)
def drafting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Drafting]:
    head, suffix, vocab = KINDS[request.param]
    options, kept = replace(BUILD, draft_suffix=suffix, draft_vocab=vocab), list[int]()
    folder, made = (
        tmp_path_factory.mktemp("drafts"),
        {"head": head in (True, BOTH), "drafter": head in (BLOCK, BOTH)},
    )
    yield load_random(folder, "f32", False, options, **made), kept
    assert sum(kept) > 0, "a head of drawn weights is hardly ever right, but drafts"


def repeating(rng: random.Random, stem: tuple[int, ...]) -> Request:
    """It answers with few ids, in the list or not, so that its text repeats, mostly behind a stem
    that others share."""
    made = random_request(rng, 40, 24)
    ids = rng.sample([*INSIDE, *OUTSIDE], rng.choice((1, 2, 3)))
    drafts = rng.choice((None, None, 1, 4))
    params = replace(made.params, logit_bias=dict.fromkeys(ids, 60.0), drafts=drafts)
    params = replace(params, repetition=rng.choice((1.0, 1.2)), frequency=0.0)
    prompt = (*stem[: rng.choice((0, 70, 130))], *made.prompt)
    return replace(made, prompt=prompt, params=params, priority=rng.choice((0, 0, 1)))


@tried(1 / 25, shrink=False)
@given(seed=st.integers(0, 2**32), depth=st.integers(0, 1), few=st.booleans(), chosen=st.booleans())
def test_traces_with_drafts_equal_undrafted_solo_runs(
    drafting: Drafting, seed: int, depth: int, few: bool, chosen: bool
) -> None:
    """Preempted, cancelled, behind restored prefixes; the engine's own k, or any."""
    (loaded, kept), rng = drafting, random.Random(seed)
    stem = tuple(rng.randrange(20, 300) for _ in range(130))
    requests = [repeating(rng, stem) for _ in range(5)]
    limits = replace(loaded.limits, pages=7 if few else 20)
    engine = Engine(replace(loaded, limits=limits), EngineOptions(depth=depth))
    if not chosen:
        inner = engine.scheduler.depth.choose

        def choose(seqs: object, bounded: bool = False) -> int:
            inner(seqs, bounded)  # type: ignore[arg-type]
            return rng.choice((0, 1, 4, 4))

        engine.scheduler.depth.choose = choose  # type: ignore[method-assign]
    solo = run_solo(loaded, requests, EngineOptions(drafts=0))
    compare(play(engine, requests, rng), solo, exact=False)
    counts = engine._loop.counts
    right = counts.accepted_by_position if loaded.limits.suffix else counts.drafts_by_position
    kept.append(sum(right))
