"""The vision tower in engines for GPUs: transformers' rows, on a GPU of numpy and on a real one."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.build import build  # noqa: E402
from spark_engine.builder.plan.options import Options  # noqa: E402
from spark_engine.check.check import run_check  # noqa: E402
from spark_engine.device.gpu import architecture  # noqa: E402
from spark_engine.plugins.registry import REGISTRY  # noqa: E402
from spark_engine.progress import Progress  # noqa: E402
from spark_engine.runtime.engine.load import load  # noqa: E402
from spark_engine.vision import VISION  # noqa: E402
from tests.check.fake_native import TARGET, Fake, build_fake, open_fake  # noqa: E402
from tests.oracles.test_parity_vision import FIRST, GRIDS, image, rows_of, truth, write  # noqa: E402

HERE = architecture()
TOWER = {"intermediate_size": 208}  # of whole m16 tiles, but not of k-slabs
TOLERANCE = 2e-2  # of the range of what is compared: bf16 through a tower of three blocks
pytestmark = pytest.mark.skipif(
    not REGISTRY["vision_attention"].cuda.tactics, reason="needs kernels of vision_attention"
)


def options(target: str) -> Options:
    """Buckets of 64 and 144 patches (with `few`)."""
    return Options(
        target=target, decode=(2,), prefill=(64,), drafts=0, max_context=128, max_seqs=2,
        timing=False, max_image_pixels=36 * 1024,
    )  # fmt: skip


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr("spark_engine.builder.plan.images.SIZES", (64,))
    return monkeypatch


def compare(checkpoint: Path, engine: Path) -> None:
    """Rows of images of every grid, in the smallest bucket that takes each; and no other rows."""
    with closing(load(engine, threads=1)) as loaded:
        info = loaded.vision
        assert info is not None and loaded.buckets(VISION) == (16, 36)
        images = [image(*grid, seed=i) for i, grid in enumerate(GRIDS)]
        for given, want in zip(images, truth(checkpoint, info, images), strict=True):
            state = rows_of(loaded, info, given)
            got = state[FIRST : FIRST + given.tokens]
            assert np.abs(got - want).max() <= TOLERANCE * np.abs(want).max(), given.tokens
            others = np.delete(state[:-1], np.arange(FIRST, FIRST + given.tokens), 0)
            assert np.isnan(others).all(), f"{given.tokens} tokens wrote rows of other images"


def test_a_tower_is_built_for_a_gpu_and_runs(tmp_path: Path, few: pytest.MonkeyPatch) -> None:
    write(tmp_path, "dense", TOWER)
    fake: Fake = build_fake(tmp_path, tmp_path / "engine", options(TARGET), few)
    open_fake(fake, few)
    compare(tmp_path, tmp_path / "engine")
    report = run_check(tmp_path / "engine", tmp_path, ("op",), Progress(None))
    assert report.passed, report.headlines
    (level,) = report.levels
    assert {"prefill embed", "decode embed"} <= {f.name for f in level.findings}, level.findings


@pytest.mark.gpu
@pytest.mark.skipif(HERE is None, reason="needs a GPU with a target's name")
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_tower_on_a_gpu_equals_transformers(
    kind: str, tmp_path: Path, few: pytest.MonkeyPatch
) -> None:
    assert HERE is not None
    write(tmp_path, kind, TOWER)
    report = build(tmp_path, tmp_path / "engine", options(HERE), lambda text: None)
    assert any("the vision tower has" in note for note in report.notes), report.notes
    compare(tmp_path, tmp_path / "engine")
    checked = run_check(tmp_path / "engine", tmp_path, ("op", "layer"), Progress(None))
    assert checked.passed, checked.headlines
