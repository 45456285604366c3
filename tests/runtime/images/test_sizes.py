"""Sizes after resizing: transformers' results, limits, and what is refused."""

from dataclasses import replace

import pytest

from spark_engine.runtime.images.sizes import BadImage, resized
from tests.runtime.images.samples import QWEN


@pytest.mark.parametrize(
    ("size", "want"),
    [  # height, width; run with transformers 5.24
        ((10, 10), (256, 256)),
        ((480, 640), (480, 640)),
        ((1080, 1920), (1088, 1920)),
        ((8, 1200), (32, 3136)),
        ((3024, 4032), (3008, 4032)),
        ((20000, 1000), (18304, 896)),
        ((272, 304), (256, 320)),  # 8.5 and 9.5 rows: round half to even
        ((1, 200), (32, 3648)),
        ((200, 1), (3648, 32)),
    ],
)
def test_sizes_are_transformers(size: tuple[int, int], want: tuple[int, int]) -> None:
    assert resized(*size, QWEN) == want


def test_low_detail_and_the_servers_limit_shrink_an_image() -> None:
    full = resized(1080, 1920, QWEN)
    low = resized(1080, 1920, QWEN, detail="low")
    capped = resized(1080, 1920, QWEN, most_pixels=1_000_000)
    assert low == (384, 672) and low[0] * low[1] <= 512 * 512
    assert capped == (736, 1312) and capped[0] * capped[1] <= 1_000_000
    assert resized(1080, 1920, QWEN, most_pixels=100_000, detail="low") == (224, 416)
    assert resized(1080, 1920, QWEN, most_pixels=50 << 20, detail="high") == full
    assert resized(100, 100, QWEN, detail="low") == (256, 256)


def test_a_limit_below_the_models_least_area_holds() -> None:
    assert resized(1080, 1920, QWEN, most_pixels=20_000) == (96, 160)
    # a size that grows beyond the limit: transformers' is 192 x 384
    assert resized(128, 256, QWEN, most_pixels=65_536) == (160, 352)
    info = replace(QWEN, least_pixels=1000, most_pixels=20_000)
    for height in range(1, 300, 7):
        for width in range(1, 300, 11):
            if max(height, width) > 200 * min(height, width):
                continue
            try:
                found = resized(height, width, info)
            except BadImage as error:
                assert f"{width} x {height} pixels cannot be resized" in str(error)
                assert min(height, width) * 9 < max(height, width)
            else:
                assert found[0] * found[1] <= 20_000 and not found[0] % 32 and not found[1] % 32


@pytest.mark.parametrize(
    ("size", "options", "words"),
    [
        ((10, 2001), {}, "2001 x 10 pixels: one side is more than 200 times the other"),
        ((402, 2), {}, "2 x 402 pixels: one side"),
        ((10, 10), {"detail": "lowest"}, "detail is 'lowest'; it must be one of auto, low, high"),
        ((4, 800), {"most_pixels": 4096}, "cannot be resized to at most 4096 pixels"),
    ],
)
def test_what_is_refused_says_why(
    size: tuple[int, int], options: dict[str, object], words: str
) -> None:
    with pytest.raises(BadImage, match=words):
        resized(*size, QWEN, **options)  # type: ignore[arg-type]
