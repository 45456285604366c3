"""A bucket's launches are timed as one graph, in several forms, and what is known is not timed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native import gpu_timer, replays  # noqa: E402
from spark_engine.builder.native.tactics import Chosen, Work  # noqa: E402
from spark_engine.builder.native.timings import Machine, Timings  # noqa: E402
from spark_engine.device import cuda_driver, gpu  # noqa: E402
from spark_engine.errors import InternalError  # noqa: E402
from spark_engine.kernel import H200, Attrs  # noqa: E402
from spark_engine.op import Op  # noqa: E402
from spark_engine.plugins.registry import REGISTRY  # noqa: E402
from spark_engine.tensors import DType, TensorSpec  # noqa: E402
from tests.builder.empty_cubins import EmptyCubin  # noqa: E402
from tests.fake_driver import FakeDriver  # noqa: E402

NODES, FORMS = 5, 2


class Driver(FakeDriver):
    """Replays of the first graph take 2 ms, of the second 1 ms, whatever was queued before."""

    def __init__(self, **attributes: int) -> None:
        super().__init__(**attributes)
        self.marks: list[int] = []  # events of graphs, two of each

    def _answer(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name == "cuEventRecordWithFlags":
            self.marks.append(args[0])
        if name == "cuEventElapsedTime":
            first, last = (self.marks.index(event) for event in args)
            assert not first % 2 and last == first + 1, "one graph is between two marks"
            return (1.0 if first // 2 % FORMS else 2.0,)
        return super()._answer(name, args)


def forms() -> list[list[Chosen]]:
    """The same norm five times, and with another launch."""
    op: Op = REGISTRY["rms_norm"]
    attrs: Attrs = {"eps": 1e-6}
    ins = (TensorSpec("x", DType.BF16, (2, 64)), TensorSpec("w", DType.F32, (64,)))
    work = Work(op.name, op, attrs, ins, op.infer(attrs, ins), frozenset({1}))
    (tactic,) = op.cuda.tactics
    plan = tactic.plan(attrs, ins, H200)
    (launch,) = plan.launches
    other = replace(plan, launches=(replace(launch, defines=(*launch.defines, ("EARLY", "1"))),))
    return [[(work, tactic, plan)] * NODES, [(work, tactic, other)] * NODES]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, Driver]:
    driver = Driver(L2_CACHE_SIZE=1 << 20)
    for module in (cuda_driver, gpu):
        monkeypatch.setattr(module, "driver", driver)
    timer: Any = object.__new__(gpu_timer.GpuTimer)
    timer._gpu, timer._say, timer._target, timer._cubins = gpu.Gpu(), print, H200, None
    timer._compiled = lambda job: EmptyCubin(b"", {})
    timer._timings = Timings(tmp_path / "times.json", Machine("a", "b", "c"))
    timer._loaded, timer._lost = {}, 0
    return timer, driver


def test_every_form_is_one_graph_of_all_its_launches(made: tuple[Any, Driver]) -> None:
    timer, driver = made
    before = dict(driver.held)
    assert timer.whole(forms()) == [2e-3, 1e-3]
    launched = sum(name == "cuLaunchKernelEx" for name, *_ in driver.asked)
    replayed = sum(name == "cuGraphLaunch" for name, *_ in driver.asked)
    assert launched == FORMS * NODES
    assert replayed == FORMS * replays.WARM, "they differ by far"
    loaded = driver.held.pop("cuModuleLoadData")
    assert loaded == FORMS, "a kernel is loaded once, for all nodes and later buckets"
    assert {n: c for n, c in driver.held.items() if c} == {n: c for n, c in before.items() if c}
    count = len(driver.asked)
    assert timer.whole(forms()) == [2e-3, 1e-3] and len(driver.asked) == count, "it is known"
    waiting, early = forms()
    assert timer.whole([waiting[1:], early]) is not None and len(driver.asked) > count


def test_without_free_memory_nothing_is_run(made: tuple[Any, Driver]) -> None:
    timer, driver = made
    driver.free = 100
    assert timer.whole(forms()) is None and timer._lost == 1
    assert not any(name == "cuLaunchKernelEx" for name, *_ in driver.asked)
    driver.free, driver.fails = 1 << 30, ("cuGraphLaunch",)
    with pytest.raises(InternalError, match="timing a bucket's launches as one graph: .*--no-tim"):
        timer.whole(forms())
