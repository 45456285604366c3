"""Positions of prompts with images, by hand and against the definition token by token."""

import numpy as np

from spark_engine.runtime.engine.rope_offsets import rope_delta, write_offsets
from spark_engine.vision import Image


def image(start: int, rows: int, columns: int) -> Image:
    return Image(start, rows, columns, b"", bytes(16))


def truth(images: list[Image], length: int) -> np.ndarray:
    """[length, 3]: the positions themselves."""
    starts, found, place = {i.start: i for i in images}, [], 0
    while len(found) < length:
        if (one := starts.get(len(found))) is None:
            found.append((place, place, place))
            place += 1
            continue
        found += [
            (place, place + r, place + c) for r in range(one.rows) for c in range(one.columns)
        ]
        place += max(one.rows, one.columns)
    return np.array(found[:length])


def test_literal_positions() -> None:
    out = np.full((10, 3), 99, np.int32)
    write_offsets(out, [image(2, 2, 3)], 0)
    places = out + np.arange(10)[:, None]
    assert places[:, 0].tolist() == [0, 1, 2, 2, 2, 2, 2, 2, 5, 6]
    assert places[:, 1].tolist() == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6]
    assert places[:, 2].tolist() == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6]
    assert rope_delta([image(2, 2, 3)]) == -3


def test_tiles_from_anywhere_have_the_prompts_positions() -> None:
    images = [image(0, 3, 1), image(7, 4, 5), image(27, 1, 1), image(30, 2, 9)]
    want = truth(images, 60)
    for start in range(55):
        out = np.full((5, 3), 99, np.int32)
        write_offsets(out, images, start)
        at = np.arange(start, start + 5)[:, None]
        assert (out + at == want[start : start + 5]).all(), start
    assert want[59, 0] == 59 + rope_delta(images)
