"""Which requests an engine takes."""

import math
from dataclasses import replace
from typing import Any

import pytest

from spark_engine.errors import RequestError
from spark_engine.interface import Limits
from spark_engine.runtime.engine.constraint import ConstraintSpec
from spark_engine.runtime.engine.request import Request, SamplingParams, capacity
from spark_engine.runtime.server.engine_client.ipc import Submit
from spark_engine.vision import Image, VisionInfo

LIMITS = Limits(max_seqs=2, max_context=100, pages=10, vocab=50, page_size=16, bias_slots=4)
EOS = (1, 2)


IMAGE = Image(0, 1, 1, bytes(12), bytes(16))


BAD: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, math.nan, 1e-9, "1"),
    "top_p": (0.0, 1.01),
    "top_k": (-2, 1.5),
    "min_p": (-0.1, 1.1),
    "repetition": (0.0, math.inf),
    "presence": (2.1,),
    "frequency": (-2.1,),
    "max_tokens": (0, True),
    "min_tokens": (-1,),
    "seed": (2**63, -(2**63) - 1),
    "logprobs": (21, -1),
    "drafts": (-1, 8, True),
    "stop": (("x",) * 17, ("",)),
    "logit_bias": ({1: 101.0}, {1: math.nan}),
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_values_on_the_edges_are_taken() -> None:
    SamplingParams(temperature=0, top_p=1, top_k=-1, min_p=1, repetition=10, presence=-2)
    SamplingParams(max_tokens=1, seed=-(2**63), logprobs=20, stop=("x",) * 16, min_tokens=1)
    SamplingParams(drafts=0), SamplingParams(drafts=7, max_tokens=4, min_tokens=4)
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)


@pytest.mark.parametrize(
    "bad",
    [
        {"stop_token_ids": (50,)},
        {"stop_token_ids": (-1,)},
        {"logit_bias": {50: 1.0}},
        {"logit_bias": {i: 1.0 for i in range(5)}},
        {"logit_bias": {10: 1.0, 11: 1.0, 12: 1.0}, "min_tokens": 1},
        {"logit_bias": {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0}, "min_tokens": 1},
    ],
    ids=str,
)
def test_ids_and_counts_over_the_engines_limits_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(bad))):
        Request((3,), SamplingParams(**bad)).check(LIMITS, EOS)


def test_suppressed_ids_share_the_bias_table_with_the_bias() -> None:
    """An id that is both biased and suppressed has two entries."""
    for bias in ({1: 1.0, 2: 1.0}, {10: 1.0, 11: 1.0}):
        Request((3,), SamplingParams(logit_bias=bias, min_tokens=1)).check(LIMITS, EOS)


