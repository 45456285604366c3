"""What several ranks make is timed on as many GPUs that read each other's memory, or not at all."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native import gpu_timer, rank_gpus  # noqa: E402
from spark_engine.builder.native.tactics import Work, choose  # noqa: E402
from spark_engine.device import cuda_driver  # noqa: E402
from spark_engine.kernel import H200  # noqa: E402
from spark_engine.op import Attrs  # noqa: E402
from spark_engine.plugins.ops.ranks import reduce_norm_quant  # noqa: E402
from spark_engine.tensors import DType, TensorSpec  # noqa: E402
from tests.builder.empty_cubins import EmptyCubin  # noqa: E402
from tests.fake_driver import FakeDriver  # noqa: E402

OP = reduce_norm_quant.OP
ATTRS: Attrs = {"ranks": 2, "eps": 1e-6, "keep": 1, "quant": "fp8", "n": 1}


class Driver(FakeDriver):
    """Of `gpus` GPUs, which read each other's memory or do not. Every time is 1 ms."""

    def __init__(self, gpus: int, peers: bool = True) -> None:
        super().__init__()
        self.gpus, self.peers = gpus, peers

    def _answer(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        fixed = {
            "cuDeviceGetCount": self.gpus,
            "cuDeviceCanAccessPeer": int(self.peers),
            "cuEventElapsedTime": 1.0,
        }
        return (fixed[name],) if name in fixed else super()._answer(name, args)


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    def used(driver: Driver) -> list[tuple[Any, tuple[Any, ...]]]:
        queued: list[tuple[Any, tuple[Any, ...]]] = []

        def queueing(stream: Any, function: Any, shape: Any, args: Any) -> Any:
            return lambda: queued.append((stream, tuple(args)))

        for module in (cuda_driver, rank_gpus):
            monkeypatch.setattr(module, "driver", driver)
        monkeypatch.setattr(rank_gpus, "queueing", queueing)
        monkeypatch.setattr(rank_gpus.nvrtc, "compile", lambda *_: EmptyCubin(b"", {}))
        return queued

    return used


def work(rows: int = 3) -> Work:
    x = TensorSpec("x", DType.BF16, (rows, 64))
    ins = (x, TensorSpec("w", DType.F32, (64,)), x, TensorSpec("s", DType.F32, (1,)))
    return Work(OP.name, OP, ATTRS, ins, OP.infer(ATTRS, ins), frozenset({1, 3}))


def timer() -> Any:
    made: Any = object.__new__(gpu_timer.GpuTimer)
    made._ranks, made._target, made._cubins = None, H200, None
    made._gpu = SimpleNamespace(use=lambda: None)
    made._timings = SimpleNamespace(get=lambda key: None, put=lambda key, seconds: None)
    made._lost = 0
    return made


@pytest.mark.parametrize(("gpus", "peers"), [(1, True), (2, False)])
def test_without_the_gpus_nothing_is_run(gpus: int, peers: bool, use: Any) -> None:
    driver = Driver(gpus, peers)
    queued = use(driver)
    for tactic in OP.cuda.tactics:
        if tactic.refuse(ATTRS, work().ins, H200) is None:
            plan = tactic.plan(ATTRS, work().ins, H200)
            assert timer()(work(), tactic, plan) is None
    assert not queued and not driver.held.total()


def test_every_rank_runs_it_over_its_own_memory(use: Any) -> None:
    driver = Driver(2)
    queued = use(driver)
    made = timer()
    seen = []
    for tactic in OP.cuda.tactics:
        if tactic.refuse(ATTRS, work().ins, H200) is not None:
            continue
        plan = tactic.plan(ATTRS, work().ins, H200)
        queued.clear()
        seconds = made(work(), tactic, plan)
        assert seconds == pytest.approx(1e-3 / rank_gpus.NODES)
        streams = [stream for stream, _ in queued]
        runs = (1 + rank_gpus.NODES) * len(plan.launches)
        assert [streams.count(s) for s in dict.fromkeys(streams)] == [runs] * 2
        last = [next(a for s, a in reversed(queued) if s == stream) for stream in set(streams)]
        if tactic.name in ("push", "one_shot"):
            assert sorted(args[-1] for args in last) == [0, 1]  # the ranks' numbers
            assert not {*last[0][:3]} & {*last[1][:3]}
        seen.append(tactic.name)
    assert seen == ["push", "one_shot", "one_shot_apart"]
    made._close_ranks()
    assert not any(driver.held.values()), driver.held


def test_regions_grow_with_what_is_timed(use: Any) -> None:
    use(Driver(2))
    made = timer()
    tactic = next(t for t in OP.cuda.tactics if t.name == "one_shot")
    sizes = []
    for rows in (3, 1, 500):
        plan = tactic.plan(ATTRS, work(rows).ins, H200)
        made._measure_ranks(work(rows), tactic, plan)
        sizes.append(made._ranks.symmetric)
        assert made._ranks.symmetric >= plan.symmetric
    assert sizes[0] == sizes[1] < sizes[2]


def test_the_least_time_is_taken_and_without_times_all_are_predicted() -> None:
    times = {"push": 5e-6, "one_shot": 4e-6, "one_shot_apart": 3e-6}
    taken = choose(OP.cuda, work(), H200, lambda work, tactic, plan: times[tactic.name])
    assert taken.tactic is not None and taken.tactic.name == "one_shot_apart" and taken.timed
    blind = choose(OP.cuda, work(), H200, lambda work, tactic, plan: None)
    assert blind.tactic is not None and blind.tactic.name == "push" and not blind.timed
    # A prefill's parts are more than are pushed, and many rows of a block come one after another.
    many = choose(OP.cuda, work(1 << 17), H200)
    assert many.tactic is not None and many.tactic.name == "one_shot_apart"


def test_operands_have_all_their_bytes() -> None:
    found = gpu_timer.fillings(work(), np.random.default_rng(0))
    assert [np.resize(f.pattern, f.nbytes).nbytes for f in found] == [s.nbytes for s in work().ins]
