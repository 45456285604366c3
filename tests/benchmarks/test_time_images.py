"""Loads of the image timer on a fake engine: what it counts, and what it refuses."""

import numpy as np
import pytest

from benchmarks.time_images import PLACE, picture, prompt_of, under_load
from spark_engine.interface import Limits
from spark_engine.runtime.engine.engine import Engine
from spark_engine.runtime.engine.request import Request, SamplingParams
from tests.runtime.fake_executor import VISION_INFO, VOCAB, build_fake

LIMITS = Limits(
    8, 340, 200, VOCAB, page_size=16, bias_slots=8, top_logprobs=3, snapshots=8, image_rows=20
)


def _requests(count: int, rows: int, most: int) -> list[Request]:
    rng, found = np.random.default_rng(0), list[Request]()
    for seed in range(count):
        ids = [i % 50 for i in prompt_of(rng, rows, None)]
        images = (picture((rows // 3, 3), seed, PLACE),) if rows else ()
        ids[PLACE : PLACE + rows] = [VISION_INFO.image_id] * rows
        params = SamplingParams(max_tokens=most, ignore_eos=True)
        found.append(Request(tuple(ids), params, images=images))
    return found


def test_a_prompt_has_its_image_between_its_tokens() -> None:
    ids = prompt_of(np.random.default_rng(0), 6, VISION_INFO)
    own = VISION_INFO.start_id, VISION_INFO.image_id, VISION_INFO.end_id
    assert ids[PLACE - 1 : PLACE + 7] == [own[0], *[own[1]] * 6, own[2]]
    assert len(ids) == len(prompt_of(np.random.default_rng(0), 6, None)) == 208


def test_gaps_are_those_of_the_texts_until_the_last_image_has_a_token() -> None:
    e = Engine(build_fake(LIMITS, (1, 2, 8), (1, 2)))
    gaps, firsts = under_load(e, _requests(2, 0, 90), (), 20)
    assert len(gaps) == 40 and not firsts and e.idle
    gaps, firsts = under_load(e, _requests(2, 0, 90), _requests(5, 6, 1), 0)
    assert len(firsts) == 5 and firsts == sorted(firsts) and min(*gaps, *firsts) > 0 and e.idle
    assert sum(gaps) / 2 <= firsts[-1] * 1.5 + 50, "gaps are between steps of the load"
    with pytest.raises(SystemExit, match="ended before the last image's first token"):
        under_load(e, _requests(2, 0, 14), _requests(5, 6, 1), 0)
