"""The engine folder refuses every change, and its weights file is plain safetensors."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from spark_engine import engine_file, manifest
from spark_engine.engine_file import EngineHeader, encode_engine, open_folder, read_engine
from spark_engine.errors import EngineError, InternalError
from spark_engine.interface import Limits, Precision
from spark_engine.manifest import (
    Bucket,
    Fingerprint,
    Manifest,
    Memory,
    ModelInfo,
    Quantised,
    Refusal,
    StateInfo,
)
from spark_engine.tensors import DType, TensorSpec
from spark_engine.weights_file import (
    WeightLayout,
    fill_weights,
    map_weights,
    plan_weights,
    read_index,
    write_weights,
)

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
    state = TensorSpec("seen", DType.I32, (5, 9))
    return EngineHeader(
        "ort",
        "cpu",
        "decode",
        2,
        1,
        (TensorSpec("token_ids", DType.I32, (2,)),),
        (state,),
        (TensorSpec("logits", DType.F32, (2, 9)),),
        {"seen.out": "seen"},
    )


def example(folder: Path) -> Manifest:
    limits = Limits(4, 128, 8, 9)
    return Manifest(
        name="toy",
        producer={"numpy": "2.0"},
        target="cpu",
        executor="ort",
        model=ModelInfo("qwen3_5_text", 4, 64, 9, 12345),
        limits=limits,
        dtypes=Precision(DType.F32, DType.F8E4M3, DType.F32),
        states=(StateInfo(TensorSpec("seen", DType.I32, (5, 9)), "slot"),),
        tables=(TensorSpec("prompt_lens", DType.I32, (5,)),),
        buckets=(Bucket("decode", 2, 1, ENGINE, 4096),),
        memory=Memory(1, 2, 3, 4, 5),
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
    assert opened.manifest.memory.total == 15
    engine = opened.engine(opened.manifest.buckets[0])
    assert engine.header == header() and engine.payload == b"payload" * 50
    for name, array in weights().items():
        assert opened.weights()[name].tobytes() == array.tobytes()
    assert opened.tokenizer_path == folder / "tokenizer"


def test_manifest_has_the_documented_keys(folder: Path) -> None:
    row = json.loads((folder / "manifest.json").read_bytes())
    assert list(row) == sorted(row)
    assert row["memory"]["total"] == 15 and row["format"] == manifest.FORMAT
    assert row["states"][0]["unit"] == "slot"
    assert row["limits"]["pages_per_seq"] == 2


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
    file.write_text('{"format": 2, "surprise": []}')
    with pytest.raises(EngineError, match="format 2.*reads up to 1.*upgrade"):
        open_folder(folder, "cpu")
    data = (folder / ENGINE).read_bytes().replace(b'"format": 1', b'"format": 9')
    (folder / ENGINE).write_bytes(data)
    with pytest.raises(EngineError, match="format 9"):
        read_engine(folder / ENGINE)


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
    bad = replace(example(folder), files={"../x": engine_file.digest_file(folder / ENGINE)})
    (folder / "manifest.json").write_bytes(bad.encode())
    with pytest.raises(EngineError, match="outside the folder"):
        open_folder(folder, "cpu")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": "1"}', "\x00"])
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
    data = bytearray((folder / ENGINE).read_bytes())
    data[70] ^= 1
    (folder / ENGINE).write_bytes(bytes(data))
    with pytest.raises(EngineError, match="between bytes 64 and 128"):
        engine_file.verify_files(folder, {ENGINE: digest})


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
    with pytest.raises(ValueError):
        write_weights(tmp_path / "w", layout, [])
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
