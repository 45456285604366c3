"""The engine folder refuses every change, and its weights file is plain safetensors."""

import hashlib
import json
import os
import time
from dataclasses import fields, replace
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from spark_engine import engine_file, interface, manifest
from spark_engine.engine_file import (
    EngineHeader,
    encode_engine,
    open_folder,
    read_engine,
    read_manifest,
)
from spark_engine.errors import EngineError, InternalError
from spark_engine.interface import Limits, Precision
from spark_engine.manifest import (
    FORMAT,
    MOST_ROWS,
    Bucket,
    Fingerprint,
    Manifest,
    Memory,
    ModelInfo,
    Quantised,
    Refusal,
    StateInfo,
    canonical_json,
)
from spark_engine.tensors import DType, TensorSpec
from spark_engine.weights_file import (
    WeightLayout,
    fill_weights,
    map_weights,
    plan_weights,
    read_index,
)
from tests.spark_engine.written_weights import write_weights

NOW = b'"format": %d' % FORMAT
ENGINE = "decode_b2.engine"


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {DType.BF16: (3, 5), DType.F32: (7,), DType.F8E4M3: (2, 33), DType.U8: (1, 1)}
    arrays = {
        f"w.{dtype}": rng.integers(0, 99, shape).astype(dtype.numpy)
        for dtype, shape in shapes.items()
    }
    return {**arrays, "scalar": np.array(0.25, np.float32), "empty": np.zeros((0, 4), np.float32)}


def write_all(path: Path, arrays: dict[str, np.ndarray]) -> None:
    specs = [TensorSpec(n, DType.of(a.dtype), a.shape) for n, a in arrays.items()]
    write_weights(path, plan_weights(specs), iter(arrays.values()))


def header() -> EngineHeader:
    state = TensorSpec("token_counts", DType.I32, (5, 9))
    return EngineHeader(
        "ort",
        "cpu",
        "decode",
        2,
        1,
        (TensorSpec("token_ids", DType.I32, (2,)),),
        (state,),
        (TensorSpec("logits", DType.F32, (2, 9)),),
        {"token_counts.out": "token_counts"},
    )


def example(folder: Path) -> Manifest:
    limits = Limits(4, 128, 8, 9)
    return Manifest(
        name="toy",
        producer={"numpy": "2.0"},
        target="cpu",
        card="",
        executor="ort",
        model=ModelInfo("qwen3_5_text", 4, 64, 9, 12345),
        limits=limits,
        dtypes=Precision(DType.F32, DType.F8E4M3, DType.F32),
        states=(StateInfo(TensorSpec("token_counts", DType.I32, (5, 9)), "slot"),),
        tables=(TensorSpec("prompt_lens", DType.I32, (5,)),),
        buckets=(Bucket("decode", 2, 1, ENGINE, 4096, cost_us=12.5),),
        memory=Memory((folder / "weights.safetensors").stat().st_size, 0, 180, 20, 4096),
        quantisation=(Quantised("lm_head", "bf16", 1),),
        fusions={"decode": {"norm_quant": 3}},
        refusals=(Refusal("shared_expert", "layers.0.mlp", "the formats differ"),),
        tactics=(),
        ignored={"vision": 3, "mtp": 1},
        generation={"temperature": 0.6, "text": "é"},
        eos_token_ids=(7, 8),
        fingerprint=Fingerprint("a", "b", "c", "d", "e"),
        files={
            name: engine_file.digest_file(folder / name)
            for name in (ENGINE, "weights.safetensors", "tokenizer/tokenizer.json")
        },
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "toy")


def write_folder(path: Path) -> Path:
    (path / "tokenizer").mkdir(parents=True)
    (path / "tokenizer" / "tokenizer.json").write_text("{}")
    (path / ENGINE).write_bytes(encode_engine(header(), b"payload" * 50))
    write_all(path / "weights.safetensors", weights())
    (path / "manifest.json").write_bytes(example(path).encode())
    return path


def test_round_trip(folder: Path) -> None:
    opened = open_folder(folder, "cpu")
    assert opened.manifest == example(folder)
    weights_size = (folder / "weights.safetensors").stat().st_size
    assert opened.manifest.memory.total == 180 + 20 + 4096 + weights_size
    engine = opened.engine(opened.manifest.buckets[0])
    assert engine.header == header() and engine.payload == b"payload" * 50
    for name, array in weights().items():
        assert opened.weights()[name].tobytes() == array.tobytes()
    assert opened.tokenizer_path == folder / "tokenizer"


