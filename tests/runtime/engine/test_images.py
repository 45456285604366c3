"""When the tower runs: for rows that a prefill reads next, and not again while they are here."""

from dataclasses import replace

import numpy as np
import pytest

from spark_engine.interface import DECODE, PREFILL, Limits
from spark_engine.runtime.engine.engine import Engine, EngineOptions
from spark_engine.runtime.engine.plan import Batch
from spark_engine.runtime.engine.policy.image_rows import ImageRows
from spark_engine.runtime.engine.policy.pacing import PrefillPolicy
from spark_engine.runtime.engine.prepare_inputs import write_step_inputs
from spark_engine.runtime.engine.request import Request, SamplingParams
from spark_engine.runtime.engine.sequence import Sequence
from spark_engine.vision import VISION, Image
from tests.runtime.engine.drive import drain, tokens_of
from tests.runtime.engine.test_traces import picture
from tests.runtime.fake_executor import VISION_INFO, VOCAB, build_fake

LIMITS = Limits(
    2, 340, 60, VOCAB, page_size=16, bias_slots=8, top_logprobs=3, snapshots=8, image_rows=20
)


def engine(**options: object) -> Engine:
    return Engine(build_fake(LIMITS, (1, 2), (1, 2)), EngineOptions(**options))  # type: ignore[arg-type]


def request(*images: Image, length: int = 150, seed: int = 1) -> Request:
    prompt = np.arange(length) % 50
    for image in images:
        prompt[image.start : image.end] = VISION_INFO.image_id
    params = SamplingParams(max_tokens=4, ignore_eos=True, seed=seed)
    return Request(tuple(prompt.tolist()), params, images=images)


def launches(engine: Engine) -> int:
    return sum(n for (family, _), n in engine._loop.counts.buckets.items() if family == VISION)


def run(engine: Engine) -> list[int]:
    return [token for events in drain(engine).values() for token in tokens_of(events)]


A, B = picture(20, 3, 5, 0), picture(20, 3, 5, 1)  # they differ in one pixel


def test_an_image_is_computed_once_for_all_that_show_it() -> None:
    e = engine()
    for seed in range(4):
        e.submit(request(A, seed=seed))
    run(e)
    e.submit(request(replace(A, start=90)))
    run(e)
    assert launches(e) == 1


def test_a_pixel_makes_another_image() -> None:
    e = engine()
    found = []
    for image in (A, B, A):
        e.submit(request(image))
        found.append(run(e))
    assert found[0] == found[2] != found[1] and e.scheduler.prefix.stats()["prefix_hits"] > 0
    assert launches(e) == 2  # the third request reads pages alone


def test_a_cached_prompt_needs_no_tower_though_its_rows_are_gone() -> None:
    e = engine()
    for _ in range(2):
        e.submit(request(A))
        want = run(e)
        e.scheduler.images = ImageRows(LIMITS.image_rows)
    assert launches(e) == 1
    e.clear_cache()
    e.submit(request(A))
    assert run(e) == want and launches(e) == 2


def test_images_of_cancelled_requests_are_not_computed() -> None:
    e = engine(depth=1)
    number = e.submit(request(A, picture(200, 2, 3, 0), length=250))
    e.step()
    e.cancel(number)
    run(e)
    assert launches(e) == 1, "the second image's tile was not reached"


def test_a_step_that_decodes_has_one_image_and_its_tile() -> None:
    e = engine()
    e.submit(replace(request(length=3), params=SamplingParams(max_tokens=60, ignore_eos=True)))
    e.step()
    plans, inner = [], e.scheduler.schedule
    e.scheduler.schedule = lambda n: (plans.append(inner(n)), plans[-1])[1]  # type: ignore[method-assign, func-returns-value]
    e.submit(request(A, picture(120, 1, 4, 0)))
    run(e)
    shown = [plan for plan in plans if plan.images]
    assert len(shown) == 2 and all(len(plan.images) == 1 for plan in shown)
    for plan in shown:
        assert [b.live for b in plan.batches if b.family == PREFILL] == [1]


