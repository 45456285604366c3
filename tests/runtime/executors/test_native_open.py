"""Opening a native engine on a fake GPU in numpy: refusals, the memory plan, and freeing.

Cooperating blocks, records that exceed their memory, leaks, and a memory plan that counts every
byte.
"""

import copy
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("cuda.bindings", reason="needs the extra `cuda`")

from spark_engine.device.buffers import Block, Buffers  # noqa: E402
from spark_engine.engine_file import EngineFolder, EngineHeader, open_folder  # noqa: E402
from spark_engine.errors import CapacityError, EngineError, ExecutorError  # noqa: E402
from spark_engine.runtime.engine import load as module  # noqa: E402
from spark_engine.runtime.engine.load import Loaded, load  # noqa: E402
from spark_engine.runtime.executors import device_memory, native, upload  # noqa: E402
from spark_engine.runtime.executors.memory import EngineMemory  # noqa: E402
from spark_engine.tensors import DType, TensorSpec  # noqa: E402
from tests.runtime import native_folder as toy  # noqa: E402
from tests.runtime.fake_gpu import NOTHING, FakeGpu  # noqa: E402
from tests.spark_engine.test_engine_file import REMOVED, put  # noqa: E402


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeGpu]]:
    """The queue of GPUs for the next engines; the first in the list is the next one."""
    made: list[FakeGpu] = []

    def next_gpu() -> FakeGpu:
        made.append(made.pop(0) if made and not made[0].made else FakeGpu(toy.KERNELS))
        return made[-1]

    monkeypatch.setattr(native, "Gpu", next_gpu)
    monkeypatch.setattr(device_memory, "STAGE", 1 << 16)  # so that no test fills MiB
    monkeypatch.setattr(upload, "PIECE", 1 << 10)
    monkeypatch.setattr(module, "runnable_targets", lambda hosts: ("cpu", toy.TARGET))
    yield made
    assert all(gpu.held == NOTHING for gpu in made), "something was not freed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    toy.write(tmp_path / "toy")
    return tmp_path / "toy"


def step(loaded: Loaded) -> None:
    """One step of every bucket, waited for, over both sets of buffers."""
    specs = {key: executor.specs for key, executor in loaded.executors.items()}
    memory = EngineMemory(
        loaded.states, loaded.tables, specs, 2, loaded.device_states, loaded.table_writer
    )
    memory.flush()
    for turn in range(2):
        for (family, rows), executor in loaded.executors.items():
            executor.launch(memory.buffers(family, rows, turn))()
            executor.run(memory.buffers(family, rows, turn))


# --- Weights and buckets at once ---------------------------------------------------------------


