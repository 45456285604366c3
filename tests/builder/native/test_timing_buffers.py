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


@pytest.mark.parametrize(
    ("cache", "ms", "runs", "replays"),
    [(40, 0.05, 4, 10), (40, 0.5, 3, 10), (40, 30, 3, 6), (3, 0.05, 4, 10), (3, 0.5, 1, 9)]
    + [(3, 30, 1, 5)],
)
def test_a_long_run_is_repeated_less_often(
    card: Card, cache: int, ms: float, runs: int, replays: int
) -> None:
    """One of a graph that is measured alone; more where copies are needed, or a run is short."""
    card.l2_bytes, card.replay_ms = cache, ms
    made = bench(card)
    made.fill(PLAN)
    assert made.seconds([]) == pytest.approx(ms / 1e3 / runs)
    assert card.calls.count("replay") == replays
    made.free()


@pytest.mark.parametrize(
    ("first", "second", "replays"),
    [(0.5, 1.1, 1), (0.5, 0.9, 2), (0.5, 0.55, 9), (0.01, 0.1, 3), (0.01, 0.01, 10)],
)
def test_a_tactic_that_is_far_slower_than_another_leaves_early(
    card: Card, first: float, second: float, replays: int
) -> None:
    """One short run is no answer: what its graph takes in addition is a part of it."""
    card.l2_bytes = 3  # no copies
    made = bench(card)
    for ms in (first, second):
        made.fill(PLAN)
        before = card.calls.count("replay")
        card.replay_ms = ms
        made.seconds([])
    assert card.calls.count("replay") - before == replays
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
    card.l2_bytes = 3  # no copies
    timer: Any = gpu_timer.GpuTimer.__new__(gpu_timer.GpuTimer)
    timer._gpu, timer._say = card, print
    monkeypatch.setattr(timer, "_functions", lambda tactic, plan: [])
    for _ in range(3):
        assert timer._measure(WORK, None, plan) == 1e-3
        assert card.held == {**NOTHING, "contexts": 1, "memory": 1}
    large = Plan((), (Scratch(card.limit),))
    assert timer._measure(WORK, None, large) is None, "it does not fit"
    assert timer._measure(WORK, None, plan) == 1e-3
    timer._free_bench()
    assert card.held == {**NOTHING, "contexts": 1}
