"""The order of a follower's calls, and its errors for invalid commands."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from spark_engine.errors import ExecutorError
from spark_engine.interface import Limits, tables
from spark_engine.manifest import StateInfo
from spark_engine.runtime.executors.executor import Specs, Wait
from spark_engine.runtime.executors.memory import Changed
from spark_engine.runtime.ranks.follower import Follower
from spark_engine.runtime.ranks.messages import (
    ORDERS,
    CopyRows,
    LaunchBucket,
    LaunchRest,
    Leave,
    Order,
    Restore,
    Table,
    Tables,
    encode,
)
from spark_engine.tensors import Array, DType, TensorSpec

LIMITS = Limits(max_seqs=3, max_context=64, pages=5, vocab=11, page_size=16, bias_slots=2)
STATES = (StateInfo(TensorSpec("layers.0.gdn_state", DType.F32, (4, 2)), "sequence"),)
KEY = ("decode", 2)


class Noting:
    """An executor and a device's tables that record their calls."""

    def __init__(self) -> None:
        self.done: list[object] = []
        steps = (TensorSpec("slots", DType.I32, (2,)), TensorSpec("starts", DType.I32, (2,)))
        states = tuple(info.spec for info in STATES)
        self.specs = Specs((*steps, *tables(LIMITS)), states, ())

    def run(self, buffers: Mapping[str, Array]) -> None:
        raise AssertionError

    def launch(self, buffers: Mapping[str, Array]) -> Wait:
        number = sum(isinstance(one, tuple) and one[0] == "launch" for one in self.done)
        self.done.append(("launch", buffers["slots"].tolist(), buffers["starts"].tolist()))
        return lambda: self.done.append(("wait", number))

    def launch_to_sample(self, buffers: Mapping[str, Array]) -> Callable[[], Wait]:
        self.done.append("part")
        return lambda: self.launch(buffers)

    def close(self) -> None:
        pass

    def write(self, given: Mapping[str, Array], changed: Changed) -> None:
        rows = {n: {s: given[n][s].tolist() for s in slots} for n, slots in changed.items()}
        self.done.append(("tables", rows))


@pytest.fixture
def noting() -> Noting:
    return Noting()


@pytest.fixture
def follower(noting: Noting) -> Follower:
    made = Follower({KEY: noting}, STATES, tables(LIMITS), None, noting)
    made.memory.flush()
    noting.done.clear()
    return made


def inputs(*numbers: int) -> bytes:
    return np.array(numbers, np.int32).tobytes()


def follow(follower: Follower, *orders: Order) -> bool:
    return follower.follow(ORDERS.decode(encode([*orders])))


def test_tables_reach_the_device_before_the_launch_and_before_its_rest(
    follower: Follower, noting: Noting
) -> None:
    lens = Table("prompt_lens", [1, 3], inputs(7, 9))
    assert follow(follower, Tables([lens]), LaunchBucket(*KEY, inputs(1, 3, 5, 6), True))
    assert noting.done == [("tables", {"prompt_lens": {1: 7, 3: 9}}), "part"]
    noting.done.clear()
    assert follow(follower, Tables([Table("prompt_lens", [0], inputs(4))]), LaunchRest())
    assert noting.done == [("tables", {"prompt_lens": {0: 4}}), ("launch", [1, 3], [5, 6])]
    assert not follow(follower, Leave(), LaunchRest())


def test_buffers_are_used_again_when_their_step_is_over(follower: Follower, noting: Noting) -> None:
    for i in range(4):
        follow(follower, LaunchBucket(*KEY, inputs(i, i, 0, 0)))
    waits = [one for one in noting.done if one[0] == "wait"]  # type: ignore[index]
    assert waits == [("wait", 0), ("wait", 1)]
    assert noting.done.index(("wait", 0)) < noting.done.index(("launch", [2, 2], [0, 0]))


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (LaunchBucket("decode", 4, b""), "which this rank does not have"),
        (LaunchBucket(*KEY, inputs(1, 2, 3, 4, 5)), "sent 20 bytes .* this rank expects 16"),
        (LaunchRest(), "has not started"),
        (Restore(3, 0, []), "snapshot 3, which this rank does not have"),
    ],
)
def test_orders_that_make_no_sense_are_said(follower: Follower, order: Any, words: str) -> None:
    with pytest.raises(ExecutorError, match=words):
        follow(follower, CopyRows([]), order)
