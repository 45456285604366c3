"""Buffers shared by buckets, and snapshots of one sequence."""

import numpy as np
import pytest

from spark_engine.errors import EngineError
from spark_engine.interface import Limits, tables
from spark_engine.manifest import StateInfo
from spark_engine.runtime.executors.executor import Specs
from spark_engine.runtime.executors.memory import EngineMemory, allocate
from spark_engine.tensors import DType, TensorSpec

LIMITS = Limits(max_seqs=3, max_context=64, pages=5, vocab=11, page_size=16, bias_slots=2)
STATES = (
    StateInfo(TensorSpec("token_counts", DType.I32, (4, 11)), "slot"),
    StateInfo(TensorSpec("layers.0.gdn_state", DType.BF16, (4, 2, 3)), "slot"),
    StateInfo(TensorSpec("layers.1.k_pages", DType.U8, (6, 2, 16)), "page"),
)


def specs(rows: int) -> Specs:
    return Specs(
        (TensorSpec("slots", DType.I32, (rows,)), *tables(LIMITS)),
        tuple(info.spec for info in STATES),
        (TensorSpec("top_ids", DType.I32, (rows, 20)),),
    )


def make(sets: int = 1) -> EngineMemory:
    buckets = {("decode", n): specs(n) for n in (1, 2, 4)}
    return EngineMemory(STATES, tables(LIMITS), buckets, sets)


def test_buckets_share_states_tables_and_first_rows() -> None:
    memory = make()
    small, large = memory.buffers("decode", 2, 0), memory.buffers("decode", 4, 0)
    assert small["top_ids"].shape == (2, 20) and large["top_ids"].shape == (4, 20)
    assert np.shares_memory(small["top_ids"], large["top_ids"])
    assert small["token_counts"] is large["token_counts"] is memory.states["token_counts"]
    assert small["token_counts.out"] is memory.states["token_counts"]
    assert small["page_table"] is memory.tables["page_table"]
    assert all(a.flags.c_contiguous for a in small.values())


def test_sets_share_states_only() -> None:
    memory = make(sets=2)
    first, second = memory.buffers("decode", 4, 0), memory.buffers("decode", 4, 1)
    assert not np.shares_memory(first["slots"], second["slots"])
    assert not np.shares_memory(first["top_ids"], second["top_ids"])
    assert first["token_counts"] is second["token_counts"]


def test_unused_entries_of_the_tables_start_as_such() -> None:
    memory = make()
    assert (memory.tables["page_table"] == -1).all() and (memory.tables["bias_ids"] == -1).all()


def test_a_snapshot_moves_one_sequence_and_touches_no_other() -> None:
    """Bit for bit, NaN too."""
    memory = make()
    rng = np.random.default_rng(0)
    held = {name: state.view(np.uint8) for name, state in memory.states.items()}
    for state in held.values():
        state[...] = rng.integers(0, 256, state.shape)
    memory.states["layers.0.gdn_state"][1, 0] = np.nan
    before = {name: state.copy() for name, state in held.items()}
    saved = memory.store.save(1, [4, 0])
    assert saved.nbytes == memory.store.slot_bytes + 2 * memory.store.page_bytes
    for state in held.values():
        state[1] = 77  # the copy must not change
    held["layers.1.k_pages"][[4, 0]] = 77
    memory.store.restore(saved, 2, [3, 1])
    for name in ("token_counts", "layers.0.gdn_state"):
        assert (held[name][2] == before[name][1]).all()
        assert (held[name][[0, 3]] == before[name][[0, 3]]).all()
    pages = held["layers.1.k_pages"]
    assert (pages[3] == before["layers.1.k_pages"][4]).all()
    assert (pages[1] == before["layers.1.k_pages"][0]).all()
    assert (pages[[2, 5]] == before["layers.1.k_pages"][[2, 5]]).all()


def test_a_bucket_with_a_state_unlike_the_manifests_is_refused() -> None:
    other = TensorSpec("token_counts", DType.I32, (4, 12))
    bad = Specs(specs(1).inputs, (other, *specs(1).states[1:]), specs(1).outputs)
    with pytest.raises(EngineError, match="token_counts is i32"):
        EngineMemory(STATES, tables(LIMITS), {("decode", 1): bad})
    with pytest.raises(EngineError, match="not in the manifest"):
        EngineMemory(STATES[1:], tables(LIMITS), {("decode", 1): specs(1)})


def test_arrays_are_aligned_and_zero() -> None:
    for size in (1, 3, 1000, 1 << 20):
        array = allocate(TensorSpec("x", DType.U8, (size,)))
        assert array.ctypes.data % 64 == 0 and array.shape == (size,) and not array.any()
