"""On a fake machine with a GPU that shares the host's memory: an engine is built for it unasked, it
starts where little is free and much available, and is refused where the host would starve."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder import build as building  # noqa: E402
from spark_engine.builder.build import build  # noqa: E402
from spark_engine.builder.plan.options import Options  # noqa: E402
from spark_engine.device import cuda_driver  # noqa: E402
from spark_engine.device import gpu as device
from spark_engine.device.shared_memory import KEPT  # noqa: E402
from spark_engine.engine_file import read_manifest  # noqa: E402
from spark_engine.errors import CapacityError  # noqa: E402
from spark_engine.runtime.engine.load import load  # noqa: E402
from spark_engine.runtime.executors import native  # noqa: E402
from tests.checkpoints import write_checkpoint  # noqa: E402
from tests.fake_spark import GIB, FakeSpark  # noqa: E402
from tests.runtime.fake_gpu import FakeGpu, Kernel  # noqa: E402


def _nothing(gpu: FakeGpu, *operands: int | float) -> None:
    """A kernel that leaves everything as it is."""


class Card(FakeGpu):
    """A Spark of numpy, on which kernels do nothing."""

    multiprocessors, per_multiprocessor = 48, 2

    def __init__(self) -> None:
        kernels: dict[str, Kernel] = defaultdict(lambda: _nothing)
        super().__init__(kernels)
        real = device.Gpu()
        self.free_bytes, self.total_bytes = real.free_bytes, real.total_bytes
        self.integrated = real.integrated


@pytest.mark.usefixtures("uncompiled")
def test_a_spark_builds_starts_and_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeSpark(free=1000)
    for place in (cuda_driver, device):
        monkeypatch.setattr(place, "driver", driver)
    monkeypatch.setattr(native, "Gpu", Card)
    monkeypatch.setattr(cuda_driver, "available_memory", lambda: 100 * GIB)
    write_checkpoint(tmp_path / "checkpoint", config_kwargs={"linear_num_value_heads": 8})
    folder = tmp_path / "engine"
    options = Options(decode=(1, 4), prefill=(64,), max_seqs=4, max_context=256, timing=False)
    build(tmp_path / "checkpoint", folder, options, lambda text: None)
    manifest = read_manifest(folder)
    assert (manifest.target, manifest.card) == ("sm_121a", "gb10"), "the GPU that is there"

    loaded = load(folder, cache_bytes=0)
    assert loaded.rows("decode") == (1, 4)
    loaded.close()

    starving = KEPT + manifest.memory.total - 1
    monkeypatch.setattr(cuda_driver, "available_memory", lambda: starving)
    with pytest.raises(CapacityError, match="that this machine itself keeps"):
        load(folder, cache_bytes=0)


def test_a_build_next_to_an_engine_leaves_the_host_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are made in what is free beyond that, or not at all."""
    driver = FakeSpark()
    for place in (cuda_driver, device):
        monkeypatch.setattr(place, "driver", driver)
    checkpoint = write_checkpoint(tmp_path / "checkpoint").path
    options = Options(target="cpu", decode=(1,), prefill=(64,), max_seqs=1, max_context=128)
    given, fill = list[int](), building.fill_weights

    def filled(*args: Any) -> None:
        given.append(args[-1])
        fill(*args)

    monkeypatch.setattr(building, "fill_weights", filled)
    monkeypatch.setattr(building, "available_memory", lambda: KEPT + 6 * GIB)
    build(checkpoint, tmp_path / "one", options, lambda text: None)
    assert given == [3 * GIB]
    monkeypatch.setattr(building, "available_memory", lambda: KEPT + 1000)
    with pytest.raises(CapacityError, match=r"1000 B of memory are free in addition to 10\.00 GiB"):
        build(checkpoint, tmp_path / "two", options, lambda text: None)
    assert not (tmp_path / "two").exists() and len(given) == 1