@pytest.mark.parametrize("name", [ENGINE, "weights.safetensors", "tokenizer/tokenizer.json"])
def test_changed_cut_or_missing_file_is_refused(folder: Path, name: str) -> None:
    file = folder / name
    data = file.read_bytes()
    for bad in (data[:-1], data + b"x", data[:-1] + bytes([data[-1] ^ 1])):
        file.write_bytes(bad)
        with pytest.raises(EngineError, match=f"{file.name}.*spark-build"):
            open_folder(folder, "cpu")
    file.unlink()
    with pytest.raises(EngineError, match=f"{file.name} is missing.*spark-build"):
        open_folder(folder, "cpu")


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_flipped_bit_of_any_file_is_refused(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "flip" / "toy"
    if not path.exists():
        write_folder(path)
    files = sorted(p for p in path.rglob("*") if p.is_file())
    file = data.draw(st.sampled_from(files))
    good = file.read_bytes()
    bit = data.draw(st.integers(0, 8 * len(good) - 1))
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << (bit % 8)
    file.write_bytes(bytes(bad))
    try:
        with pytest.raises(EngineError):
            open_folder(path, "cpu")
    finally:
        file.write_bytes(good)
    open_folder(path, "cpu")


def test_other_target_is_refused(folder: Path) -> None:
    with pytest.raises(EngineError, match="built for 'cpu'.*'sm_90a'.*--target sm_90a"):
        open_folder(folder, "sm_90a")


def test_newer_format_is_refused_before_anything_else(folder: Path) -> None:
    file = folder / "manifest.json"
    file.write_text(f'{{"format": {FORMAT + 1}, "surprise": []}}')
    with pytest.raises(EngineError, match=f"format {FORMAT + 1}.*reads up to {FORMAT}.*upgrade"):
        open_folder(folder, "cpu")
    data = (folder / ENGINE).read_bytes().replace(NOW, b'"format":10')  # as long
    (folder / ENGINE).write_bytes(data)
    with pytest.raises(EngineError, match="format 10"):
        read_engine(folder / ENGINE)


def test_an_engine_from_before_its_states_were_renamed_is_refused(folder: Path) -> None:
    data = (folder / "manifest.json").read_bytes()
    (folder / "manifest.json").write_bytes(data.replace(NOW, b'"format": 2'))
    with pytest.raises(EngineError, match="format 2: rebuild the engine with spark-build"):
        open_folder(folder, "cpu")


def test_a_manifest_of_equal_values_in_other_bytes_is_refused(folder: Path) -> None:
    file = folder / "manifest.json"
    data = file.read_bytes()
    for same in (data.replace(b"\n", b"\n ", 1), data.replace(b": ", b":", 1), data[:-1]):
        file.write_bytes(same)
        with pytest.raises(EngineError, match="changed after it was written"):
            open_folder(folder, "cpu")
    file.write_bytes(data)
    open_folder(folder, "cpu")


def test_file_outside_the_folder_is_refused(folder: Path) -> None:
    digest = engine_file.digest_file(folder / ENGINE)
    strange = {"nul\0": "is missing", "x" * 300: "too long", "": "is missing", ".": "is missing"}
    outside = dict.fromkeys(("../x", str(folder / ENGINE), f"a/../../toy/{ENGINE}"), "outside the")
    for name, words in {**strange, **outside}.items():
        good = example(folder)
        bad = replace(good, files={**good.files, name: digest})
        (folder / "manifest.json").write_bytes(bad.encode())
        with pytest.raises(EngineError, match=f"{words}.*spark-build"):
            open_folder(folder, "cpu")


@pytest.mark.parametrize("name", ["../x.engine", "/etc/hostname", "other.engine", ""])
def test_a_bucket_in_a_file_without_a_digest_is_refused(folder: Path, name: str) -> None:
    (folder.parent / "x.engine").write_bytes((folder / ENGINE).read_bytes())
    (folder / "other.engine").write_bytes((folder / ENGINE).read_bytes())
    good = example(folder)
    bad = replace(good, buckets=(replace(good.buckets[0], file=name),))
    (folder / "manifest.json").write_bytes(bad.encode())
    with pytest.raises(EngineError, match="buckets name .*which `files` does not have"):
        open_folder(folder, "cpu")


@pytest.mark.parametrize("deferred", [(), (engine_file.WEIGHTS,)])
def test_a_manifest_without_the_weights_is_refused(folder: Path, deferred: tuple[str, ...]) -> None:
    good = example(folder)
    files = {k: v for k, v in good.files.items() if k != engine_file.WEIGHTS}
    (folder / "manifest.json").write_bytes(replace(good, files=files).encode())
    with pytest.raises(EngineError, match="files has no weights.safetensors.*spark-build"):
        open_folder(folder, "cpu", deferred)


HUGE = [(name, most + 1) for name, most in interface.MOST.items()]
HUGE += [(name, 0) for name in interface._NEEDED]
HUGE += [("max_seqs", 10**18), ("pages", 10**14)]


@pytest.mark.parametrize(("name", "value"), HUGE)
def test_a_manifest_of_limits_that_no_engine_has_is_refused(
    name: str, value: int, folder: Path
) -> None:
    path = folder / "manifest.json"
    limits = replace(example(folder).limits, **{name: value or -1})
    text = replace(example(folder), limits=limits).encode()
    row = json.loads(text)
    row["limits"][name] = value
    row.pop("digest")
    digest = hashlib.sha256(canonical_json(row)).hexdigest()
    path.write_bytes(canonical_json({**row, "digest": digest}))
    with pytest.raises(EngineError, match=f"{name} is {value}"):
        read_manifest(folder)


def test_a_manifest_of_very_many_rows_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, toy = folder / "manifest.json", example(folder)
    path.write_bytes(replace(toy, ranks=10**9).encode())
    with pytest.raises(EngineError, match="ranks is 1000000000"):
        read_manifest(folder)
    (state,) = toy.states
    many = tuple(
        replace(state, spec=TensorSpec(f"s{i}", DType.I32, (5, 9))) for i in range(MOST_ROWS + 1)
    )
    path.write_bytes(replace(toy, states=many).encode())
    with pytest.raises(EngineError, match=f"states has {MOST_ROWS + 1} rows"):
        read_manifest(folder)
    with path.open("r+b") as file:
        file.truncate(engine_file.MOST_MANIFEST + 1)  # of which no byte is read
    with pytest.raises(EngineError, match="at most 16777216 are read"):
        read_manifest(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 7}', '{"format": "3"}', "\x00", "[" * 9999]
)
def test_malformed_manifest_is_refused(folder: Path, text: str) -> None:
    (folder / "manifest.json").write_text(text)
    with pytest.raises(EngineError, match="spark-build"):
        open_folder(folder, "cpu")


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no engine folder"):
        open_folder(tmp_path / "none", "cpu")


