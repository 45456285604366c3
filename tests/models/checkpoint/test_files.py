"""Opening folders: laziness, views, digests, and one error for each fault of a file."""

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spark_engine.errors import CheckpointError
from spark_engine.models.checkpoint.files import MOST_JSON, open_checkpoint, read_configs
from spark_engine.models.checkpoint.weight_files import INDEX, SINGLE
from spark_engine.models.open_model import open_model
from tests.checkpoint_files import write_safetensors, write_shards
from tests.checkpoints import Written, write_checkpoint

Json = dict[str, Any]
A = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.uint8)}


def _folder(path: Path, shards: int = 1) -> Path:
    (path / "config.json").write_text("{}")
    write_shards(path, A, shards)
    return path


def _raw(header: object, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def _row(dtype: str, shape: list[int], begin: int, end: int) -> Json:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize("shards", [1, 2])
def test_reads_are_views(tmp_path: Path, shards: int) -> None:
    checkpoint = open_checkpoint(_folder(tmp_path, shards))
    for name, array in A.items():
        read = checkpoint.read(name)
        assert np.array_equal(read, array) and read.dtype == array.dtype
        assert np.shares_memory(read, checkpoint.maps[checkpoint.tensors[name].file])
        with pytest.raises(ValueError, match="read-only"):
            read[...] = 0


def test_odd_offsets_and_scalars(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tensors = {"odd": np.ones(3, np.uint8), "x": np.float32([1.5, -2]), "s": np.array(7.0, "f4")}
    write_safetensors(tmp_path / SINGLE, tensors)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("x").tolist() == [1.5, -2]
    assert checkpoint.read("s").shape == () and float(checkpoint.read("s")) == 7


def test_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no tensor c"):
        open_checkpoint(_folder(tmp_path)).read("c")


def _cut(p: Path) -> None:
    (p / SINGLE).write_bytes((p / SINGLE).read_bytes()[:-1])


def _cut_in_header(p: Path) -> None:
    (p / SINGLE).write_bytes((p / SINGLE).read_bytes()[:20])


def _write(content: bytes) -> Callable[[Path], None]:
    return lambda p: (p / SINGLE).write_bytes(content) and None


_ONE = {"a": _row("F32", [2], 0, 8)}
_A = json.dumps(_ONE["a"]).encode()
_FAULT = "no whole safetensors file"
FILE_FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (_cut, "its .* bytes .*file not fully covered.*cut short"),
    "cut in header": (_cut_in_header, "20 bytes .*invalid header length.*cut short"),
    "empty": (_write(b""), f"its 0 bytes are {_FAULT}"),
    "long header": (_write(struct.pack("<Q", 1 << 40) + b"{}"), "header too large"),
    "garbage": (_write(_raw(b"\xff\xfe{]", b"")), f"{_FAULT} .invalid UTF-8 in header"),
    "deep": (_write(_raw(b'{"a":' + b"[" * 100_000, b"")), "recursion limit"),
    "list": (_write(_raw([], b"")), f"{_FAULT} .invalid JSON in header"),
    "twice": (_write(_raw(b'{"a": %s, "a": %s}' % (_A, _A), bytes(8))), "a appears twice"),
    "no shape": (_write(_raw({"a": {"dtype": "F32"}}, b"")), "missing field `shape`"),
    "no entry": (_write(_raw({"a": 3}, b"")), "invalid type: integer `3`"),
    "negative": (_write(_raw({"a": _row("F32", [-2], 0, 8)}, b"")), "integer `-2`"),
    "true": (_write(_raw({"a": _row("U8", [True], 0, 1)}, b"1")), "boolean `true`"),
    "unknown dtype": (_write(_raw({"a": _row("F9", [8], 0, 8)}, bytes(8))), "variant `F9`"),
    "dtype": (
        _write(_raw({"a": _row("I8", [8], 0, 8)}, bytes(8))),
        "int8 is not read .*tensor a has dtype 'I8'",
    ),
    "unhashable": (_write(_raw({"a": _row([], [8], 0, 8)}, bytes(8))), _FAULT),  # type: ignore[arg-type]
    "size": (_write(_raw({"a": _row("F32", [3], 0, 8)}, bytes(8))), "invalid shape"),
    "overflow": (_write(_raw({"a": _row("F32", [1 << 40] * 2, 0, 8)}, bytes(8))), "overflow"),
    "beyond": (_write(_raw(_ONE, bytes(7))), "its .* bytes .*file not fully covered"),
    "behind": (_write(_raw(_ONE, bytes(9))), "its .* bytes .*file not fully covered"),
    "gap": (_write(_raw(_ONE | {"b": _row("U8", [4], 9, 13)}, bytes(13))), "offset for tensor `b`"),
    "overlap": (
        _write(_raw(_ONE | {"b": _row("U8", [4], 4, 8)}, bytes(8))),
        "offset for tensor `b`",
    ),
}


@pytest.mark.parametrize("fault", FILE_FAULTS)
def test_a_damaged_file_is_refused(tmp_path: Path, fault: str) -> None:
    spoil, words = FILE_FAULTS[fault]
    spoil(_folder(tmp_path))
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(tmp_path)
    text = str(caught.value)
    assert SINGLE in text
    assert "download this file again" in text or "docs/models.md" in text


def _index(p: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((p / INDEX).read_text())
    change(index["weight_map"])
    (p / INDEX).write_text(json.dumps(index))


def _shard(p: Path, i: int) -> Path:
    return p / f"model-{i:05d}-of-00002.safetensors"


INDEX_FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing shard": (
        lambda p: _shard(p, 2).unlink(),
        "00002-of-00002.safetensors: the shard is missing",
    ),
    "cut shard": (
        lambda p: _shard(p, 1).write_bytes(_shard(p, 1).read_bytes()[:-4]),
        "00001-of-00002.safetensors: its .* bytes .*cut short",
    ),
    "duplicate": (lambda p: write_safetensors(_shard(p, 2), A), "tensor a is also in .*00001"),
    "other file": (
        lambda p: _index(p, lambda m: m.update(a=m["b"], b=m["a"])),
        "tensor a is in .*00001-of-00002.safetensors, not here",
    ),
    "not there": (
        lambda p: _index(p, lambda m: m.update(c=m["a"])),
        "00001.*tensor c is missing, though .*index.json",
    ),
    "not listed": (
        lambda p: write_safetensors(_shard(p, 2), {"b": A["b"], "c": A["b"]}),
        "tensor c is not listed in",
    ),
    "escape": (lambda p: _index(p, lambda m: m.update(a="../x")), "'../x'"),
    "no map": (lambda p: (p / INDEX).write_text('{"metadata": 1}'), "no weight_map"),
    "not json": (lambda p: (p / INDEX).write_text("{"), "index.json: is not JSON"),
    "two": (lambda p: write_safetensors(p / SINGLE, A), "model.safetensors: is in a folder with"),
}


