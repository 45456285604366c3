"""A Hugging Face folder, opened lazily: headers parsed once, tensors read as views of a map.

Knows the safetensors layout, the index file and the folder's JSON files. Knows no model.
Finds every fault of the files before any later step.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from spark_engine import hints
from spark_engine.errors import CheckpointError
from spark_engine.tensors import Array, DType

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIGS = ("config.json", "generation_config.json", "hf_quant_config.json")
AGAIN = "download this file again"
DTYPES = {
    "F32": DType.F32,
    "F16": DType.F16,
    "BF16": DType.BF16,
    "F8_E4M3": DType.F8E4M3,
    "U8": DType.U8,
    "I32": DType.I32,
    "I64": DType.I64,
    "BOOL": DType.BOOL,
}
_LONGEST_HEADER = 100_000_000  # bytes; the limit of the format's own reader
_HASH_ALL = 256 << 20  # bytes; below this the digest covers every byte of a file
_SAMPLE = 64 << 10  # bytes of each tensor above it


@dataclass(frozen=True)
class StoredTensor:
    """The place of one tensor: `offset` in bytes from the start of `file` (a name in the
    folder)."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    file: str
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Checkpoint:
    """An open folder. `maps` holds one read-only memory map per shard; nothing is copied.

    `config`, `generation` and `hf_quant` are the parsed JSON files, {} where absent.
    """

    path: Path
    config: Mapping[str, Any]
    generation: Mapping[str, Any]
    hf_quant: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    maps: Mapping[str, Array]

    def read(self, name: str) -> Array:
        """A read-only view of the tensor's bytes in its own dtype and shape.

        Raises CheckpointError when there is no such tensor.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} holds no tensor {name}; {AGAIN}s")
        t = self.tensors[name]
        raw = self.maps[t.file][t.offset : t.offset + t.nbytes]
        return raw.view(t.dtype.numpy).reshape(t.shape)

    def digest(self) -> str:
        """SHA-256 over the JSON files, every header and the weights' bytes.

        Of a shard of 256 MiB or more only 64 KiB of each tensor are read: its first and last
        32 KiB. An edit elsewhere in such a shard is not detected. Other names, dtypes, shapes and
        sizes are, and so is another training run or another quantisation.
        """
        total = hashlib.sha256()
        for file in CONFIGS:
            if (self.path / file).is_file():
                total.update(file.encode() + b"\0" + (self.path / file).read_bytes())
        by_file: dict[str, list[StoredTensor]] = {file: [] for file in sorted(self.maps)}
        for tensor in self.tensors.values():
            by_file[tensor.file].append(tensor)
        for file, tensors in by_file.items():
            data = self.maps[file]
            total.update(f"\0{file}\0{data.nbytes}\0".encode())
            for part in _sampled(data, tensors):
                total.update(part)
        return total.hexdigest()


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Opens a folder with config.json and safetensors, one file or sharded with an index.

    Reads the JSON files and the headers only. Raises CheckpointError, naming tensor, file and
    remedy, when a file is missing, truncated or malformed; when a tensor appears twice, exceeds its
    file, overlaps another, or has an unknown dtype; or when index and shards disagree.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(hints.no_checkpoint(folder))
    configs = [read_json(folder / file, required=file == CONFIGS[0]) for file in CONFIGS]
    index = read_json(folder / INDEX, required=False)
    files = _index_files(folder, index) if index else [_single(folder)]
    for file in files:
        if not (folder / file).is_file():
            _fail(file, f"the shard is missing from {folder}", AGAIN)
    maps = {file: _map(folder / file) for file in files}
    tensors = _merge(_header(file, data) for file, data in maps.items())
    if index:
        _check_index(index["weight_map"], tensors)
    config, generation, hf_quant = configs
    return Checkpoint(folder, config, generation, hf_quant, tensors, MappingProxyType(maps))


def _fail(file: str, what: str, remedy: str) -> NoReturn:
    raise CheckpointError(f"{file}: {what}; {remedy}")


def _remedy(folder: Path) -> str:
    if words := hints.gguf(folder):
        return words
    if (folder / "manifest.json").is_file():
        return f"that is an engine already: run it with `spark-run {folder}`"
    return "give a Hugging Face checkpoint folder"


def read_json(file: Path, required: bool) -> dict[str, Any]:
    """The object in a JSON file; {} where it is absent and not required.

    Raises CheckpointError if it is required and missing, or holds no object.
    """
    if not file.is_file():
        if required:
            _fail(file.name, f"missing from {file.parent}", _remedy(file.parent))
        return {}
    text = file.read_bytes()
    refuse_pointer(file, text)
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        _fail(file.name, f"is not JSON ({error})", AGAIN)
    if not isinstance(row, dict):
        _fail(file.name, f"holds a {type(row).__name__}, not an object", AGAIN)
    return row


def _single(folder: Path) -> str:
    found = sorted(p.name for p in folder.glob("*.safetensors"))
    if SINGLE in found or len(found) == 1:
        return SINGLE if SINGLE in found else found[0]
    if found:
        _fail(INDEX, f"missing, with {len(found)} shards such as {found[0]}", AGAIN)
    others = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf")]
    what = f"only {sorted(others)[0]} is there" if others else "there are no weights"
    _fail(SINGLE, f"missing from {folder}: {what}", "give a checkpoint saved as safetensors")


def _index_files(folder: Path, index: Mapping[str, Any]) -> list[str]:
    table = index.get("weight_map")
    if not isinstance(table, dict) or not all(isinstance(f, str) for f in table.values()):
        _fail(INDEX, "has no weight_map of tensor to file", AGAIN)
    files = sorted(set(table.values()))
    for file in files:
        if Path(file).name != file:
            _fail(INDEX, f"names {file!r}, which is not a plain file name", "do not trust it")
    if (folder / SINGLE).is_file() and SINGLE not in files:
        _fail(
            SINGLE, f"is in a folder with {INDEX}, which does not name it", "remove one of the two"
        )
    return files


def refuse_pointer(file: Path, start: bytes) -> None:
    """Raises CheckpointError for a file that Git LFS has not fetched; `start`: its first bytes."""
    if hints.is_lfs_pointer(start):
        what = "is a Git LFS pointer, its content was not fetched"
        _fail(file.name, what, f"run `git lfs pull` in {file.parent}")


def _map(file: Path) -> Array:
    with file.open("rb") as opened:
        refuse_pointer(file, opened.read(64))
    if file.stat().st_size < 8:
        _fail(file.name, f"has {file.stat().st_size} bytes and no header", AGAIN)
    return np.memmap(file, dtype=np.uint8, mode="r")


def _header(file: str, data: Array) -> list[StoredTensor]:
    """The tensors of one file, checked against its length and against each other."""
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > min(_LONGEST_HEADER, data.nbytes - 8):
        _fail(
            file, f"its header claims {length} bytes of {data.nbytes}: cut short or damaged", AGAIN
        )
    try:
        row = json.loads(data[8 : 8 + length].tobytes(), object_pairs_hook=_no_repeats)
    except (ValueError, RecursionError) as error:
        _fail(file, f"its header is not a safetensors header ({error})", AGAIN)
    if not isinstance(row, dict):
        _fail(file, "its header is not a safetensors header (no object)", AGAIN)
    row.pop("__metadata__", None)
    tensors = [_tensor(file, name, entry, 8 + length) for name, entry in row.items()]
    _check_extent(file, data.nbytes, tensors)
    return tensors


def _no_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice} appears twice")
    return row


def _tensor(file: str, name: str, entry: Any, start: int) -> StoredTensor:
    try:
        dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
        shape = tuple(entry["shape"])
        numbers = (begin, end, *shape)
        sound = isinstance(dtype, str) and all(type(n) is int and n >= 0 for n in numbers)
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        _fail(file, f"tensor {name} has the malformed entry {entry!r}", AGAIN)
    if dtype not in DTYPES:
        known = ", ".join(DTYPES)
        _fail(file, f"tensor {name} has dtype {dtype!r}", f"supported are {known}: requantise it")
    tensor = StoredTensor(name, DTYPES[dtype], shape, file, start + begin)
    if end - begin != tensor.nbytes:
        what = f"tensor {name} has {end - begin} bytes, but {dtype} {list(shape)} needs "
        _fail(file, what + str(tensor.nbytes), AGAIN)
    return tensor


def _check_extent(file: str, size: int, tensors: Iterable[StoredTensor]) -> None:
    last: StoredTensor | None = None
    for t in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        if t.offset + t.nbytes > size:
            what = f"tensor {t.name} ends at byte {t.offset + t.nbytes}, but the file has {size}"
            _fail(file, what + ": it is cut short", AGAIN)
        if last is not None and t.offset < last.offset + last.nbytes:
            _fail(file, f"tensors {last.name} and {t.name} overlap", AGAIN)
        last = t


def _merge(shards: Iterable[list[StoredTensor]]) -> Mapping[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for t in (t for shard in shards for t in shard):
        if t.name in tensors:
            other = tensors[t.name].file
            _fail(t.file, f"tensor {t.name} is also in {other}", "remove the file that is not part")
        tensors[t.name] = t
    return MappingProxyType(tensors)


def _check_index(table: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> None:
    for name, file in table.items():
        if name not in tensors:
            _fail(file, f"tensor {name} is missing, though {INDEX} says it is here", AGAIN)
        if tensors[name].file != file:
            what = f"tensor {name} is in {tensors[name].file}, not here as {INDEX} says"
            _fail(file, what, f"take {INDEX} and shards from one source")
    extra = next((t for name, t in tensors.items() if name not in table), None)
    if extra is not None:
        what = f"tensor {extra.name} is not listed in {INDEX}"
        _fail(extra.file, what, f"take {INDEX} and shards from one source")


def _sampled(data: Array, tensors: Iterable[StoredTensor]) -> Iterable[bytes | memoryview[int]]:
    if data.nbytes < _HASH_ALL:
        yield data.data
        return
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    yield data[: 8 + length].tobytes()
    half = _SAMPLE // 2
    for t in sorted(tensors, key=lambda t: t.offset):
        end = t.offset + t.nbytes
        middle = min(t.offset + half, end)
        yield data[t.offset : middle].tobytes()
        yield data[max(middle, end - half) : end].tobytes()
