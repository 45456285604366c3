"""The prefix cache on onnxruntime: what is taken over from other requests changes no token."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import Loaded
from spark_engine.runtime.engine.policy.pacing import LATENCY, THROUGHPUT
from spark_engine.runtime.engine.request import Request, SamplingParams
from tests.runtime.engine.drive import drain
from tests.runtime.engine.invariants import check_idle
from tests.runtime.generated import tried
from tests.runtime.random_engines import (
    OPTIONS,
    VOCAB,
    compare,
    heard,
    load_random,
    play,
    poison,
    quantised,
    random_request,
    run_solo,
)

KINDS = (("f32", False), ("modelopt_mixed", True))
DRAFTS = 2


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind[0])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    verify = tuple((8, k + 1) for k in range(DRAFTS))
    options = replace(OPTIONS, decode=(1, 8), verify=verify, drafts=DRAFTS)
    folder = tmp_path_factory.mktemp("engine")
    return load_random(folder, *request.param, options, head=True)


def shared(rng: random.Random, count: int) -> list[Request]:
    """Prompts that part from two others anywhere, some of them early repetitions of another."""
    stems = [[rng.randrange(VOCAB) for _ in range(260)] for _ in range(2)]
    made = []
    for _ in range(count):
        request = random_request(rng, 60, 40)
        cut = rng.choice((0, 64, 130, 200, rng.randrange(260)))
        prompt = (*rng.choice(stems)[:cut], *request.prompt)
        marks = tuple(sorted(rng.randrange(cut + 1) for _ in range(rng.randrange(3))))
        made.append(replace(request, prompt=prompt, marks=marks, priority=rng.choice((0, 0, 1))))
    return made


@tried(1 / 20, shrink=False)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(0, 1),
    swap=st.booleans(),
    kept=st.sampled_from((None, None, 20, 3)),
    invariant=st.booleans(),
)
def test_traces_of_shared_beginnings_equal_cold_solo_runs(
    loaded: Loaded, seed: int, depth: int, swap: bool, kept: int | None, invariant: bool
) -> None:
    """Bit for bit where only prefill's own work is taken over; `kept`: a budget of few states."""
    exact, rng = quantised(loaded) or invariant, random.Random(seed)
    limits = replace(loaded.limits, pages=rng.choice((8, 16, 60)), max_seqs=6)
    budget = kept and kept * (loaded.limits.page_size * 512 + 40_000)
    options = EngineOptions(
        policy=THROUGHPUT if seed % 2 else LATENCY,
        depth=depth,
        swap_bytes=1 << 30 if swap or exact else 0,
        cache_bytes=budget,
    )
    engine = Engine(replace(loaded, limits=limits, invariant=exact), options)
    engine.scheduler.depth.choose = lambda seqs, brisk=False: rng.randint(0, DRAFTS)  # type: ignore[method-assign]
    requests = shared(rng, 8)
    compare(play(engine, requests, rng), run_solo(loaded, requests), exact)
    engine.clear_cache()
    pools = engine.scheduler.pages, engine.scheduler.prefix.rows
    assert [pool.free for pool in pools] == [pool.size for pool in pools]


def test_conversations_resume_from_what_was_generated(loaded: Loaded) -> None:
    """Three turns of four at once: each prompt is the one before, its answer, and a few more."""
    rng, engine = random.Random(17), Engine(loaded, EngineOptions(depth=1))
    engine.scheduler.depth.choose = lambda seqs, brisk=False: rng.randint(0, DRAFTS)  # type: ignore[method-assign]
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(20 + 30 * i)) for i in range(4)]
    for turn in range(3):
        greedy = SamplingParams(temperature=0, max_tokens=15, ignore_eos=True, logprobs=1)
        requests = [Request(prompt, greedy) for prompt in prompts]
        before = engine.stats()
        events = drain(engine, *requests, after=lambda: poison(engine))
        check_idle(engine)
        done = [heard(one) for one in events.values()]
        alone = run_solo(loaded, requests)
        if quantised(loaded):  # rounded otherwise where it is not computed as in a cold run
            assert turn or done == alone
        else:
            assert [[e[0] for e in one] for one in done] == [[e[0] for e in one] for one in alone]
        if turn:
            new = sum(len(one[-1:]) + 9 for one in done)  # the last token was never fed
            assert engine.stats()["prefilled"] - before["prefilled"] == new  # type: ignore[operator]
            assert [one[-1].cached for one in events.values()] == [len(p) - 10 for p in prompts]
        prompts = [
            (*prompt, *(e[0] for e in one), *(rng.randrange(VOCAB) for _ in range(9)))
            for prompt, one in zip(prompts, done, strict=True)
        ]


def test_a_restart_resumes_from_the_folder(loaded: Loaded, tmp_path: Path) -> None:
    """Prompts of two engines, each with the files of those before: bit for bit where only
    prefill's own work is taken over. Bytes of every dtype of a state pass through the files."""
    exact, rng = quantised(loaded), random.Random(0)
    requests = shared(rng, 6)
    for life in range(2):
        options = EngineOptions(cache_dir=str(tmp_path), depth=life)
        engine = Engine(replace(loaded, invariant=exact), options)
        engine.scheduler.depth.choose = lambda seqs, brisk=False: rng.randint(0, DRAFTS)  # type: ignore[method-assign]
        compare(play(engine, requests, rng), run_solo(loaded, requests), exact)
        assert engine._disk is not None and engine._disk.folder.refused == 0
        engine._disk.close()
        assert bool(engine._disk.reader.read) == bool(life)
        longer = [(*r.prompt, *(rng.randrange(VOCAB) for _ in range(9))) for r in requests]
        requests = [replace(r, prompt=p) for r, p in zip(requests, longer, strict=True)]
