"""Snapshots of the prefix cache: copies of rows and pages within the states, on the host and a
device.

A device queues its copies; each one sees all copies queued before it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest

from spark_engine.device.resources import DeviceResources
from spark_engine.interface import Limits, Precision
from spark_engine.manifest import Bucket, Fingerprint, Manifest, Memory, ModelInfo, StateInfo
from spark_engine.plugins.ops.sampling import mark_tokens
from spark_engine.runtime.executors.cache_size import SPARE, GpuMemory, budget, device_rows
from spark_engine.runtime.executors.device_memory import MARKED, DeviceStates
from spark_engine.runtime.executors.memory import HostStates, PrefixStore, States
from spark_engine.tensors import Array, DType, TensorSpec
from tests.runtime.fake_gpu import FakeGpu

SLOTS, SNAPSHOTS, VOCAB = 3, 4, 11
ROWS = SLOTS + SNAPSHOTS + 1
COUNTS = StateInfo(TensorSpec("token_counts", DType.I32, (SLOTS + 1, VOCAB)), "slot")
BY_SEQUENCE = (
    StateInfo(TensorSpec("layers.0.gdn_state", DType.F32, (ROWS, 2, 3)), "sequence"),
    StateInfo(TensorSpec("layers.0.conv_state", DType.BF16, (ROWS, 5)), "sequence"),
)
PAGES = StateInfo(TensorSpec("layers.1.k_pages", DType.U8, (6, 2, 16)), "page")
STATES = (COUNTS, *BY_SEQUENCE, PAGES)
Made: TypeAlias = tuple[States, Callable[[str], Array]]


def on_host() -> Made:
    states = HostStates(STATES)
    return states, lambda name: states.arrays[name]


def on_device() -> Made:
    """The plan of its engine has no snapshot rows; the runtime allocates them."""
    gpu: Any = FakeGpu({})
    plain = [
        replace(i, spec=replace(i.spec, shape=(SLOTS + 1, *i.spec.dims[1:])))
        if i.unit == "sequence"
        else i
        for i in STATES
    ]
    states, dims = (
        DeviceStates(DeviceResources(gpu), plain, SNAPSHOTS),
        {i.spec.name: i.spec for i in STATES},
    )

    def read(name: str) -> Array:
        gpu.wait()
        found: Array = gpu.view(states.addresses[name], dims[name].dtype.numpy, dims[name].dims)
        return found

    return states, read


@pytest.fixture(params=[on_host, on_device])
def made(request: pytest.FixtureRequest) -> Made:
    """States in which every byte is known."""
    states, read = request.param()
    for info in STATES:
        array = read(info.spec.name)
        array.reshape(-1).view(np.uint8)[:] = np.arange(array.nbytes) % 251
    return states, read


def bits(array: Array) -> Array:
    return array.view(np.uint8).copy()


def test_a_prefix_is_a_row_of_the_states_by_sequence_and_pages(made: Made) -> None:
    """Or pages alone; what it is written over has its bits, and nothing else changes."""
    states, read = made
    assert isinstance(states, PrefixStore)
    before = {info.spec.name: bits(read(info.spec.name)) for info in STATES}
    names = {info.spec.name for info in BY_SEQUENCE}
    both, alone = states.save_prefix([4, 2], names, SLOTS + 1), states.save_prefix([1])
    assert {*both.rows} == names and not alone.rows
    states.restore(both, SLOTS + 3, [0, 3])
    states.restore(alone, 0, [5])
    for info in STATES:
        rows = {PAGES.unit: {0: 4, 3: 2, 5: 1}, "sequence": {SLOTS + 3: SLOTS + 1}}
        expected = before[info.spec.name]
        for to, source in rows.get(info.unit, {}).items():
            expected[to] = before[info.spec.name][source]
        assert np.array_equal(bits(read(info.spec.name)), expected), info.spec.name


def test_what_a_snapshot_takes(made: Made) -> None:
    states, _ = made
    assert (states.snapshot_rows, states.snapshot_bytes) == (SNAPSHOTS, 6 * 4 + 5 * 2)
    assert states.slot_bytes == VOCAB * 4 + states.snapshot_bytes and states.page_bytes == 32


@pytest.mark.parametrize(
    ("unit", "moves"),
    [("sequence", [(1, SLOTS), (0, ROWS - 2), (SLOTS + 1, 2)]), ("page", [(4, 0), (1, 3)])],
)
def test_rows_and_pages_go_to_others_and_touch_nothing_else(
    made: Made, unit: str, moves: list[tuple[int, int]]
) -> None:
    states, read = made
    before = {i.spec.name: bits(read(i.spec.name)) for i in STATES}
    (states.copy_rows if unit == "sequence" else states.copy_pages)(moves)
    for info in STATES:
        want = before[info.spec.name].copy()
        if info.unit == unit:
            want[[end for _, end in moves]] = want[[start for start, _ in moves]]
        np.testing.assert_array_equal(bits(read(info.spec.name)), want)


def test_nothing_to_copy_copies_nothing(made: Made) -> None:
    states, read = made
    before = {i.spec.name: bits(read(i.spec.name)) for i in STATES}
    states.copy_rows([])
    states.copy_pages([])
    assert all((bits(read(name)) == array).all() for name, array in before.items())


def test_nan_is_copied_bit_for_bit(made: Made) -> None:
    states, read = made
    read("layers.0.gdn_state")[1] = np.nan
    read("layers.0.gdn_state").view(np.uint32)[1, 0, 0] |= 77
    states.copy_rows([(1, 4)])
    state = bits(read("layers.0.gdn_state"))
    np.testing.assert_array_equal(state[4], state[1])


@pytest.mark.parametrize(("ids", "generated"), [([], []), ([3, 3, 9], []), ([3, 9, 3], [9, 5, 9])])
def test_counts_are_those_of_a_prefill(made: Made, ids: list[int], generated: list[int]) -> None:
    """The op leaves row 1 so after a prompt and generated ids; the other rows do not change."""
    states, read = made
    want = read("token_counts").copy()
    want[1] = 0
    tokens = np.array([*ids, *generated], np.int32)
    steps = (np.full(len(tokens), 1), np.arange(len(tokens)), np.ones(len(tokens), int))
    steps = tuple(step.astype(np.int32) for step in steps)
    last = np.zeros(SLOTS + 1, np.int32)
    arrays = (want, tokens, last, *steps, np.full(SLOTS + 1, len(ids), np.int32))
    (want,) = mark_tokens.reference({"tile": 1}, arrays)
    states.set_counts(1, ids, generated)
    np.testing.assert_array_equal(read("token_counts"), want)


def test_many_rows_of_counts_are_copied_at_once() -> None:
    """More rows than stages: a stage is rewritten only after its copy has ended."""
    slots, gpu = 3 * MARKED, FakeGpu({})
    resources: Any = DeviceResources(gpu)  # type: ignore[arg-type]
    spec = TensorSpec("token_counts", DType.I32, (slots, VOCAB))
    states = DeviceStates(resources, [StateInfo(spec, "slot")])
    for slot in range(slots):
        states.set_counts(slot, [slot % VOCAB])
    gpu.wait()
    found = gpu.view(states.addresses["token_counts"], np.int32, spec.dims)
    assert [np.flatnonzero(row).tolist() for row in found] == [[s % VOCAB] for s in range(slots)]


def test_a_model_without_recurrence_has_no_rows() -> None:
    infos = (COUNTS, PAGES)
    host = HostStates(infos)
    gpu: Any = FakeGpu({})
    device = DeviceStates(DeviceResources(gpu), infos, 7)
    for states in (host, device):
        assert (states.snapshot_rows, states.snapshot_bytes) == (0, 0)


# ---- numbers of rows ----------------------------------------------------------------------------

GIB = 1 << 30
ROW = 1 << 28


def manifest(total: int, row: int = ROW) -> Manifest:
    """Manifest with a plan of `total` bytes, 3 pages of 1 MiB and a scratch page."""
    states = [
        StateInfo(TensorSpec("token_counts", DType.I32, (3, 1)), "slot"),
        StateInfo(TensorSpec("layers.1.k_pages", DType.U8, (4, 1 << 20)), "page"),
    ]
    if row:
        states.append(StateInfo(TensorSpec("layers.0.gdn_state", DType.U8, (3, row)), "sequence"))
    plan = Memory.of(0, states, (), (Bucket("decode", 1, 1, "f", 0),))
    return Manifest(
        "toy", {}, "sm_90a", "h200", "native", ModelInfo("q", 1, 1, 1, 1), Limits(2, 64, 3, 1),
        Precision(DType.BF16, DType.BF16, DType.F32), tuple(states), (), (),
        replace(plan, weights=total - plan.total), (), {}, (), (), {}, {}, (),
        Fingerprint("", "", "", "", ""), {},
    )  # fmt: skip


def test_half_of_what_is_free_and_a_quarter_of_the_device_at_most() -> None:
    engine = manifest(60 * GIB)
    assert device_rows(engine, GpuMemory(80 * GIB, 100 * GIB), None) == 40  # half of 20 GiB
    assert device_rows(engine, GpuMemory(80 * GIB, 100 * GIB, shared=True), None) == 10  # 10 kept
    assert device_rows(engine, GpuMemory(80 * GIB, 20 * GIB), None) == 20  # a quarter of 20
    assert device_rows(engine, GpuMemory(60 * GIB, 100 * GIB), None) == 0
    assert device_rows(engine, GpuMemory(59 * GIB, 100 * GIB), None) == 0


def test_a_budget_is_taken_as_far_as_it_fits() -> None:
    engine = manifest(60 * GIB)
    assert device_rows(engine, GpuMemory(80 * GIB, 100 * GIB), 15 * GIB) == 60
    assert (
        device_rows(engine, GpuMemory(80 * GIB, 100 * GIB), 50 * GIB) == (20 * GIB - SPARE) // ROW
    )
    assert device_rows(engine, GpuMemory(80 * GIB, 100 * GIB), 0) == 0
    assert device_rows(engine, GpuMemory(80 * GIB, 100 * GIB), ROW - 1) == 0
    assert device_rows(manifest(60 * GIB, 0), GpuMemory(80 * GIB, 100 * GIB), None) == 0


def test_the_default_budget_is_all_memory() -> None:
    engine = manifest(60 * GIB)
    assert budget(engine, 40, None) == 3 * (1 << 20) + 40 * ROW
    assert budget(engine, 40, 5) == 5 and budget(engine, 40, 0) == 0
