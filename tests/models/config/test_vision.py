"""`VisionInfo` from the files of checkpoints: both layouts, defaults, and what is refused."""

from typing import Any

import pytest

from spark_engine.errors import CheckpointError
from spark_engine.models.config.vision import vision_info
from spark_engine.vision import VisionInfo

CONFIG: dict[str, Any] = {
    "text_config": {"vocab_size": 248_320},
    "vision_config": {"patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "image_token_id": 248_056,
    "vision_start_token_id": 248_053,
    "vision_end_token_id": 248_054,
}
PUBLISHED: dict[str, Any] = {  # Qwen3.5's preprocessor_config.json
    "size": {"longest_edge": 16_777_216, "shortest_edge": 65_536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "do_convert_rgb": True,
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
INFO = VisionInfo(16, 2, 65_536, 16_777_216, (0.5,) * 3, (0.5,) * 3, 248_056, 248_053, 248_054)


@pytest.mark.parametrize(
    ("preprocessor", "processor"),
    [
        (PUBLISHED, {}),
        ({}, {"image_processor": PUBLISHED, "processor_class": "Qwen3VLProcessor"}),
        ({"size": {"longest_edge": 99_999}}, {"image_processor": PUBLISHED}),
        ({}, {}),
        ({}, {"processor_class": "Qwen3VLProcessor"}),
        ({"size": None, "do_resize": None}, {}),
    ],
)
def test_both_layouts_and_no_file_give_the_published_values(
    preprocessor: dict[str, Any], processor: dict[str, Any]
) -> None:
    assert vision_info(CONFIG, preprocessor, processor) == INFO


def test_a_file_s_own_values_are_read() -> None:
    config = {
        "vocab_size": 100,
        "vision_config": {"patch_size": 8, "spatial_merge_size": 4},
        "image_token_id": 99,
        "vision_start_token_id": 0,
        "vision_end_token_id": 1,
    }
    row = {
        "patch_size": 8,
        "merge_size": 4,
        "size": {"shortest_edge": 1024, "longest_edge": 4096},
        "image_mean": [0, 0.25, 1],
        "image_std": 0.125,
    }
    want = VisionInfo(8, 4, 1024, 4096, (0.0, 0.25, 1.0), (0.125,) * 3, 99, 0, 1)
    assert vision_info(config, row, {}) == want
    older = vision_info(config, row | {"min_pixels": 2048, "max_pixels": 2048}, {})
    assert older is not None and (older.least_pixels, older.most_pixels) == (2048, 2048)


@pytest.mark.parametrize("config", [{}, {"vision_config": None}, {"vision_config": {}}])
def test_a_checkpoint_without_a_tower_has_no_images(config: dict[str, Any]) -> None:
    assert vision_info(config, PUBLISHED, {}) is None


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"patch_size": 14}, "patch_size is 14, but config.json: vision_config.patch_size is 16"),
        ({"merge_size": 1}, "merge_size is 1, but config.json: vision_config.spatial_merge_size"),
        ({"temporal_patch_size": 1}, "temporal_patch_size is 1, but"),
        ({"patch_size": "16"}, "patch_size is '16': expected an integer"),
        ({"size": {"longest_edge": 1000}}, "at least 65536 pixels and at most 1000"),
        ({"size": {"shortest_edge": 0}}, "size: shortest_edge is 0: expected an integer of at le"),
        ({"size": {"longest_edge": 1 << 40}}, "longest_edge is 1099511627776: expected"),
        ({"size": [4, 5]}, "preprocessor_config.json is malformed"),
        ({"max_pixels": -1}, "preprocessor_config.json: max_pixels is -1"),
        ({"image_mean": [0.5, 0.5]}, "image_mean is .*: expected three numbers from 0.0 to 1"),
        ({"image_mean": [0.5, float("nan"), 0.5]}, "image_mean is"),
        ({"image_mean": "0.5"}, "image_mean is '0.5'"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std is .*: expected three numbers from 0.001"),
        ({"resample": 2}, "resample is 2; supported: 3"),
        ({"do_normalize": False}, "do_normalize is False; supported: True"),
        ({"rescale_factor": 1}, "rescale_factor is 1; supported: 0.0039"),
    ],
)
def test_other_values_are_refused_by_name(row: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        vision_info(CONFIG, PUBLISHED | row, {})
    assert str(caught.value).startswith("preprocessor_config.json")
    with pytest.raises(CheckpointError, match="^processor_config.json: image_processor"):
        vision_info(CONFIG, {}, {"image_processor": PUBLISHED | row})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"image_token_id": 248_320}, "image_token_id is 248320: expected an integer of at least"),
        ({"vision_start_token_id": True}, "vision_start_token_id is True"),
        (
            {"vision_end_token_id": 248_056},
            "vision_end_token_id 248056: each must be another token",
        ),
        ({"vision_config": {"patch_size": 0}}, "vision_config: patch_size is 0"),
        ({"text_config": {}}, "vocab_size is None"),
    ],
)
def test_a_wrong_config_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        vision_info(CONFIG | change, PUBLISHED, {})


def test_a_processor_that_is_no_object_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match="processor_config.json: image_processor is malformed"
    ):
        vision_info(CONFIG, {}, {"image_processor": [1]})
