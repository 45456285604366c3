"""Drafts on onnxruntime from the text, with a draft head and without, and from a block drafter: no
token changes, and a restored prefix is context to a drafter."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.engine.request import Event, Request, SamplingParams
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

DRAFTER = replace(BUILD, verify=((6, 2), (6, 4)), draft_suffix=0)


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


@pytest.fixture(scope="module", params=[0, 3], ids=["alone", "with the text"])
def block_drafting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Loaded:
    options = replace(DRAFTER, draft_suffix=request.param)
    return load_random(tmp_path_factory.mktemp("drafter"), "f32", False, options, drafter=True)


def test_a_drafter_changes_no_token(block_drafting: Loaded) -> None:
    """Greedy and sampled, preempted, cancelled, behind a restored prefix, in rounds of any k."""
    rng = random.Random(5)
    stem = tuple(rng.randrange(20, 300) for _ in range(130))
    requests = [repeating(rng, stem) for _ in range(10)]
    limits = replace(block_drafting.limits, pages=8)
    engine = Engine(replace(block_drafting, limits=limits), EngineOptions(depth=1))
    engine.scheduler.depth.choose = lambda seqs, brisk=False: rng.choice((0, 2, 4, 4))  # type: ignore[method-assign]
    solo = run_solo(block_drafting, requests, EngineOptions(drafts=0))
    compare(play(engine, requests, rng), solo, exact=False)
    stats = engine.stats()
    assert sum(stats["drafts_by_position"]) > 100  # type: ignore[call-overload]
    assert stats["preempted_swap"] and stats["prefix_hits"]


def _answer(engine: Engine, prompt: tuple[int, ...]) -> list[Event]:
    """The events of a greedy answer of 24 tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, draft_counts=True)
    engine.submit(Request(prompt, params))
    events: list[Event] = []
    while not engine.idle:
        events += engine.step()
    return events


def _drafts_seen(engine: Engine) -> list[list[int]]:
    """A list that gets what slot 0 drafts, where it changes, while `engine` runs."""
    seen: list[list[int]] = []
    inner: Callable[[], list[Event]] = engine.step

    def step() -> list[Event]:
        events = inner()
        made = engine.memory.states["drafts"][0].tolist()
        if seen[-1:] != [made]:
            seen.append(made)
        return events

    engine.step = step  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("kept", ["memory", "disk", "lost"])
def test_a_restored_prefix_drafts_what_a_computed_one_does(
    block_drafting: Loaded, tmp_path: Path, kept: str
) -> None:
    """The drafter's keys and values of the prefix come back with the target's."""
    rng = random.Random(3)
    stem = tuple(rng.randrange(20, 300) for _ in range(200))
    prompt = (*stem, 7, 9, 11)
    options = EngineOptions(fixed_drafts=True)
    if kept == "disk":
        options = replace(options, cache_dir=str(tmp_path / "cache"))
    cold = Engine(block_drafting, replace(options, cache_bytes=0, cache_dir=None))
    cold_drafts = _drafts_seen(cold)
    expected = _answer(cold, prompt)
    warm = Engine(block_drafting, options)
    _answer(warm, stem)
    _answer(warm, stem)
    if kept == "disk":
        warm.settle()
        assert warm._disk is not None
        warm._disk.close()
        for state in warm.memory.states.values():
            state[...] = np.zeros((), state.dtype)
        warm = Engine(block_drafting, options)
    if kept == "lost":
        for name, state in warm.memory.states.items():
            if name.startswith("dflash."):
                state[...] = 0
    warm_drafts = _drafts_seen(warm)
    events = _answer(warm, prompt)
    assert events[-1].cached >= 128
    assert [e.token for e in events] == [e.token for e in expected]
    same = warm_drafts[-12:] == cold_drafts[-12:]
    assert same == (kept != "lost")
    assert events[-1].by_source is not None and [*events[-1].by_source] == [
        *(["text"] if block_drafting.limits.suffix else []),
        "dflash",
    ]
