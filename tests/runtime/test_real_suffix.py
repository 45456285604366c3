"""Drafts from the text on onnxruntime, with a draft head and without: no token changes."""

import random
from dataclasses import replace

import pytest

from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.engine.request import Request
from tests.runtime.random_engines import (
    OPTIONS,
    compare,
    load_random,
    play,
    random_request,
    run_solo,
)

BUILD = replace(
    OPTIONS, decode=(6,), prefill=(64,), max_seqs=6, verify=((6, 4),), drafts=4, draft_suffix=3
)


@pytest.fixture(scope="module", params=[False, True], ids=["headless", "head"])
def drafting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load_random(tmp_path_factory.mktemp("suffix"), "f32", False, BUILD, head=request.param)


def repeating(rng: random.Random, stem: tuple[int, ...]) -> Request:
    """It answers with few ids, so that its text repeats, mostly behind a stem that others share."""
    made = random_request(rng, 60, 60)
    bias = dict.fromkeys(rng.sample(range(20, 26), rng.choice((1, 2, 3))), 60.0)
    params = replace(made.params, logit_bias=bias, repetition=1.0, frequency=0.0, max_tokens=40)
    prompt = (*stem[: rng.choice((0, 70, 130))], *made.prompt)
    return replace(made, prompt=prompt, params=params, priority=rng.choice((0, 0, 1)))


def test_drafts_from_the_text_change_no_token(drafting: Loaded) -> None:
    """Preempted, cancelled, behind a restored prefix, in rounds of any k."""
    rng = random.Random(5)
    stem = tuple(rng.randrange(20, 300) for _ in range(130))
    requests = [repeating(rng, stem) for _ in range(8)]
    engine = Engine(
        replace(drafting, limits=replace(drafting.limits, pages=8)), EngineOptions(depth=1)
    )
    engine.scheduler.depth.choose = lambda seqs, brisk=False: rng.choice((0, 4, 4, 4))  # type: ignore[method-assign]
    solo = run_solo(drafting, requests, EngineOptions(drafts=0))
    compare(play(engine, requests, rng), solo, exact=False)
    stats = engine.stats()
    kept = stats["accepted_by_position"]
    assert isinstance(kept, list) and kept[0] > 9 and kept[3] > 5
    assert stats["preempted_swap"] and stats["prefix_hits"]