@pytest.mark.parametrize("itl_ms", [5.0, 3.6])  # the second: a long launch of the tower is alone
def test_others_wait_for_no_more_than_the_bound_where_screenshots_come(itl_ms: float) -> None:
    """Sixteen at once next to a text that decodes, and one text after the other."""
    us = {PREFILL: 1_000.0, DECODE: 500.0, VISION: 3_000.0}
    limits = replace(LIMITS, max_seqs=19, pages=400)
    fake = build_fake(limits, (1, 8, 19), (1, 2, 8))
    costs = {(f, n): us[f] * (n**0.7 if f == PREFILL else n > 6 or 0.3) for f, n in fake.executors}
    e = Engine(replace(fake, costs=costs), EngineOptions(policy=PrefillPolicy(itl_ms=itl_ms)))
    e.scheduler.pacing.took = lambda *_: None  # type: ignore[method-assign]  # a fake's time
    plans, inner = [], e.scheduler.schedule
    e.scheduler.schedule = lambda n: (plans.append(inner(n)), plans[-1])[1]  # type: ignore[method-assign, func-returns-value]
    e.submit(replace(request(length=3), params=SamplingParams(max_tokens=300, ignore_eos=True)))
    e.step()
    for i in range(16):
        e.submit(request(replace(picture(20, 2 + i % 2, 3 + i % 2, 0), digest=bytes([i]) * 16)))
    steps = 0
    while launches(e) < 16:
        steps += 1
        assert steps < 100, "texts that come all the time do not delay an image for ever"
        e.submit(request(length=60, seed=100 + steps))
        e.step()
    run(e)
    towers, full = [], 0
    for plan in plans:
        keys = [(VISION, 6 if image.tokens <= 6 else 16) for image, _ in plan.images]
        took = sum(costs[key] for key in (*keys, *(b.key for b in plan.batches)))
        assert took <= 1e3 * itl_ms, plan
        towers.append(len(keys))
        full += bool(keys) and max(b.live for b in plan.batches) > 1
    assert max(towers) == 1 and full, "what a short launch of the tower leaves is prefilled"


@pytest.mark.parametrize("start", [0, 64])
def test_ids_of_rows_and_offsets_of_a_tile(start: int) -> None:
    """An image that a tile's end cuts; the next id is a row too."""
    image = picture(60, 2, 3, 0)
    seq = Sequence(0, request(image), 160, frozenset(), 0)
    seq.slot = 1
    pool = ImageRows(20)
    pool.place([picture(0, 1, 4, 0), image], ())
    buffers = {
        name: np.full(2, 99, np.int32)
        for name in ("slots", "starts", "counts", "emit", "sources", "saves", "next_ids")
    }
    buffers["token_ids"] = np.full(128, 99, np.int32)
    buffers["rope_offsets"] = np.full((2, 192), 99, np.int32)
    batch = Batch(PREFILL, 2, [seq], [start], [64], [False])
    write_step_inputs(buffers, batch, pool, VOCAB)
    ids, row = buffers["token_ids"], VOCAB + 4
    own = buffers["rope_offsets"][0].reshape(64, 3)
    if start == 0:
        assert ids[:60].tolist() == list(seq.tokens[:60])
        assert ids[60:64].tolist() == [row, row + 1, row + 2, row + 3]
        assert buffers["next_ids"][0] == row + 4
        assert own[59:].tolist() == [[0] * 3, [0] * 3, [-1, -1, 0], [-2, -2, 0], [-3, -2, -3]]
    else:
        assert ids[:3].tolist() == [row + 4, row + 5, seq.tokens[66]]
        assert own[:4].tolist() == [[-4, -3, -3], [-5, -4, -3], [-3] * 3, [-3] * 3]
        assert buffers["next_ids"][0] == seq.tokens[128]
    decode = {**buffers, "token_ids": np.zeros(2, np.int32)}
    decode["rope_offsets"] = np.full((2, 1), 99, np.int32)
    write_step_inputs(decode, Batch("decode", 2, [seq], [150], [1], [True]), pool, VOCAB)
    assert decode["rope_offsets"].tolist() == [[-3], [0]] and decode["token_ids"][0] == -1
