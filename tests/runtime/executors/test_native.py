"""The native executor over a fake GPU in numpy: staging, tables, states, snapshots, closing."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.engine_file import EngineHeader  # noqa: E402
from spark_engine.errors import EngineError, ExecutorError  # noqa: E402
from spark_engine.interface import PREFILL, Limits, common_states, steps, tables  # noqa: E402
from spark_engine.manifest import Bucket, StateInfo  # noqa: E402
from spark_engine.runtime.executors import device_memory, native  # noqa: E402
from spark_engine.runtime.executors.memory import EngineMemory, allocate  # noqa: E402
from spark_engine.runtime.executors.program import MemoryOperand  # noqa: E402
from spark_engine.tensors import DType, TensorSpec  # noqa: E402
from spark_engine.weights_file import plan_weights  # noqa: E402
from tests.runtime.fake_gpu import NOTHING, FakeGpu  # noqa: E402
from tests.runtime.native_folder import encode, tabled  # noqa: E402
from tests.spark_engine.written_weights import write_weights  # noqa: E402

ROWS, SLOTS, VOCAB = 3, 4, 2048
LIMITS = Limits(max_seqs=SLOTS, max_context=128, pages=3, vocab=VOCAB)
STATES = (
    *(StateInfo(s, "slot") for s in common_states(LIMITS)[:1]),
    StateInfo(TensorSpec("layers.0.k_pages", DType.BF16, (4, 2, 8)), "page"),
)
OUTPUTS = (
    TensorSpec("next_tokens", DType.I32, (ROWS,)),
    TensorSpec("logits", DType.F32, (ROWS, VOCAB)),
)


def _i32(gpu: FakeGpu, address: int, count: int) -> Any:
    return gpu.at(address, 4 * count).view(np.int32)


def sum_up(gpu: FakeGpu, tokens: int, slots: int, lens: int, weight: int, inner: int) -> None:
    """inner[r] = token + prompt_lens[slot] + weight[0]."""
    rows = [_i32(gpu, a, ROWS) for a in (tokens, slots)]
    table, w = _i32(gpu, lens, SLOTS + 1), gpu.at(weight, 4).view(np.float32)
    _i32(gpu, inner, ROWS)[:] = rows[0] + table[rows[1]] + int(w[0])


def finish(
    gpu: FakeGpu, inner: int, slots: int, last: int, result: int, logits: int, add: int
) -> None:
    """next = inner + last[slot] + add; last[slot] = next."""
    made, where = _i32(gpu, inner, ROWS), _i32(gpu, slots, ROWS)
    state = _i32(gpu, last, SLOTS + 1)
    _i32(gpu, result, ROWS)[:] = made + state[where] + add
    state[where] = _i32(gpu, result, ROWS)
    gpu.at(logits, 4 * ROWS * VOCAB).view(np.float32)[:] = 1.5


def mask(gpu: FakeGpu, allow: int, result: int) -> None:
    """next += the first word of the table."""
    _i32(gpu, result, ROWS)[:] += _i32(gpu, allow, 1)


KERNELS: dict[str, Callable[..., None]] = {"sum_up": sum_up, "finish": finish, "mask": mask}


def launch_row(kernel: int, *args: list[Any]) -> dict[str, Any]:
    one = [1, 1, 1]
    shape = {"grid": one, "block": one, "cluster": one, "shared": 0, "pdl": True}
    shape["resident"] = True
    return {"node": "n", "kernel": kernel, "args": list(args), **shape}


BODY = {
    "arena_bytes": 1024,
    "zeroed_bytes": 0,
    "cubins": [5],
    "kernels": [{"cubin": 0, "symbol": s, "shared": 0} for s in KERNELS],
    "launches": [
        launch_row(0, ["input", "token_ids"], ["input", "slots"], ["input", "prompt_lens"],
                   ["weight", "w"], ["arena", 512, 12]),
        launch_row(1, ["arena", 512, 12], ["input", "slots"], ["state", "last_tokens"],
                   ["output", "next_tokens"], ["output", "logits"], ["i32", 1000]),
    ],
}  # fmt: skip
_LAST = launch_row(2, ["input", "allow"], ["output", "next_tokens"])
MASKED = {**BODY, "launches": [*BODY["launches"], _LAST]}


def payload(body: dict[str, Any] = BODY) -> bytes:
    return encode(tabled(body))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    made = FakeGpu(KERNELS)
    monkeypatch.setattr(native, "Gpu", lambda: made)
    return made


@pytest.fixture
def stages() -> list[str]:
    return []


def described(file: Path, symmetric: int = 0) -> Any:
    """What an engine reads of a folder with one bucket; its weights are written."""
    specs = [TensorSpec("w", DType.F32, (2,)), TensorSpec("z", DType.F32, (100,))]
    arrays = [np.array([7, 8], np.float32), np.arange(100, dtype=np.float32)]
    write_weights(file, plan_weights(specs), arrays)
    wide = 4 * ROWS * VOCAB
    bucket = Bucket("decode", ROWS, 1, "f", 1024, 0, 0, wide, symmetric_bytes=symmetric)
    manifest = SimpleNamespace(
        target="sm_90a", card="h200", states=STATES, tables=tables(LIMITS), buckets=[bucket]
    )
    check: Any = lambda name, index, digest: None  # noqa: E731
    return SimpleNamespace(manifest=manifest, weights_of=lambda rank: file, check_chunk=check)


@pytest.fixture(params=[True, False], ids=["graphs", "no graphs"])
def engine(
    gpu: FakeGpu, tmp_path: Path, stages: list[str], request: pytest.FixtureRequest
) -> Iterator[native.NativeEngine]:
    folder = described(tmp_path / "w.safetensors")
    opened = native.NativeEngine(folder, lambda available: 0, stages.append, request.param)
    opened.wait()
    yield opened
    opened.close()
    assert gpu.held == NOTHING


def header() -> EngineHeader:
    bound = tuple(s.bind({"rows": ROWS, "tokens": ROWS}) for s in steps())
    inputs = (*bound, *tables(LIMITS))
    states = tuple(i.spec for i in STATES)
    return EngineHeader("native", "sm_90a", "decode", ROWS, 1, inputs, states, OUTPUTS, {})


def opened(
    engine: native.NativeEngine, body: dict[str, Any] = BODY
) -> tuple[native.NativeExecutor, EngineMemory]:
    executor = engine.open(header(), payload(body), Path(), 1)
    specs = {("decode", ROWS): executor.specs}
    return executor, EngineMemory(STATES, tables(LIMITS), specs, 2, engine.states, engine.tables)


def test_steps_tables_weights_states_and_outputs_meet(engine: native.NativeEngine) -> None:
    executor, memory = opened(engine)
    last = engine.states.addresses["last_tokens"]
    engine.gpu.wait()
    assert not _i32(engine.gpu, last, SLOTS + 1).any(), "opening a bucket runs nothing"
    memory.tables["prompt_lens"][:] = (10, 20, 30, 40, 0)
    memory.flush()
    for turn in range(2):
        buffers = memory.buffers("decode", ROWS, turn)
        buffers["token_ids"][:] = (1, 2, 3)
        buffers["slots"][:] = (2, 0, 3)
        buffers["logits"].fill(0)
        executor.launch(buffers)()
        base = np.array([1 + 30, 2 + 10, 3 + 40]) + 7 + 1000
        np.testing.assert_array_equal(buffers["next_tokens"], base * (turn + 1))
        assert not buffers["logits"].any(), "a wide output stays on the device"
    executor.run(buffers)
    assert (buffers["logits"] == 1.5).all()


def test_graphs_are_replayed_where_they_are_wanted(engine: native.NativeEngine) -> None:
    executor, memory = opened(engine)
    executor.launch(memory.buffers("decode", ROWS, 0))()
    calls: list[str] = engine.gpu.calls  # type: ignore[attr-defined]
    assert engine.graphs is ("replay" in calls) is ("capture" in calls)


def test_launches_one_by_one_are_a_step(engine: native.NativeEngine) -> None:
    executor, memory = opened(engine)
    engine.gpu.fill(engine.states.addresses["last_tokens"], 0, 4 * (SLOTS + 1))
    memory.tables["prompt_lens"][:] = (10, 20, 30, 40, 0)
    memory.flush()
    buffers = memory.buffers("decode", ROWS, 0)
    buffers["token_ids"][:] = (1, 2, 3)
    buffers["slots"][:] = (2, 0, 3)
    executor.launch(buffers)()
    gpu: Any = executor.gpu
    resources = len(gpu.blocks)
    alone = executor.launches(payload())
    assert [(x.node, x.symbol) for x in alone] == [("n", "sum_up"), ("n", "finish")]
    assert len(gpu.blocks) == resources, "scratch memory is the graph's"
    for launch in alone:
        launch.queue()
    gpu.wait()
    last = _i32(gpu, engine.states.addresses["last_tokens"], SLOTS)
    assert last.tolist() == [2 * (12 + 1007), 0, 2 * (31 + 1007), 2 * (43 + 1007)]


def test_the_part_before_sampling_runs_without_the_masks(engine: native.NativeEngine) -> None:
    """The first part is queued at once; masks written afterwards take effect in the second part."""
    executor, memory = opened(engine, MASKED)
    gpu: Any = engine.gpu
    gpu.fill(engine.states.addresses["last_tokens"], 0, 4 * (SLOTS + 1))
    memory.tables["prompt_lens"][:] = (10, 20, 30, 40, 0)
    memory.flush()
    buffers = memory.buffers("decode", ROWS, 0)
    buffers["token_ids"][:], buffers["slots"][:] = (1, 2, 3), (2, 0, 3)
    for turn in range(3):
        graphs = gpu.calls.count("capture")
        rest = executor.launch_to_sample(buffers)
        assert gpu.calls.count("capture") - graphs == (2 if engine.graphs and not turn else 0)
        gpu.wait()
        first = _i32(gpu, engine.states.addresses["last_tokens"], SLOTS)
        base = np.array([2 + 10, 0, 1 + 30, 3 + 40])[[2, 0, 3]] + 1007
        np.testing.assert_array_equal(first[[2, 0, 3]], base * (turn + 1))
        memory.tables["allow"][0, 0] = 5000 + turn
        memory.mark(0, ("allow",))
        memory.flush()
        rest()()
        np.testing.assert_array_equal(buffers["next_tokens"], base * (turn + 1) + 5000 + turn)
    executor.launch(buffers)()
    np.testing.assert_array_equal(buffers["next_tokens"], base * 4 + 5002)


def test_an_engine_that_takes_grammars_records_both_graphs_at_its_start(
    engine: native.NativeEngine,
) -> None:
    gpu: Any = engine.gpu
    engine.masks = True
    before = gpu.calls.count("capture")
    executor, memory = opened(engine, MASKED)
    assert gpu.calls.count("capture") - before == (3 if engine.graphs else 0)
    memory.flush()
    executor.launch_to_sample(memory.buffers("decode", ROWS, 0))()()
    assert gpu.calls.count("capture") - before == (3 if engine.graphs else 0)
    engine.open(header(), payload(), Path(), 1)  # none of its launches reads masks


def test_a_bucket_that_reads_no_masks_is_refused_in_parts(engine: native.NativeEngine) -> None:
    executor, memory = opened(engine)
    with pytest.raises(EngineError, match="decode 3 bucket has no launch that reads the mask"):
        executor.launch_to_sample(memory.buffers("decode", ROWS, 0))


def test_only_rows_that_were_marked_are_copied(engine: native.NativeEngine) -> None:
    _, memory = opened(engine)
    gpu: Any = engine.gpu
    places = {a: n for n, a in engine.tables.addresses.items()}
    gpu.uploads.clear()
    memory.flush()
    assert [(places[a], n) for a, n in gpu.uploads] == [(s.name, s.nbytes) for s in tables(LIMITS)]
    for name, slots, copies in (
        ("page_table", (), []),
        ("page_table", (1, 2), [(8, 16)]),  # two pages a row: consecutive pages are one copy
        ("bias_values", (0, 3), [(0, 2048 * 4)]),  # a gap of 4 KiB: faster than a second copy
        ("bias_values", (3,), [(3 * 2048, 2048)]),
    ):
        for slot in slots:
            memory.tables[name][slot] = slot + 5
            memory.mark(slot, (name,))
        gpu.uploads.clear()
        memory.flush()
        start = engine.tables.addresses[name]
        assert [(a - start, n) for a, n in gpu.uploads] == copies
    gpu.wait()
    for name, resources in memory.tables.items():
        found = gpu.view(engine.tables.addresses[name], resources.dtype, resources.shape)
        np.testing.assert_array_equal(found, resources)


def test_a_snapshot_goes_to_another_slot_and_other_pages(engine: native.NativeEngine) -> None:
    _, memory = opened(engine)
    assert memory.store.slot_bytes == 4 and memory.store.page_bytes == 32 and not memory.states
    last = _i32(engine.gpu, engine.states.addresses["last_tokens"], SLOTS + 1)
    last[:] = range(SLOTS + 1)
    pages = engine.gpu.at(engine.states.addresses["layers.0.k_pages"], 4 * 32).reshape(4, 32)
    pages[:] = np.arange(4, dtype=np.uint8)[:, None]
    saved = memory.store.save(1, [2, 0])
    assert saved.nbytes == 4 + 64
    memory.store.restore(saved, 3, [1, 3])
    assert last.tolist() == [0, 1, 2, 1, 4]
    assert pages[:, 0].tolist() == [0, 2, 2, 0]


def test_states_of_the_caller_go_in_and_come_out(engine: native.NativeEngine) -> None:
    executor, _ = opened(engine)
    arrays = {s.name: allocate(s) for s in (*executor.specs.inputs, *executor.specs.outputs)}
    arrays |= {s.name: allocate(s) for s in executor.specs.states}
    arrays["last_tokens"][:] = 100
    executor.run(arrays)
    assert arrays["last_tokens"].tolist() == [1107 + 0, 100, 100, 100, 100]


def test_a_snapshot_larger_than_the_stage_goes_in_pieces(
    engine: native.NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_memory, "STAGE", 48)  # a page and a half
    _, memory = opened(engine)
    pages = engine.gpu.at(engine.states.addresses["layers.0.k_pages"], 4 * 32)  # type: ignore[attr-defined]
    pages[:] = np.arange(128, dtype=np.uint8)
    saved = memory.store.save(0, [1, 2, 0])
    assert saved.pages["layers.0.k_pages"].view(np.uint8).reshape(-1).tolist() == [
        *range(32, 96), *range(32)
    ]  # fmt: skip
    pages[:] = 0
    memory.store.restore(saved, 0, [1, 2, 0])
    assert pages[:96].tolist() == list(range(96))


def test_with_nccl_a_prefill_is_first_run_over_rows_that_save_nothing(
    engine: native.NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening runs the launches once; they may write no row of a state."""
    monkeypatch.setattr(native.NativeEngine, "across", True)
    more = tuple(s.bind({"rows": ROWS, "tokens": ROWS}) for s in steps(PREFILL)[-3:-1])
    assert [spec.name for spec in more] == ["sources", "saves"]
    plain = header()
    executor = engine.open(replace(plain, inputs=(*plain.inputs, *more)), payload(), Path(), 1)
    gpu: Any = engine.gpu
    for name, value in (("slots", -1), ("sources", -1), ("saves", -1), ("counts", 0)):
        address = executor.address(MemoryOperand("input", name))
        assert _i32(gpu, address, ROWS).tolist() == [value] * ROWS, name
    last = engine.states.addresses["last_tokens"]
    assert not _i32(gpu, last, SLOTS).any() and _i32(gpu, last, SLOTS + 1)[SLOTS], "scratch alone"


