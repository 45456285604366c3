"""What is kept of a launch: copies, of the pages those in use, and states by their way through."""

from __future__ import annotations

from typing import Any

import numpy as np

from spark_engine.check.node_recorder import _Keeper
from spark_engine.check.reference import Step
from spark_engine.manifest import StateInfo
from spark_engine.plugins.registry import get
from spark_engine.tensors import DType, TensorSpec

PAGES = StateInfo(TensorSpec("layers.0.k_pages", DType.U8, (12, 2, 4)), "page")
COUNTS = StateInfo(TensorSpec("token_counts", DType.I32, (4, 8)), "slot")


def _keeper() -> tuple[_Keeper, dict[str, Any]]:
    table = np.full((4, 3), -1, np.int32)
    table[0, 0], table[2, :2] = 5, (0, 10)  # slot 0 has no row in this launch
    buffers: dict[str, Any] = {
        "page_table": table,
        "slots": np.asarray([2, -1], np.int32),
        "counts": np.asarray([1, 0], np.int32),
        "layers.0.k_pages": np.arange(96, dtype=np.uint8).reshape(12, 2, 4),
        "token_counts": np.zeros((4, 8), np.int32),
    }
    return _Keeper(buffers, (PAGES, COUNTS)), buffers


def test_of_pages_those_in_use_and_their_neighbours_are_kept() -> None:
    keeper, buffers = _keeper()
    pages = buffers["layers.0.k_pages"]
    step = Step("n", "Any", None, {}, ("layers.0.k_pages", "w"), ("layers.0.k_pages.out",))
    weight, after = np.ones(3), pages + 1
    keeper.keep(step, (pages.view(), weight), (after,))
    (kept,) = keeper.nodes
    index = [0, 1, 9, 10]  # 11 is the scratch page
    assert kept.operands[0].tolist() == pages[index].tolist()
    assert kept.results[0].tolist() == after[index].tolist()
    assert kept.operands[1] is weight
    held = kept.states["layers.0.k_pages.out"]
    assert (held.name, held.count) == ("layers.0.k_pages", 12)
    assert held.index is not None and held.index.tolist() == index


def test_a_state_is_known_along_a_chain_and_copied_before_it_changes() -> None:
    keeper, buffers = _keeper()
    counts, op = buffers["token_counts"], get("mark_tokens")
    names = op.names({}, len(op.operands))
    assert names[0] == "token_counts"
    steps = [
        Step(f"n{i}", op.name, op, {}, (before, *names[1:]), (after,))
        for i, (before, after) in enumerate(
            [("token_counts", "between"), ("between", "token_counts.out")]
        )
    ]
    rest = tuple(np.zeros(1, np.int32) for _ in names[1:])
    between, after = counts + 1, counts + 2
    keeper.keep(steps[0], (counts.view(), *rest), (between,))
    keeper.keep(steps[1], (between, *rest), (after,))
    counts += 9
    first, second = keeper.nodes
    assert first.operands[0].max() == 0 and second.results[0].max() == 2
    for name in ("token_counts", "between"):
        assert first.states[name].name == "token_counts" and first.states[name].index is None
    assert set(second.states) == {"between", "token_counts.out"}
