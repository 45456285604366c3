"""Pixels against transformers' image processor, value by value."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from spark_engine.runtime.images.decode import DecodedImage, decode, on_white
from spark_engine.vision import VisionInfo
from tests.runtime.images.samples import INFO, QWEN, file_of, size_of


@pytest.fixture(scope="module")
def oracle() -> Any:
    name = "transformers.models.qwen2_vl.image_processing_pil_qwen2_vl"
    return pytest.importorskip(name).Qwen2VLImageProcessorPil


def _expected(oracle: Any, data: bytes, info: VisionInfo) -> tuple[np.ndarray, list[int]]:
    """`pixel_values` f32 [patches, 3 · 2 · 16 · 16] and the grid of patches."""
    processor = oracle(
        patch_size=info.patch,
        merge_size=info.merge,
        size={"shortest_edge": info.least_pixels, "longest_edge": info.most_pixels},
        image_mean=list(info.mean),
        image_std=list(info.std),
    )
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    found = processor(image, return_tensors="np")
    return found["pixel_values"], found["image_grid_thw"][0].tolist()


def _normalised(decoded: DecodedImage, info: VisionInfo) -> np.ndarray:
    """`pixel_values` from u8 patches, in the oracle's order of operations."""
    patches = np.frombuffer(decoded.pixels, np.uint8).reshape(-1, 3 * info.patch**2)
    values = (patches.astype(np.float64) * (1 / 255)).astype(np.float32)
    mean, std = (np.repeat(np.float32(v), info.patch**2) for v in (info.mean, info.std))
    values = ((values - mean) / std).reshape(-1, 3, 1, info.patch**2)
    return np.repeat(values, 2, axis=2).reshape(len(values), -1)  # a still is its frame twice


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_two_hundred_files_of_all_modes_give_the_oracles_values(oracle: Any) -> None:
    sizes = set()
    for seed in range(200):
        data = file_of(seed, seed, size_of(seed))
        want, grid = _expected(oracle, data, INFO)
        found = decode(data, INFO)
        assert [1, 2 * found.rows, 2 * found.columns] == grid, seed
        np.testing.assert_array_equal(_normalised(found, INFO), want, err_msg=f"{seed}")
        sizes.add((found.rows, found.columns))
    assert len(sizes) > 40


@pytest.mark.parametrize(
    ("kind", "size"), [(3, (10, 10)), (13, (1920, 1080)), (9, (640, 480)), (17, (33, 1200))]
)
def test_real_sizes_and_limits_give_the_oracles_values(
    oracle: Any, kind: int, size: tuple[int, int]
) -> None:
    data = file_of(kind, 1, size)
    want, _ = _expected(oracle, data, QWEN)
    np.testing.assert_array_equal(_normalised(decode(data, QWEN), QWEN), want)


def test_other_colours_scale(oracle: Any) -> None:
    info = VisionInfo(16, 2, 8192, 40_000, (0.4, 0.5, 0.6), (0.2, 0.3, 0.4), 7, 8, 9)
    data = file_of(3, 0, (90, 111))
    want, _ = _expected(oracle, data, info)
    np.testing.assert_array_equal(_normalised(decode(data, info), info), want)


@pytest.mark.parametrize(
    "mode", "1 L LA P PA RGB RGBA RGBX CMYK YCbCr LAB HSV I F I;16 I;16B".split()
)
def test_every_mode_of_pillow_becomes_rgb_as_the_oracles(oracle: Any, mode: str) -> None:
    transforms = pytest.importorskip("transformers.image_transforms")
    drawn = Image.frombytes("RGBA", (37, 300), np.random.default_rng(0).bytes(37 * 300 * 4))
    image = (drawn.convert("L") if mode[0] in "IF" else drawn).convert(mode)
    want = transforms.convert_to_rgb(image, return_numpy=True)
    np.testing.assert_array_equal(np.array(on_white(image)), want)