def test_buckets_are_recorded_while_the_weights_are_read(
    gpus: list[FakeGpu], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights' only chunk waits for the last bucket; it is checked before `load` returns."""
    recorded, seen, stages = threading.Event(), list[str](), list[str]()
    weights = "weights.safetensors"

    def check(self: object, name: str, index: int, found: str) -> None:
        assert name != weights or recorded.wait(20), "no bucket is opened before they are there"
        seen.append(name)

    def mark(stage: str) -> None:
        stages.append(stage)
        if stage == f"decode {toy.ROWS[-1]}":
            recorded.set()

    monkeypatch.setattr(EngineFolder, "check_chunk", check)
    loaded = load(folder, mark=mark)
    buckets = [f"decode_b{rows}.engine" for rows in toy.ROWS]
    assert seen == [*buckets, weights] and stages[-1] == "weights"
    step(loaded)
    loaded.close()


def test_a_file_is_read_while_the_bucket_before_is_opened(
    gpus: list[FakeGpu], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, (first, second) = threading.Event(), (f"decode_b{rows}.engine" for rows in toy.ROWS)
    check, opened = EngineFolder.check_chunk, native.NativeEngine.open

    def checked(self: EngineFolder, name: str, index: int, found: str) -> None:
        check(self, name, index, found)
        if name == second:
            read.set()

    def opening(self: Any, header: EngineHeader, *rest: Any) -> Any:
        assert read.wait(20), f"{second} is not read before {first} is open"
        return opened(self, header, *rest)

    monkeypatch.setattr(EngineFolder, "check_chunk", checked)
    monkeypatch.setattr(native.NativeEngine, "open", opening)
    load(folder).close()
    (folder / second).write_bytes((folder / second).read_bytes()[:-1] + b"x")
    with pytest.raises(EngineError, match=f"{second} was changed"):
        load(folder)
    assert not [t.name for t in threading.enumerate() if t.name.startswith("files")]


def test_damaged_weights_are_refused_after_buckets_were_recorded(
    gpus: list[FakeGpu], folder: Path
) -> None:
    data = bytearray((folder / "weights.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "weights.safetensors").write_bytes(data)
    with pytest.raises(EngineError, match=r"weights\.safetensors was changed"):
        load(folder)
    assert gpus[0].calls.count("instantiate") == len(toy.ROWS) and "replay" not in gpus[0].calls
    assert gpus[0].held == NOTHING


# --- Freeing -----------------------------------------------------------------------------------


def test_everything_is_freed_at_the_end(gpus: list[FakeGpu], folder: Path) -> None:
    loaded = load(folder)
    step(loaded)
    (gpu,) = gpus
    assert gpu.held["pinned"] > 10 and gpu.held["events"] > 2 and gpu.held["graphs"] == 2
    loaded.close()
    loaded.close()
    assert gpu.held == NOTHING


def test_everything_is_freed_wherever_opening_fails(gpus: list[FakeGpu], folder: Path) -> None:
    count = 0
    while True:
        gpus.insert(0, FakeGpu(toy.KERNELS, fails=count))
        try:
            loaded = load(folder)
        except ExecutorError as error:
            assert f"call {count} failed" in str(error)
            assert gpus[-1].held == NOTHING, error
            count += 1
        else:
            break
    assert count > 50
    loaded.close()


@pytest.mark.parametrize("broken", toy.ROWS)
def test_everything_is_freed_when_a_buckets_file_is_refused(
    gpus: list[FakeGpu], folder: Path, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    real = module._open

    def refuse(*args: Any) -> Any:
        if args[1].rows == broken:
            raise EngineError("refused before the executor is asked")
        return real(*args)

    monkeypatch.setattr(module, "_open", refuse)
    with pytest.raises(EngineError, match="refused before"):
        load(folder)
    assert gpus[0].held == NOTHING


def test_a_step_is_not_waited_for_after_the_end(gpus: list[FakeGpu], folder: Path) -> None:
    """The staging memory is freed."""
    loaded = load(folder)
    specs = {key: executor.specs for key, executor in loaded.executors.items()}
    memory = EngineMemory(
        loaded.states, loaded.tables, specs, 1, loaded.device_states, loaded.table_writer
    )
    wait = loaded.executors["decode", 2].launch(memory.buffers("decode", 2, 0))
    loaded.close()
    with pytest.raises(ExecutorError, match="is closed"):
        wait()


# --- Blocks that wait for one another ----------------------------------------------------------


def test_a_second_engine_of_the_process_is_refused_while_one_is_open(
    gpus: list[FakeGpu], folder: Path
) -> None:
    first = load(folder)
    for _ in range(2):
        with pytest.raises(EngineError, match=r"has an engine open.*close that one.*another proc"):
            load(folder)
    assert len(gpus) == 1, "refused before it took a context"
    first.close()
    load(folder).close()


def test_mps_is_refused(gpus: list[FakeGpu], folder: Path) -> None:
    gpus.append(FakeGpu(toy.KERNELS))
    gpus[0].shared_by_mps = True
    with pytest.raises(EngineError, match=r"NVIDIA MPS.*run without MPS"):
        load(folder)
    assert gpus[0].calls == []


@pytest.mark.parametrize(
    ("sms", "each", "fits"),
    [(130, 1, False), (65, 2, False), (0, 1, False), (131, 1, True), (66, 2, True), (132, 1, True)],
)
def test_a_gpu_that_cannot_hold_all_blocks_of_a_launch_is_refused(
    gpus: list[FakeGpu], folder: Path, sms: int, each: int, fits: bool
) -> None:
    """Those that wait for none may be more than fit."""
    gpus.append(FakeGpu(toy.KERNELS))
    gpus[0].multiprocessors, gpus[0].per_multiprocessor = sms, each
    if fits:
        load(folder).close()
        return
    numbers = (
        f"fix-up of the decode 2 .*131 blocks of meet .*{sms} multiproc.* runs {sms * each} at"
        " once: .* built for, h200, .*rebuild"
    )
    with pytest.raises(EngineError, match=numbers):
        load(folder)
    assert not any(call in gpus[0].calls for call in ("replay", "capture"))


# --- The plan counts every byte ----------------------------------------------------------------


def test_what_is_allocated_is_what_was_planned(gpus: list[FakeGpu], folder: Path) -> None:
    loaded = load(folder, cache_bytes=0)
    step(loaded)
    assert loaded.folder and loaded.cache_bytes == 0
    planned, (gpu,) = loaded.folder.manifest.memory, gpus
    assert (
        gpu.taken == planned.total == sum(v for k, v in planned.to_json().items() if k != "total")
    )
    wide = 4 * 2048 * max(toy.ROWS)
    assert wide < planned.buffers < 1.5 * wide, "the buckets share the logits' memory"
    loaded.close()


def test_snapshots_are_allocated_in_addition_to_the_plan(gpus: list[FakeGpu], folder: Path) -> None:
    """A quarter of the device's memory, in rows after those of the plan."""
    loaded = load(folder)
    step(loaded)
    assert loaded.folder and loaded.device_states
    planned, (gpu,) = loaded.folder.manifest.memory, gpus
    row = loaded.device_states.snapshot_bytes
    assert loaded.device_states.snapshot_rows == FakeGpu.total_bytes // 4 // row > 1
    assert gpu.taken == planned.total + loaded.device_states.snapshot_rows * row
    pages = toy.LIMITS.pages * loaded.device_states.page_bytes
    assert loaded.cache_bytes == pages + loaded.device_states.snapshot_rows * row
    loaded.device_states.copy_rows(
        [(0, toy.LIMITS.max_seqs + loaded.device_states.snapshot_rows)]
    )  # the last
    gpu.wait()
    loaded.close()
    assert gpu.held == NOTHING


def test_the_plan_is_held_against_what_is_free(gpus: list[FakeGpu], folder: Path) -> None:
    planned = open_folder(folder, toy.TARGET).manifest.memory.total
    for free in (planned, planned - 1):
        gpus.insert(0, FakeGpu(toy.KERNELS))
        gpus[0].free_bytes = free
        if free == planned:
            load(folder).close()
        else:
            with pytest.raises(CapacityError, match="buffers .*--kv-tokens, --max-context or"):
                load(folder)
            assert gpus[-1].taken == 0


def test_another_payload_with_wider_outputs_has_them_apart(
    gpus: list[FakeGpu], folder: Path
) -> None:
    loaded = load(folder)
    assert loaded.open_bucket
    before, layers = gpus[0].taken, TensorSpec("layers", DType.F32, (4, 9, 2048))
    wider = replace(toy.header(4), outputs=(*toy.header(4).outputs, layers))
    more = loaded.open_bucket(wider, toy.encode(toy.body(4)), folder, 1)
    own = Buffers.of(wider, toy.names_of_tables())
    assert gpus[0].taken - before == own.own_bytes + own.wide.nbytes
    more.close()
    assert gpus[0].held["graphs"] == 2, "the others are still open"
    loaded.close()


def test_fields_start_on_boundaries_and_do_not_meet() -> None:
    specs = [TensorSpec(f"t{i}", DType.U8, (n,)) for i, n in enumerate((1, 256, 257, 0, 5))]
    block = Block.of(specs)
    assert [f.offset for f in block.fields] == [0, 256, 512, 1024, 1024] and block.nbytes == 1280


# --- Invalid records and headers ---------------------------------------------------------------


def refusal(folder: Path, **kwargs: Callable[[int], Any]) -> str:
    """The error of loading a folder with a changed larger bucket."""
    toy.write(folder, **kwargs)
    with pytest.raises(EngineError) as caught:
        load(folder)
    return str(caught.value)


def changed(path: tuple[Any, ...], value: object) -> Callable[[int], dict[str, Any]]:
    """Bodies in which the bucket of 4 rows has another value at the path."""

    def make(rows: int) -> dict[str, Any]:
        made = copy.deepcopy(toy.body(rows))
        at: Any = made
        for part in path[:-1]:
            at = at[part]
        if rows == 4:
            at[path[-1]] = value
        return made

    return make


ARGS = ("operands",)  # of the first launch, in its order


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ((*ARGS, 2), ["arena", 512, 513], "512:1025 of 1024 bytes of the arena memory"),
        ((*ARGS, 2), ["arena", -256, 8], "-256:-248 of 1024"),
        ((*ARGS, 2), ["arena", 512, -8], "512:504 of 1024"),
        ((*ARGS, 2), ["arena", 1 << 70, 8], "of 1024 bytes|out of range"),
        ((*ARGS, 2), ["arena", True, 8], "got `bool`"),
        ((*ARGS, 4), ["zeroed", 256, 512], "256:768 of 512 bytes of the zeroed memory"),
        ((*ARGS, 0), ["weight", "v"], "'v'"),
        ((*ARGS, 0), ["weight", 7], "is not an operand"),
        ((*ARGS, 0), ["state", "w"], "'w'"),
        ((*ARGS, 0), ["disk", "w"], "is not an operand"),
        ((*ARGS, 1), ["i32", 1 << 31], "is not of type i32"),
        ((*ARGS, 1), ["f32", 1e39], "is not an operand"),
        (("launches", 0, "kernel"), 2, "index 2 is outside 2 rows"),
        (("launches", 0, "kernel"), -1, ">= 0"),
        (("launches", 0, "args", 3), 14, "index 14 is outside 14 rows"),
        (("launches", 0, "args", 3), -1, ">= 0"),
        (("launches", 0, "grid"), [0, 1, 1], ">= 1"),
        (("launches", 0, "shared"), 1 << 40, "<= 1048576"),
        (("kernels", 0, "cubin"), 1, "index 1 is outside 1 rows"),
        (("cubins",), [6], "bytes of payload expected"),
        (("cubins",), [4], "bytes of payload expected"),
        (("arena_bytes",), 1025, "needs 1025 bytes of scratch memory, the engine has 1024"),
        (("zeroed_bytes",), 513, "needs 513 bytes of zeroed memory, the engine has 512"),
    ],
)
def test_a_record_that_cannot_be_is_refused_before_anything_runs(
    gpus: list[FakeGpu], tmp_path: Path, path: tuple[Any, ...], value: object, words: str
) -> None:
    said = refusal(tmp_path / "toy", bodies=changed(path, value))
    assert "decode 4 bucket" in said and re.search(words, said), said


JUNK = (None, True, -1, 0.5, 1 << 40, 10**30, "", "junk", [], [[]], {}, [None], [1, 2], [1] * 9)
ROOT = toy.body(4)
PLACES = [("launches",), ("kernels",), ("cubins",), ("arena_bytes",), ("zeroed_bytes",)]
PLACES += [("operands",), ("launches", 0, "args", 0)]
PLACES += [("launches", 0, key) for key in ROOT["launches"][0]]
PLACES += [("kernels", 0, key) for key in ROOT["kernels"][0]]
PLACES += [("launches", 0, key, 1) for key in ("grid", "block", "cluster")]
PLACES += [(*ARGS, i) for i in range(6)] + [(*ARGS, i, j) for i in range(6) for j in (0, 1)]
# Fields for which every value of the right type is valid.
FREE = {("launches", 0, "node"): str, ("kernels", 0, "symbol"): str}
FREE |= {("launches", 0, key): bool for key in ("pdl", "resident")}
FREE |= {(*ARGS, i, 1): int for i in (1, 3, 5)}
FREE |= {("launches",): list, ("launches", 0, "args"): list, ("launches", 0, "kernel"): bool}


@settings(max_examples=70, deadline=None, suppress_health_check=list(HealthCheck))
@given(where=st.sampled_from(PLACES), value=st.sampled_from([REMOVED, *JUNK]))
def test_records_of_junk_are_refused(
    gpus: list[FakeGpu], folder: Path, where: tuple[Any, ...], value: object
) -> None:
    row = copy.deepcopy(ROOT)
    put(row, where, value)
    gpus.insert(0, FakeGpu(defaultdict(lambda: lambda gpu, *args: None)))
    engine = native.NativeEngine(
        open_folder(folder, toy.TARGET), lambda available: 0, lambda at: None
    )
    try:
        engine.open(toy.header(4), toy.encode(row), folder, 1)
    except EngineError as error:
        assert "rebuild" in str(error)
    else:
        lacks_an_argument = value is REMOVED and where[:-1] == ("launches", 0, "args")
        known = lacks_an_argument or value == toy_value(where)
        assert known or type(value) is FREE.get(where), (where, value)
    finally:
        engine.close()


def toy_value(where: tuple[Any, ...]) -> object:
    """The value at this path in a valid payload."""
    at: Any = ROOT
    for key in where:
        at = at[key]
    return at


def other(**kwargs: Any) -> Callable[[int], EngineHeader]:
    """Headers in which the bucket of 4 rows differs."""
    return lambda rows: replace(toy.header(rows), **kwargs) if rows == 4 else toy.header(rows)


SEEN = toy.header(4).states[1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tile": 2}, "not what the manifest says"),
        ({"states": (replace(SEEN, shape=(4, 9999)),)}, "9999.*the manifest"),
        ({"states": (replace(SEEN, name="heard"),)}, "heard.*the manifest None"),
        ({"outputs": (TensorSpec("logits", DType.F32, (4, 4096)),)}, "has buffers of"),
        ({"inputs": (TensorSpec("token_ids", DType.I32, (9999,)),)}, "has buffers of"),
        ({"inputs": (*toy.header(4).inputs[:6], replace(toy.header(4).inputs[6], shape=(9, 9)))},
         "page_table.*the manifest"),
    ],
)  # fmt: skip
def test_a_header_of_other_tensors_is_refused(
    gpus: list[FakeGpu], tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    said = refusal(tmp_path / "toy", headers=other(**change))
    assert re.search(words, said, re.DOTALL) and "rebuild" in said, said
