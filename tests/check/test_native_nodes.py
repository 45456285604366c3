"""The op level of native engines: nodes over places of device memory, on a GPU of numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.options import Options  # noqa: E402
from spark_engine.check.check import run_check  # noqa: E402
from spark_engine.check.report import Report  # noqa: E402
from spark_engine.errors import OptionError  # noqa: E402
from tests.check.fake_native import Fake, build_fake, open_fake, places_of  # noqa: E402
from tests.check.planted import scaled  # noqa: E402
from tests.checkpoints import write_checkpoint  # noqa: E402

SHALLOW = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "vocab_size": 256,
    "linear_num_value_heads": 8,
}
OPTIONS = Options(
    target="sm_90a", decode=(2,), prefill=(64,), max_context=128, max_seqs=2, timing=False
)
BLUR = 2e-3  # relative, of every value that a kernel rounds to bf16


def _quiet(text: str) -> None:
    del text


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Fake]:
    """(checkpoint, engine, what its kernels are)."""
    folder = tmp_path_factory.mktemp("native")
    checkpoint = folder / "checkpoint"
    write_checkpoint(checkpoint, SHALLOW, format="modelopt_mixed", moe=True, seed=4)
    with pytest.MonkeyPatch.context() as patch:
        fake = build_fake(checkpoint, folder / "engine", OPTIONS, patch)
    return checkpoint, folder / "engine", fake


@pytest.fixture
def engine(built: tuple[Path, Path, Fake], monkeypatch: pytest.MonkeyPatch) -> Fake:
    fake = built[2]
    fake.blur, fake.spoil = BLUR, None
    fake.ran.clear()
    open_fake(fake, monkeypatch)
    return fake


def _op(engine: Path, checkpoint: Path) -> Report:
    return run_check(engine, checkpoint, ("op",), _quiet)


def test_a_sound_engine_has_no_findings(built: tuple[Path, Path, Fake], engine: Fake) -> None:
    report = _op(built[1], built[0])
    assert report.passed and report.headlines == [], report.headlines
    (level,) = report.levels
    assert level.name == "op" and level.launches == 2
    nodes = {name for found in engine.nodes.values() for name in found}
    assert {f.name.split(maxsplit=1)[1] for f in level.findings} == nodes, "a node was left out"
    assert max(f.figures.get("rel_l2", 0) for f in level.findings) > 1e-3, "the blur is not seen"