@pytest.mark.parametrize("fault", INDEX_FAULTS)
def test_shards_and_index_that_disagree_are_refused(tmp_path: Path, fault: str) -> None:
    spoil, words = INDEX_FAULTS[fault]
    spoil(_folder(tmp_path, shards=2))
    with pytest.raises(CheckpointError, match=words) as caught:
        open_checkpoint(tmp_path)
    assert "; " in str(caught.value)  # the remedy


def test_folders_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no folder .* config.json"):
        read_configs(tmp_path / "none")
    with pytest.raises(CheckpointError, match="config.json: missing"):
        read_configs(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="not an object"):
        read_configs(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(CheckpointError, match="there are no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="PyTorch pickle .*pytorch_model.bin; take.*safetens"):
        open_checkpoint(tmp_path)
    write_safetensors(_shard(tmp_path, 2), A)
    with pytest.raises(CheckpointError, match="00001-of-00002.safetensors: the shard is missing"):
        open_checkpoint(tmp_path)
    write_safetensors(_shard(tmp_path, 1), A)
    with pytest.raises(CheckpointError, match="tensor a is also in .*00001-of-00002"):
        open_checkpoint(tmp_path)


B = {"model.b": np.ones(3, np.uint8)}
MTP = {"mtp.norm.weight": np.ones(3, np.float32)}
SOME: tuple[str, ...] = ("mtp.", "model.visual.")


def _read_too(path: Path) -> tuple[set[str], str]:
    """The tensors of a folder, and its notes."""
    checkpoint = open_checkpoint(path, SOME)
    for name in checkpoint.tensors:
        checkpoint.read(name)
    return set(checkpoint.tensors), " | ".join(checkpoint.notes)


def test_files_without_an_index_are_one_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_safetensors(tmp_path / "part-a.safetensors", {"model.a": A["a"]})
    write_safetensors(tmp_path / "part-b.safetensors", B)
    write_safetensors(tmp_path / "adapter_model.safetensors", {"x.lora_A": A["a"]})
    names, notes = _read_too(tmp_path)
    assert names == {"model.a", "model.b"}
    assert notes.startswith("adapter_model.safetensors is not applied: merge the LoRA adapter")
    for i in (1, 2):
        (tmp_path / f"part-{'ab'[i - 1]}.safetensors").rename(_shard(tmp_path, i))
    write_safetensors(tmp_path / "consolidated.safetensors", {"model.a": A["a"]} | B)
    names, notes = _read_too(tmp_path)
    assert names == {"model.a", "model.b"}
    assert "consolidated.safetensors is not read: it is no part of the model in" in notes


@pytest.mark.parametrize("file", ["mtp.safetensors", "model_mtp.safetensors"])
@pytest.mark.parametrize("shards", [1, 2])
def test_a_draft_head_next_to_the_model_is_read(tmp_path: Path, file: str, shards: int) -> None:
    write_safetensors(_folder(tmp_path, shards) / file, MTP)
    names, notes = _read_too(tmp_path)
    assert names == {*A, *MTP} and f"{file} is read too, though no index names it" in notes


def test_what_is_no_part_of_the_model_is_passed_over(tmp_path: Path) -> None:
    path = _folder(tmp_path)
    write_safetensors(path / "vae.safetensors", {"vae.x": A["a"]})
    (path / "zz.safetensors").write_bytes(b"damaged")
    names, notes = _read_too(path)
    assert names == {*A}
    assert "vae.safetensors is not read: it is no part" in notes
    assert "zz.safetensors is not read: zz.safetensors: its 7 bytes are no whole" in notes


def test_optional_tensors_of_an_index(tmp_path: Path) -> None:
    """In the index and in no file; in no file that is there; in a file and not in the index."""
    path = _folder(tmp_path, 2)
    _index(
        path, lambda m: m.update({"mtp.fc.weight": m["a"], "model.visual.x": "gone.safetensors"})
    )
    names, notes = _read_too(path)
    assert names == {*A}
    assert "names 2 tensors that no file has, mtp.fc.weight first: not needed" in notes
    assert "gone.safetensors is missing; model.safetensors.index.json names no text" in notes
    with pytest.raises(CheckpointError, match="gone.safetensors: the shard is missing"):
        open_checkpoint(path)
    write_safetensors(_shard(path, 2), {"b": A["b"]} | MTP)
    assert _read_too(path)[0] == {*A, *MTP}
    with pytest.raises(CheckpointError, match="gone.safetensors: the shard is missing"):
        open_checkpoint(path, ("mtp.",))


def test_an_adapter_alone_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    write_safetensors(tmp_path / "adapter_model.safetensors", A)
    with pytest.raises(CheckpointError, match="a LoRA adapter alone is no checkpoint; merge"):
        open_checkpoint(tmp_path)


def test_a_json_file_without_end_is_not_read(tmp_path: Path) -> None:
    path = _folder(tmp_path)
    with (path / "hf_quant_config.json").open("wb") as file:
        file.truncate(64 << 30)  # a hole
    with pytest.raises(CheckpointError, match=f"has {64 << 30} bytes, more than {MOST_JSON}"):
        read_configs(path)


def test_digest_sees_bytes_configs_and_names(tmp_path: Path) -> None:
    first = open_checkpoint(_folder(tmp_path)).digest()
    assert open_checkpoint(tmp_path).digest() == first
    (tmp_path / "config.json").write_text('{"x": 1}')
    second = open_checkpoint(tmp_path).digest()
    (tmp_path / "config.json").write_text("{}")
    write_safetensors(tmp_path / SINGLE, A | {"b": np.uint8([1, 1, 1, 2])})
    third = open_checkpoint(tmp_path).digest()
    assert len({first, second, third}) == 3


def _sparse(path: Path, mib: int) -> Written:
    """A checkpoint with an embedding that is a hole of `mib` MiB on disk."""
    vocab = mib * 2**20 // 256
    written = write_checkpoint(path, {"tie_word_embeddings": True})
    opened = open_checkpoint(path)
    tensors = {n: opened.read(n).copy() for n in opened.tensors}
    name = "model.embed_tokens.weight"
    del tensors[name]
    header: Json = {}
    end = 0
    for n, a in tensors.items():
        row = opened.tensors[n]
        header[n] = _row("BF16", list(row.shape), end, end + a.nbytes)
        end += a.nbytes
    header[name] = _row("BF16", [vocab, 128], end, end + vocab * 256)
    with (path / SINGLE).open("wb") as out:
        out.write(_raw(header, b"".join(a.tobytes() for a in tensors.values())))
        out.truncate(out.tell() + vocab * 256)
    config = json.loads((path / "config.json").read_text()) | {"vocab_size": vocab}
    (path / "config.json").write_text(json.dumps(config))
    return written


def test_a_gigabyte_is_opened_lowered_and_digested_in_little_memory(tmp_path: Path) -> None:
    from spark_engine.interface import Limits, Precision
    from spark_engine.models.build_network import build_network
    from spark_engine.models.open_model import open_model
    from spark_engine.tensors import DType

    _sparse(tmp_path, 1024)
    precision = Precision(DType.F32, DType.F32, DType.F32)
    tracemalloc.start()
    model = open_model(tmp_path)
    limits = Limits(4, 256, 16, model.config.vocab)
    network = build_network(model, "decode", limits, precision)
    embedding = network.weights["embed_tokens.weight"].evaluate(model.checkpoint)
    assert model.checkpoint is not None
    model.checkpoint.digest()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert embedding.nbytes == 1 << 30
    assert np.shares_memory(embedding, model.checkpoint.maps[SINGLE])
    assert peak < 50 << 20


def test_json_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(tmp_path, format="modelopt_mixed")
    (tmp_path / "generation_config.json").write_text("{}")
    names, read = [], Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: names.append(path.name) or read(path))
    open_model(tmp_path)
    assert sorted(names) == sorted(p.name for p in tmp_path.glob("*.json"))