def test_equal_cubins_are_loaded_once_and_keep_the_most_shared_memory(
    engine: native.NativeEngine,
) -> None:
    for shared in (300, 100):
        kernels = [{**row, "shared": shared} for row in BODY["kernels"]]
        engine.open(header(), payload({**BODY, "kernels": kernels}), Path(), 1)
    gpu: Any = engine.gpu
    assert gpu.modules == [b"cubin"] and gpu.allowed == dict.fromkeys(KERNELS, 300)


def test_the_stages_of_opening_are_reported(engine: native.NativeEngine, stages: list[str]) -> None:
    assert stages == ["device", "memory"]


def test_bad_buffers_and_bad_payloads_are_named(engine: native.NativeEngine) -> None:
    executor, memory = opened(engine)
    wrong = {**memory.buffers("decode", ROWS, 0), "slots": np.zeros(2, np.int32)}
    with pytest.raises(ExecutorError, match="buffer slots is int32"):
        executor.launch(wrong)
    unknown = replace(header(), outputs=OUTPUTS[1:])
    with pytest.raises(EngineError, match="decode 3 bucket's launches cannot be read.*next_tokens"):
        engine.open(unknown, payload(), Path(), 1)


def test_the_last_executor_gives_the_device_back(engine: native.NativeEngine) -> None:
    first, second = opened(engine)[0], opened(engine)[0]
    first.close()
    first.close()
    assert not engine.gpu.closed
    second.close()
    assert engine.gpu.closed and not engine.gpu.blocks
    with pytest.raises(ExecutorError, match="is closed"):
        second.launch({})