@pytest.mark.parametrize("size", [0, 4, 7, 8, 100])
def test_engine_cut_anywhere_is_refused(folder: Path, size: int) -> None:
    file = folder / ENGINE
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(EngineError, match="cut off"):
        read_engine(file)


def test_chunks_are_hashed_apart(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_file, "CHUNK_BYTES", 64)
    digest = engine_file.digest_file(folder / ENGINE)
    assert len(digest.chunks) == -(-digest.bytes // 64) > 3
    good, last = (folder / ENGINE).read_bytes(), len(digest.chunks) - 1
    for at in (0, 63, 64, 70, 64 * last, digest.bytes - 1):
        data = bytearray(good)
        data[at] ^= 1
        (folder / ENGINE).write_bytes(bytes(data))
        start = at // 64 * 64
        with pytest.raises(EngineError, match=f"between bytes {start} and {start + 64}"):
            engine_file.verify_files(folder, {ENGINE: digest})
    (folder / ENGINE).write_bytes(good)
    engine_file.verify_files(folder, {ENGINE: digest})
    short = replace(digest, chunks=digest.chunks[:-1])
    with pytest.raises(EngineError, match="bytes, not"):
        engine_file.verify_files(folder, {ENGINE: short})


def test_a_deferred_file_is_left_to_its_reader_but_for_its_length(folder: Path) -> None:
    weights = folder / engine_file.WEIGHTS
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    opened = open_folder(folder, "cpu", (engine_file.WEIGHTS,))
    opened.check_chunk(engine_file.WEIGHTS, 0, hashlib.sha256(good).hexdigest())
    with pytest.raises(EngineError, match="weights.safetensors was changed between bytes 0"):
        opened.check_chunk(engine_file.WEIGHTS, 0, hashlib.sha256(weights.read_bytes()).hexdigest())
    weights.write_bytes(good[:-1])
    with pytest.raises(EngineError, match="weights.safetensors has .* bytes, not"):
        open_folder(folder, "cpu", (engine_file.WEIGHTS,))


def test_weights_are_safetensors_and_aligned(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    write_all(path, weights())
    assert list(read_index(path)) == sorted(weights())
    assert all(entry.offset % 64 == 0 for entry in read_index(path).values())
    with safe_open(path, "numpy") as file:  # numpy has no fp8 here: compare by shape
        for name, array in weights().items():
            assert file.get_slice(name).get_shape() == list(array.shape)
        assert np.array_equal(file.get_tensor("w.f32"), weights()["w.f32"])
    mapped = map_weights(path)
    assert set(mapped) == set(weights())
    assert not mapped["w.bf16"].flags.writeable


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(0, 200), st.sampled_from(sorted(DType))), max_size=8))
def test_any_weights_round_trip(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[tuple[int, DType]]
) -> None:
    arrays = {f"t{i}": np.arange(n).astype(dtype.numpy) for i, (n, dtype) in enumerate(sizes)}
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    write_all(path, arrays)
    with safe_open(path, "numpy") as file:
        assert {k for k in file.keys() if not k.startswith(".pad.")} == set(arrays)  # noqa: SIM118
    for name, array in map_weights(path).items():
        assert array.tobytes() == arrays[name].tobytes()


