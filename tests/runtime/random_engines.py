"""Engines of random checkpoints on real executors, and random requests run in them."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from spark_engine.builder.build import build
from spark_engine.builder.plan.options import Options
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.load import Loaded, load
from spark_engine.runtime.engine.request import Event, FinishReason, Request, SamplingParams
from spark_engine.tensors import Array
from tests.checkpoints import write_checkpoint
from tests.models.drafters import write_drafter
from tests.runtime.engine.drive import drain
from tests.runtime.engine.invariants import check_engine, check_idle
from tests.runtime.fake_executor import free_rows

VOCAB = 512
OpenProgress = list[tuple[Any, ...]]
OPTIONS = Options(
    decode=(1, 8, 32), prefill=(64, 256), max_context=384, max_seqs=32, kv_tokens=64 * 120
)


def load_random(
    folder: Path,
    format: str,
    moe: bool,
    options: Options = OPTIONS,
    head: bool = False,
    drafter: bool = False,
) -> Loaded:
    """Writes, builds and opens one random checkpoint; with a draft `head` if it is to have one, or
    with a block `drafter`."""
    wanted = {"mtp_num_hidden_layers": 1} if head else {}
    written = write_checkpoint(folder / "checkpoint", wanted, format=format, moe=moe)
    if drafter:
        made = write_drafter(folder / "drafter", written.config, sliding_window=100)
        options = replace(options, drafter=str(made))
    build(written.path, folder / "engine", options, lambda text: None)
    return load(folder / "engine", threads=1)


def random_request(rng: random.Random, longest: int, most: int) -> Request:
    """A prompt of 1..longest tokens and 1..most to generate, greedy or sampled."""
    prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, longest)))
    params = SamplingParams(
        temperature=rng.choice((0.0, 0.8, 1.2)),
        top_p=rng.choice((1.0, 0.9)),
        top_k=rng.choice((0, 40)),
        repetition=rng.choice((1.0, 1.2)),
        frequency=rng.choice((0.0, 0.5)),
        max_tokens=rng.randint(1, most),
        ignore_eos=rng.random() < 0.5,
        seed=rng.getrandbits(62),
        logprobs=3,
    )
    return Request(prompt, params)


def heard(events: list[Event]) -> OpenProgress:
    return [(e.token, e.logprob, e.top, e.finish) for e in events]


def run_solo(
    loaded: Loaded, requests: list[Request], options: EngineOptions | None = None
) -> list[OpenProgress]:
    """Each request alone and cold, one after another in one engine."""
    cold = replace(options or EngineOptions(), cache_bytes=0)
    engine, results = Engine(loaded, cold), []
    for request in requests:
        (events,) = drain(engine, request).values()
        results.append(heard(events))
    return results


def quantised(loaded: Loaded) -> bool:
    return bool(
        loaded.folder and any(q.format != "f32" for q in loaded.folder.manifest.quantisation)
    )


def poison(engine: Engine) -> None:
    """NaN (codes of NaN, wild integers) in every free state row."""
    free = free_rows(engine)
    for info in engine.loaded.states:
        state = engine.memory.states[info.spec.name]
        state[[*free[info.unit], len(state) - 1]] = wild(state)


def wild(state: Array) -> object:
    """A value of the state's type that nothing gets over."""
    if state.dtype == np.uint8:
        return 0x7F  # NaN in e4m3
    return -(1 << 30) if state.dtype == np.int32 else state.dtype.type(np.nan)


def compare(events: list[list[Event]], solo: list[OpenProgress], exact: bool) -> None:
    """Bit for bit if `exact`; else what recomputing may change is the log-probabilities' last."""
    for together, alone in zip(events, solo, strict=True):
        cut = together[-1].finish is FinishReason.CANCELLED
        mine = heard(together[:-1] if cut else together)
        theirs = alone[: len(mine)] if cut else alone
        if exact:
            assert mine == theirs
        else:
            assert [t[0] for t in mine] == [t[0] for t in theirs]
            assert [t[3] for t in mine] == [t[3] for t in theirs]
            logprobs = [[t[1] for t in reported if t[0] is not None] for reported in (mine, theirs)]
            np.testing.assert_allclose(*logprobs, atol=1e-3)


def play(
    engine: Engine,
    requests: list[Request],
    rng: random.Random,
    after: Callable[[], None] = lambda: None,
) -> list[list[Event]]:
    """Each request's events; `after` is called after each step."""
    events: dict[int, list[Event]] = {}
    queue = list(requests)
    while queue or not engine.idle:
        if queue and rng.random() < 0.8:
            events[engine.submit(queue.pop(0))] = []
        if events and rng.random() < 0.03:
            engine.cancel(rng.choice(list(events)))
        for event in engine.step():
            events[event.request_id].append(event)
        check_engine(engine)
        poison(engine)
        after()
    check_idle(engine)
    return list(events.values())