def test_a_rank_launches_over_its_region_and_all_others(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 reads its own weights, and its kernels receive the addresses of all regions."""
    names, name = list[str](), "weights.1.safetensors"
    folder = described(tmp_path / name, 96)
    folder.weights_of = lambda rank: tmp_path / f"weights.{rank}.safetensors"
    folder.check_chunk = lambda name, index, digest: names.append(name)
    shown: list[int] = []

    def connect(resources: Any, nbytes: int, comm: Any) -> Any:
        shown.append(nbytes)
        return SimpleNamespace(own=5000, table=9000)

    monkeypatch.setattr(native, "connect_peers", connect)
    args = [["peers"], ["rank"], ["symmetric", 32, 64]]
    body = {**BODY, "symmetric_bytes": 96, "launches": [launch_row(0, *args)]}
    reported: list[tuple[int, ...]] = []
    gpu.kernels["sum_up"] = lambda gpu, *operands: reported.append(operands)
    comm: Any = SimpleNamespace(rank=1)
    engine = native.NativeEngine(folder, lambda available: 0, lambda stage: None, comm=comm)
    executor = engine.open(header(), payload(body), Path(), 1)
    engine.wait()
    executor.launches(payload(body))[0].queue()
    gpu.wait()
    assert reported[0] == (9000, 1, 5032) and shown == [96] and names == [name]
    with pytest.raises(EngineError, match="needs 97 bytes of symmetric memory, the engine has 96"):
        engine.open(header(), payload({**body, "symmetric_bytes": 97}), Path(), 1)
    executor.close()


def test_one_rank_alone_has_no_region(engine: native.NativeEngine) -> None:
    body = {**BODY, "launches": [launch_row(0, ["peers"])]}
    with pytest.raises(EngineError, match=r"launches cannot be read.*needs several ranks"):
        engine.open(header(), payload(body), Path(), 1)
