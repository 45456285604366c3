"""What is kept of a launch: copies, of states the rows in use, and states from node to node."""

from typing import Any

import numpy as np

from spark_engine.check.engines.live_rows import LiveRows
from spark_engine.check.engines.reference import ReferenceStep
from spark_engine.check.nodes.node_recorder import _LaunchRecorder
from spark_engine.interface import Limits
from spark_engine.manifest import StateInfo
from spark_engine.plugins.registry import get
from spark_engine.tensors import DType, TensorSpec

LIMITS = Limits(max_seqs=5, max_context=192, pages=11, vocab=8, snapshots=2)
PAGES = StateInfo(TensorSpec("layers.0.k_pages", DType.U8, (12, 2, 4)), "page")
COUNTS = StateInfo(TensorSpec("token_counts", DType.I32, (6, 8)), "slot")
STATES = (PAGES, COUNTS)


def _recorder(slot: int) -> tuple[_LaunchRecorder, dict[str, Any], LiveRows]:
    """Of a launch of one slot and an inert row, as it is shown: with the neighbours."""
    table = np.full((6, 3), -1, np.int32)
    table[1, 0], table[slot, :2] = 5, (0, 10)  # slot 1 has no row in this launch
    buffers: dict[str, Any] = {
        "page_table": table,
        "slots": np.asarray([slot, -1], np.int32),
        "counts": np.asarray([1, 0], np.int32),
        "token_ids": np.zeros(2, np.int32),
        "layers.0.k_pages": np.arange(96, dtype=np.uint8).reshape(12, 2, 4),
        "token_counts": np.arange(48, dtype=np.int32).reshape(6, 8),
    }
    inputs = {name: buffers[name] for name in ("page_table", "slots", "counts")}
    return (
        _LaunchRecorder(inputs, STATES, {"w"}),
        buffers,
        LiveRows.of(buffers, LIMITS, STATES, near=1),
    )


def test_of_states_the_rows_in_use_and_their_neighbours_are_kept() -> None:
    recorder, buffers, live = _recorder(slot=4)
    for name, count, index in (
        ("layers.0.k_pages", 12, [0, 1, 9, 10]),  # 11 is the scratch page
        ("token_counts", 6, [3, 4]),  # 5 is the scratch slot, and a snapshot has no row
    ):
        given = live.cut(name, buffers[name])
        step = ReferenceStep("n", "Any", None, {}, (name, "w"), (f"{name}.out",))
        weight, after = np.ones(1), given + 1
        recorder.keep(step, (given, weight), (after,), live)
        kept = recorder.nodes[-1]
        assert kept.operands[0].tolist() == buffers[name][index].tolist()
        assert kept.results[0].tolist() == (buffers[name][index] + 1).tolist()
        assert kept.operands[1] is weight
        held = kept.states[f"{name}.out"]
        assert (held.name, held.count, held.index.tolist()) == (name, count, index)


def test_what_names_rows_is_kept_as_the_engine_numbers_them() -> None:
    recorder, buffers, live = _recorder(slot=3)
    names = ("slots", "page_table", "counts")
    given = tuple(live.cut(name, buffers[name]) for name in names)
    assert given[0].tolist() == [1], "slot 3, between its neighbours"
    recorder.keep(
        ReferenceStep("n", "Any", None, {}, names, ("y",)), given, (np.ones((1, 3)),), live
    )
    wanted = {name: buffers[name].tolist() for name in names}
    buffers["slots"] += 1  # the next launch
    (kept,) = recorder.nodes
    assert kept.results[0].tolist() == [[1.0] * 3, [0.0] * 3], "a row of the bucket is inert"
    assert [a.tolist() for a in kept.operands] == [*wanted.values()]


def test_a_state_is_known_along_a_chain_and_copied_before_it_changes() -> None:
    recorder, buffers, live = _recorder(slot=2)
    counts, op = live.cut("token_counts", buffers["token_counts"]), get("mark_tokens")
    counts[:] = 0
    names = op.names({}, len(op.operands))
    assert names[0] == "token_counts"
    steps = [
        ReferenceStep(f"n{i}", op.name, op, {}, (before, *names[1:]), (after,))
        for i, (before, after) in enumerate(
            [("token_counts", "between"), ("between", "token_counts.out")]
        )
    ]
    rest = tuple(np.zeros(3, np.int32) for _ in names[1:])
    between, after = counts + 1, counts + 2
    recorder.keep(steps[0], (counts, *rest), (between,), live)
    recorder.keep(steps[1], (between, *rest), (after,), live)
    counts += 9
    first, second = recorder.nodes
    assert first.operands[0].max() == 0 and second.results[0].max() == 2
    for name in ("token_counts", "between"):
        held = first.states[name]
        assert held.name == "token_counts" and held.index.tolist() == [1, 2, 3]
    assert set(second.states) == {"between", "token_counts.out"}
