"""What ranks on one GPU launch keeps the driver's rules: nothing of it is run.

A driver that knows the rules takes the calls of the tests for a GPU (test_cuda_ranks.py,
test_cuda_sample_ranks.py), in their order.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")
from spark_engine.builder.native import rank_gpus
from spark_engine.device import cuda_driver
from spark_engine.kernel import H200, Tactic
from spark_engine.op import Attrs, Op
from spark_engine.plugins.ops.ranks import all_reduce, gather_logits, reduce_norm_quant
from spark_engine.plugins.ops.sampling import sample
from spark_engine.tensors import Array
from tests.builder.empty_cubins import EmptyCubin
from tests.fake_driver import FakeDriver
from tests.plugins.cases.sampling.sample import Launch
from tests.plugins.ranks.rank_cards import RankCards, specs_of

ALWAYS = 48 << 10  # bytes of dynamic shared memory that need no leave
# While a launch waits for another rank's, these may wait for it, or for the whole device.
BLOCKING = (
    "cuCtxSynchronize cuMemAlloc cuMemFree cuMemcpyDtoH cuMemcpyHtoD cuModuleLoadData "
    "cuModuleUnload cuFuncLoad cuFuncSetAttribute cuStreamCreate cuStreamDestroy"
).split()


class Rules(FakeDriver):
    """Fails on a call that a driver refuses, or that never comes back where ranks wait for one
    another on one GPU of `ranks` streams."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks = ranks
        self.leave = True
        self.allowed: dict[int, int] = {}  # of kernels that are loaded
        self.streams: list[int] = []
        self.queued: list[tuple[int, Any, tuple[Any, ...]]] = []  # and not waited for

    def _call(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if name in BLOCKING:
            assert not self.queued, f"{name} between launches that wait for one another"
        answer = super()._call(name, args)
        if name == "cuStreamCreate":
            assert args[0] == self.CUstream_flags.CU_STREAM_NON_BLOCKING.value
            self.streams.append(answer[1])
        elif name == "cuFuncLoad":
            self.allowed[args[0]] = ALWAYS
        elif name == "cuFuncSetAttribute":
            _, what, size = args
            assert what == cuda_driver.MAX_SHARED and size <= H200.shared_bytes
            self.allowed[args[0]] = max(ALWAYS, size) if self.leave else ALWAYS
        elif name == "cuStreamSynchronize":
            self._every_rank_launched()
        elif name == "cuLaunchKernelEx":
            self._launch(*args[:3])
        return answer

    def _launch(self, config: Any, function: Any, given: tuple[Any, ...]) -> None:
        assert function in self.allowed, "a kernel that is loaded where it is launched waits"
        if config.sharedMemBytes > self.allowed[function]:
            self.queued.clear()  # so that what fails is this
            raise AssertionError(f"{config.sharedMemBytes} bytes of shared memory without leave")
        threads = config.blockDimX * config.blockDimY * config.blockDimZ
        assert 0 < threads <= 1024 and config.blockDimZ <= 64
        assert 0 < config.gridDimX < 1 << 31 and 0 < config.gridDimY < 1 << 16 > config.gridDimZ
        values, kinds = given
        assert len(values) == len(kinds) and all(v is not None for v in values)
        self.queued.append((int(config.hStream), (config.gridDimX, config.gridDimY), values))

    def _every_rank_launched(self) -> None:
        """Every rank queued the same launches, each rank on its own stream."""
        if not self.queued:
            return
        streams = list(dict.fromkeys(stream for stream, _, _ in self.queued))
        assert len(streams) == self.ranks and set(streams) <= set(self.streams)
        by_rank = [[q[1] for q in self.queued if q[0] == stream] for stream in streams]
        assert all(mine == by_rank[0] for mine in by_rank)
        self.queued.clear()


@pytest.fixture(params=[2, 4])
def cards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RankCards:
    driver = Rules(request.param)
    for module in (cuda_driver, rank_gpus):
        monkeypatch.setattr(module, "driver", driver)
    monkeypatch.setattr("tests.plugins.ranks.rank_cards.driver", driver)
    monkeypatch.setattr(rank_gpus.nvrtc, "compile", lambda *_: EmptyCubin(b"", {}))
    few = replace(H200, card=replace(H200.card, sms=16))
    return RankCards([0] * request.param, few, Path(), 1 << 10)


def nodes(ranks: int) -> list[tuple[Op, Attrs, list[Sequence[Array]]]]:
    """The served width of the vocabulary, and a decode step's sums."""
    launch = Launch(0.8, top_k=20, width=248_320, vocab=248_320, slots=(0, -1, 2))
    arrays = launch.inputs(np.random.default_rng(0))
    cuts = np.split(arrays[0], ranks, axis=1)
    x, logits = np.zeros((3, 5120), ml_dtypes.bfloat16), np.zeros((2, 4096), np.float32)
    norm = (x, np.ones(5120, np.float32), x, np.ones(1, np.float32))
    shares = [(cut, *arrays[1:], np.array([i], np.int32)) for i, cut in enumerate(cuts)]
    quant: Attrs = {"ranks": ranks, "eps": 1e-6, "keep": 1, "quant": "fp8", "n": 1}
    return [
        (sample.OP, {**launch.attrs, "ranks": ranks}, list(shares)),
        (all_reduce.OP, {"ranks": ranks}, [(x,)] * ranks),
        (gather_logits.OP, {"ranks": ranks}, [(logits,)] * ranks),
        (reduce_norm_quant.OP, quant, [norm] * ranks),
    ]


def test_every_launch_of_ranks_keeps_the_drivers_rules(cards: RankCards) -> None:
    driver: Any = rank_gpus.driver
    shared = 0
    for op, attrs, operands in nodes(cards.ranks):
        ran = 0
        for tactic in op.cuda.tactics:
            if refused(cards, op, tactic, attrs, operands):
                continue
            cards.run(op, attrs, tactic, operands)
            ran += 1
        assert ran, op.name
        shared = max([shared, *driver.allowed.values()])
    assert shared > ALWAYS, "no launch needs leave for its shared memory"
    cards.close()
    assert not any(driver.held.values()), driver.held


def refused(
    cards: RankCards, op: Op, tactic: Tactic, attrs: Attrs, operands: Sequence[Sequence[Array]]
) -> str | None:
    return tactic.refuse(attrs, specs_of(op, attrs, operands[0]), cards.target)


def test_a_launch_that_no_driver_takes_is_seen(
    cards: RankCards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules themselves: shared memory without leave, a rank that is not launched, and memory
    taken while ranks wait for one another."""
    driver: Any = rank_gpus.driver
    op, attrs, operands = nodes(cards.ranks)[1]
    tactic = op.cuda.tactics[0]
    plan = tactic.plan(attrs, specs_of(op, attrs, operands[0]), cards.target)
    with cards.placed(tactic, plan, operands, [operands[0][0].nbytes]) as (_, queues):
        queues[0][0]()
        with pytest.raises(AssertionError):
            cards.wait(0)
        with pytest.raises(AssertionError, match="cuMemAlloc between launches"):
            cards.put(0, operands[0][0])
        driver.queued.clear()
    op, attrs, operands = nodes(cards.ranks)[0]
    monkeypatch.setattr(driver, "leave", False)
    with pytest.raises(AssertionError, match="bytes of shared memory without leave"):
        cards.run(op, attrs, op.cuda.tactics[0], operands)
