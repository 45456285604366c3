"""The buffers of a timed node: their places in one block, what they hold, and its replays."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.builder.native import gpu_timer  # noqa: E402
from spark_engine.builder.native.tactics import Work  # noqa: E402
from spark_engine.builder.native.timing_inputs import fillings  # noqa: E402
from spark_engine.kernel import Plan, Scratch  # noqa: E402
from spark_engine.tensors import DType, TensorSpec  # noqa: E402
from tests.runtime.fake_gpu import NOTHING, FakeGpu  # noqa: E402

SPECS = (TensorSpec("x", DType.BF16, (3, 5)), TensorSpec("w", DType.F32, (7,)))
WORK = Work("Toy", None, {}, SPECS, (TensorSpec("y", DType.BF16, (3, 5)),), frozenset({1}))
PLAN = Plan((), (Scratch(10, zeroed=True), Scratch(300)))


class Card(FakeGpu):
    """`milliseconds` of each replay."""

    l2_bytes = 40
    replay_ms = 1.0

    def milliseconds(self, first: object, last: object) -> float:
        return self.replay_ms


@pytest.fixture
def card() -> Card:
    return Card({})


def bench(card: Any) -> Any:
    return gpu_timer._Bench(card, WORK)


def test_every_buffer_has_its_place_in_its_block(card: Card) -> None:
    made = bench(card)
    need = made.missing(PLAN)
    made.fill(PLAN)
    assert made.copies == 3, "of the weight, twice the cache"
    sizes = [(made._inputs[0], 30), (made._inputs[1], 28), (made._outputs[0], 30)]
    sizes += [
        ([address], need.nbytes) for address, need in zip(made._scratch, PLAN.scratch, strict=True)
    ]
    ends = sorted((a, a + nbytes) for addresses, nbytes in sizes for a in addresses)
    firsts = made._inputs[0][0], made._scratch[0]  # of the two blocks
    assert len(ends) == 1 + 3 + 1 + 2
    assert not any(all((a - b) % gpu_timer.PLACE for b in firsts) for a, _ in ends)
    assert all(end <= start for (_, end), (start, _) in zip(ends, ends[1:], strict=False))
    assert card.taken == need and card.held["memory"] == 2
    wanted = fillings(WORK, np.random.default_rng(0))
    for address in made._inputs[1]:
        assert card.at(address, 28).tobytes() == wanted[1].pattern.tobytes()
    assert not card.at(made._scratch[0], 10).any(), "zeroed"
    made.free()
    assert card.held == {**NOTHING, "contexts": 1}


@pytest.mark.parametrize(("ms", "replays"), [(1.0, 9), (30.0, 5)])
def test_a_long_graph_is_replayed_less_often(card: Card, ms: float, replays: int) -> None:
    made = bench(card)
    made.fill(PLAN)
    card.replay_ms = ms
    assert made.seconds([]) == ms / 1e3 / 4 and card.calls.count("replay") == replays
    made.free()


@pytest.mark.parametrize(("cache", "launches"), [(40, 4), (3, 1)])
def test_a_large_operand_is_read_once_by_each_replay(card: Card, cache: int, launches: int) -> None:
    card.l2_bytes = cache
    made = bench(card)
    made.fill(PLAN)
    assert made.seconds([]) == 1e-3 / launches
    made.free()


def test_the_tactics_of_a_work_share_its_operands(card: Card) -> None:
    """A later plan gets its scratch alone; operands are neither allocated nor written again."""
    made = bench(card)
    made.fill(PLAN)
    card.fill(made._scratch[0], 7, 10)
    places, written = [*made._inputs, *made._outputs], card.calls.count("upload")
    other = Plan((), (Scratch(10, zeroed=True),))
    assert made.missing(other) == 10 + gpu_timer.PLACE
    made.seconds([])
    made.fill(other)
    assert [*made._inputs, *made._outputs] == places and card.calls.count("upload") == written
    assert len(made._scratch) == 1 and not card.at(made._scratch[0], 10).any(), "zeroed again"
    made.seconds([])
    made.fill(Plan(()))
    assert card.held["memory"] == 1, "of the operands"
    made.free()
    assert card.held == {**NOTHING, "contexts": 1}


class Limited(Card):
    """Its free memory falls with what is allocated."""

    limit = 4000

    @property
    def free_bytes(self) -> int:  # type: ignore[override]
        return self.limit - sum(len(block) for block in self.blocks.values())


def test_a_measured_tactic_leaves_the_operands_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its graph and scratch are gone, and the next one has their memory."""
    card, plan = Limited({}), Plan((), (Scratch(1000),))
    timer: Any = gpu_timer.GpuTimer.__new__(gpu_timer.GpuTimer)
    timer._gpu, timer._say = card, print
    monkeypatch.setattr(timer, "_functions", lambda tactic, plan: [])
    for _ in range(3):
        assert timer._measure(WORK, None, plan) == 1e-3 / 4
        assert card.held == {**NOTHING, "contexts": 1, "memory": 1}
    large = Plan((), (Scratch(card.limit),))
    assert timer._measure(WORK, None, large) is None, "it does not fit"
    assert timer._measure(WORK, None, plan) == 1e-3 / 4
    timer._free_bench()
    assert card.held == {**NOTHING, "contexts": 1}