def test_wrong_arrays_are_our_bug(tmp_path: Path) -> None:
    layout = plan_weights([TensorSpec("a", DType.F32, (2,))])
    for bad in ([np.zeros(2, np.float64)], [np.zeros(3, np.float32)]):
        with pytest.raises(InternalError, match="weight a is"):
            write_weights(tmp_path / "w", layout, bad)
    with pytest.raises(InternalError, match="twice or reserved"):
        plan_weights([TensorSpec("a", DType.F32, (2,))] * 2)


def planned(arrays: dict[str, np.ndarray]) -> WeightLayout:
    return plan_weights([TensorSpec(n, DType.of(a.dtype), a.shape) for n, a in arrays.items()])


@pytest.mark.parametrize("workers", [1, 4])
def test_threads_write_the_same_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    arrays = weights() | {f"m{i}": np.full((i + 1, 50), i, np.float32) for i in range(30)}
    write_all(tmp_path / "one", arrays)
    whole = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, data[:100], at))
    (tmp_path / "many").write_bytes(b"\xff" * 100_000)  # what was there before must not show
    fill_weights(tmp_path / "many", planned(arrays), arrays.__getitem__, workers, 3000)
    assert (tmp_path / "many").read_bytes() == (tmp_path / "one").read_bytes()


def test_the_bytes_in_work_are_bounded(tmp_path: Path) -> None:
    arrays = {f"m{i:02}": np.zeros(100 * (i % 5 + 1), np.uint8) for i in range(40)}
    lock, held, most = Lock(), 0, 0

    def make(name: str) -> np.ndarray:
        nonlocal held, most
        with lock:
            held += 3 * arrays[name].nbytes
            most = max(most, held)
        time.sleep(0.001)
        with lock:
            held -= 3 * arrays[name].nbytes
        return arrays[name]

    fill_weights(tmp_path / "w", planned(arrays), make, 8, 4000)
    assert 1500 < most <= 4000  # more than one at once, never more than allowed


def test_a_failing_tensor_ends_the_write(tmp_path: Path) -> None:
    arrays = {f"m{i:03}": np.zeros(10, np.uint8) for i in range(200)}
    asked = []

    def make(name: str) -> np.ndarray:
        asked.append(name)
        if name == "m005":
            raise OSError("no such shard")
        time.sleep(0.001)
        return arrays[name] if name != "m150" else np.zeros(11, np.uint8)

    with pytest.raises(OSError, match="no such shard"):
        fill_weights(tmp_path / "w", planned(arrays), make, 2, 90)
    assert len(asked) < 100
    with pytest.raises(InternalError, match="weight m000 is"):
        fill_weights(tmp_path / "w", planned(arrays), lambda n: np.zeros(1, np.uint8), 2)


@pytest.mark.parametrize("cut", [1, 63, 64, 200])
def test_weights_that_end_beyond_the_file_are_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "w"
    write_all(path, {"a": np.zeros(7, np.float32), "z": np.arange(64, dtype=np.float32)})
    good = path.read_bytes()
    path.write_bytes(good[:-cut])
    for read in (read_index, map_weights):
        with pytest.raises(EngineError, match="tensor z is at .* bytes.*spark-build"):
            read(path)


@pytest.mark.parametrize("offsets", [[-64, 192], [0, 257], [256, 512], [0, 1 << 70], ["0", 4], [0]])
def test_weights_of_places_that_cannot_be_are_refused(tmp_path: Path, offsets: object) -> None:
    path = tmp_path / "w"
    text = json.dumps({"z": {"dtype": "U8", "shape": [256], "data_offsets": offsets}}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(256))
    with pytest.raises(EngineError, match="not a readable safetensors file"):
        read_index(path)


