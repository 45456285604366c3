"""What an engine has for images: buckets, rows, limits, and when it is built without them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spark_engine import kernel
from spark_engine.builder.build import planned
from spark_engine.builder.plan.images import ImagePlan, decide
from spark_engine.builder.plan.options import Options
from spark_engine.errors import OptionError
from spark_engine.vision import VisionInfo
from tests.oracles.test_parity_vision import write

GPU = next(iter(kernel.TARGETS.values()))
INFO = VisionInfo(16, 2, 65_536, 16_777_216, (0.5,) * 3, (0.5,) * 3, 7, 8, 9)


def test_buckets_and_rows_follow_from_the_largest_image() -> None:
    cpu, gpu = decide(True, None, INFO, None), decide(True, None, INFO, GPU)
    assert (cpu.patches, cpu.rows) == ((1024, 4096), 4 * 1024)
    assert (gpu.patches[0], gpu.patches[-1], gpu.rows) == (256, 16_384, 4 * 4096)
    assert gpu.info is not None and gpu.info.most_pixels == 16_384 * 256
    screen = decide(True, 1920 * 1088 + 5, INFO, GPU)
    assert screen.patches == (256, 1024, 2304, 4096, 8160) and screen.rows == 4 * 2040
    whole = decide(True, INFO.most_pixels, INFO, GPU)
    assert whole.patches[-2:] == (16_384, 65_536) and whole.info == INFO
    tiny = decide(True, 3000, INFO, None)
    assert tiny.patches == (8,) and tiny.info == replace(INFO, least_pixels=3000, most_pixels=3000)


def test_there_may_be_no_images() -> None:
    assert decide(False, None, INFO, None) == ImagePlan() == decide(True, None, "no tower", GPU)
    for wanted, pixels, found, words in (
        (False, 5000, INFO, "--max-image-pixels does nothing with --no-vision"),
        (True, 5000, "no tower", "--max-image-pixels 5000: no tower; leave it out"),
        (True, 1023, INFO, "--max-image-pixels 1023: give 1024 to 16777216"),
        (True, 0, INFO, "--max-image-pixels 0: give 1024"),
        (True, 1 << 25, INFO, "--max-image-pixels 33554432: give 1024 to 16777216"),
    ):
        with pytest.raises(OptionError, match=words):
            decide(wanted, pixels, found, None)


def test_a_gpu_without_kernels_and_a_tower_that_is_not_read_leave_text(tmp_path: Path) -> None:
    write(tmp_path, "moe")
    _, plan = planned(tmp_path, Options(target=GPU.name))
    assert plan.vision is None and not plan.limits.image_rows and not plan.buckets.vision
    assert any(n.startswith(f"built without images: no kernel of {GPU.name}") for n in plan.notes)
    model, plan = planned(tmp_path, Options(target="cpu", vision=False))
    assert model.vision is not None and plan.vision is None and not plan.limits.image_rows
    assert not any("images" in note for note in plan.notes)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"patch_size": 14}))
    _, plan = planned(tmp_path, Options(target="cpu"))
    assert plan.vision is None and any("patch_size is 14" in note for note in plan.notes)