@pytest.mark.parametrize(
    "prompt",
    [(), (50,), (-1,), (1 << 40,), (5, True), (1, 2.0, 3), tuple(range(49)) * 3],
    ids=range(7),
)
def test_prompts_that_can_never_run_are_refused(prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompt"):
        Request(prompt).check(LIMITS, EOS)


def test_a_prompt_may_fill_all_but_one_position() -> None:
    assert capacity(LIMITS) == 100
    Request((3,) * 99).check(LIMITS, EOS)
    with pytest.raises(RequestError, match="100 tokens.*at most 99"):
        Request((3,) * 100).check(LIMITS, EOS)


def test_few_pages_bind_before_the_context() -> None:
    limits = Limits(max_seqs=2, max_context=100, pages=2, vocab=50, page_size=16)
    Request((3,) * 31).check(limits, EOS)
    with pytest.raises(RequestError, match="2 pages of 16"):
        Request((3,) * 32).check(limits, EOS)


def test_what_ends_a_request() -> None:
    assert SamplingParams(stop_token_ids=(9,)).stop_ids(EOS) == {1, 2, 9}
    assert SamplingParams(stop_token_ids=(9,), ignore_eos=True).stop_ids(EOS) == {9}


def test_what_goes_to_the_engine_with_every_choice_is_bounded() -> None:
    """Each part of a request but its prompt, which the context bounds."""
    many = tuple(range(600))
    assert SamplingParams(stop_token_ids=(5, 5, 3, 5)).stop_token_ids == (5, 3)
    assert len(SamplingParams(stop_token_ids=(1,) * 10**6).stop_token_ids) == 1
    with pytest.raises(RequestError, match="stop_token_ids is 600 ids; it must be at most 512"):
        SamplingParams(stop_token_ids=many)
    Request((1,), SamplingParams(stop_token_ids=many[:512])).check_sizes()
    for words, request in {
        "stop is 80000 bytes": Request((1,), SamplingParams(stop=("é" * 40_000,))),
        "grammar is 3000000 bytes": Request(
            (1,), constraint=ConstraintSpec(grammar="a" * 3_000_000)
        ),
        "close is 6000 entries": Request((1,), constraint=ConstraintSpec(close=many * 10)),
        "calls is 6000 entries": Request((1,), constraint=ConstraintSpec(calls=many * 10)),
        "barred is 200000 entries": Request(
            (1,), constraint=ConstraintSpec(barred=((1,),) * 10**5)
        ),
        "marks is 1800 entries": Request((1,), marks=many * 3),
        "owner is 600 bytes": Request((1,), owner="a" * 600),
        "salt is 65 bytes": Request((1,), salt=b"a" * 65),
        "images is 1025 entries": Request((1,), images=(IMAGE,) * 1025),
        "pixels is 201326604 entries": Request(
            (1,), images=(IMAGE, Image(0, 1, 1, bytes(192 << 20), bytes(16)))
        ),
    }.items():
        with pytest.raises(RequestError, match=words):
            request.check_sizes()
        with pytest.raises(RequestError, match=words):
            request.check(LIMITS, ())
        with pytest.raises(RequestError, match=words):
            Submit.of(0, request)


VISION = VisionInfo(16, 2, 1024, 6 * 1024, (0.5,) * 3, (0.5,) * 3, 40, 41, 42)
PIXELS = bytes(3 * 1024 * 2)


def _image(start: int, rows: int = 1, columns: int = 2, pixels: bytes = PIXELS) -> Image:
    return Image(start, rows, columns, pixels, bytes(16))


def _check(*images: Image, rows: int = 4, vision: VisionInfo | None = VISION) -> None:
    prompt = [1] * 90
    for at in (2, 3, 10, 11, 80, 81):
        prompt[at] = VISION.image_id
    request = Request(tuple(prompt), images=images)
    request.check(replace(LIMITS, image_rows=rows), EOS, vision)


def test_images_that_fit_are_taken() -> None:
    _check(_image(2), _image(10), _image(80))
    _check(_image(2, 2, 1), _image(80), rows=2)


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ((_image(1),), "not all of id 40"),
        ((_image(10), _image(2)), "positions 2 to 4; it must be within 12 to 90"),
        ((_image(2), _image(3, 1, 1, PIXELS[: 3 * 1024])), "within 4 to 90"),
        ((_image(89),), "within 0 to 90"),
        ((_image(2, pixels=b""),), "1 x 2 rows in 0 bytes"),
        ((_image(2, -1, -2),), "-1 x -2"),
        ((Image(2, 1, 2, PIXELS, b"short"),), "1 x 2 rows in"),
    ],
)
def test_images_that_are_not_what_they_say_are_refused(
    images: tuple[Image, ...], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        _check(*images)


def test_images_over_the_engines_limits_are_refused() -> None:
    with pytest.raises(RequestError, match="the engine reads none"):
        _check(_image(2), vision=None)
    with pytest.raises(RequestError, match="4 rows with those next to it; it must be at most 3"):
        _check(_image(2), _image(10), rows=3)
    with pytest.raises(RequestError, match="at most 1024 pixels"):
        _check(_image(2), vision=replace(VISION, most_pixels=1024))