# --- Fuzz: fields of the manifest that are missing, of another type, or huge --------------------

JUNK = st.sampled_from(
    [
        None,
        True,
        -1,
        0.5,
        1 << 62,
        10**30,
        "",
        "junk",
        [],
        [[]],
        {},
        {"a": 1},
        [None],
        float("1e300"),
    ]
)
REMOVED = object()


def places(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Paths of everything inside a JSON value."""
    if isinstance(value, dict):
        inside = list(value.items())
    else:
        inside = list(enumerate(value)) if isinstance(value, list) else []
    return [p for k, v in inside for p in ((*path, k), *places(v, (*path, k)))]


def put(value: object, path: tuple[object, ...], new: object) -> None:
    """Replaces or removes the value at the path."""
    at: Any = value
    for key in path[:-1]:
        at = at[key]
    if new is REMOVED:
        del at[path[-1]]
    else:
        at[path[-1]] = new


def sealed(row: dict[str, Any]) -> bytes:
    """The bytes of a manifest with a correct digest, whatever it says."""
    body = {k: v for k, v in row.items() if k != "digest"}
    digest = hashlib.sha256(manifest.canonical_json(body)).hexdigest()
    return manifest.canonical_json({**body, "digest": digest})


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_manifest_of_junk_is_refused_or_means_what_it_says(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "junk" / "toy"
    if not path.exists():
        write_folder(path)
    good = (path / "manifest.json").read_bytes()
    row = json.loads(good)
    where = data.draw(st.sampled_from([p for p in places(row) if p != ("digest",)]))
    put(row, where, data.draw(st.just(REMOVED) | JUNK))
    bad = sealed(row)
    (path / "manifest.json").write_bytes(bad)
    try:
        opened = open_folder(path, "cpu")
        opened.engine(opened.manifest.buckets[0]) if opened.manifest.buckets else None
    except EngineError as error:
        assert "spark-build" in str(error)
    else:
        assert free(where) or opened.manifest.encode() == bad, where
    finally:
        (path / "manifest.json").write_bytes(good)


def free(where: tuple[object, ...]) -> bool:
    """Places whose value the reader does not look at or may complete."""
    known = ("tile", "pages_per_seq", "gdn_ring", "drafts", "snapshots", "image_rows", "suffix")
    return where[0] == "limits" and where[1:] in ((), *((name,) for name in known))


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_header_of_junk_is_refused_or_means_what_it_says(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = tmp_path_factory.getbasetemp() / "junk.engine"
    good = encode_engine(header(), b"payload")
    length = int.from_bytes(good[:8], "little")
    row = json.loads(good[8 : 8 + length])
    where = data.draw(st.sampled_from(places(row)))
    put(row, where, data.draw(st.just(REMOVED) | JUNK))
    text = manifest.canonical_json(row)
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"payload")
    try:
        found = read_engine(file)
    except EngineError:
        return
    assert found.header.to_json() == {
        k: v for k, v in row.items() if k not in ("payload_bytes", "payload_sha256")
    }


def test_the_plan_is_of_what_the_engine_has() -> None:
    page, slot = (TensorSpec("k", DType.U8, (3, 64)), TensorSpec("token_counts", DType.I32, (5,)))
    kept = TensorSpec("gdn_state", DType.F32, (5 + 7, 3))
    states = [StateInfo(page, "page"), StateInfo(slot, "slot"), StateInfo(kept, "sequence")]
    table = TensorSpec("prompt_lens", DType.I32, (2,))
    buckets = [Bucket("decode", 1, 1, "a", 7, 9, 100, 1000), Bucket("decode", 2, 1, "b", 8, 5, 200)]
    memory = Memory.of(100, states, [table], buckets)
    assert memory == Memory(100, 192, 20 + 60, 8, 8 + 9, buffers=300 + 1000, snapshots=7 * 12)
    assert memory.total == 100 + 192 + 80 + 8 + 17 + 1300 + 84


@pytest.mark.parametrize("name", [*(f.name for f in fields(Memory)), "total"])
def test_a_plan_that_is_not_of_the_engine_is_refused(folder: Path, name: str) -> None:
    row = json.loads((folder / "manifest.json").read_bytes())
    row["memory"][name] += 1
    (folder / "manifest.json").write_bytes(sealed(row))
    with pytest.raises(EngineError, match="memory is .*for what takes"):
        open_folder(folder, "cpu")
