"""A restored prefix is context to a drafter, on onnxruntime; test_real_draft_traces.py tests the
tokens."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.engine.request import Event, Request, SamplingParams
from tests.runtime.engine.drive import drain
from tests.runtime.random_engines import OPTIONS, load_random

DRAFTER = replace(
    OPTIONS, decode=(6,), prefill=(64,), max_seqs=6, verify=((6, 2), (6, 4)), drafts=4
)


@pytest.fixture(scope="module", params=[0, 3], ids=["alone", "with the text"])
def block_drafting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Loaded:
    options = replace(DRAFTER, draft_suffix=request.param)
    return load_random(tmp_path_factory.mktemp("drafter"), "f32", False, options, drafter=True)


def _answer(engine: Engine, prompt: tuple[int, ...]) -> list[Event]:
    """The events of a greedy answer of 24 tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, draft_counts=True)
    (events,) = drain(engine, Request(prompt, params)).values()
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
