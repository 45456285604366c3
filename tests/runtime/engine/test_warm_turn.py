"""What the next turn of a long conversation costs the host, compared with a short prompt.

A first token waits for all of it, so nothing may be done token by token, and by page only what a
page needs.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import FrameType

import pytest

from spark_engine.interface import PREFILL, Limits
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.request import Request, SamplingParams
from tests.runtime.engine.drive import said
from tests.runtime.fake_executor import VOCAB, build_fake

CONTEXT, NEW, PAGE = 3584, 200, 16
LIMITS = Limits(
    4, 4096, 700, VOCAB, page_size=PAGE, bias_slots=8, top_logprobs=3, snapshots=40
)  # fmt: skip


@pytest.fixture
def engine() -> Engine:
    costs = {(PREFILL, rows): 100.0 + 10 * rows for rows in (1, 4, 16)}
    loaded = build_fake(LIMITS, (1, 4), (1, 4, 16))
    return Engine(replace(loaded, costs=costs), EngineOptions(depth=1))


def ids(count: int, seed: int) -> tuple[int, ...]:
    return tuple((i * seed + i // 7) % VOCAB for i in range(count))


def run(engine: Engine, prompt: tuple[int, ...], answer: int = 1) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
    return said(engine, Request(prompt, params))[0]


def calls(work: Callable[[], object]) -> int:
    """Calls of Python and of the library that `work` makes outside the fake device."""
    count = 0

    def on_call(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        inside = "tests" in frame.f_code.co_filename
        count += event in ("call", "c_call") and not inside

    sys.setprofile(on_call)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_warm_turn_costs_few_calls_a_page(engine: Engine) -> None:
    run(engine, ids(NEW, 3))
    history = ids(CONTEXT, 11)
    heard = run(engine, history, 8)
    few = calls(lambda: run(engine, ids(NEW, 5)))
    many = calls(lambda: run(engine, (*history, *heard, *ids(NEW, 5))))
    assert engine.stats()["prefix_hits"] == CONTEXT + 7, "all but the last token of the answer"
    assert many - few < 8 * CONTEXT / PAGE


@pytest.mark.parametrize("known", [False, True])
def test_it_is_one_launch_of_the_bucket_of_a_short_prompt(engine: Engine, known: bool) -> None:
    """Its first token, which the last turn sampled and did not compute, makes no launch more."""
    history = ids(CONTEXT, 11)
    prompt = (*history, *run(engine, history, 8), *ids(NEW, 5)) if known else ids(NEW, 5)
    before = Counter(engine.stats()["buckets"])  # type: ignore[arg-type]
    run(engine, prompt)
    assert Counter(engine.stats()["buckets"]) - before == {"prefill_4": 1}  # type: ignore[arg-type]
